"""Tenuto's placement on random cases: memory, SLOs, rates and determinism."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from policies.placement.common.base import Placement
from policies.placement.common.conditions import ConditionedPolicy, Conditions
from policies.placement.registry import placement_policy
from profiles.interference import interference_named
from tests.requirement_profiles import Case, random_case

SEEDS = range(12)


def drawn(seed: int) -> Case:
    draw = random.Random(f"tenuto {seed}")
    return random_case(draw, models=draw.randint(1, 3), gpus=draw.randint(1, 3), batches=(4, 8, 32))


def place(of: Case, *, is_fixed: bool, **options: Any) -> Placement:
    profiles = {model_id: profile for (model_id, _), profile in of.profiles.items()}
    known = {"v100": interference_named("sm", profiles, "v100", {"strength": 1.0})}
    policy = placement_policy("tenuto", {"forecasts_max": 400, **options})
    assert isinstance(policy, ConditionedPolicy)
    conditions = Conditions(known, has_fixed_batches=is_fixed)
    return policy.under(conditions).place(of.models, of.gpus, of.profiles)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_keeps_memory_shares_slos_and_the_sum_of_rates(seed: int, is_fixed: bool) -> None:
    of = drawn(seed)
    placement = place(of, is_fixed=is_fixed)
    inputs = {model.model_id: model for model in of.models}
    memory = dict.fromkeys((gpu.index for gpu in of.gpus), 0)
    share = dict.fromkeys(memory, 0.0)
    for planned in placement.slices:
        share[planned.gpu] += planned.share_percent or 0.0
        for entry in planned.models:
            size = entry.batch_max or entry.batch or 1
            memory[planned.gpu] += of.profiles[entry.model_id, "v100"].memory_bytes(size)
            if entry.predicted_ms is not None:
                assert entry.predicted_ms <= inputs[entry.model_id].slo_ms
    assert all(memory[gpu.index] <= gpu.memory_bytes for gpu in of.gpus)
    assert all(percent <= 100 + 1e-6 for percent in share.values())
    asked = math.fsum(model.rate_rps or 0.0 for model in of.models)
    left = math.fsum(one.rate_rps or 0.0 for one in placement.unplaced)
    assert placement.expected_goodput_rps == pytest.approx(asked - left, rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_the_same_case_has_the_same_plan(seed: int) -> None:
    of = drawn(seed)
    assert place(of, is_fixed=False) == place(of, is_fixed=False)


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_a_larger_price_for_fairness_never_leaves_the_worst_model_worse(seed: int) -> None:
    of = drawn(seed)

    def worst(placement: Placement) -> float:
        left = {one.model_id: one.rate_rps or 0.0 for one in placement.unplaced}
        return min(1 - left.get(m.model_id, 0.0) / (m.rate_rps or 1.0) for m in of.models)

    fractions = [worst(place(of, is_fixed=False, fairness_cost=cost)) for cost in (0.0, 0.05, 0.5)]
    assert (
        fractions == sorted(fractions) or max(fractions) - min(fractions) < 0.011
    )  # chosen in steps of 0.01
