"""The central matchmaker (Symphony algorithm 1 and appendix D): every model's candidate against every free slice.

Each candidate has one timer. At exec - delay(b) the batch is sent to the best slice that will be free by exec; if
there is none the candidate waits in the pools of its class, and the timer then guards the moment after which the
head could not finish even alone. Each pool has one timer too, armed only while somebody waits: at the next slice's free moment less the delay it
serves the waiting candidate with the smallest latest. A candidate that is overtaken by time while it waits (Symphony's
invalidate timer) is not touched until a slice comes for it: nothing could be done about it before, and the outcome is
the same. Requests that were being prepared (`preparing.py`) are queued by one timer of their own, and before any other event: all that
are ready by then, before a batch of them is sent.

The candidate's timer is armed early, where the arrivals to be expected will have moved it; firing early it is armed
again. So most arrivals only add to a count. An event costs O(log models + log slices + pools of the model).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop
from typing import Any, Final

from fabric.ids import FrontendId, ModelId, SliceId
from fabric.policy_options import Choice
from policies.batching.base import NEVER_MS, QUIET, BatchDecision, BatchModel, BatchSlice, Drop, RequestRun
from policies.batching.matchmaking.matchmaker import Matchmaker
from policies.batching.matchmaking.model_state import Candidate, ModelState
from policies.batching.matchmaking.pools import Pool
from policies.batching.matchmaking.send_rule import SendRule
from policies.batching.matchmaking.slice_pools import SlicePools
from policies.batching.preparing import Announced

NOTHING: tuple[BatchDecision, ...] = ()
PICK: Final = Choice(("lowest_id", "longest_idle"))


def central_options(options: Mapping[str, Any]) -> dict[str, bool]:
    """What `Central` is told, of the checked options ``drop`` and ``pick``."""
    return {
        "is_window_drop": options["drop"] == "window",
        "is_lowest_id": options["pick"] == "lowest_id",
    }


class Central(Matchmaker):
    """Deferred, eager and timeout scheduling in one: they differ in `rule` (Symphony sections 3.2 and 3.4).

    `is_window_drop`: heads may be given up to protect the target size, else only what is expired.
    `is_lowest_id`: take the lowest order among the free slices, else the one that has idled longest.
    """

    def __init__(self, rule: SendRule, *, is_window_drop: bool = True, is_lowest_id: bool = True) -> None:
        super().__init__(rule, is_window_drop=is_window_drop)
        self._models: dict[ModelId, ModelState] = {}
        self._announced: Announced[ModelState] = Announced()
        self._fleet = SlicePools(is_lowest=is_lowest_id)

    def set_guard_ms(self, guard_ms: float) -> None:
        """The measured p99 of dispatch lateness: batches are sent so much before frontrun from now on."""
        self._guard_ms = guard_ms

    def add_model(self, model: BatchModel, now_ms: float) -> None:
        """See `Discipline`."""
        state = self._models.get(model.model_id)
        if state is None:
            state = self._models[model.model_id] = ModelState(model)
        self._reset(state, now_ms)
        state.model = model
        state.candidates = []  # their tables hold the old delay
        state.set_pools(self._fleet.pools_of(model.model_id), self._rule)
        self._start_over(state, now_ms)

    def remove_model(self, model_id: ModelId, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        state = self._models.pop(model_id, None)
        if state is None:
            return NOTHING
        runs = state.queue.pop(state.queue.count) + state.preparing.take_all()
        self._follow_preparing(state)
        self._reset(state, now_ms)
        return [Drop(model_id, runs, is_expired=False)] if runs else NOTHING

    def add_slice(self, slice_: BatchSlice, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`. A table in place of another one costs the other models of the slice next to nothing."""
        out: list[BatchDecision] = []
        former = self._fleet.slices.get(slice_.slice_id)
        left = None if former is None else former.pool
        self._repool(self._fleet.put(slice_), now_ms, out)
        joined = self._fleet.slices[slice_.slice_id].pool
        for pool in (joined,) if left is joined else (left, joined):
            if pool is not None and (pool.waiting or pool.early):
                self._serve(pool, now_ms, out)
        return out

    def remove_slices(self, slice_ids: Collection[SliceId], now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        out: list[BatchDecision] = []
        slices = [self._fleet.slices[slice_id] for slice_id in slice_ids if slice_id in self._fleet.slices]
        left = {id(slice_.pool): slice_.pool for slice_ in slices}
        self._repool({one for slice_id in slice_ids for one in self._fleet.drop(slice_id)}, now_ms, out)
        for pool in left.values():
            if pool is not None and pool.early:  # of its reserve less is kept now
                self._serve(pool, now_ms, out)
        return out

    def slice_free(self, slice_id: SliceId, free_at_ms: float, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        slice_ = self._fleet.slices.get(slice_id)
        if slice_ is None:
            return NOTHING
        is_new_late = free_at_ms == NEVER_MS and slice_.due_at_ms < now_ms and not slice_.is_late
        if slice_.free_at_ms == free_at_ms and not is_new_late:
            return NOTHING
        pool = slice_.pool
        assert pool is not None
        pool.free_from(slice_, free_at_ms)
        if is_new_late:
            pool.note_late(slice_)
        out: list[BatchDecision] = []
        if now_ms >= self._announced.armed_at_ms:
            self._queue_ready(now_ms, out)
        if pool.waiting or pool.early:
            self._serve(pool, now_ms, out)
        return out or NOTHING

    def arrive(
        self, model_id: ModelId, run: RequestRun, now_ms: float, *, is_admitted: bool = False
    ) -> Sequence[BatchDecision]:
        """See `Discipline`. The run belongs to the discipline from now on."""
        if now_ms >= self._announced.armed_at_ms:
            out: list[BatchDecision] = []
            self._queue_ready(now_ms, out)
            return (*out, *self.arrive(model_id, run, now_ms, is_admitted=is_admitted))
        state = self._models[model_id]
        if (run.priority is not None or state.is_gated) and not is_admitted:
            return self._admit(state, run, now_ms)
        if run.ready_at_ms > now_ms:
            return self._prepare(state, run)
        count = run.count
        rate = state.rate
        if now_ms < rate.due_at_ms:  # `add`, written out: every single request pays for these lines
            rate.counted += count
        else:
            rate.add(count, now_ms)
        queue = state.queue
        waiting = queue.count
        deadline_at_ms = run.deadline_at_ms
        candidate = state.sole
        if waiting and deadline_at_ms >= queue.tail_at_ms and candidate:
            queue.runs.append(run)
            queue.tail_at_ms = deadline_at_ms
            queue.count = count = waiting + count
            if count < candidate.size_max:
                if candidate.hold_deadline_at_ms - candidate.hold[count] >= candidate.alarm_at_ms:
                    return QUIET
            elif candidate.alarm_at_ms == -NEVER_MS:
                return QUIET
            index = len(queue.runs) - 1
        else:
            index = queue.push(run)
        out = []
        self._stands_at(state, index, now_ms)
        self._look_at(state, now_ms, out)
        return out or NOTHING

    def _stands_at(self, state: ModelState, index: int, now_ms: float) -> None:
        """A run was queued there; nothing is decided yet."""
        if index == 0:
            self._reset(state, now_ms)
        is_last = index == len(state.queue.runs) - 1
        for candidate in state.candidates:
            if index <= candidate.skip_runs and candidate.skip_runs:
                if candidate.is_waiting:
                    self._leave(candidate, now_ms)
                candidate.reset(self._guard_ms)
            elif not is_last and candidate.is_waiting:
                candidate.alarm_at_ms = NEVER_MS  # amid the queue it may change which heads are in the way

    def _look_at(self, state: ModelState, now_ms: float, out: list[BatchDecision]) -> None:
        """Its queue has grown."""
        for candidate in state.candidates:
            if self._grow(candidate, now_ms, out):
                self._advance(state, now_ms, out)
                break

    def _admit(self, state: ModelState, run: RequestRun, now_ms: float) -> Sequence[BatchDecision]:
        """What arrives and is not like all else: it has a priority of its own, or not all are taken on."""
        return self._take_on(state, run, now_ms)

    def _take_on(self, state: ModelState, run: RequestRun, now_ms: float) -> Sequence[BatchDecision]:
        """It is admitted."""
        if run.priority is not None:
            state.queue.has_priorities = True
        return self.arrive(state.model.model_id, run, now_ms, is_admitted=True)

    def _prepare(self, state: ModelState, run: RequestRun) -> Sequence[BatchDecision]:
        """Its inputs are not ready yet: it is queued when they are, unless that is too late."""
        out: list[BatchDecision] = []
        late = state.preparing.put(run, state.alone_ms)
        if late is not None:
            self._give_up(state, [late], late.ready_at_ms, out)
        self._follow_preparing(state)
        return out or NOTHING

    def _follow_preparing(self, state: ModelState) -> None:
        """What is being prepared of it has changed."""
        self._announced.follow(state)
        self._arm(self._announced, self._announced.next_at_ms)

    def _queue_ready(self, now_ms: float, out: list[BatchDecision]) -> None:
        """Inputs are ready by now."""
        for state in self._take_ready(now_ms):
            self._look_at(state, now_ms, out)

    def _take_ready(self, now_ms: float) -> list[ModelState]:
        """Queue all that is ready by now, before anything is decided. The models of which that is."""
        ready = self._announced.take_ready(now_ms)
        for state, runs in ready:
            for run in runs:
                self._now_ready(state, run, now_ms)
        self._arm(self._announced, self._announced.next_at_ms)
        return [state for state, _ in ready]

    def _now_ready(self, state: ModelState, run: RequestRun, now_ms: float) -> None:
        """Its inputs are ready. It was admitted when it was announced."""
        if run.priority is not None:
            state.queue.has_priorities = True
        state.rate.add(run.count, now_ms)
        self._stands_at(state, state.queue.push(run), now_ms)

    def arrive_again(
        self, model_id: ModelId, runs: Sequence[RequestRun], now_ms: float
    ) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        state = self._models[model_id]
        return [decision for run in runs for decision in self._take_on(state, run, now_ms)]

    def withdraw(
        self, model_id: ModelId, frontend_id: FrontendId, spans: Sequence[tuple[int, int]], now_ms: float
    ) -> None:
        """See `Discipline`."""
        state = self._models.get(model_id)
        if state is None:
            return
        if state.preparing.withdraw(frontend_id, spans):
            self._follow_preparing(state)
        if state.queue.withdraw(frontend_id, spans):
            self._start_over(state, now_ms)

    def forget_frontend(self, frontend_id: FrontendId, now_ms: float) -> Mapping[ModelId, int]:
        """See `Discipline`."""
        forgotten: dict[ModelId, int] = {}
        for model_id, state in self._models.items():
            unready = state.preparing.forget(frontend_id)
            if unready:
                self._follow_preparing(state)
            queued = state.queue.forget(frontend_id)
            if queued:
                self._start_over(state, now_ms)
            if count := unready + queued:
                forgotten[model_id] = count
        return forgotten

    def tick(self, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        timers = self._timers
        out: list[BatchDecision] = []
        if now_ms >= self._announced.armed_at_ms:
            self._queue_ready(now_ms, out)
        while timers and timers[0][0] <= now_ms:
            at_ms, _, target = heappop(timers)
            if at_ms != target.armed_at_ms:
                continue  # armed anew since
            target.armed_at_ms = NEVER_MS
            if isinstance(target, Pool):
                self._serve(target, now_ms, out)
            elif isinstance(target, Candidate) and (
                target.model.sole is None or self._step(target, now_ms, out)
            ):
                self._advance(target.model, now_ms, out)  # due at one moment, the fastest class goes first
        return out or NOTHING

    def queued(self, model_id: ModelId) -> int:
        """See `Discipline`."""
        state = self._models.get(model_id)
        return 0 if state is None else state.queue.count + state.preparing.count

    def _start_over(self, state: ModelState, now_ms: float) -> None:
        """Something else than an arrival changed: look again at the next tick, which is due at once."""
        self._reset(state, now_ms)
        if state.queue.count:
            for candidate in state.candidates:
                self._arm(candidate, now_ms)

    def _repool(self, model_ids: Iterable[ModelId], now_ms: float, out: list[BatchDecision]) -> None:
        """These models have gained or lost a pool: all of them, and those of which something is ready, look at it before a slice in it is given away."""
        ready = self._take_ready(now_ms)
        states: list[ModelState] = []
        for model_id in sorted(model_ids):
            state = self._models.get(model_id)
            by_class = self._fleet.pools_of(model_id)
            if state is None or (not state.queue.count and state.classes == by_class.keys()):
                continue  # its candidates share the lists of pools, and nothing of it waits in one
            states.append(state)
            self._reset(state, now_ms)
            state.set_pools(by_class, self._rule)
            self._reset(state, now_ms)
        states += [state for state in ready if state not in states]
        self._is_gathering = True
        for state in states:
            self._advance(state, now_ms, out)
        self._is_gathering = False
        pools = {id(pool): pool for state in states for one in state.candidates for pool in one.pools}
        for pool in pools.values():
            if pool.waiting or pool.early:
                self._serve(pool, now_ms, out)
