"""Workloads that are too much for a GPU, or nearly: `tenuto` plans what can be planned, and says of the rest why."""

from __future__ import annotations

import random

import pytest

from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, Profiles, cannot_host
from policies.placement.common.conditions import ConditionedPolicy, Conditions
from policies.placement.registry import placement_policy
from profiles.interference.by_sm import SmInterference, WantedSms
from profiles.model import LinearProfile
from tests.placement_checks import check_promises

GIB = 2**30
TYPES = ("v100", "t4")
SEEDS = [*range(40), 170, 197, 390]
Case = tuple[list[PlacedModelInput], list[GpuSlot], Profiles, Conditions]


def drawn(seed: int) -> Case:
    """SLOs about what one request takes, with the way to the GPU or without; types that differ in speed and in largest batch."""
    draw = random.Random(f"too much {seed}")
    types = draw.sample(TYPES, draw.randint(1, 2))
    gpus = [
        GpuSlot(i, draw.choice(types), 16 * GIB, NodeId("a"), i) for i in range(draw.choice([1, 2, 3, 17]))
    ]
    models: list[PlacedModelInput] = []
    profiles = {}
    for place in range(draw.randint(1, 3)):
        model_id = ModelId(f"m{place}")
        runs_on = draw.sample(types, draw.randint(1, len(types)))
        for of in runs_on:
            line = draw.choice([0.01, 0.5, 2.0]), draw.choice([1.0, 4.0, 9.0]), draw.choice([1, 3, 8, 64])
            profiles[model_id, of] = LinearProfile(*line)
        single_ms = profiles[model_id, runs_on[0]].exec_ms(1)
        slo_ms = single_ms * draw.choice([0.9, 1.0, 1.1, 1.5, 1.9, 3.0, 40.0])
        rate_rps = 1000 / single_ms * draw.choice([1e-6, 0.1, 1.0, 50.0])
        models.append(PlacedModelInput(model_id, slo_ms, rate_rps, draw.choice([GIB, 9 * GIB, 17 * GIB])))
    wanted = {model.model_id: WantedSms({1: draw.choice([5, 40, 100])}) for model in models}
    law = SmInterference(wanted, 1.0)
    conditions = Conditions(
        dict.fromkeys(types, law) if draw.random() < 0.5 else {},
        has_fixed_batches=draw.random() < 0.5,
        control_ms=draw.choice([0.0, 0.5]),
        data_ms_per_item=draw.choice([0.0, 0.1]),
    )
    return models, gpus, profiles, conditions


def place(case: Case) -> Placement:
    models, gpus, profiles, conditions = case
    policy = placement_policy("tenuto", {"forecasts_max": 200})
    assert isinstance(policy, ConditionedPolicy)
    return policy.under(conditions).place(models, gpus, profiles)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_workload_is_too_much_to_be_planned_and_no_batch_larger_than_its_profile(seed: int) -> None:
    models, gpus, profiles, _ = case = drawn(seed)
    plan = place(case)
    check_promises(plan, models, gpus, profiles)
    for planned in plan.slices:
        for entry in planned.models:
            batch_max = profiles[entry.model_id, gpus[planned.gpu].gpu_type].batch_size_max
            assert max(entry.batch or 1, entry.batch_max or 1) <= batch_max


@pytest.mark.parametrize("seed", SEEDS)
def test_no_model_is_hosted_nowhere_beside_an_idle_gpu_that_could_host_it(seed: int) -> None:
    models, gpus, profiles, _ = case = drawn(seed)
    plan = place(case)
    hosted = {entry.model_id for planned in plan.slices for entry in planned.models}
    idle = [gpu for gpu in gpus if gpu.index not in plan.gpus_used]
    for model in models:
        assert model.model_id in hosted or not any(can_host(gpu, model, profiles) for gpu in idle)
    for one in plan.unplaced:
        if "other models" in one.reason:
            (model,) = (model for model in models if model.model_id == one.model_id)
            assert hosted - {one.model_id}
            assert any(can_host(gpu, model, profiles) for gpu in gpus)


def can_host(gpu: GpuSlot, model: PlacedModelInput, profiles: Profiles) -> bool:
    reason = cannot_host(model, gpu, profiles)
    return reason is None and (model.memory_bytes or 0) <= gpu.memory_bytes
