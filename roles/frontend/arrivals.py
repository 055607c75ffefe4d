"""From the requests of one turn to `Arrivals`: runs of dense seqs whose budgets never fall (design section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from fabric.ids import ModelId
from fabric.messages import RUN_REQUESTS_MAX, Arrivals
from roles.frontend.announced_runs import AnnouncedRun
from roles.frontend.estimates import Estimates
from roles.frontend.requests import Pending, Request, RequestState, RequestTransition
from roles.frontend.return_margin import ReturnMargin

SPAN_MAX_MS = 1.0


class Gatherer:
    """Collects what one turn of the shell's loop brought, per model, and numbers it when the turn ends."""

    def __init__(self) -> None:
        self.gathered: dict[ModelId, list[Request]] = {}
        # Of all shards together, so that a seq means one request whoever speaks of it. Never forgotten: a model that
        # returns goes on where it was.
        self._next_seq: dict[ModelId, int] = {}

    def add(self, request: Request) -> None:
        """Announce it when the turn ends."""
        self.gathered.setdefault(request.model_id, []).append(request)

    def forget(self, model_ids: Iterable[ModelId]) -> None:
        """Announce nothing of these: there is nobody to tell."""
        for model_id in model_ids:
            self.gathered.pop(model_id, None)

    def announce(
        self,
        pending: Pending,
        estimates: Estimates,
        shard_of: Callable[[ModelId], int | None],
        now_ms: float,
    ) -> Iterator[tuple[int, Arrivals]]:
        """Number all that was gathered and is still unanswered; with each run the shard that it is for.

        `shard_of`: the one that can be told of a model; None: none can, and its requests stay as they are.
        """
        gathered, self.gathered = self.gathered, {}
        for model_id, requests in gathered.items():
            shard = shard_of(model_id)
            if shard is None:
                continue
            live = [one for one in dict.fromkeys(requests) if one.stage is RequestState.GATHERED]
            path = estimates.return_of(model_id)
            # A run has one priority and one ready moment, and whoever is ready need not wait for who is not.
            kinds: dict[tuple[bool, int | None], list[Request]] = {}
            for request in live:
                kinds.setdefault((request.is_ready, request.priority), []).append(request)
            for (is_ready, priority), alike in sorted(kinds.items(), key=lambda kind: not kind[0][0]):
                for run, tightest_ms, span_ms in cut_runs(alike, path, now_ms):
                    first_seq = self._number(model_id, run, shard, pending, now_ms)
                    ready_ms = (
                        0.0 if is_ready else max(estimates.ready_in_ms(request, now_ms) for request in run)
                    )
                    slack_ms = path.slack_ms(run[0].due_at_ms - now_ms)
                    yield (
                        shard,
                        Arrivals(
                            model_id, first_seq, len(run), tightest_ms, span_ms, ready_ms, slack_ms, priority
                        ),
                    )

    def _number(
        self, model_id: ModelId, run: Sequence[Request], shard: int, pending: Pending, now_ms: float
    ) -> int:
        """Give them dense seqs; the first one."""
        first_seq = self._next_seq.get(model_id, 0)
        self._next_seq[model_id] = first_seq + len(run)
        announced = AnnouncedRun(model_id, left=len(run))
        for seq, request in enumerate(run, first_seq):
            pending.set_seq(request, seq)
            request.step(RequestTransition.ANNOUNCE)
            request.run = announced
            request.shard = shard
            request.announced_at_ms = now_ms
            if request.first_announced_at_ms is None:
                request.first_announced_at_ms = now_ms
        return first_seq


class _Due(Protocol):
    @property
    def due_at_ms(self) -> float: ...


DueT = TypeVar("DueT", bound=_Due)


def cut_runs(
    requests: Iterable[DueT], path: ReturnMargin, now_ms: float
) -> Iterator[tuple[list[DueT], float, float]]:
    """Tightest first, cut where a run would spread over more than `SPAN_MAX_MS` or be too long: runs, tightest budgets, spreads."""
    run: list[DueT] = []
    tightest_ms = span_ms = 0.0
    for request in sorted(requests, key=lambda one: one.due_at_ms):
        budget_ms = path.budget_ms(request.due_at_ms - now_ms)
        if run and (budget_ms - tightest_ms > SPAN_MAX_MS or len(run) == RUN_REQUESTS_MAX):
            yield run, tightest_ms, span_ms
            run = []
        if not run:
            tightest_ms = budget_ms
        span_ms = max(0.0, budget_ms - tightest_ms)
        run.append(request)
    if run:
        yield run, tightest_ms, span_ms
