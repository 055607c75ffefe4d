"""AlpaServe's placement: its simulation against ours, and what its plans must be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId
from policies.placement.alpaserve import AlpaServe, first_come
from policies.placement.alpaserve.first_come import arrivals, play
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, slice_memory_bytes
from policies.placement.common.conditions import Conditions
from policies.placement.common.request_checks import require_pipelines
from policies.placement.registry import placement_policy
from profiles.model import TableProfile
from roles.config.arrival_gaps import drawn_gaps
from roles.config.read_config import parse_config
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

GIB = 2**30
CUTS = {2: (51.0, 52.0), 4: (28.0, 27.0, 27.0, 29.0)}
BERT = TableProfile({100: {1: 99.0}}).with_cuts(CUTS)
Case = tuple[list[PlacedModelInput], list[GpuSlot], Mapping[tuple[ModelId, str], TableProfile]]


def case(
    count: int = 8, gpus: int = 4, slo_ms: float = 500.0, rate_rps: float = 2.0, gib: float = 2.6
) -> Case:
    """Models of which a GPU holds two."""
    names = [ModelId(f"m{number}") for number in range(count)]
    models = [PlacedModelInput(name, slo_ms, rate_rps, int(gib * GIB)) for name in names]
    slots = [GpuSlot(number, "v100", int(5.5 * GIB), NodeId("a"), number) for number in range(gpus)]
    return models, slots, {(name, "v100"): BERT for name in names}


def placed(of: Case, variation: float = 1.0, **options: object) -> Placement:
    models, gpus, profiles = of
    conditions = Conditions(gaps=lambda model_id: gaps_of(variation, model_id))
    return AlpaServe(options, conditions).place(models, gpus, profiles)


def gaps_of(variation: float, name: str) -> Iterator[float]:
    """As a configuration draws them."""
    return drawn_gaps("gamma" if variation else "uniform", variation**-2 if variation else 1.0, name)


def group_sizes(plan: Placement) -> list[int]:
    return [len(planned.gpus) for planned in plan.slices]


@pytest.mark.parametrize("seed", range(30))
def test_many_groups_serve_what_a_plain_loop_over_them_serves(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    models = draw.randint(1, 5)
    groups: list[dict[int, list[float]]] = []
    for _ in range(draw.randint(1, 9)):
        stages, hosted = draw.randint(1, 4), [model for model in range(models) if draw.random() < 0.7]
        groups.append(
            {
                model: [draw.choice([1.0, 2.5, draw.uniform(0.1, 9)]) for _ in range(stages)]
                for model in hosted
            }
        )
    came = sorted((draw.uniform(0, 300), draw.randrange(models)) for _ in range(200))
    slos_ms = [draw.uniform(5, 40) for _ in range(models)]
    plain = play(came, slos_ms, groups)
    monkeypatch.setattr(first_come, "FEW_GROUPS", 0)
    assert play(came, slos_ms, groups) == plain


@pytest.mark.parametrize("variation", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("slo_ms", [150.0, 600.0])
def test_its_simulation_serves_the_requests_that_ours_serves_first_come_first_served(
    tmp_path: Path, stages: int, variation: float, slo_ms: float
) -> None:
    """Two routes to the same number: one pass over the arrivals, and scheduler and GPUs on a heap of events."""
    came = arrivals([6.0, 3.0], [gaps_of(variation, "m0"), gaps_of(variation, "m1")], 400)
    times_ms = tuple(table[0] for table in BERT.stage_tables(stages))
    theirs = play(came, [slo_ms, slo_ms], [{0: times_ms, 1: times_ms}])
    trace = tmp_path / "trace.csv"
    trace.write_text("at_ms,model\n" + "".join(f"{at_ms!r},m{model}\n" for at_ms, model in came))
    profile = {"table": {1: 99}, "stages": {count: list(cut) for count, cut in CUTS.items()}}
    arrival = {"process": "trace", "path": str(trace)}
    names = ["m0", "m1"]
    written = {
        "models": [{"name": n, "slo_ms": slo_ms, "profile": profile, "arrival": arrival} for n in names],
        "cluster": {"gpus": 4},
        "batching": "eager",
        "placement": {
            "given": {
                "slices": [
                    {"gpu": 0, "following": list(range(1, stages)), "models": [{"model": n} for n in names]}
                ]
            }
        },
    }
    config = parse_config(written, Path())
    until_ms = came[-1][0] - 2 * slo_ms - 1.0  # later on the trace would begin again
    run = simulate(config, workload_of(config), Window(0.0, until_ms))
    heard = play([one for one in came if one[0] < until_ms], [slo_ms, slo_ms], [{0: times_ms, 1: times_ms}])
    assert run.outcome.good == sum(heard.served[0])
    assert run.outcome.offered == sum(heard.served[0]) + sum(heard.refused)
    assert theirs.attained > 0.2


def test_requests_come_at_their_rates_and_are_as_bursty_as_asked_for() -> None:
    came = arrivals([30.0, 10.0], [gaps_of(1.0, "m0"), gaps_of(4.0, "m1")], 40_000)
    assert came == sorted(came)
    for model, rate_rps, variation in ((0, 30.0, 1.0), (1, 10.0, 4.0)):
        own = [at_ms for at_ms, which in came if which == model]
        gaps = [after - before for before, after in pairwise(own)]
        mean = sum(gaps) / len(gaps)
        spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(1000 / rate_rps, rel=0.1)
        assert spread / mean == pytest.approx(variation, rel=0.1)


def test_bursts_are_met_with_groups_and_tight_slos_with_whole_models() -> None:
    assert group_sizes(placed(case(slo_ms=500.0), variation=4.0)) == [4]
    assert group_sizes(placed(case(slo_ms=1.02 * 99), variation=4.0)) == [1, 1, 1, 1]


def test_a_model_that_no_gpu_holds_is_served_by_a_group() -> None:
    of = case(count=2, gib=9.0)
    plan = placed(of)
    assert group_sizes(plan) == [2, 2]  # a half is 4.5 GB of a GPU's 5.5
    assert plan.unplaced == ()
    assert (
        placed(case(count=2, gib=30.0)).unplaced[0].reason.startswith("memory: a stage of 1 needs 30.00 GB")
    )


def test_groups_stay_on_one_host_and_the_rest_of_a_host_makes_smaller_ones() -> None:
    models, _, profiles = case()
    slots = [GpuSlot(number, "v100", 6 * GIB, NodeId("ab"[number // 3]), number % 3) for number in range(6)]
    plan = placed((models, slots, profiles), group_size=2)
    assert [planned.gpus for planned in plan.slices] == [(0, 1), (3, 4)]
    both = placed((models, slots, profiles), variation=4.0)
    assert [planned.gpus for planned in both.slices] in (
        [(0, 1), (2,), (3, 4), (5,)],
        [(n,) for n in range(6)],
    )


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="group_size is 5; a host has at most 4 equal GPUs"):
        placed(case(), group_size=5)
    three = placed(case(), group_size=3)
    assert {one.reason for one in three.unplaced} == {"its profile has no cut into 3 stages"}
    with pytest.raises(ConfigError, match="group_size"):
        placement_policy("alpaserve", {"group_size": 0})
    models, gpus, profiles = case(count=1)
    nothing = placed(([PlacedModelInput(models[0].model_id, 500.0)], gpus, profiles))
    assert "no rate_rps" in nothing.unplaced[0].reason


@st.composite
def cases(draw: st.DrawFn) -> Case:
    hosts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    slots: list[GpuSlot] = []
    for host, count in zip("ab", hosts, strict=False):
        for local in range(count):
            slots.append(GpuSlot(len(slots), "v100", 8 * GIB, NodeId(host), local))
    models, profiles = [], {}
    for number in range(draw(st.integers(1, 5))):
        name = ModelId(f"m{number}")
        alone_ms = draw(st.floats(5, 100))
        profile = TableProfile({100: {1: alone_ms, 4: 2 * alone_ms}})
        counts = draw(st.sets(st.sampled_from((2, 3, 4))))
        profiles[name, "v100"] = profile.with_cuts({k: [1.1 * alone_ms / k] * k for k in counts})
        slo_ms, rate_rps = (
            draw(st.floats(10, 600)),
            draw(st.sampled_from((0.001, 1.0))) * draw(st.floats(0.5, 40)),
        )
        models.append(PlacedModelInput(name, slo_ms, rate_rps, int(draw(st.floats(0, 20)) * GIB)))
    return models, slots, profiles


@settings(deadline=None, max_examples=25)
@given(cases(), st.sampled_from((0.0, 1.0, 4.0)))
def test_no_gpu_is_over_its_memory_and_every_stage_is_of_a_cut_that_exists(
    of: Case, variation: float
) -> None:
    models, gpus, profiles = of
    plan = placed(of, variation)
    require_pipelines(plan.slices, gpus)
    by_id = {model.model_id: model for model in models}
    used: Counter[int] = Counter()
    for planned in plan.slices:
        hosted = [by_id[model.model_id] for model in planned.models]
        for gpu in planned.gpus:
            used[gpu] += slice_memory_bytes(hosted, "v100", profiles, len(planned.gpus))
        for model in hosted:
            assert len(planned.gpus) == 1 or len(planned.gpus) in profiles[model.model_id, "v100"].cuts
    assert all(size <= 8 * GIB for size in used.values())
    names = {model.model_id for planned in plan.slices for model in planned.models}
    assert names | {one.model_id for one in plan.unplaced} == set(by_id)
    rates_rps = Counter({one.model_id: one.rate_rps or 0.0 for one in plan.unplaced})
    for planned in plan.slices:
        rates_rps.update({entry.model_id: entry.rate_rps or 0.0 for entry in planned.models})
    assert rates_rps == pytest.approx({model.model_id: model.rate_rps for model in models})
    assert plan.expected_goodput_rps is not None
    assert 0 <= plan.expected_goodput_rps <= sum(model.rate_rps or 0 for model in models) * (1 + 1e-9)
    assert placed(of, variation) == plan


def test_burstiness_is_that_of_the_configuration() -> None:
    def expected_rps(arrival: Mapping[str, object]) -> float:
        model = {"slo_ms": 400, "rate_rps": 3, "arrival": arrival, "memory_mb": 2600}
        profile = {"table": {1: 99}, "stages": {2: [51, 52]}}
        models: Sequence[object] = [{"name": f"m{k}", "profile": profile, **model} for k in range(4)]
        nodes = [{"host": "a", "gpus": 2, "memory_gb": 6}]
        config = parse_config(
            {"models": models, "cluster": {"nodes": nodes}, "placement": "alpaserve"}, Path()
        )
        return config.place().expected_goodput_rps or 0.0

    bursty = expected_rps({"process": "gamma", "shape": 1 / 16})
    assert bursty < 0.9 * expected_rps({"process": "poisson"})
    assert expected_rps({"process": "uniform"}) == pytest.approx(12.0)
