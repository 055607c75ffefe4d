"""The policy `gpulet`: elastic partitioning and GPU scaling behind the interface that every placement has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fabric.policy_options import Choice, Flag
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Rejected,
    Unplaced,
    cannot_host,
    in_gib,
    largest_batch,
)
from policies.placement.common.gpu_kinds import gpu_kind
from policies.placement.common.request_checks import in_order, joined, rated, require_gpus
from policies.placement.gpulet.board import Board, ModelDemand, cost_kind
from policies.placement.gpulet.explain import model_decision, scaling_decision
from policies.placement.gpulet.quantities import (
    BATCH_MAX,
    PARTITION_BYTES,
    SIZES,
    USABLE_MEMORY,
    WHOLE,
    inflated_rps,
    size_costs,
)
from policies.placement.gpulet.scaling import as_much_as_fits, scaled
from policies.registry import Registered
from policies.rounding import ROUNDING
from profiles.model import ModelProfile


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model, and what stands for it in the search; `reason`: why it can never be placed."""

    model: PlacedModelInput
    demand: ModelDemand | None
    reason: str | None = None


class GpuletPolicy:
    """Each model on gpulets of its most efficient size, rests beside them or in shared time, on the fewest GPUs.

    `search`: `elastic` (Algorithms 1 and 2), `exhaustive` (the ideal of figure 16), or `whole` (temporal sharing
    of uncut GPUs, as in Nexus). With `interference`, gpulets side by side slow each other by the linear model.
    """

    def __init__(self, *, has_interference: bool = True, search: str = "elastic") -> None:
        self._has_interference = has_interference
        self._search = search

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,
    ) -> Placement:
        """Place (Algorithm 2); `current` says how many GPUs the scaling starts from.

        A workload that is too much for all GPUs is carried as far as it goes. Raises ConfigError where there is
        no GPU, or an exhaustive search is asked over too many.
        """
        require_gpus(gpus)
        planned, unrated = rated(models)
        asked = [_asked(place, model, gpus, profiles) for place, model in enumerate(planned)]
        demands = [one.demand for one in asked if one.demand is not None]
        kinds = [gpu_kind(gpu) for gpu in gpus]
        if not demands:
            nowhere = _unplaced(Board.of(kinds), asked, gpus)
            return Placement((), in_order([*nowhere, *unrated], models), (), 0.0)
        first_count = len(current.gpus_used) if current is not None else 1
        board = scaled(
            demands,
            kinds,
            search=self._search,
            has_interference=self._has_interference,
            first_count=first_count,
        )
        is_scheduled = board is not None
        board = board or as_much_as_fits(
            demands, kinds, search=self._search, has_interference=self._has_interference
        )
        decisions = [
            Decision(one.model.model_id, "nowhere", {}, (Rejected("any GPU", one.reason or ""),))
            if one.demand is None
            else model_decision(one.model.model_id, one.demand, board, gpus, is_cut=self._search != "whole")
            for one in asked
        ]
        decisions.append(scaling_decision(board, first_count, len(gpus), is_scheduled=is_scheduled))
        return Placement(
            tuple(_slices(board, asked, gpus)),
            in_order([*_unplaced(board, asked, gpus), *unrated], models),
            tuple(_violations(board, asked, gpus)),
            sum(_served_rps(board, demand) for demand in demands),
            tuple(decisions),
        )

    def gpus_needed(
        self, models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
    ) -> int | None:
        """The fewest of the GPUs that serve every model in full, None where all are too few.

        Quicker than `place`, which would make a partial plan then.
        """
        planned, _ = rated(models)
        asked = [_asked(place, model, gpus, profiles) for place, model in enumerate(planned)]
        demands = [one.demand for one in asked if one.demand is not None]
        if len(demands) < len(models):
            return None
        kinds = [gpu_kind(gpu) for gpu in gpus]
        found = scaled(demands, kinds, search=self._search, has_interference=self._has_interference)
        return None if found is None else len(found.gpulets)


def _asked(place: int, model: PlacedModelInput, gpus: Sequence[GpuSlot], profiles: Profiles) -> _Asked:
    """The model, which has a rate, as a demand, or the reason why no GPU here can ever serve it."""
    costs, memory = {}, {}
    reasons = []
    for kind, gpu in {cost_kind(gpu_kind(gpu)): gpu for gpu in gpus}.items():
        profile = profiles.get((model.model_id, gpu.gpu_type))
        refused = cannot_host(model, gpu, profiles)
        if refused is None and profile is None:
            refused = f"it has no profile for GPU type {gpu.gpu_type}"
        if refused is None and profile is not None:
            refused = _never_in_time(model, profile)
        if refused is None and profile is not None:
            needed = _memory_bytes(model, profile)
            alike = (other for other in map(gpu_kind, gpus) if cost_kind(other) == kind)
            usable = USABLE_MEMORY * max(other.memory_bytes for other in alike)
            if needed + PARTITION_BYTES <= usable:
                known = {size: size_costs(profile, size) for size in SIZES}
                costs[kind] = {size: one for size, one in known.items() if one is not None}
                memory[kind] = needed
                continue
            refused = (
                f"memory: it and its process need {in_gib(needed + PARTITION_BYTES)}, "
                f"{in_gib(usable)} of a GPU are usable"
            )
        if refused is not None:
            reasons.append(refused)
    if not costs:
        return _Asked(model, None, joined(reasons))
    rate_rps = model.rate_rps or 0.0
    return _Asked(model, ModelDemand(place, model.slo_ms, inflated_rps(rate_rps), rate_rps, costs, memory))


def _never_in_time(model: PlacedModelInput, profile: ModelProfile) -> str | None:
    """A request may just miss a batch, so two must fit into the SLO even on a whole GPU."""
    whole = size_costs(profile, WHOLE)
    if whole is None or 2 * whole.exec_ms(1) <= model.slo_ms:
        return None
    return (
        f"its SLO of {model.slo_ms:g} ms is below twice the {whole.exec_ms(1):g} ms that a single request is "
        "planned to take on a whole GPU"
    )


def _memory_bytes(model: PlacedModelInput, profile: ModelProfile) -> int:
    """The stated memory, else that of the largest batch that could be planned."""
    if model.memory_bytes is not None:
        return model.memory_bytes
    table = profile.exec_table(float(WHOLE))[:BATCH_MAX]
    return profile.memory_bytes(max(1, largest_batch(table, model.slo_ms)))


def _served_rps(board: Board, demand: ModelDemand) -> float:
    """The part of the stated rate that is served: all of it, or as much as of the inflated one is carried."""
    if board.is_served(demand):
        return demand.stated_rps
    return demand.stated_rps * min(1.0, board.carried_rps(demand) / demand.rps)


def _slices(board: Board, asked: Sequence[_Asked], gpus: Sequence[GpuSlot]) -> list[PlannedSlice]:
    slices = []
    for spot, gpulet in board.spots():
        planned = []
        for load in gpulet.loads:
            share = load.rps / board.carried_rps(load.demand)
            planned.append(
                PlannedModel(
                    asked[load.demand.place].model.model_id,
                    load.batch,
                    _served_rps(board, load.demand) * share,
                    gpulet.duty_ms,
                    load.exec_ms,
                )
            )
        if planned:
            size = None if gpulet.size == WHOLE else float(gpulet.size)
            slices.append(PlannedSlice(gpus[spot.gpu].index, size, tuple(planned)))
    return slices


def _unplaced(board: Board, asked: Sequence[_Asked], gpus: Sequence[GpuSlot]) -> list[Unplaced]:
    unplaced = []
    for one in asked:
        model, demand = one.model, one.demand
        if demand is None:
            unplaced.append(Unplaced(model.model_id, model.rate_rps, one.reason or ""))
        elif not board.is_served(demand):
            carried = board.carried_rps(demand)
            reason = (
                f"{len(gpus)} GPUs have gpulets for {carried:.0f} of the {demand.rps:.0f} requests per second that "
                f"{demand.stated_rps:g} are planned as"
            )
            unplaced.append(Unplaced(model.model_id, demand.stated_rps - _served_rps(board, demand), reason))
    return unplaced


def _violations(board: Board, asked: Sequence[_Asked], gpus: Sequence[GpuSlot]) -> list[str]:
    """Residues that a neighbour disturbs may exceed their SLO by 5 % (the authors' slack)."""
    violations = []
    for spot, gpulet in board.spots():
        latency_ms = gpulet.duty_ms + sum(load.exec_ms for load in gpulet.loads)
        for load in gpulet.loads:
            slo_ms = load.demand.slo_ms
            if latency_ms > slo_ms * (1 + ROUNDING):
                violations.append(
                    f"{asked[load.demand.place].model.model_id} on GPU {gpus[spot.gpu].index}: planned for up to "
                    f"{latency_ms:.2f} ms beside its neighbour, its SLO is {slo_ms:g} ms"
                )
    return violations


REGISTERED: Final = Registered(
    {"search": Choice(("elastic", "exhaustive", "whole")), "interference": Flag(True)},
    lambda options: GpuletPolicy(has_interference=options["interference"], search=options["search"]),
)
