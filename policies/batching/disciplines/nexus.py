"""Nexus (Symphony section 2.2): slices are assigned to models once per epoch, and then act on their own.

Every epoch the measured rates are packed onto the slices (`baselines/squishy.py`). A request is routed at once to one of its
model's slices, by their shares. A slice runs its models in turn, at most the assigned batch each time, whenever it is
free; heads that would force a smaller batch although enough younger ones wait are dropped early. Nothing
coordinates the slices between epochs (ADR 0013).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fabric.ids import ModelId, SliceId
from fabric.policy_options import Number
from policies.batching.base import NEVER_MS, BatchDecision, Drop, RequestRun
from policies.batching.baselines.baseline import Baseline
from policies.batching.baselines.squishy import Bin, ModelLoad, saturated_size, spread
from policies.batching.baselines.state import BaselineModel, BaselineSlice, Line, Timer
from policies.batching.batch_moments import Table, cost_table, just_after, lead_table
from policies.batching.drop import suffix_size
from policies.batching.run_queue import cut
from policies.rates import RateMeter
from policies.registry import Registered

Waiting = Sequence[tuple[BaselineModel, Sequence[RequestRun]]]
FIRST_EPOCH_MS = 1000.0  # before it all models count alike


@dataclass(slots=True)
class _Turn:
    """A model on a slice: its line there, and what the plan gives it."""

    line: Line
    cost: Table
    batch_size: int
    per_ms: float
    routed: float = 0.0


class Nexus(Baseline):
    """`epoch_s`: how often the assignment is made anew."""

    def __init__(self, *, epoch_s: float = 10.0) -> None:
        super().__init__()
        self._epoch_ms = epoch_s * 1000.0
        self._epoch = Timer(self._next_epoch)
        self._rates: dict[ModelId, RateMeter] = {}
        self._turns: dict[SliceId, list[_Turn]] = {}
        self._routes: dict[ModelId, list[tuple[BaselineSlice, _Turn]]] = {}
        self._is_started = False

    def _line_up(
        self, state: BaselineModel, runs: Sequence[RequestRun], now_ms: float, out: list[BatchDecision]
    ) -> None:
        if not self._is_started:
            self._is_started = True
            self._arm(self._epoch, now_ms + min(FIRST_EPOCH_MS, self._epoch_ms))
        self._rates[state.model_id].add(sum(run.count for run in runs), now_ms)
        self._route([(state, runs)], now_ms, out)

    def _model_added(self, state: BaselineModel) -> None:
        self._rates[state.model_id] = RateMeter()
        if state.hosts:  # the others' turns stay until the next epoch
            self._add_unplanned(state)

    def _fleet_changed(self, now_ms: float, out: list[BatchDecision]) -> None:
        self._rates = {model_id: rate for model_id, rate in self._rates.items() if model_id in self._models}
        self._assign(now_ms, out)

    def _next_epoch(self, now_ms: float, out: list[BatchDecision]) -> None:
        self._assign(now_ms, out)
        if any(self._rates[model_id].rate_rps(now_ms) for model_id in self._models):
            self._arm(self._epoch, now_ms + self._epoch_ms)
        else:
            self._is_started = False  # silence; the next arrival starts the clock again

    def _route(self, waiting: Waiting, now_ms: float, out: list[BatchDecision]) -> None:
        """All of it gets a place before any slice is looked at."""
        chosen: dict[SliceId, BaselineSlice] = {}
        for state, runs in waiting:
            routes = self._routes.get(state.model_id)
            for run in runs:
                if not routes:
                    self._push(self._line_without_home(state), run)
                    continue
                # One that is longer than a batch goes to several slices, as its requests would.
                piece = None
                while piece is not run:
                    slice_, turn = _next_turn(routes, run.count)
                    piece = run if run.count <= turn.batch_size else cut(run, turn.batch_size)
                    turn.routed += piece.count
                    self._push(turn.line, piece)
                    chosen[slice_.slice_id] = slice_
        for slice_ in chosen.values():
            self._slice_due(slice_, now_ms, out)

    def _line_without_home(self, state: BaselineModel) -> Line:
        for line in state.lines:
            if line.home is None:
                return line
        return self._new_line(state, None)

    def _slice_due(self, slice_: BaselineSlice, now_ms: float, out: list[BatchDecision]) -> None:
        turns = self._turns.get(slice_.slice_id, [])
        for position, turn in enumerate(turns):
            line = turn.line
            if not line.queue.count:
                continue
            lead_ms = line.model.lead_ms(1)
            if slice_.free_at_ms > now_ms + lead_ms:
                if slice_.free_at_ms < NEVER_MS:
                    at_ms = slice_.free_at_ms
                    self._arm(slice_.free, just_after(at_ms - lead_ms) if lead_ms else at_ms)
                return
            self._drop_early(turn, now_ms, out)
            size = slice_.fit(line, now_ms, count_max=turn.batch_size) if line.queue.count else 0
            if size:
                turns.append(turns.pop(position))  # whoever ran goes to the end of the round
                self._send(line, slice_, size, "turn", now_ms, out)
                return

    def _drop_early(self, turn: _Turn, now_ms: float, out: list[BatchDecision]) -> None:
        """Give up heads that cannot finish in a batch of the assigned size, or of all that could still run."""
        queue = turn.line.queue
        slack_ms = queue.runs[0].deadline_at_ms - now_ms
        if turn.cost[min(turn.batch_size, queue.count)] <= slack_ms:
            return
        floor = suffix_size(queue.runs, turn.cost, now_ms, turn.batch_size)
        dropped = queue.drop_before(now_ms + turn.cost[floor] if floor else NEVER_MS)
        alone_at_ms = now_ms + turn.cost[1]
        for is_expired in (True, False):
            runs = [run for run in dropped if (run.deadline_at_ms < alone_at_ms) is is_expired]
            if runs:
                out.append(Drop(turn.line.model.model_id, runs, is_expired=is_expired))

    def _assign(self, now_ms: float, out: list[BatchDecision]) -> None:
        """Pack the measured rates anew; what had lined up for a slice is routed again."""
        slices = sorted(self._slices.values(), key=lambda slice_: (slice_.order, slice_.slice_id))
        rates = {model_id: self._rates[model_id].rate_rps(now_ms) for model_id in self._models}
        is_known = any(rates.values())
        loads = [
            ModelLoad(
                model_id,
                state.model.slo_ms - state.lead_ms(1),
                (rates[model_id] or 0.0) / 1000.0 if is_known else 1.0,
            )
            for model_id, state in self._models.items()
        ]
        plan = spread(loads, [Bin(slice_.slice_id, slice_.tables) for slice_ in slices])
        waiting: Waiting = [
            (line.model, self._drop_line(line)) for state in self._models.values() for line in state.lines[:]
        ]
        self._turns = {}
        self._routes = {}
        for slice_ in slices:
            for share in plan.shares.get(slice_.slice_id, ()):
                self._add_turn(self._models[share.load.model_id], slice_, share.batch_size, share.per_ms)
        for model_id, state in self._models.items():
            if model_id not in self._routes and state.hosts:
                self._add_unplanned(state)
        self._route(waiting, now_ms, out)

    def _add_unplanned(self, state: BaselineModel) -> None:
        """It has no share, as nobody has asked for it lately or nothing fits: the slice with the fewest models takes it along."""
        budget_ms = state.model.slo_ms - state.lead_ms(1)
        slice_ = min(
            state.hosts.values(),
            key=lambda host: (
                host.tables[state.model_id][1] > budget_ms,
                len(self._turns.get(host.slice_id, ())),
                host.order,
                host.slice_id,
            ),
        )
        size = saturated_size(slice_.tables[state.model_id], budget_ms)
        self._add_turn(state, slice_, max(1, size), 1.0)

    def _add_turn(self, state: BaselineModel, slice_: BaselineSlice, batch_size: int, per_ms: float) -> None:
        table = slice_.tables[state.model_id]
        cost = cost_table(table, lead_table(state.model.delay, len(table) - 2))
        turn = _Turn(self._new_line(state, slice_), cost, batch_size, per_ms)
        self._turns.setdefault(slice_.slice_id, []).append(turn)
        self._routes.setdefault(state.model_id, []).append((slice_, turn))


def _next_turn(routes: Sequence[tuple[BaselineSlice, _Turn]], count: int) -> tuple[BaselineSlice, _Turn]:
    """Which of them has the least of its share with so many requests more."""
    return min(
        routes, key=lambda route: (route[1].routed + min(count, route[1].batch_size)) / route[1].per_ms
    )


REGISTERED: Final = Registered(
    {"epoch_s": Number(10.0, minimum=0.01, is_minimum_allowed=True)},
    lambda options: Nexus(epoch_s=options["epoch_s"]),
)
