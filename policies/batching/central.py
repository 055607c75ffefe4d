"""The central matchmaker (Symphony algorithm 1 and appendix D): every model's candidate against every free slice.

Each candidate has one timer. At exec - delay(b) the batch is sent to the best slice that will be free by exec; if
there is none the candidate waits in the pools of its class, and the timer then guards the moment after which the
head could not finish even alone. Each pool has one timer too, armed only while somebody waits: at the next slice's
free moment less the delay it serves the waiting candidate with the smallest latest, less its model's credit for
what it has lost (there is none while nothing is dropped). A candidate that is overtaken
by time while it waits (Symphony's invalidate timer) is not touched until a slice comes for it: nothing could
be done about it before, and the outcome is the same.

The model timer is armed early, where the arrivals to be expected will have moved it; firing early it is armed
again. So most arrivals only add to a count. An event costs O(log models + log slices + pools of the model).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import (
    NEVER_MS,
    BatchModel,
    BatchSlice,
    Decision,
    Dispatch,
    Drop,
    RequestRun,
)
from policies.batching.candidate import Candidate, ModelState, Want
from policies.batching.drop import suffix_size
from policies.batching.fleet import Fleet
from policies.batching.moments import EPSILON_MS
from policies.batching.pools import Pool, Slice
from policies.batching.ready import ready_batch

NOTHING: tuple[Decision, ...] = ()


class Central:
    """Deferred, eager and timeout scheduling in one: they differ in `want` (Symphony sections 3.2 and 3.4).

    `is_window_drop`: heads may be given up to protect the target size, else only what is expired.
    `is_lowest_id`: take the lowest order among the free slices, else the one that has idled longest.
    """

    def __init__(self, want: Want, *, is_window_drop: bool = True, is_lowest_id: bool = True) -> None:
        self._want = want
        self._is_window_drop = is_window_drop
        self._guard_ms = 0.0
        self._models: dict[ModelId, ModelState] = {}
        self._fleet = Fleet(is_lowest=is_lowest_id)
        self._timers: list[tuple[float, int, Candidate | Pool[Candidate]]] = []
        self._serial = 0

    def set_guard_ms(self, guard_ms: float) -> None:
        """The measured p99 of dispatch lateness: batches are sent so much before frontrun from now on."""
        self._guard_ms = guard_ms

    def add_model(self, model: BatchModel, now_ms: float) -> None:
        """See `Discipline`."""
        state = self._models.get(model.model_id)
        if state is None:
            state = self._models[model.model_id] = ModelState(model)
        for candidate in state.candidates:
            candidate.reset(self._guard_ms)
        state.model = model
        state.candidates = []  # their tables hold the old delay
        state.set_pools(self._fleet.pools_of(model.model_id), self._want)
        self._start_over(state, now_ms)

    def remove_model(self, model_id: ModelId, now_ms: float) -> Sequence[Decision]:  # noqa: ARG002  the shape of `Discipline`
        """See `Discipline`."""
        state = self._models.pop(model_id, None)
        if state is None:
            return NOTHING
        runs = state.queue.pop(state.queue.count)
        self._reset(state)
        return [Drop(model_id, runs, is_expired=False)] if runs else NOTHING

    def add_slice(self, slice_: BatchSlice, now_ms: float) -> Sequence[Decision]:
        """See `Discipline`. Replacing a table by one up to 10 % faster than its class costs next to nothing."""
        out: list[Decision] = []
        self._repool(self._fleet.put(slice_), now_ms, out)
        pool = self._fleet.slices[slice_.slice_id].pool
        if pool is not None and pool.waiting:
            self._serve(pool, now_ms, out)
        return out

    def remove_slice(self, slice_id: SliceId, now_ms: float) -> Sequence[Decision]:
        """See `Discipline`."""
        out: list[Decision] = []
        self._repool(self._fleet.drop(slice_id), now_ms, out)
        return out

    def slice_free(self, slice_id: SliceId, free_at_ms: float, now_ms: float) -> Sequence[Decision]:
        """See `Discipline`."""
        slice_ = self._fleet.slices.get(slice_id)
        if slice_ is None or slice_.free_at_ms == free_at_ms:
            return NOTHING
        pool = slice_.pool
        assert pool is not None
        pool.free_from(slice_, free_at_ms)
        if not pool.waiting:
            return NOTHING
        out: list[Decision] = []
        self._serve(pool, now_ms, out)
        return out

    def arrive(self, model_id: ModelId, run: RequestRun, now_ms: float) -> Sequence[Decision]:
        """See `Discipline`. The run belongs to the discipline from now on."""
        state = self._models[model_id]
        count = run.count
        state.rate.add(count, now_ms)
        queue = state.queue
        runs = queue.runs
        candidate = state.sole
        if (
            candidate is not None
            and runs
            and run.deadline_at_ms >= runs[-1].deadline_at_ms
            and run.ready_at_ms <= now_ms
        ):
            runs.append(run)
            queue.count = count = queue.count + count
            if count < candidate.size_max:
                if candidate.edge_at_ms - candidate.hold[count] >= candidate.alarm_at_ms:
                    return NOTHING
            elif candidate.alarm_at_ms == -NEVER_MS:
                return NOTHING
            index = len(runs) - 1
        else:
            state.ready_at_ms = max(state.ready_at_ms, run.ready_at_ms)
            index = queue.push(run)
            if index == 0:
                state.drops.add(0, now_ms)  # both meters cover the same time
                self._reset(state)
        out: list[Decision] = []
        for candidate in state.candidates:
            if index <= candidate.skip_runs and candidate.skip_runs:
                candidate.reset(self._guard_ms)
            if self._grow(candidate, now_ms, out):
                self._advance(state, now_ms, out)
                break
        return out or NOTHING

    def withdraw(
        self, model_id: ModelId, frontend_id: FrontendId, first_seq: int, count: int, now_ms: float
    ) -> None:
        """See `Discipline`."""
        state = self._models.get(model_id)
        if state is not None and state.queue.withdraw(frontend_id, first_seq, count):
            self._start_over(state, now_ms)

    def tick(self, now_ms: float) -> Sequence[Decision]:
        """See `Discipline`."""
        timers = self._timers
        out: list[Decision] = []
        while timers and timers[0][0] <= now_ms:
            at_ms, _, target = heappop(timers)
            if at_ms != target.armed_at_ms:
                continue  # armed anew since
            target.armed_at_ms = NEVER_MS
            if isinstance(target, Pool):
                self._serve(target, now_ms, out)
            elif self._step(target, now_ms, out):
                self._advance(target.model, now_ms, out)
        return out or NOTHING

    @property
    def wake_at_ms(self) -> float | None:
        """See `Discipline`."""
        timers = self._timers
        while timers:
            if timers[0][0] == timers[0][2].armed_at_ms:
                return timers[0][0]
            heappop(timers)
        return None

    def queued(self, model_id: ModelId) -> int:
        """See `Discipline`."""
        state = self._models.get(model_id)
        return 0 if state is None else state.queue.count

    def _grow(self, candidate: Candidate, now_ms: float, out: list[Decision]) -> bool:
        """An arrival may have moved the candidate's moments; True: the head of the queue has changed."""
        if not candidate.is_waiting:
            if (
                candidate.due_at_ms(candidate.model.queue.count - candidate.skip_count)
                >= candidate.alarm_at_ms
            ):
                return False
            return self._step(candidate, now_ms, out)
        if candidate.alarm_at_ms != -NEVER_MS:
            # It waits and may have grown; the larger batch has to start earlier, which changes its rank.
            size = bisect_right(candidate.cost, candidate.deadline_at_ms - now_ms) - 1
            if size > 0:
                candidate.stamp += 1
                self._wait(candidate, size, now_ms)
        return False

    def _advance(self, state: ModelState, now_ms: float, out: list[Decision]) -> None:
        """Bring all candidates up to date, until none of them changes the head of the queue."""
        while any(self._step(candidate, now_ms, out) for candidate in state.candidates):
            pass

    def _step(self, candidate: Candidate, now_ms: float, out: list[Decision]) -> bool:
        """Drop, send, wait or sleep, whatever is next; True: the head of the queue has changed."""
        state = candidate.model
        while (count := state.queue.count - candidate.skip_count) > 0:
            due_at_ms = candidate.due_at_ms(count)
            if due_at_ms > now_ms:
                self._sleep(candidate, due_at_ms, now_ms)
                return False
            size, limit_at_ms = self._fit(candidate, count, now_ms)
            ready_at_ms = now_ms
            if size and state.ready_at_ms > now_ms:
                gathers = self._want.gathers_unready
                size, ready_at_ms = ready_batch(candidate, size, now_ms, gathers_unready=gathers)
                due_at_ms = ready_at_ms - candidate.lead[size]
                if gathers and size:
                    due_at_ms = max(due_at_ms, candidate.due_at_ms(size))
                if due_at_ms > now_ms and size:
                    self._sleep(candidate, due_at_ms, now_ms)
                    candidate.alarm_at_ms = -NEVER_MS  # arrivals now are not ready in time to change much
                    return False
            if not size:
                limit_at_ms = max(limit_at_ms, candidate.deadline_at_ms + EPSILON_MS)
                if candidate is not state.candidates[0]:
                    candidate.skip_before(limit_at_ms, self._guard_ms)
                    continue
                self._give_up(state, state.queue.drop_before(limit_at_ms), now_ms, out)
                self._reset(state)
                return True
            slice_ = self._find(candidate, max(now_ms + candidate.lead[size], ready_at_ms))
            if slice_ is None:
                self._wait(candidate, size, now_ms)
                return False
            self._dispatch(candidate, slice_, size, ready_at_ms, now_ms, out)
            return True
        return False

    def _fit(self, candidate: Candidate, count: int, now_ms: float) -> tuple[int, float]:
        """The size of a batch sent now; 0 if requests with deadlines before the second value must go first."""
        cost = candidate.cost
        slack_ms = candidate.deadline_at_ms - now_ms
        whole = min(count, candidate.size_max)
        if cost[whole] <= slack_ms:
            return whole, now_ms
        target = candidate.window_target(now_ms) if self._is_window_drop else 1
        if slack_ms < cost[min(target, whole)]:
            floor = suffix_size(candidate.model.queue.runs, cost, now_ms, target)
            if floor == 0:
                return 0, NEVER_MS
            if slack_ms < cost[floor]:
                return 0, now_ms + cost[floor]
        return bisect_right(cost, slack_ms) - 1, now_ms

    def _sleep(self, candidate: Candidate, due_at_ms: float, now_ms: float) -> None:
        """Set the candidate's timer: where expected arrivals will have moved `due_at_ms` to, if it is far."""
        if candidate.is_waiting:
            candidate.is_waiting = False
            candidate.stamp += 1
        state = candidate.model
        state.refresh_rate(now_ms)
        per_ms = state.per_ms
        at_ms = now_ms + (due_at_ms - now_ms) / (1.0 + per_ms * candidate.slope_ms)
        if (at_ms - now_ms) * per_ms < state.queue.runs[-1].count:  # nobody else is expected by then
            at_ms = due_at_ms
        candidate.alarm_at_ms = at_ms
        self._arm(candidate, at_ms)

    def _wait(self, candidate: Candidate, size: int, now_ms: float) -> None:
        """No slice is free in time: queue up for one, and look after the head until one comes."""
        state = candidate.model
        if candidate.is_waiting:
            candidate.stamp += 1
        else:
            candidate.is_waiting = True
            candidate.wanted_at_ms = min(candidate.wanted_at_ms, now_ms)
        count = state.queue.count - candidate.skip_count
        candidate.alarm_at_ms = NEVER_MS if size == count < candidate.size_max else -NEVER_MS
        rank_at_ms = candidate.deadline_at_ms - candidate.table[size] - state.credit_ms(now_ms)
        lead_ms = candidate.lead[size]
        for pool in candidate.pools:
            self._serial += 1
            pool.wait(rank_at_ms, state.model.priority, self._serial, candidate)
            pool.lead_max_ms = max(pool.lead_max_ms, lead_ms)
            self._arm_pool(pool, lead_ms, now_ms)
        if candidate is state.candidates[0]:
            self._arm(candidate, candidate.deadline_at_ms - state.alone_ms + EPSILON_MS)

    def _serve(self, pool: Pool[Candidate], now_ms: float, out: list[Decision]) -> None:
        """Give slices that are free by now to those who wait, the smallest latest first."""
        waiting = pool.waiting
        while waiting:
            candidate = waiting[0][4]
            if waiting[0][3] != candidate.stamp or not candidate.is_waiting:
                heappop(waiting)
                continue
            if pool.find(now_ms + pool.lead_max_ms) is None:
                self._arm_pool(pool, pool.lead_max_ms, now_ms)
                return
            state = candidate.model
            slack_ms = candidate.deadline_at_ms - now_ms
            count = state.queue.count - candidate.skip_count
            size = min(count, bisect_right(candidate.cost, slack_ms) - 1)
            if size > 0:
                rank_at_ms = candidate.deadline_at_ms - candidate.table[size] - state.credit_ms(now_ms)
                if rank_at_ms != waiting[0][0] and not pool.wait_again(rank_at_ms):
                    continue  # overtaken by time, and now somebody else is more urgent
                if pool.find(now_ms + candidate.lead[size]) is None:
                    self._arm_pool(pool, candidate.lead[size], now_ms)
                    return
            heappop(waiting)
            if self._step(candidate, now_ms, out):
                self._advance(state, now_ms, out)
            elif candidate.is_waiting:
                return
        pool.lead_max_ms = 0.0

    def _dispatch(
        self,
        candidate: Candidate,
        slice_: Slice,
        size: int,
        ready_at_ms: float,
        now_ms: float,
        out: list[Decision],
    ) -> None:
        """Send the batch, grown to what the slice's own speed allows."""
        state = candidate.model
        queue = state.queue
        lead = candidate.lead
        table = slice_.tables[state.model.model_id]
        if table is not candidate.table and state.ready_at_ms <= now_ms:
            slack_ms = candidate.deadline_at_ms - now_ms
            size_max = min(queue.count - candidate.skip_count, candidate.size_max)
            while size < size_max and table[size + 1] + lead[size + 1] <= slack_ms:
                size += 1
        start_at_ms = max(now_ms + lead[size], slice_.free_at_ms, ready_at_ms)
        exec_ms = table[size]
        waited_ms = 0.0
        reason = self._want.reason
        if candidate.wanted_at_ms < now_ms:
            waited_ms = now_ms - candidate.wanted_at_ms
            reason = "slice_free"
        elif size == candidate.size_max:
            reason = "full"
        latest_at_ms = candidate.deadline_at_ms - exec_ms
        skip_runs = candidate.skip_runs
        runs = queue.pop_after(skip_runs, size) if skip_runs else queue.pop(size)
        assert slice_.pool is not None
        slice_.pool.free_from(slice_, start_at_ms + exec_ms)
        self._reset(state)
        out.append(
            Dispatch(
                slice_.slice_id,
                state.model.model_id,
                runs,
                size,
                start_at_ms,
                latest_at_ms,
                exec_ms,
                waited_ms,
                reason,
            )
        )

    def _find(self, candidate: Candidate, horizon_ms: float) -> Slice | None:
        pools = candidate.pools
        if len(pools) == 1:
            return pools[0].find(horizon_ms)
        best: Slice | None = None
        best_rank = NEVER_MS
        for pool in pools:
            slice_ = pool.find(horizon_ms)
            if slice_ is None:
                continue
            rank = slice_.order if pool.is_lowest else slice_.free_at_ms
            if rank < best_rank:
                best, best_rank = slice_, rank
        return best

    def _give_up(self, state: ModelState, runs: list[RequestRun], now_ms: float, out: list[Decision]) -> None:
        """Report dropped runs (in order of their deadlines): first what is expired, then what was given up."""
        state.drops.add(sum(run.count for run in runs), now_ms)
        limit_at_ms = now_ms + state.alone_ms
        expired = [run for run in runs if run.deadline_at_ms < limit_at_ms or run.ready_at_ms > now_ms]
        if expired:
            out.append(Drop(state.model.model_id, expired, is_expired=True))
        if len(expired) < len(runs):
            early = [run for run in runs if run.deadline_at_ms >= limit_at_ms and run.ready_at_ms <= now_ms]
            out.append(Drop(state.model.model_id, early, is_expired=False))

    def _reset(self, state: ModelState) -> None:
        guard_ms = self._guard_ms
        for candidate in state.candidates:
            candidate.reset(guard_ms)

    def _start_over(self, state: ModelState, now_ms: float) -> None:
        """Something else than an arrival changed: look again at the next tick, which is due at once."""
        self._reset(state)
        if state.queue.count:
            for candidate in state.candidates:
                self._arm(candidate, now_ms)

    def _repool(self, model_ids: Iterable[ModelId], now_ms: float, out: list[Decision]) -> None:
        """These models have gained or lost a pool."""
        for model_id in sorted(model_ids):
            state = self._models.get(model_id)
            if state is not None:
                self._reset(state)
                state.set_pools(self._fleet.pools_of(model_id), self._want)
                self._reset(state)
                self._advance(state, now_ms, out)

    def _arm(self, target: Candidate | Pool[Candidate], at_ms: float) -> None:
        target.armed_at_ms = at_ms
        self._serial += 1
        heappush(self._timers, (at_ms, self._serial, target))

    def _arm_pool(self, pool: Pool[Candidate], lead_ms: float, now_ms: float) -> None:
        at_ms = pool.next_free_at_ms()
        if lead_ms:
            at_ms = max(now_ms, at_ms - lead_ms) + EPSILON_MS
        if at_ms < pool.armed_at_ms:
            self._arm(pool, at_ms)
