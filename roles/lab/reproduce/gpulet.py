"""gpulet's experiments (Choi et al., USENIX ATC 2022): schedulability and SLO-preserved throughput.

The authors never published their latency table, so these run on a SYNTHETIC one
(`profiles/data/gpulet_2080ti.json`, anchored at the SLOs): orders and ratios can be compared, counts cannot.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Profiles
from policies.placement.gpulet import GpuletPolicy
from profiles.gpu import MIB
from profiles.store import shipped_data, shipped_profile
from roles.lab.reproduce.report import Grid, Reproduction, Row

GPU_TYPE = "2080ti"
SYNTHETIC = "on a synthetic latency table, the authors' is unpublished"
PAPER_GAIN_PERCENT = 61.7
GPU_COUNT = 4
"""For the throughput. The slides' table 2 has two a server and does not say how many servers."""

RATE_LIMIT_RPS = 1e5
RATE_STEP = 0.01
"""How finely a rate is searched, relative."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """One of the schedulers that the paper compares."""

    name: str
    title: str
    search: str
    has_interference: bool = False

    @property
    def policy(self) -> GpuletPolicy:
        """The policy that plans like it."""
        return GpuletPolicy(has_interference=self.has_interference, search=self.search)


SCHEDULERS = (
    Scheduler("whole", "time sharing of whole GPUs", "whole"),
    Scheduler("gpulet", "gpulet", "elastic"),
    Scheduler("gpulet+int", "gpulet with interference", "elastic", has_interference=True),
    Scheduler("ideal", "exhaustive search", "exhaustive"),
    Scheduler("ideal+int", "exhaustive search with interference", "exhaustive", has_interference=True),
)


@dataclass(frozen=True, slots=True)
class WorkloadModel:
    """A model of a workload: its shipped profile and its SLO."""

    model_id: ModelId
    profile: str
    slo_ms: float


def gpus(count: int) -> list[GpuSlot]:
    """RTX 2080 Tis as the authors' scheduler sees them."""
    memory_bytes = shipped_data("gpulet_2080ti")["scheduler_constants"]["gpu_mem_mb"] * MIB
    return [GpuSlot(index, GPU_TYPE, memory_bytes, NodeId("node0"), index) for index in range(count)]


def profiles_of(members: Sequence[WorkloadModel]) -> Profiles:
    """The shipped profiles of a workload."""
    return {
        (member.model_id, GPU_TYPE): shipped_profile(f"gpulet-2080ti/{member.profile}") for member in members
    }


# ---------------------------------------------------------------- schedulability (slides, figures 5 and 16)


def grid_size() -> int:
    """3^9 - 1 rate vectors: nine models at 0, 100 or 200 requests per second."""
    size: int = shipped_data("gpulet_2080ti")["schedulability_grid"]["scenarios"]
    return size


def grid_sample(count: int, seed: int = 1) -> list[int]:
    """Numbers of scenarios, drawn without repetition; all of them if `count` reaches their number."""
    if count >= grid_size():
        return list(range(1, grid_size() + 1))
    return sorted(random.Random(seed).sample(range(1, grid_size() + 1), count))


def grid_scenario(number: int) -> list[PlacedModelInput]:
    """Scenario n, from 1: the n-th non-zero rate vector, the first model's rate changing last."""
    data = shipped_data("gpulet_2080ti")
    grid = data["schedulability_grid"]
    inputs = []
    for model in reversed(grid["model_order"]):
        number, digit = divmod(number, len(grid["rates_rps"]))
        rate_rps = grid["rates_rps"][digit]
        if rate_rps:
            inputs.append(PlacedModelInput(ModelId(model), data["models"][model]["slo_ms"], rate_rps))
    return inputs[::-1]


def gpus_needed(numbers: Sequence[int], gpu_count: int, scheduler: Scheduler) -> dict[int, int]:
    """The fewest GPUs that serve each scenario, for those that `gpu_count` GPUs can serve."""
    data = shipped_data("gpulet_2080ti")
    members = [
        WorkloadModel(ModelId(model), model, 0.0) for model in data["schedulability_grid"]["model_order"]
    ]
    slots, known, policy = gpus(gpu_count), profiles_of(members), scheduler.policy
    found = {number: policy.gpus_needed(grid_scenario(number), slots, known) for number in numbers}
    return {number: needed for number, needed in found.items() if needed is not None}


def schedulability(sample: int = 100, gpu_counts: Sequence[int] = (2, 3, 4)) -> Reproduction:
    """How many scenarios each scheduler serves, on a seeded sample of the grid."""
    numbers = grid_sample(sample)
    needed = {scheduler: gpus_needed(numbers, max(gpu_counts), scheduler) for scheduler in SCHEDULERS}
    rows = tuple(
        Row(
            f"{scheduler.title}, {gpu_count} GPUs: schedulable, % of {len(numbers)} scenarios",
            _PAPER_ORDER.get(scheduler.name),
            100 * sum(count <= gpu_count for count in needed[scheduler].values()) / len(numbers),
            SYNTHETIC,
        )
        for gpu_count in gpu_counts
        for scheduler in SCHEDULERS
    )
    return Reproduction(
        "gpulet-schedulability",
        "gpulet: schedulable scenarios of nine models",
        "gpulet (ATC 2022), figures 5 and 16: nine models at 0, 100 or 200 requests per second. The figures' "
        "counts are not printed as numbers; the full grid is in docs/results/gpulet.md.",
        rows,
    )


_PAPER_ORDER = {
    "whole": "least (figure 5)",
    "gpulet+int": "close to the ideal (figure 16)",
    "ideal+int": "most (figure 16)",
}


# ---------------------------------------------------------------- SLO-preserved throughput (slides, figure 13)


def workloads() -> dict[str, list[WorkloadModel]]:
    """The models of the two applications, independent of each other, and five scenarios; all models of one get one rate."""
    data = shipped_data("gpulet_2080ti")
    found = {}
    game = data["applications"]["game"]
    found["game"] = [
        WorkloadModel(
            ModelId(name),
            profile_of(name),
            game["slo_ms_in_scheduling_scripts"],
        )
        for name in game["models"]
    ]
    traffic = data["applications"]["traffic"]
    found["traffic"] = [
        WorkloadModel(ModelId(name), name, traffic["slo_ms_in_scheduling_scripts"][name])
        for name in traffic["models"]
    ]
    for name, models in data["scenarios_table4"].items():
        if name.startswith("scen"):
            found[name] = [
                WorkloadModel(ModelId(model), model, data["models"][model]["slo_ms"]) for model in models
            ]
    return found


def profile_of(model: str) -> str:
    """The shipped profile of a model of the applications: its six LeNets have one."""
    return "lenet1" if model.startswith("lenet") else model


def highest_rps(members: Sequence[WorkloadModel], gpu_count: int, scheduler: Scheduler) -> float:
    """The highest rate of every model, in requests per second, that is schedulable; 0 if none is."""
    slots, known, policy = gpus(gpu_count), profiles_of(members), scheduler.policy

    def is_schedulable(rate_rps: float) -> bool:
        inputs = [PlacedModelInput(member.model_id, member.slo_ms, rate_rps) for member in members]
        return policy.gpus_needed(inputs, slots, known) is not None

    return highest_schedulable_rps(is_schedulable)


def highest_schedulable_rps(is_schedulable: Callable[[float], bool]) -> float:
    """The highest of the rates that are tried, in requests per second; 0 if none is schedulable.

    Schedulability is not monotone in the rate, so there is nothing to bisect: rates are doubled until twice in a
    row nothing fits, and from there tried downwards in steps of 1 %.
    """
    rate_rps, failures = 1.0, 0
    while failures < 2 and rate_rps < RATE_LIMIT_RPS:
        failures = 0 if is_schedulable(rate_rps) else failures + 1
        rate_rps *= 2
    while rate_rps >= 1:
        if is_schedulable(rate_rps):
            return rate_rps
        rate_rps *= 1 - RATE_STEP
    return 0.0


def slo_preserved_throughput(gpu_count: int = GPU_COUNT) -> Reproduction:
    """The most requests per second of each workload, all models together, that each scheduler can plan for."""
    bars, gains = [], {scheduler.name: list[float]() for scheduler in SCHEDULERS}
    compared = [scheduler for scheduler in SCHEDULERS if scheduler.search != "exhaustive"]
    for name, members in workloads().items():
        rates_rps = {
            scheduler.name: len(members) * highest_rps(members, gpu_count, scheduler)
            for scheduler in compared
        }
        base_rps = rates_rps[compared[0].name]
        bars.append((name, tuple(round(rates_rps[scheduler.name], 1) for scheduler in compared)))
        for scheduler in compared:
            if base_rps > 0:  # else there is nothing to gain over
                gains[scheduler.name].append(100 * (rates_rps[scheduler.name] / base_rps - 1))
    rows = [
        Row(
            f"{scheduler.title}: mean gain over time sharing over {len(gains[scheduler.name])} workloads, %",
            PAPER_GAIN_PERCENT if scheduler.has_interference else None,
            round(statistics.fmean(gains[scheduler.name]), 1) if gains[scheduler.name] else None,
            f"planned, not measured; {SYNTHETIC}",
        )
        for scheduler in compared[1:]
    ]
    return Reproduction(
        "gpulet-throughput",
        "gpulet: SLO-preserved throughput",
        f"gpulet (ATC 2022), figure 13, here on {gpu_count} GPUs of 11 GB.",
        tuple(rows),
        (
            Grid(
                f"Requests per second of all models together, those of game and traffic independent, {SYNTHETIC}:",
                tuple(scheduler.title for scheduler in compared),
                tuple(bars),
            ),
        ),
    )
