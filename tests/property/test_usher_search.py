"""Usher's search against the plain rule: enumerate everything, place one replica after the other, keep the first."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from policies.placement.common.base import PlannedModel
from policies.placement.registry import placement_policy
from tests.requirement_profiles import Case, check_sound, random_case, v100s

BATCHES = (4, 8, 16)
SEEDS = range(60)


@dataclass
class PlainGpu:
    index: int
    is_used_before: bool = False
    is_ours: bool = False
    compute: Fraction = Fraction(100)
    memory: Fraction = Fraction(100)
    models: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class PlainOption:
    model: str
    rate_rps: float
    degree: int
    batch: int
    exec_ms: float
    compute: Fraction
    memory: Fraction


def options(of: Case, name: str) -> list[PlainOption]:
    model = next(m for m in of.models if m.model_id == name)
    profile = of.profiles[(model.model_id, "v100")]
    rate_rps = model.rate_rps
    assert rate_rps is not None
    batches = [b for b in BATCHES if profile.exec_ms(b) <= model.slo_ms]
    if not batches:
        return []
    throughput_rps = 1000 * max(batches) / profile.exec_ms(max(batches))
    smallest = -int(-rate_rps // throughput_rps)
    found = []
    for i in range(1, 7):
        for batch in batches:
            needed = profile.requirements[batch]
            if i * smallest <= len(of.gpus):
                compute, memory = str(needed.achieved_occupancy_percent), str(needed.memory_percent)
                exec_ms = profile.exec_ms(batch)
                found.append(
                    PlainOption(
                        name, rate_rps, i * smallest, batch, exec_ms, Fraction(compute), Fraction(memory)
                    )
                )
    return found


def interleaved(configuration: tuple[PlainOption, ...]) -> list[PlainOption]:
    def falling(kept: list[PlainOption]) -> list[PlainOption]:
        return sorted(kept, key=lambda o: -(o.compute + o.memory))

    compute_heavy = falling([o for o in configuration if o.compute / o.memory >= Fraction(6, 5)])
    memory_heavy = falling([o for o in configuration if o.memory / o.compute >= Fraction(6, 5)])
    neutral = falling([o for o in configuration if o not in compute_heavy and o not in memory_heavy])
    order = []
    for pair in itertools.zip_longest(compute_heavy, memory_heavy):
        order += [option for option in pair if option is not None]
    return order + neutral


def placed(configuration: tuple[PlainOption, ...], gpus: list[PlainGpu]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {option.model: [] for option in configuration}
    for option in interleaved(configuration):
        for _ in range(option.degree):
            fitting = [
                gpu
                for gpu in gpus
                if gpu.compute >= option.compute
                and gpu.memory >= option.memory
                and option.model not in gpu.models
            ]
            if not fitting:
                break
            chosen = min(
                fitting,
                key=lambda g: (
                    0 if g.is_ours else 1 if g.is_used_before else 2,
                    g.compute + g.memory if g.is_ours or g.is_used_before else 0,
                    g.index,
                ),
            )
            chosen.is_ours = True
            chosen.compute -= option.compute
            chosen.memory -= option.memory
            chosen.models.add(option.model)
            places[option.model].append(chosen.index)
    return places


def copied(gpus: list[PlainGpu], *, is_next_group: bool = False) -> list[PlainGpu]:
    return [
        PlainGpu(
            g.index,
            g.is_used_before or g.is_ours,
            g.is_ours and not is_next_group,
            g.compute,
            g.memory,
            set(g.models),
        )
        for g in gpus
    ]


def plain_usher(of: Case, groups: list[list[str]], *, is_growing: bool) -> set[tuple[str, int, int]]:
    """(model, batch, GPU) of every replica."""
    gpus = [PlainGpu(gpu.index) for gpu in of.gpus]
    result = set()
    for group in groups:
        offered = [found for name in group if (found := options(of, name))]
        best: tuple[float, float] | None = None
        best_configuration: tuple[PlainOption, ...] = ()
        for configuration in itertools.product(*offered):
            tried = copied(gpus, is_next_group=True)
            places = placed(configuration, tried)
            served = [
                min(o.rate_rps, len(places[o.model]) * 1000 * o.batch / o.exec_ms) for o in configuration
            ]
            is_met = all(s >= o.rate_rps - 1e-7 for s, o in zip(served, configuration, strict=True))
            added = sum(gpu.is_ours and not gpu.is_used_before for gpu in tried)
            value = (1.0, -float(added)) if is_growing and is_met else (0.0, round(sum(served), 6))
            if best is None or value > best:
                best, best_configuration = value, configuration
        gpus = copied(gpus, is_next_group=True)
        places = placed(best_configuration, gpus)
        result |= {(o.model, o.batch, g) for o in best_configuration for g in places[o.model]}
    return result


@pytest.mark.parametrize("cluster", ["fixed", "growing"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_places_exactly_what_the_plain_rule_places(seed: int, cluster: str) -> None:
    draw = random.Random(f"usher {seed}")
    gpu_count = draw.randint(1, 5)
    of = random_case(draw, models=draw.randint(1, 4), gpus=gpu_count, batches=BATCHES)
    names = [str(model.model_id) for model in of.models]
    cut = draw.randint(1, len(names))
    groups = [group for group in (names[:cut], names[cut:]) if group]
    placement = placement_policy("usher", {"groups": groups, "cluster": cluster}).place(
        of.models, of.gpus, of.profiles
    )
    check_sound(placement, of)

    def entry(gpu: int, model: PlannedModel) -> tuple[str, int | None, int]:
        return str(model.model_id), model.batch, gpu

    found = {entry(planned.gpu, model) for planned in placement.slices for model in planned.models}
    assert found == plain_usher(of, groups, is_growing=cluster == "growing")


@pytest.mark.parametrize("seed", range(10))
def test_computed_groups_give_sound_and_repeatable_placements_whatever_the_order_of_gpus(seed: int) -> None:
    draw = random.Random(f"groups {seed}")
    of = random_case(draw, models=6, gpus=4, batches=BATCHES)
    policy = placement_policy("wsm-usher")
    placement = policy.place(of.models, of.gpus, of.profiles)
    check_sound(placement, of)
    assert policy.place(of.models, of.gpus[::-1], of.profiles) == placement


def test_full_groups_on_many_gpus_are_searched_without_placing_every_configuration() -> None:
    # 18^4 = 104,976 configurations, all rates met by many of them: the first chunk has the answer.
    draw = random.Random("many")
    of = random_case(draw, models=4, gpus=1, batches=BATCHES)
    easy = [type(m)(m.model_id, slo_ms=1000, rate_rps=100.0) for m in of.models]
    placement = placement_policy("usher", {"groups": [["m0", "m1", "m2", "m3"]]}).place(
        easy, v100s(40), of.profiles
    )
    (decision,) = placement.decisions
    assert decision.metrics["configurations"] == 18**4
    assert decision.metrics["configurations_placed"] < 18**4 / 10
