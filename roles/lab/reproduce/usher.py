"""Usher's experiments (OSDI 2024) that need no trace of production: figures 3, 6a, 7 and 16.

Its measured ones (1, 2, 4, 5, 13 to 26) were driven by traces on 24 V100s, or are of a GPU's cache. The models of figures 3 and 7
are the paper's own; where it states no run times they are ours, which change nothing about what fits where.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement
from policies.placement.registry import placement_policy
from profiles.gpu import gpu_profile
from profiles.model import WHOLE_GPU_PERCENT, ModelProfile, TableProfile
from profiles.requirements import Requirements, Usage
from profiles.store import shipped_data, shipped_profile
from roles.lab.reproduce.report import Grid, Range, Reproduction, Row, Value

GPU_TYPE = "v100"
HEAVY = 1.2
EXEC_MS = {4: 60.0, 8: 100.0, 32: 100.0}
SLO_MS, RATE_RPS = 100.0, 80.0
"""A replica of batch 8 carries the rate alone, two of batch 4 together."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Creq and Mreq of a model in percent, by batch size."""

    name: str
    by_batch: Mapping[int, tuple[float, float]]

    def only(self, batch: int) -> Needs:
        """The same model where it may run no other batch."""
        return Needs(self.name, {batch: self.by_batch[batch]})


SMALL_CREQ = 10.0
FIGURE_3 = tuple(
    Needs(name, {8: (SMALL_CREQ, whole), 4: (SMALL_CREQ, weights + (whole - weights) / 2)})
    for name, whole, weights in (("M1", 70.0, 10.0), ("M2", 65.0, 5.0), ("M3", 40.0, 10.0))
)
"""Section 2.2: intermediate data halves with the batch. Creq is not stated: a small one."""
FIGURE_7 = tuple(
    Needs(name, {32: (compute, memory)})
    for name, compute, memory in (
        ("M1", 50.0, 20.0),
        ("M2", 50.0, 20.0),
        ("M3", 40.0, 60.0),
        ("M4", 40.0, 60.0),
    )
)
"""Section 2.3. The text lists 20 % as M2's Creq; its averages, 100 % of the first GPU among them, need 50 %."""


@dataclass(frozen=True, slots=True)
class Packed:
    """GPUs used, and their mean use of compute and memory in percent."""

    gpus: int
    compute_percent: float
    memory_percent: float


def packed(models: Sequence[Needs], groups: Sequence[Sequence[str]] | None = None) -> Packed:
    """What Usher makes of them where the cluster may grow."""
    options = {"cluster": "growing", **({} if groups is None else {"groups": [list(one) for one in groups]})}
    slots = v100s(len(models))
    profiles = {(ModelId(one.name), GPU_TYPE): _profile(one) for one in models}
    asked = [PlacedModelInput(ModelId(one.name), SLO_MS, RATE_RPS) for one in models]
    plan = placement_policy("usher", options).place(asked, slots, profiles)
    needs = {one.name: one for one in models}
    compute, memory = 0.0, 0.0
    for slice_ in plan.slices:
        for placed in slice_.models:
            assert placed.batch is not None, "Usher chooses one"
            creq, mreq = needs[placed.model_id].by_batch[placed.batch]
            compute, memory = compute + creq, memory + mreq
    count = len(plan.gpus_used)
    return Packed(count, compute / count, memory / count)


def _profile(model: Needs) -> TableProfile:
    column = {batch: EXEC_MS[batch] for batch in sorted(model.by_batch)}
    needs = {
        batch: Requirements(achieved_occupancy_percent=creq, memory_percent=mreq)
        for batch, (creq, mreq) in sorted(model.by_batch.items())
    }
    return TableProfile(
        {WHOLE_GPU_PERCENT: column}, source="Usher, section 2", is_padded=True, usage=Usage(needs)
    )


def v100s(count: int) -> list[GpuSlot]:
    """On one node."""
    memory_bytes = gpu_profile(GPU_TYPE).memory_bytes
    return [GpuSlot(index, GPU_TYPE, memory_bytes, NodeId("node0"), index) for index in range(count)]


def figures_3_and_7() -> Reproduction:
    """The two examples by which the paper explains workload division and interleaving."""
    m1, m2, m3 = FIGURE_3
    cases: tuple[tuple[str, Packed, tuple[int, float | None, float]], ...] = (
        ("3a, no division", packed([m1.only(8), m2.only(8), m3.only(8)]), (3, None, 58.33)),
        ("3b, M1 divided", packed([m1.only(4), m2.only(8), m3.only(8)]), (3, None, 61.66)),
        ("3c, all divided as Usher chooses", packed(FIGURE_3), (2, None, 100.0)),
        ("7a, M1 with M2", packed(FIGURE_7, [["M1", "M2"], ["M3"], ["M4"]]), (3, 60.0, 53.33)),
        ("7b, interleaved by Usher", packed(FIGURE_7), (2, 90.0, 80.0)),
    )
    rows = []
    for name, ours, (gpus, compute, memory) in cases:
        rows.append(Row(f"{name}: GPUs", gpus, ours.gpus))
        if compute is not None:
            note = "with 50 % as M2's Creq: the text's 20 % does not give its own averages"
            rows.append(Row(f"{name}: mean use of compute, %", compute, round(ours.compute_percent, 2), note))
        note = (
            "another division with as few GPUs: M3's alone; the paper divides all three"
            if name.startswith("3c")
            else ""
        )
        rows.append(Row(f"{name}: mean use of memory, %", memory, round(ours.memory_percent, 2), note))
    return Reproduction(
        "usher-figures-3-7",
        "Usher: workload division and interleaving",
        "Usher, figures 3 and 7 (sections 2.2 and 2.3), placed by our policy `usher` with `cluster: growing`.",
        tuple(rows),
    )


# ---------------------------------------------------------------- on the thesis' models

MODELS = (
    "alexnet",
    "densenet121",
    "efficientnet_b7",
    "resnet50",
    "vgg19",
    "mobilenet_v2",
    "bert",
    "gpt2",
    "t5",
)
FIGURE_16_SLO_MS = 300.0
LOADS_RPS = (50.0, 100.0, 200.0)
GPUS_MAX = 64


def figures_6_and_16() -> Reproduction:
    """Which models are heavy in what, and the GPUs that a growing cluster needs, on Table A.1's models."""
    ratios = {name: _creq_over_mreq(shipped_profile(f"thesis-v100/{name}")) for name in _table_a1_models()}
    note = "the 13 models of the thesis' Table A.1, Mreq as part of the capacity; the paper's 19 small ones, of bandwidth"
    heavy = {
        "C-heavy": sum(one >= HEAVY for one in ratios.values()),
        "M-heavy": sum(1 / one >= HEAVY for one in ratios.values()),
    }
    heavy["neither"] = len(ratios) - sum(heavy.values())
    rows = [
        Row(f"6a: {kind} models, %", paper, round(100 * heavy[kind] / len(ratios), 1), note)
        for kind, paper in (("C-heavy", 59), ("M-heavy", 39), ("neither", 2))
    ]
    bars: list[tuple[str, tuple[Value, ...]]] = []
    policies = ("usher", "wao-usher", "wsm-usher", "gpulet", "exclusive")
    for rate_rps in LOADS_RPS:
        counts = {policy: _gpus_needed(policy, rate_rps) for policy in policies}
        bars.append((f"{rate_rps:g} requests/s each", tuple(counts.values())))
        for metric, name in (
            ("usher", "achieved occupancy"),
            ("wsm-usher", "weighted SMs"),
            ("wao-usher", "weighted occupancy"),
        ):
            mine, theirs = counts[metric], counts["exclusive"]
            rows.append(
                Row(
                    f"16: GPUs of one model each over Usher's with {name}, {rate_rps:g} requests/s each",
                    Range(2.5, 3.0),
                    None if mine is None or theirs is None else round(theirs / mine, 2),
                    "the paper's rivals, models and trace are others; what a model needs in Table A.1 decides: 69 to 100 % of achieved "
                    "occupancy lets no two share a GPU",
                )
            )
    return Reproduction(
        "usher-figures-6-16",
        "Usher: heavy models, and GPUs that are needed",
        "Usher, figures 6a and 16 (sections 2.3 and 5.2.2), planned with the thesis' Table A.1: the paper publishes no requirements. "
        f"{len(MODELS)} models at equal rates, SLO {FIGURE_16_SLO_MS:g} ms, up to {GPUS_MAX} V100s.",
        tuple(rows),
        (Grid("GPUs planned (nothing: not all rates are met):", policies, tuple(bars)),),
    )


def _table_a1_models() -> list[str]:
    return list(dict.fromkeys(str(row["model"]) for row in shipped_data("thesis_table_a1_v100")["rows"]))


def _creq_over_mreq(profile: ModelProfile) -> float:
    """Averages over the profiled batches, as Usher groups."""
    known = [
        (needs.achieved_occupancy_percent, needs.memory_percent)
        for needs in profile.requirements.values()
        if needs.achieved_occupancy_percent is not None and needs.memory_percent is not None
    ]
    return statistics.fmean(creq for creq, _ in known) / statistics.fmean(mreq for _, mreq in known)


def _gpus_needed(policy: str, rate_rps: float) -> int | None:
    """On a cluster that grows; None where it does not meet all rates."""
    options = {"cluster": "growing"} if policy.endswith("usher") else {}
    profiles = {(ModelId(name), GPU_TYPE): shipped_profile(f"thesis-v100/{name}") for name in MODELS}
    asked = [PlacedModelInput(ModelId(name), FIGURE_16_SLO_MS, rate_rps) for name in MODELS]
    plan: Placement = placement_policy(policy, options).place(asked, v100s(GPUS_MAX), profiles)
    return None if plan.unplaced else len(plan.gpus_used)
