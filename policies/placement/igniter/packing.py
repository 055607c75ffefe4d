"""Which GPU hosts which workload: algorithm 1, and first fit with and without growth of shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from policies.placement.common.base import Decision, Rejected
from policies.placement.igniter.gpu import Joined, SharedGpu, TrialFailed
from policies.placement.igniter.workload import IgniterGpuKind, IgniterWorkload, by_need

_SHOWN = 4  # rejected options in a decision
_Looked = tuple[SharedGpu, Joined | TrialFailed]
Choose = Callable[
    [Iterable[SharedGpu], IgniterWorkload], tuple[SharedGpu | None, tuple[int, ...], list[_Looked]]
]
"""Among GPUs with room in plan order: the one, everybody's shares there, and what was tried."""


@dataclass(frozen=True, slots=True)
class Packing:
    """GPUs in plan order, as many as the plan wants, and why each workload is where it is."""

    gpus: tuple[SharedGpu, ...]
    decisions: tuple[Decision, ...]


def pack(
    workloads: Sequence[IgniterWorkload], kind: IgniterGpuKind, choose: Choose, *, is_new_checked: bool
) -> Packing:
    """Place the workloads by r_lower descending; who finds no GPU gets a new one.

    A new GPU starts with r_lower, as in the paper; with `is_new_checked` with what the workload takes alone,
    which is more where it draws so much power that the frequency drops.
    """
    gpus: list[SharedGpu] = []
    open_gpus: list[SharedGpu] = []
    decisions: list[Decision] = []
    least = min((workload.units for workload in workloads), default=0)
    for workload in by_need(workloads):
        with_room = (gpu for gpu in open_gpus if gpu.has_room(workload))
        chosen, units, looked = choose(with_room, workload)
        is_new = chosen is None
        if chosen is None:
            chosen = SharedGpu(kind, len(gpus))
            units = (workload.alone_units if is_new_checked else workload.units,)
            gpus.append(chosen)
            open_gpus.append(chosen)
        growth = sum(units) - chosen.used
        decisions.append(_decision(workload, chosen, growth, looked, open_gpus, is_new=is_new))
        chosen.take(workload, units)
        if chosen.used + least > kind.units_max:
            open_gpus.remove(chosen)
    return Packing(tuple(gpus), tuple(decisions))


def least_growth(
    gpus: Iterable[SharedGpu], workload: IgniterWorkload
) -> tuple[SharedGpu | None, tuple[int, ...], list[_Looked]]:
    """Algorithm 1, lines 5 to 12: where the shares grow least, the first of equals."""
    chosen: SharedGpu | None = None
    units: tuple[int, ...] = ()
    least = 1 << 30
    looked: list[_Looked] = []
    for gpu in gpus:
        result = gpu.trial(workload, least)
        looked.append((gpu, result))
        if isinstance(result, Joined):
            chosen, units, least = gpu, result.units, result.growth
            if least == workload.units:
                break  # nobody grows: no other GPU can do better
    return chosen, units, looked


def first_fit(
    gpus: Iterable[SharedGpu], workload: IgniterWorkload
) -> tuple[SharedGpu | None, tuple[int, ...], list[_Looked]]:
    """FFD+: the first GPU with room for r_lower; nobody's share grows."""
    first = next(iter(gpus), None)
    return (None, (), []) if first is None else (first, (*first.units, workload.units), [])


def first_growth(
    gpus: Iterable[SharedGpu], workload: IgniterWorkload
) -> tuple[SharedGpu | None, tuple[int, ...], list[_Looked]]:
    """FFD++: the first GPU on which algorithm 2 succeeds."""
    looked: list[_Looked] = []
    for gpu in gpus:
        result = gpu.trial(workload, 1 << 30)
        looked.append((gpu, result))
        if isinstance(result, Joined):
            return gpu, result.units, looked
    return None, (), looked


def _decision(
    workload: IgniterWorkload,
    chosen: SharedGpu,
    growth: int,
    looked: list[_Looked],
    open_gpus: Sequence[SharedGpu],
    *,
    is_new: bool,
) -> Decision:
    """What was looked at, the closest first: GPUs where it would fit, where it would not, and full ones."""
    percent = chosen.kind.percent
    tried = sorted(((gpu, result) for gpu, result in looked if gpu is not chosen), key=_distance)
    rejected = [
        Rejected(
            gpu.name, _why_not(result, chosen), {"growth_percent": percent_sum(chosen.kind, result.growth)}
        )
        for gpu, result in tried[:_SHOWN]
    ]
    full = (gpu for gpu in open_gpus if gpu is not chosen and not gpu.has_room(workload))
    for gpu in islice(full, _SHOWN - len(rejected)):
        reason = f"its shares or its memory leave no room for {percent(workload.units):g} %"
        rejected.append(Rejected(gpu.name, reason, {"used_percent": percent(gpu.used)}))
    return Decision(
        str(workload.model.model_id),
        f"{chosen.name}, new" if is_new else chosen.name,
        {
            "r_lower_percent": percent(workload.units),
            "batch": workload.batch_size,
            "objective_ms": workload.objective_ms,
            "growth_percent": percent_sum(chosen.kind, growth),
        },
        tuple(rejected),
    )


def percent_sum(kind: IgniterGpuKind, units: int) -> float:
    """A sum of shares, which may be over 100 %."""
    return units * kind.hardware.share_step_percent


def _distance(looked: _Looked) -> tuple[bool, int]:
    _, result = looked
    return isinstance(result, TrialFailed) and result.is_full, result.growth


def _why_not(result: Joined | TrialFailed, chosen: SharedGpu) -> str:
    if isinstance(result, Joined):
        return f"the shares there grow more than on {chosen.name}"
    if result.is_full:
        return "the shares there would sum to over 100 % before everybody is in time"
    return f"the shares there grow at least as much as on {chosen.name}"
