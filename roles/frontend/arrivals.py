"""From the requests of one turn to `Arrivals`: runs of dense seqs whose budgets never fall (design section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fabric.ids import ModelId
from fabric.messages import Arrivals
from roles.frontend.requests import Pending, Request, Stage, Step
from roles.frontend.runs import AnnouncedRun

SPAN_MAX_MS = 1.0


class Gatherer:
    """Collects what one turn of the shell's loop brought, per model, and numbers it when the turn ends."""

    def __init__(self) -> None:
        self._gathered: dict[ModelId, list[Request]] = {}
        self._next_seq: dict[ModelId, int] = {}  # never forgotten: a model that returns goes on where it was

    def __bool__(self) -> bool:
        return bool(self._gathered)

    def add(self, request: Request) -> None:
        """Announce it when the turn ends."""
        self._gathered.setdefault(request.model_id, []).append(request)

    def clear(self) -> None:
        """Announce nothing: there is nobody to tell."""
        self._gathered.clear()

    def announce(
        self,
        pending: Pending,
        budget_ms: Callable[[Request], float],
        ready_in_ms: Callable[[Request], float],
        now_ms: float,
    ) -> Iterator[Arrivals]:
        """Number all that was gathered and is still unanswered. `budget_ms` may not fall with the deadline."""
        gathered, self._gathered = self._gathered, {}
        for model_id, requests in gathered.items():
            live = [request for request in requests if request.stage is Stage.GATHERED]
            # A run has one ready moment, and whoever is ready need not wait for who is not.
            for is_ready in (True, False):
                for run in _cut([request for request in live if request.is_ready is is_ready], budget_ms):
                    yield self._number(model_id, run, pending, budget_ms, ready_in_ms, now_ms)

    def _number(
        self,
        model_id: ModelId,
        run: Sequence[Request],
        pending: Pending,
        budget_ms: Callable[[Request], float],
        ready_in_ms: Callable[[Request], float],
        now_ms: float,
    ) -> Arrivals:
        first_seq = self._next_seq.get(model_id, 0)
        self._next_seq[model_id] = first_seq + len(run)
        announced = AnnouncedRun(model_id, left=len(run))
        for seq, request in enumerate(run, first_seq):
            pending.set_seq(request, seq)
            request.step(Step.ANNOUNCE)
            request.run = announced
            request.announced_at_ms = now_ms
            if request.first_announced_at_ms is None:
                request.first_announced_at_ms = now_ms
        tightest_ms = budget_ms(run[0])
        return Arrivals(
            model_id,
            first_seq,
            len(run),
            budget_ms=tightest_ms,
            span_ms=budget_ms(run[-1]) - tightest_ms,
            ready_in_ms=max(0.0 if request.is_ready else ready_in_ms(request) for request in run),
        )


def _cut(requests: list[Request], budget_ms: Callable[[Request], float]) -> Iterator[list[Request]]:
    """Tightest first, cut where a run would spread over more than `SPAN_MAX_MS`."""
    requests.sort(key=lambda request: request.deadline_at_ms)
    run: list[Request] = []
    for request in requests:
        if run and budget_ms(request) - budget_ms(run[0]) > SPAN_MAX_MS:
            yield run
            run = []
        run.append(request)
    if run:
        yield run
