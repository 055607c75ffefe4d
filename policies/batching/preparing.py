"""Requests whose inputs are still being prepared: a picture that is being decoded.

A frontend announces them before they are ready, and says when they are expected to be (p95 of decoding). Every discipline keeps them
out of its queues until then, and treats them like requests that come at that moment, those of one model and moment together. So a batch
takes only what is expected to be ready when it is sent, and neither it nor anybody in it waits for who is not. Nothing is lost by a
discipline that holds until frontrun: its batches grow by who becomes ready meanwhile. One that sends at once may take the slice that
a tight request, ready a moment later, needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

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
        kept, removed = without((run for _, _, run in self._runs), frontend_id, spans)
        if removed:
            self.count -= removed
            self._serial = len(kept)
            self._runs = [(run.ready_at_ms, serial, run) for serial, run in enumerate(kept)]
            heapify(self._runs)
        return removed

    def forget(self, frontend_id: FrontendId) -> int:
        """Forget all of a frontend, and say how many they were."""
        gone = sum(run.count for _, _, run in self._runs if run.frontend_id == frontend_id)
        if gone:
            self.count -= gone
            self._runs = [entry for entry in self._runs if entry[2].frontend_id != frontend_id]
            heapify(self._runs)
        return gone


class Prepares(Protocol):
    """A model, as a discipline keeps it."""

    preparing: Preparing


ModelT = TypeVar("ModelT", bound=Prepares)


class Announced(Generic[ModelT]):
    """When the next run of any model is ready. `armed_at_ms`: the timer that its discipline has set for that (`timers.py`)."""

    __slots__ = ("_moments", "_serial", "armed_at_ms")

    def __init__(self) -> None:
        self.armed_at_ms = NEVER_MS
        self._moments: list[tuple[float, int, ModelT]] = []
        self._serial = 0

    @property
    def next_at_ms(self) -> float:
        """Inf: nothing is being prepared. An entry counts while it is the moment of its model's first run."""
        moments = self._moments
        while moments and moments[0][0] != moments[0][2].preparing.next_at_ms:
            heappop(moments)
        return moments[0][0] if moments else NEVER_MS

    def follow(self, model: ModelT) -> None:
        """Another run of the model may be its first now."""
        at_ms = model.preparing.next_at_ms
        if at_ms < NEVER_MS:
            self._serial += 1
            heappush(self._moments, (at_ms, self._serial, model))

    def take_ready(self, now_ms: float) -> list[tuple[ModelT, list[RequestRun]]]:
        """Of each model all that is ready, the models in the order in which the first of it was."""
        ready: list[tuple[ModelT, list[RequestRun]]] = []
        while self.next_at_ms <= now_ms:
            _, _, model = heappop(self._moments)
            ready.append((model, model.preparing.take_ready(now_ms)))
            self.follow(model)
        return ready
