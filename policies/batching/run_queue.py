"""The waiting requests of one model, as runs in the order of their deadlines.

Arrivals are run-length coded (design section 4), so every operation costs per run touched, never per request.
A frontend sends runs in order of their deadlines and budgets mostly agree, so appending is the common case;
a run with a tighter deadline is put in its place. Runs given to a queue belong to it: cutting changes them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

from fabric.ids import FrontendId
from policies.batching.base import RequestRun
from policies.batching.priorities import by_priority


class RunQueue:
    """Runs by deadline, the tightest first; equal ones in the order they came.

    `runs` and `count` may be read by anyone. `tail_at_ms` is no earlier than the last run's deadline: a caller
    in a hurry may append to `runs` a run that is not tighter, if it sets `count` and `tail_at_ms` too. (Looking at
    the last run itself costs a visit to memory that has long left the cache.) All else goes through the methods. Whoever
    adds a run with a priority of its own sets `has_priorities`.
    """

    __slots__ = ("count", "has_priorities", "runs", "tail_at_ms")

    def __init__(self) -> None:
        self.runs: deque[RequestRun] = deque()
        self.count = 0
        self.has_priorities = False
        self.tail_at_ms = -math.inf

    def push(self, run: RequestRun) -> int:
        """Put a run in its place and say at which index of `runs` it now is."""
        runs = self.runs
        self.count += run.count
        if not runs or run.deadline_at_ms >= runs[-1].deadline_at_ms:
            runs.append(run)
            self.tail_at_ms = run.deadline_at_ms
            return len(runs) - 1
        index = bisect_right(runs, run.deadline_at_ms, key=_deadline_at_ms)
        runs.insert(index, run)
        return index

    def pop(self, count: int) -> list[RequestRun]:
        """Take the `count` tightest requests (at most what is there); the last run may be cut."""
        runs = self.runs
        if count >= self.count:
            taken = list(runs)
            runs.clear()
            self.count = 0
            return taken
        taken = []
        left = count
        while left and runs:
            run = runs[0]
            size = run.count
            if size <= left:
                taken.append(runs.popleft())
                left -= size
            else:
                taken.append(cut(run, left))
                self._reseat_head()
                left = 0
        self.count -= count - left
        return taken

    def pop_after(self, skip_runs: int, count: int) -> list[RequestRun]:
        """As `pop`, but leaving the first `skip_runs` runs where they are."""
        runs = self.runs
        runs.rotate(-skip_runs)
        skipped = [runs.pop() for _ in range(skip_runs)]
        self.count -= (skipped_count := sum(run.count for run in skipped))
        taken = self.pop(count)
        runs.extendleft(skipped)
        self.count += skipped_count
        return taken

    def pop_by_priority(self, skip_runs: int, count: int, usual: int) -> list[RequestRun]:
        """As `pop_after`, but those of the highest priority, the tightest of them first. Costs a look at every run.

        `usual`: see `by_priority`. What waits behind the tightest deadline is no tighter, so any batch of `count` is in
        time if the first `count` are.
        """
        waiting = list(self.runs)
        kept = waiting[:skip_runs]
        taken: list[RequestRun] = []
        left = count
        for run in by_priority(waiting[skip_runs:], usual):
            if not left:
                kept.append(run)
            elif run.count <= left:
                taken.append(run)
                left -= run.count
            else:
                taken.append(cut(run, left))
                kept.append(run)
                left = 0
        self.runs = deque(sorted(kept, key=_deadline_at_ms))
        self.count -= count - left
        self.tail_at_ms = max((run.deadline_at_ms for run in kept), default=-math.inf)
        self.has_priorities = any(run.priority is not None for run in kept)
        return sorted(taken, key=_deadline_at_ms)

    def drop_before(self, deadline_at_ms: float) -> list[RequestRun]:
        """Take all requests with a deadline before that moment; a run with both sorts is cut."""
        runs = self.runs
        taken: list[RequestRun] = []
        while runs and runs[0].deadline_at_ms < deadline_at_ms:
            run = runs[0]
            share = tight_count(run, deadline_at_ms)
            if share == run.count:
                taken.append(runs.popleft())
            else:
                taken.append(cut(run, share))
                self._reseat_head()
            self.count -= share
        return taken

    def withdraw(self, frontend_id: FrontendId, spans: Sequence[tuple[int, int]]) -> int:
        """Forget those of a frontend's requests that are here, and say how many. Costs one look at every run.

        `spans`: first seq and count of each, in any order.
        """
        kept, removed = without(self.runs, frontend_id, spans)
        if removed:
            # A run whose tight end was taken out may now be looser than its neighbour.
            self.runs = deque(sorted(kept, key=_deadline_at_ms))
            self.tail_at_ms = max((run.deadline_at_ms for run in kept), default=-math.inf)
            self.count -= removed
        return removed

    def forget(self, frontend_id: FrontendId) -> int:
        """Forget all of a frontend, and say how many they were."""
        removed = 0
        kept: deque[RequestRun] = deque()
        for run in self.runs:
            if run.frontend_id == frontend_id:
                removed += run.count
            else:
                kept.append(run)
        if removed:
            self.runs = kept
            self.count -= removed
        return removed

    def _reseat_head(self) -> None:
        """What is left of a cut run may be looser than the runs behind it, and than the tail was."""
        runs = self.runs
        self.tail_at_ms = max(self.tail_at_ms, runs[0].deadline_at_ms)
        if len(runs) > 1 and runs[0].deadline_at_ms > runs[1].deadline_at_ms:
            run = runs.popleft()
            self.count -= run.count
            self.push(run)


def cut(run: RequestRun, count: int) -> RequestRun:
    """Take the `count` tightest requests off a run as a run of their own; `run` keeps the rest.

    Deadlines lie linearly between the tightest and the loosest; the first piece keeps the tightest bound.
    """
    assert 0 < count < run.count
    step_ms = run.span_ms / (run.count - 1)
    piece = RequestRun(
        frontend_id=run.frontend_id,
        first_seq=run.first_seq,
        count=count,
        deadline_at_ms=run.deadline_at_ms,
        arrived_at_ms=run.arrived_at_ms,
        span_ms=step_ms * (count - 1),
        ready_at_ms=run.ready_at_ms,
        slack_ms=run.slack_ms,
        priority=run.priority,
    )
    run.first_seq += count
    run.count -= count
    run.deadline_at_ms += step_ms * count
    run.span_ms = step_ms * (run.count - 1)
    return piece


def without(
    runs: Iterable[RequestRun], frontend_id: FrontendId, spans: Sequence[tuple[int, int]]
) -> tuple[list[RequestRun], int]:
    """The runs less those of a frontend's requests, in the same order; and how many requests that took away."""
    firsts, ends = _disjoint(spans)
    lowest, highest = (firsts[0], ends[-1]) if firsts else (0, 0)
    removed = 0
    kept: list[RequestRun] = []
    for run in runs:
        first = run.first_seq
        if run.frontend_id != frontend_id or first >= highest or first + run.count <= lowest:
            kept.append(run)
            continue
        left = run.count
        index = bisect_right(ends, first)  # the first span that ends behind its beginning
        while left and index < len(firsts) and firsts[index] < run.first_seq + left:
            before = firsts[index] - run.first_seq
            if before > 0:
                kept.append(cut(run, before))
                left -= before
            gone = min(left, ends[index] - run.first_seq)
            removed += gone
            left -= gone
            if left:
                cut(run, gone)
            index += 1
        if left:
            kept.append(run)
    return kept, removed


def tight_count(run: RequestRun, deadline_at_ms: float) -> int:
    """How many requests of the run have a deadline before that moment."""
    missing_ms = deadline_at_ms - run.deadline_at_ms
    if missing_ms <= 0:
        return 0
    if run.span_ms < missing_ms:
        return run.count
    return min(run.count, max(1, math.ceil(missing_ms * (run.count - 1) / run.span_ms)))


def _disjoint(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """First seqs and ends, ascending, of spans that may overlap."""
    firsts: list[int] = []
    ends: list[int] = []
    for first, count in sorted(spans):
        if ends and first <= ends[-1]:
            ends[-1] = max(ends[-1], first + count)
        else:
            firsts.append(first)
            ends.append(first + count)
    return firsts, ends


def _deadline_at_ms(run: RequestRun) -> float:
    return run.deadline_at_ms
