"""Requests whose inputs are still being prepared: a picture that is being decoded.

A frontend announces them before they are ready, and says when they should be. Every discipline keeps them out of its queues until
then, and treats them like requests that come at that moment. So a batch takes only what is ready when it is sent, and neither it nor
anybody in it waits for who is not. Nothing is lost by that: a batch that is held grows by who becomes ready meanwhile, and one that
leaves does so because it has been held for long enough, or because nobody more would fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from fabric.ids import FrontendId
from policies.batching.base import NEVER_MS, RequestRun
from policies.batching.run_queue import cut, tight_count, without


class Preparing:
    """The runs of one model that are not ready yet, the first to be ready first. Runs given to it belong to it."""

    __slots__ = ("_runs", "_serial", "count")

    def __init__(self) -> None:
        self.count = 0
        self._runs: list[tuple[float, int, RequestRun]] = []
        self._serial = 0

    @property
    def next_at_ms(self) -> float:
        """When the next run is ready; inf: there is none."""
        return self._runs[0][0] if self._runs else NEVER_MS

    def put(self, run: RequestRun, alone_ms: float) -> RequestRun | None:
        """Keep a run until it is ready. What is ready too late to finish, as each request needs `alone_ms`, comes back."""
        late_count = tight_count(run, run.ready_at_ms + alone_ms)
        if late_count == run.count:
            return run
        late = cut(run, late_count) if late_count else None
        self._serial += 1
        heappush(self._runs, (run.ready_at_ms, self._serial, run))
        self.count += run.count
        return late

    def take_ready(self, now_ms: float) -> list[RequestRun]:
        """The runs that are ready. They count as arrived at that moment: what was before it is no wait for a batch."""
        taken: list[RequestRun] = []
        while self._runs and self._runs[0][0] <= now_ms:
            _, _, run = heappop(self._runs)
            run.arrived_at_ms = run.ready_at_ms
            self.count -= run.count
            taken.append(run)
        return taken

    def take_all(self) -> list[RequestRun]:
        """All runs, ready or not."""
        taken = [run for _, _, run in sorted(self._runs)]
        self._runs.clear()
        self.count = 0
        return taken

    def withdraw(self, frontend_id: FrontendId, spans: Sequence[tuple[int, int]]) -> int:
        """As `RunQueue.withdraw`."""
        kept, removed = without((run for _, _, run in sorted(self._runs)), frontend_id, spans)
        if removed:
            self.count -= removed
            self._serial = len(kept)
            self._runs = [(run.ready_at_ms, serial, run) for serial, run in enumerate(kept)]
        return removed

    def forget(self, frontend_id: FrontendId) -> int:
        """Forget all of a frontend, and say how many they were."""
        gone = sum(run.count for _, _, run in self._runs if run.frontend_id == frontend_id)
        if gone:
            self.count -= gone
            self._runs = [entry for entry in self._runs if entry[2].frontend_id != frontend_id]
            heapify(self._runs)
        return gone
