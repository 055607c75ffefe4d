"""The placement program against trying everything, on cases of at most three models and three GPUs."""

from __future__ import annotations

import itertools
import random

import pytest

from policies.placement.milp import packing
from policies.placement.registry import placement_policy
from tests.requirement_profiles import Case, check_sound, random_case

BATCHES = (4, 8)
SEEDS = range(25)
UNHURRIED = {"time_limit_s": 120}  # a busy machine must not change the plan


def best_by_trying_all(of: Case) -> float:
    """Every batch size per model, every set of models on every GPU."""
    best = 0.0
    batches: list[list[int | None]] = []
    for m in of.models:
        profile = of.profiles[(m.model_id, "v100")]
        batches.append([b for b in BATCHES if profile.exec_ms(b) <= m.slo_ms] or [None])
    for chosen in itertools.product(*batches):
        needs = []
        for model, batch in zip(of.models, chosen, strict=True):
            if batch is None:
                needs.append((1e9, 1e9, 0.0))
                continue
            profile = of.profiles[(model.model_id, "v100")]
            needed = profile.requirements[batch]
            assert needed.weighted_sm_percent is not None
            assert needed.memory_percent is not None
            rps = 1000 * batch / profile.exec_ms(batch)
            needs.append((needed.weighted_sm_percent, needed.memory_percent, rps))
        fitting = [
            subset
            for subset in itertools.product((0, 1), repeat=len(of.models))
            if all(sum(n[k] for n, x in zip(needs, subset, strict=True) if x) <= 100 + 1e-9 for k in (0, 1))
        ]
        for gpus in itertools.combinations_with_replacement(fitting, len(of.gpus)):
            counts = [sum(column) for column in zip(*gpus, strict=True)]
            total = 0.0
            for model, need, count in zip(of.models, needs, counts, strict=True):
                assert model.rate_rps is not None
                total += min(model.rate_rps, count * need[2])
            best = max(best, total)
    return best


def drawn(seed: int) -> Case:
    draw = random.Random(f"milp {seed}")
    return random_case(draw, models=draw.randint(1, 3), gpus=draw.randint(1, 3), batches=BATCHES)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_program_finds_what_trying_all_finds(seed: int) -> None:
    of = drawn(seed)
    policy = placement_policy("wsm-milp", UNHURRIED)
    placement = policy.place(of.models, of.gpus, of.profiles)
    check_sound(placement, of)
    assert placement.expected_goodput_rps == pytest.approx(best_by_trying_all(of), abs=1e-3)
    assert policy.place(of.models, of.gpus, of.profiles) == placement


@pytest.mark.parametrize("seed", range(8))
def test_with_a_variable_per_gpu_the_optimum_is_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PATTERNS_MAX", 0)  # every case has too many
    of = drawn(seed)
    placement = placement_policy("wsm-milp", UNHURRIED).place(of.models, of.gpus, of.profiles)
    check_sound(placement, of)
    assert placement.expected_goodput_rps == pytest.approx(best_by_trying_all(of), abs=1e-3)
