"""The shape every placement policy has: models, GPUs and profiles in, slices out.

A policy is a pure function of its arguments: no clock, no randomness of its own, no memory of former calls. The
exceptions are programs with a time limit, `ao-milp`, `wsm-milp` and the partition of `symphony` into sub-clusters: what it
cut short may differ on a slower machine.
What it cannot place it says, with the reason; it never fails because a workload is too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct, field

from fabric.ids import ModelId, NodeId
from policies.rounding import ROUNDING
from profiles.model import ModelProfile

Profiles = Mapping[tuple[ModelId, str], ModelProfile]
"""By model and GPU type; a pair that is absent cannot be placed by its run time."""

WHOLE_PERCENT = 100.0


class PlacedModelInput(Struct, frozen=True):
    """A model to place. `rate_rps` None: not known; `memory_bytes` None: what the profile says.

    `needs_real_gpu`: it has a loader, and the cluster has real devices. `stages` over 1: it must be cut into so many, `ranks` over 1: it runs in so many; no policy but `given` sees such a model (`cut_models.py`).
    """

    model_id: ModelId
    slo_ms: float
    rate_rps: float | None = None
    memory_bytes: int | None = None
    has_loader: bool = False
    needs_real_gpu: bool = False
    priority: int = 0
    stages: int = 1
    ranks: int = 1

    @property
    def gpus(self) -> int:
        """How many each of its replicas takes."""
        return max(self.stages, self.ranks)


class GpuSlot(Struct, frozen=True):
    """A GPU of the cluster: `index` is cluster-wide (file order, from 0), `local_index` its node's own."""

    index: int
    gpu_type: str
    memory_bytes: int
    node_id: NodeId
    local_index: int
    device: str = "emulated"
    price_per_hour: float | None = None

    @property
    def is_emulated(self) -> bool:
        """Sleeps instead of computing."""
        return self.device == "emulated"


class PlannedModel(Struct, frozen=True):
    """A model on a slice. None: `batch` the runtime chooses; the others are not part of this policy's plan.

    `batch` is a target for disciplines that have one. `batch_max` binds all of them: the model's run time and
    what it takes from its neighbours were planned for batches no larger.
    """

    model_id: ModelId
    batch: int | None = None
    rate_rps: float | None = None
    duty_ms: float | None = None
    predicted_ms: float | None = None
    batch_max: int | None = None


class PlannedSlice(Struct, frozen=True):
    """A share of one GPU (`gpu` is its cluster-wide index; share None: no limit) and its models.

    With `following` it is a pipeline: each model is cut into as many stages as there are GPUs, the first on `gpu`, the others
    on these; or a gang, whose one model runs in a rank on each. All are of one node, and carry no other slice.
    """

    gpu: int
    share_percent: float | None
    models: tuple[PlannedModel, ...]
    following: tuple[int, ...] = ()

    @property
    def gpus(self) -> tuple[int, ...]:
        """All its GPUs, in the order of the stages."""
        return (self.gpu, *self.following)


class Unplaced(Struct, frozen=True):
    """A model, or that part of its rate, that found no place."""

    model_id: ModelId
    rate_rps: float | None
    reason: str


class Rejected(Struct, frozen=True):
    """An option that a policy looked at and did not take; `metrics` are what it was judged by."""

    option: str
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)


class Decision(Struct, frozen=True):
    """Why a policy did what it did: for `subject` (a model, a group) it chose `chosen` (`tenuto plan --why`).

    `metrics` are the values that led there, named with their unit; `rejected` the options beside it, the
    closest ones first, at most a handful.
    """

    subject: str
    chosen: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()


class Placement(Struct, frozen=True):
    """What should run where. `expected_goodput_rps` is the policy's own prediction.

    `violations` are promises that the policy's own model says it breaks (only policies whose paper does so);
    `decisions` say why. `short_rps`: what placed models are expected to lose of their rates, where a policy has no such parts in `unplaced`.
    """

    slices: tuple[PlannedSlice, ...]
    unplaced: tuple[Unplaced, ...] = ()
    violations: tuple[str, ...] = ()
    expected_goodput_rps: float | None = None
    decisions: tuple[Decision, ...] = ()
    short_rps: Mapping[ModelId, float] = field(default_factory=dict)

    @property
    def gpus_used(self) -> tuple[int, ...]:
        """The indices of the GPUs that carry a slice, ascending."""
        return tuple(sorted({gpu for planned in self.slices for gpu in planned.gpus}))


class PlacementPolicy(Protocol):
    """Where each model runs (design section 6)."""

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,
    ) -> Placement:
        """Place `models` on `gpus`; `current` is what runs now, None at the start."""
        ...


@runtime_checkable
class NamingPolicy(Protocol):
    """A policy whose options name models or GPUs: `place` leaves out those that are not asked for, as they may come back."""

    def check_names(self, models: Sequence[PlacedModelInput], gpus: int) -> None:
        """Raise ConfigError for a name that a configuration of these models and so many GPUs does not have."""
        ...


def cannot_host(model: PlacedModelInput, gpu: GpuSlot, profiles: Profiles, *, stages: int = 1) -> str | None:
    """Why that GPU can never serve the model by itself (or so many of them a stage each), or None.

    Real devices need a loader, emulated ones a profile. A model with a loader does not go to an emulated
    device while the cluster has real ones, in use or not: its answers would be made up there.
    """
    if not gpu.is_emulated:
        return None if model.has_loader else f"it has no loader for a {gpu.device} device"
    if model.needs_real_gpu:
        return "it has a loader, so it is for the real devices that there are"
    profile = profiles.get((model.model_id, gpu.gpu_type))
    if profile is None:
        return f"it has no profile for GPU type {gpu.gpu_type}"
    if model.ranks > 1:
        stages = 1  # its profile is of all ranks together
    if stages > 1 and stages not in profile.cuts:
        return f"its profile has no cut into {stages} stages"
    fastest_ms = sum(table[0] for table in profile.stage_tables(stages))
    if fastest_ms > model.slo_ms:
        return f"its SLO of {model.slo_ms:g} ms is below the {fastest_ms:g} ms of a single request"
    return None


def largest_batch(exec_ms: Sequence[float], limit_ms: float) -> int:
    """The largest b with l(b) ≤ `limit_ms`, 0 if there is none; `exec_ms[b - 1]` is l(b)."""
    low, high = 0, len(exec_ms)
    while low < high:
        middle = (low + high + 1) // 2
        if exec_ms[middle - 1] <= limit_ms * (1 + ROUNDING):
            low = middle
        else:
            high = middle - 1
    return low


def slice_memory_bytes(
    models: Iterable[PlacedModelInput],
    gpu_type: str,
    profiles: Profiles,
    stages: int = 1,
    batch_max: Mapping[ModelId, int | None] | None = None,
) -> int:
    """Memory in bytes of one slice with these models, on each of its GPUs: one runs at a time, all stay loaded.

    What a model needs at batch 1 stays; what its largest batch within the SLO, or within `batch_max` where the plan bounds it,
    needs on top is shared by all models of the slice, so the largest such surplus counts once. A given memory has no surplus.
    """
    bounds = batch_max or {}
    resident, surplus = 0, 0
    for model in models:
        profile = profiles.get((model.model_id, gpu_type))
        if model.memory_bytes is not None:
            resident += model.memory_bytes
        elif profile is not None:
            idle = profile.memory_bytes(1)
            resident += idle
            largest = largest_batch(profile.exec_table(), model.slo_ms)
            batch_size = max(1, min(largest, bounds.get(model.model_id) or largest))
            surplus = max(surplus, profile.memory_bytes(batch_size) - idle)
    return -(-(resident + surplus) // stages)  # a cut is balanced, so each stage has its part


def share_violations(slices: Iterable[PlannedSlice]) -> tuple[str, ...]:
    """GPUs whose shares sum to more than 100 %; a slice without a limit counts nothing."""
    total: dict[int, float] = {}
    for planned in slices:
        total[planned.gpu] = total.get(planned.gpu, 0.0) + (planned.share_percent or 0.0)
    return tuple(
        f"GPU {gpu}: the shares sum to {percent:g} %, over 100 %"
        for gpu, percent in sorted(total.items())
        if percent > WHOLE_PERCENT * (1 + ROUNDING)
    )


def in_gib(size_bytes: float) -> str:
    """A size for people."""
    return f"{size_bytes / 2**30:.2f} GB"
