"""When slices of a model were not there, in words: for `why` and `explain`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from fabric.ids import ModelId, SliceId
from roles.observability.remembered import AbsenceSeen, gpu_of
from roles.observability.units import shown_ms

_NAMED_MAX: Final = 3
_CLOCKS_MS: Final = 5.0
"""By which the clocks of roles may disagree: mostly about one, more where an answer came late."""


def absences_of(
    absences: Iterable[AbsenceSeen], model_id: ModelId, hosting: Collection[SliceId]
) -> list[AbsenceSeen]:
    """Those of slices that should host a model, or should have when they were lost: there may be no such slice any more."""
    return [one for one in absences if one.slice_id in hosting or model_id in one.entry.models]


def during(absences: Iterable[AbsenceSeen], from_ms: float, until_ms: float) -> list[AbsenceSeen]:
    """Those that overlap a span, on the asker's clock, as far as that can be told."""
    return [
        one
        for one in absences
        if one.began_at_ms <= until_ms + _CLOCKS_MS
        and (one.ended_at_ms is None or one.ended_at_ms >= from_ms - _CLOCKS_MS)
    ]


def gone(absences: Sequence[AbsenceSeen], hosting: Collection[SliceId]) -> str:
    """`its only slice here/gpu0/0 was gone for 12 s, from 41 s to 29 s ago (its worker was killed by signal 9)`; empty: no slice was away.

    `hosting`: slices that should host its model now.
    """
    by_slice: dict[SliceId, list[AbsenceSeen]] = defaultdict(list)
    for one in sorted(absences, key=lambda one: one.began_at_ms):
        by_slice[one.slice_id].append(one)
    if not by_slice:
        return ""
    slices = {*hosting, *by_slice}
    if len(slices) == 1:
        ((slice_id, its),) = by_slice.items()
        return f"its only slice {slice_id} was gone {_when(its)}"
    named = [
        f"{slice_id}{'' if slice_id in hosting else ' (of a former plan)'} {_when(its)}"
        for slice_id, its in list(by_slice.items())[:_NAMED_MAX]
    ]
    if len(by_slice) > _NAMED_MAX:
        named.append(f"and {len(by_slice) - _NAMED_MAX} more")
    were = "was" if len(by_slice) == 1 else "were"
    return f"{len(by_slice)} of its {len(slices)} slices {were} gone: {', '.join(named)}"


def not_there(
    absences: Sequence[AbsenceSeen], hosting: Collection[SliceId], not_ready: Mapping[SliceId, str]
) -> tuple[str, bool]:
    """Of a model that no slice serves: which are gone, and why the others are not ready; and whether any is gone."""
    # Where one of a former plan was gone, another one takes its place, and is not ready yet.
    away = [one for one in absences if one.ended_at_ms is None or one.slice_id not in hosting]
    told = {one.slice_id for one in away}
    # The same reason may be that of many.
    others = [*dict.fromkeys(reason for slice_id, reason in not_ready.items() if slice_id not in told)]
    if len(others) > _NAMED_MAX:
        others[_NAMED_MAX:] = [f"and {len(others) - _NAMED_MAX} more"]
    return "; ".join([gone(away, hosting)] * bool(away) + others), bool(away)


def second_replica(hosting: Collection[SliceId]) -> str:
    """What helps where slices are lost. Slices of a node may share a process, and always share its host."""
    nodes = {gpu_of(slice_id).rpartition("/")[0] for slice_id in hosting}
    if len(nodes) > 1:
        return "see why they were gone together: tenuto status, and the logs of their workers"
    return "have a second replica on another node, which serves while this one is started again"


def _when(its: Sequence[AbsenceSeen]) -> str:
    """Of one slice, oldest first."""
    entry = its[-1].entry
    reason = f" ({entry.reason})" if entry.reason else ""
    total_ms = sum(one.entry.began_ago_ms - (one.entry.ended_ago_ms or 0.0) for one in its)
    if entry.ended_ago_ms is None:
        last = f"for the last {shown_ms(entry.began_ago_ms)}"
    else:
        last = f"from {shown_ms(entry.began_ago_ms)} to {shown_ms(entry.ended_ago_ms)} ago"
        last = f"for {shown_ms(total_ms)}, {last}" if len(its) == 1 else last
    if len(its) > 1:
        last = f"{len(its)} times, {shown_ms(total_ms)} in all, and last {last}"
    return last + reason
