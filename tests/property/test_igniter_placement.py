"""iGniter and its kin on any workloads: shares, promises, fates; and the fast plan beside the plain one."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import ModelId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Profiles
from policies.placement.registry import placement_policy
from profiles.igniter.performance_model import IgniterProfile, Resident, predict_ms
from profiles.store import shipped_profile
from tests.igniter_workloads import gpus
from tests.placement_checks import check_promises

ROUNDING = 1e-9
NAMES = ("alexnet", "resnet50", "vgg19", "ssd")
Drawn = tuple[str, float, float]
Make = Callable[[list[Drawn]], tuple[list[PlacedModelInput], Profiles]]

drawn_workloads = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([4, 8, 15, 20, 33.3, 60, 150]), st.floats(0.5, 2500)),
    min_size=1,
    max_size=14,
)
policies = st.sampled_from(["igniter", "ffd", "gslice", "gpulets"])


def case(drawn: list[Drawn], gpu_type: str = "v100") -> tuple[list[PlacedModelInput], Profiles]:
    models = [PlacedModelInput(ModelId(f"m{i}"), slo, rate) for i, (_, slo, rate) in enumerate(drawn)]
    return models, {
        (ModelId(f"m{i}"), gpu_type): shipped_profile(f"igniter-{gpu_type}/{name}")
        for i, (name, _, _) in enumerate(drawn)
    }


def estimated_case(drawn: list[Drawn]) -> tuple[list[PlacedModelInput], Profiles]:
    """The thesis' models: eager PyTorch is some ten times slower, so ten times the SLO at a tenth of the rate."""
    models = [
        PlacedModelInput(ModelId(f"m{i}"), 10 * slo, rate / 10) for i, (_, slo, rate) in enumerate(drawn)
    ]
    of = {"alexnet": "mobilenet_v2", "resnet50": "resnet50", "vgg19": "bert", "ssd": "efficientnet_b7"}
    return models, {
        (ModelId(f"m{i}"), "v100"): shipped_profile(f"thesis-v100-estimate/{of[name]}")
        for i, (name, _, _) in enumerate(drawn)
    }


def igniter_profile(profiles: Profiles, model_id: ModelId) -> IgniterProfile:
    profile = profiles[model_id, "v100"]
    assert isinstance(profile, IgniterProfile)
    return profile


@settings(deadline=None, max_examples=60)
@given(policies, drawn_workloads, st.integers(1, 12), st.sampled_from(["v100", "t4"]))
def test_large_workloads_keep_the_promises_of_all_placements(
    name: str, drawn: list[Drawn], count: int, gpu_type: str
) -> None:
    models, profiles = case(drawn, gpu_type)
    slots = gpus(count, gpu_type)
    check_promises(placement_policy(name).place(models, slots, profiles), models, slots, profiles)


@settings(deadline=None)
@given(
    st.sampled_from([("igniter", {}), ("ffd", {"growth": True})]),
    drawn_workloads,
    st.integers(1, 30),
    st.sampled_from([case, estimated_case]),
)
def test_nobody_is_late_by_the_performance_model(
    policy: tuple[str, dict[str, bool]], drawn: list[Drawn], count: int, make: Make
) -> None:
    models, profiles = make(drawn)
    placed = placement_policy(*policy).place(models, gpus(count), profiles)
    assert placed.violations == ()
    slo_of = {model.model_id: model.slo_ms for model in models}
    for gpu in placed.gpus_used:
        entries = [planned.models[0] for planned in placed.slices if planned.gpu == gpu]
        shares = [planned.share_percent or 0.0 for planned in placed.slices if planned.gpu == gpu]
        known = [igniter_profile(profiles, entry.model_id) for entry in entries]
        hardware = known[0].hardware
        residents = [
            Resident(profile.coefficients, entry.batch or 0, share)
            for profile, entry, share in zip(known, entries, shares, strict=True)
        ]
        for entry, resident, latency_ms in zip(
            entries, residents, predict_ms(hardware, residents), strict=True
        ):
            assert latency_ms <= slo_of[entry.model_id] / 2 * (1 + ROUNDING)
            load_ms = resident.coefficients.load_bytes * resident.batch_size / hardware.pcie_bytes_per_ms
            rps = 1000 * resident.batch_size / (latency_ms - load_ms)
            assert rps >= (entry.rate_rps or 0.0) * (1 - ROUNDING)


@settings(deadline=None)
@given(drawn_workloads)
def test_gpu_lets_plus_puts_at_most_two_on_a_gpu(drawn: list[Drawn]) -> None:
    models, profiles = case(drawn)
    placed = placement_policy("gpulets").place(models, gpus(60), profiles)
    for gpu in placed.gpus_used:
        on_it = [planned.models[0].model_id for planned in placed.slices if planned.gpu == gpu]
        assert len(on_it) <= 2
        assert len(set(on_it)) == len(on_it)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(20, 80), st.integers(10, 300)), min_size=1, max_size=12
    )
)
def test_the_plan_is_that_of_the_algorithms_as_written(drawn: list[Drawn]) -> None:
    models, profiles = case(drawn)
    expected = as_written(models, profiles, gpus(1)[0])
    if expected is None:
        return
    policy = placement_policy("igniter", {"new_gpu": "paper"})
    placed = policy.place(models, gpus(len(models)), profiles)
    found: list[dict[str, float]] = [{} for _ in placed.gpus_used]
    for planned in placed.slices:
        assert planned.share_percent is not None
        found[planned.gpu][planned.models[0].model_id] = planned.share_percent
    assert found == expected


def as_written(
    models: list[PlacedModelInput], profiles: Profiles, gpu: GpuSlot
) -> list[dict[str, float]] | None:
    """Algorithms 1 and 2 with shares in percent and every prediction from the start; None outside the paper."""
    batch: dict[str, int] = {}
    lower: dict[str, float] = {}
    limit = {model.model_id: model.slo_ms / 2 for model in models}
    known: dict[str, IgniterProfile] = {}
    for model in models:
        profile = profiles[model.model_id, gpu.gpu_type]
        assert isinstance(profile, IgniterProfile)
        own, pcie = profile.coefficients, profile.hardware.pcie_bytes_per_ms
        rate, half = (model.rate_rps or 0.0) / 1000, model.slo_ms / 2
        b = math.ceil(half * rate * pcie / (pcie + rate * own.load_bytes))
        k1, k2, k3, k4, k5 = own.active
        left = (
            half
            - (own.load_bytes + own.feedback_bytes) * b / pcie
            - k5
            - own.sched_ms_per_kernel * own.kernels
        )
        if left <= 0 or b > profile.batch_size_max:
            return None
        share = math.ceil(((k1 * b * b + k2 * b + k3) / left - k4) / 2.5) * 2.5
        if share > 100 or profile.exec_ms(b, 100) > half:
            return None
        known[model.model_id], batch[model.model_id], lower[model.model_id] = profile, b, share
    plan: list[dict[str, float]] = []
    for model_id in sorted(lower, key=lambda name: -lower[name]):
        best, growth = None, math.inf
        for place, there in enumerate(plan):
            grown = {**there, model_id: lower[model_id]}
            while sum(grown.values()) <= 100:
                residents = [Resident(known[n].coefficients, batch[n], share) for n, share in grown.items()]
                predicted = predict_ms(known[model_id].hardware, residents)
                late = [n for n, ms in zip(grown, predicted, strict=True) if ms > limit[ModelId(n)]]
                if not late:
                    break
                for name in late:
                    grown[name] += 2.5
            more = sum(grown.values()) - sum(there.values())
            if sum(grown.values()) <= 100 and more < growth:
                best, growth = (place, grown), more
        if best is None:
            plan.append({model_id: lower[model_id]})
        else:
            plan[best[0]] = best[1]
    return plan
