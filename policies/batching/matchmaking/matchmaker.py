"""The matchmaking engine: one candidate at a time against the slices of its class (see `central.py`)."""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush, heapreplace
from itertools import islice
from typing import NamedTuple

from policies.batching.base import NEVER_MS, BatchDecision, Dispatch, Drop, RequestRun
from policies.batching.batch_moments import exec_at_ms, just_after, latest_at_ms
from policies.batching.drop import suffix_size
from policies.batching.matchmaking.model_state import Candidate, ModelState
from policies.batching.matchmaking.pools import Pool, Slice
from policies.batching.matchmaking.send_rule import SendRule
from policies.batching.preparing import Announced
from policies.batching.timers import Timed, keep_first_of_each

Target = Candidate | Pool[Candidate] | Announced[ModelState]


class _Batch(NamedTuple):
    """What a candidate would run now: so many of the `left` that are in its queue then, from one with that deadline on."""

    size: int
    left: int
    deadline_at_ms: float


class Matchmaker(Timed[Target]):
    """What happens to candidates and waiting pools; it knows neither how models nor how slices come and go.

    A slice that is free goes to the most urgent batch that waits for it. Those that wait stand in heaps by a moment
    that is corrected only when they come to the front, so it must never be later than their true one. Time makes a
    waiting batch smaller, hence less urgent: that may be seen late. Two things make it more urgent, and are seen at once:
    arrivals, where the batch is the whole queue, or they let the window drop take more of its heads; and another size worth
    protecting, for the same reason. (Heads that the drop would take are left out of the rank, and stay until a slice comes.)

    Decisions are appended to `out`.
    """

    def __init__(self, rule: SendRule, *, is_window_drop: bool) -> None:
        super().__init__()
        self._rule = rule
        self._is_window_drop = is_window_drop
        self._guard_ms = 0.0
        self._is_gathering = False  # candidates queue up, and no slice is given away

    def _grow(self, candidate: Candidate, now_ms: float, out: list[BatchDecision]) -> bool:
        """An arrival may have moved the candidate's moments; True: the head of the queue has changed."""
        if not candidate.is_waiting:
            due_at_ms = candidate.due_at_ms(candidate.model.queue.count - candidate.skip_count)
            if due_at_ms >= candidate.alarm_at_ms:
                return False
            if due_at_ms <= now_ms:
                return self._step(candidate, now_ms, out)
            self._sleep(candidate, due_at_ms, now_ms)
            return False
        if candidate.alarm_at_ms != -NEVER_MS:
            # It has grown; a larger batch has to start earlier, so it may be more urgent than before.
            self._queue_anew(candidate, now_ms)
        return False

    def _queue_anew(self, candidate: Candidate, now_ms: float) -> None:
        """Rank a waiting candidate by the largest batch that its head allows, so that arrivals matter as little as may be."""
        batch = self._batch_left(candidate, now_ms)
        if batch.size:
            size = bisect_right(candidate.cost, batch.deadline_at_ms - now_ms) - 1
            rank_at_ms = batch.deadline_at_ms - candidate.table[size]
            if rank_at_ms < candidate.rank_at_ms:
                self._wait(candidate, _Batch(size, batch.left, batch.deadline_at_ms), now_ms)
            elif not self._is_window_drop or size >= candidate.window_target(now_ms):
                candidate.alarm_at_ms = -NEVER_MS

    def _advance(self, state: ModelState, now_ms: float, out: list[BatchDecision]) -> None:
        """Bring all candidates up to date, until none of them changes the head of the queue."""
        is_changed = True
        while is_changed:
            for candidate in state.candidates:
                is_changed = self._step(candidate, now_ms, out)
                if is_changed:
                    break

    def _step(
        self,
        candidate: Candidate,
        now_ms: float,
        out: list[BatchDecision],
        pool: Pool[Candidate] | None = None,
    ) -> bool:
        """Drop, send, wait or sleep, whatever is next; True: the head of the queue has changed.

        `pool`: there it is its turn. Else it takes no slice for which others wait.
        """
        state = candidate.model
        while (count := state.queue.count - candidate.skip_count) > 0:
            due_at_ms = candidate.due_at_ms(count)
            if due_at_ms > now_ms:
                self._sleep(candidate, due_at_ms, now_ms)
                return False
            if candidate.spares_reserve and self._holds_back(candidate, count, now_ms, pool):
                return False
            size, limit_at_ms = self._fit(candidate, count, now_ms)
            if not size:
                if state.is_crossed or candidate is not state.candidates[0]:
                    if candidate.is_waiting:
                        self._leave(candidate, now_ms)
                    candidate.skip_before(limit_at_ms, self._guard_ms)
                    pool = None  # it was the turn of another batch
                    if not state.is_crossed or not (left := min(one.skip_count for one in state.candidates)):
                        continue
                    lost = state.queue.pop(left)  # by all classes
                elif self._is_window_drop and self._keeps_heads(candidate, now_ms, pool):
                    return False
                else:
                    lost = state.queue.drop_before(limit_at_ms)
                self._give_up(state, lost, now_ms, out)
                self._reset(state, now_ms)
                return True
            horizon_ms = now_ms + candidate.lead[size]
            slice_ = self._find(candidate, horizon_ms) if pool is None else pool.find(horizon_ms)
            if slice_ is None:
                self._wait(candidate, _Batch(size, count, candidate.deadline_at_ms), now_ms)
                return False
            self._dispatch(candidate, slice_, size, now_ms, out)
            return True
        return False

    def _fit(self, candidate: Candidate, count: int, now_ms: float) -> tuple[int, float]:
        """The size of a batch sent now; 0 if requests with deadlines before the second value must go first."""
        cost = candidate.cost
        slack_ms = candidate.deadline_at_ms - now_ms
        whole = count if count < candidate.size_max else candidate.size_max
        if cost[whole] <= slack_ms:
            return whole, now_ms
        target = candidate.window_target(now_ms) if self._is_window_drop else 1
        if slack_ms < cost[target if target < whole else whole]:
            floor = suffix_size(candidate.model.queue.runs, cost, now_ms, target)
            if floor == 0:
                return 0, NEVER_MS
            if slack_ms < cost[floor]:
                limit_at_ms = now_ms + cost[floor]
                if limit_at_ms <= candidate.deadline_at_ms:  # by rounding
                    limit_at_ms = just_after(candidate.deadline_at_ms)
                return 0, limit_at_ms
        return bisect_right(cost, slack_ms) - 1, now_ms

    def _batch_left(self, candidate: Candidate, now_ms: float) -> _Batch:
        """What a waiting candidate would run if its turn came now: without the heads that it would give up then."""
        count = candidate.model.queue.count - candidate.skip_count
        size, limit_at_ms = self._fit(candidate, count, now_ms)
        if size:
            return _Batch(size, count, candidate.deadline_at_ms)
        for run in islice(candidate.model.queue.runs, candidate.skip_runs, None):
            if run.deadline_at_ms >= limit_at_ms:
                size = min(count, bisect_right(candidate.cost, run.deadline_at_ms - now_ms) - 1)
                return _Batch(size, count, run.deadline_at_ms)
            count -= run.count
        return _Batch(0, 0, NEVER_MS)

    def _keeps_heads(self, candidate: Candidate, now_ms: float, pool: Pool[Candidate] | None) -> bool:
        """Whether heads that stand in the way stay, for no slice is there for what they leave: then it waits with that.

        Given up at once they would be answered sooner, at the price of an event for each of them where slices are short.
        """
        if candidate.deadline_at_ms - now_ms < candidate.cost[1]:
            return False
        batch = self._batch_left(candidate, now_ms)
        if not batch.size:
            return False
        horizon_ms = now_ms + candidate.lead[batch.size]
        if (self._find(candidate, horizon_ms) if pool is None else pool.find(horizon_ms)) is not None:
            return False
        self._wait(candidate, batch, now_ms)
        return True

    def _sleep(self, candidate: Candidate, due_at_ms: float, now_ms: float) -> None:
        """Set the candidate's timer: where expected arrivals will have moved `due_at_ms` to, if it is far."""
        if candidate.is_waiting:
            self._leave(candidate, now_ms)
            candidate.is_waiting = False
            candidate.stamp += 1
        state = candidate.model
        if state.version != state.rate.version or now_ms >= state.rate.due_at_ms:
            state.refresh_rate(now_ms)
        per_ms = state.per_ms
        at_ms = now_ms + (due_at_ms - now_ms) / (1.0 + per_ms * candidate.slope_ms)
        if (at_ms - now_ms) * per_ms < state.queue.runs[-1].count:  # nobody else is expected by then
            at_ms = due_at_ms
        candidate.alarm_at_ms = at_ms
        self._arm(candidate, at_ms)
        if candidate.is_early:
            self._queue_early(candidate, at_ms)

    def _wait(self, candidate: Candidate, batch: _Batch, now_ms: float) -> None:
        """No slice is free in time: queue up for one, and look after the head until one comes."""
        state = candidate.model
        if candidate.is_waiting:
            candidate.stamp += 1
        else:
            candidate.is_waiting = True
            candidate.wanted_at_ms = min(candidate.wanted_at_ms, now_ms)
        self._watch_arrivals(candidate, batch.size, batch.left, now_ms)
        candidate.rank_at_ms = rank_at_ms = batch.deadline_at_ms - candidate.table[batch.size]
        lead_ms = candidate.lead[batch.size]
        for pool in candidate.pools:
            self._serial += 1
            pool.wait(rank_at_ms, state.model.priority, self._serial, candidate)
            pool.lead_max_ms = max(pool.lead_max_ms, lead_ms)
            if pool.find(now_ms + lead_ms) is None:
                self._arm_pool(pool, lead_ms, now_ms)
            elif not self._is_gathering and pool.first_waiting() is candidate:
                self._arm(pool, now_ms)  # those that waited have a shorter way, and would take it later
        if state.is_crossed or candidate is state.candidates[0]:
            at_ms = just_after(candidate.deadline_at_ms - candidate.cost[1])
            if self._is_window_drop and not candidate.target_planned:
                # With each sample of the model's rate another size may be worth protecting.
                if now_ms >= state.rate.due_at_ms:
                    state.refresh_rate(now_ms)
                at_ms = min(at_ms, state.rate.due_at_ms)
            self._arm(candidate, at_ms)

    def _watch_arrivals(self, candidate: Candidate, size: int, left: int, now_ms: float) -> None:
        """Where they may make a waiting batch more urgent than a rank by that size says.

        They do where it is all that is left, and where its first request allows no batch of the size worth protecting: when
        enough have come for one, it has to go.
        """
        is_whole = size == left < candidate.size_max
        is_watched = is_whole or (self._is_window_drop and size < candidate.window_target(now_ms))
        candidate.alarm_at_ms = NEVER_MS if is_watched else -NEVER_MS

    def _serve(self, pool: Pool[Candidate], now_ms: float, out: list[BatchDecision]) -> None:
        """Give slices that are free by now to those who wait, the smallest latest first."""
        waiting = pool.waiting
        while waiting:
            candidate = waiting[0][4]
            if waiting[0][3] != candidate.stamp:
                heappop(waiting)
                continue
            if pool.find(now_ms + pool.lead_max_ms) is None:
                self._arm_pool(pool, pool.lead_max_ms, now_ms)
                return
            state = candidate.model
            batch = self._batch_left(candidate, now_ms)
            size = batch.size
            if size > 0:
                rank_at_ms = batch.deadline_at_ms - candidate.table[size]
                if rank_at_ms != waiting[0][0]:
                    self._watch_arrivals(candidate, size, batch.left, now_ms)
                    candidate.rank_at_ms = rank_at_ms
                    if not pool.wait_again(rank_at_ms):
                        continue  # overtaken by time, and now somebody else is more urgent
                lead_ms = candidate.lead[size]
                if lead_ms < pool.lead_max_ms and pool.find(now_ms + lead_ms) is None:
                    self._arm_pool(pool, lead_ms, now_ms)
                    # Then it is smaller, and somebody with a longer way may be more urgent.
                    shrinks_at_ms = just_after(batch.deadline_at_ms - candidate.cost[size])
                    if shrinks_at_ms < pool.armed_at_ms:
                        self._arm(pool, shrinks_at_ms)
                    return
            heappop(waiting)
            skip_runs = candidate.skip_runs
            if self._step(candidate, now_ms, out, pool):
                self._advance(state, now_ms, out)
            elif candidate.is_waiting and candidate.skip_runs == skip_runs:
                return
        pool.lead_max_ms = 0.0
        if pool.early:
            self._serve_early(pool, now_ms, out)

    def _serve_early(self, pool: Pool[Candidate], now_ms: float, out: list[BatchDecision]) -> None:
        """Nobody needs a slice now: those beyond the reserve go to who would like one, the most urgent first."""
        early = pool.early
        while (candidate := self._first_early(pool)) is not None:
            rank_at_ms, _, head_no, _ = early[0]
            state = candidate.model
            count = min(state.queue.count - candidate.skip_count, candidate.size_max)
            lead_ms = candidate.lead[count]
            if not pool.is_spare(now_ms + lead_ms):
                self._arm_pool(pool, lead_ms, now_ms)
                return
            pressed_at_ms = candidate.hold_deadline_at_ms - candidate.hold[count]
            if pressed_at_ms > rank_at_ms:
                candidate.alarm_at_ms = pressed_at_ms  # as it is now, arrivals make it more urgent
                self._serial += 1
                heapreplace(early, (pressed_at_ms, self._serial, head_no, candidate))
                if early[0][1] != self._serial:
                    continue
            heappop(early)
            candidate.is_early = False
            if self._step(candidate, now_ms, out, pool):
                self._advance(state, now_ms, out)
            elif candidate.is_early:
                return

    @staticmethod
    def _first_early(pool: Pool[Candidate]) -> Candidate | None:
        early = pool.early
        while early:
            if _is_early(early[0]):
                return early[0][3]
            heappop(early)
        return None

    def _queue_early(self, candidate: Candidate, pressed_at_ms: float) -> None:
        """Rank a candidate that holds back by a moment before which it need not go, whatever arrives quietly."""
        for pool in candidate.pools:
            if len(pool.early) >= pool.early_max:
                counting = (entry for entry in pool.early if _is_early(entry))
                pool.early_max = keep_first_of_each(pool.early, counting)
            self._serial += 1
            heappush(pool.early, (pressed_at_ms, self._serial, candidate.head_no, candidate))

    def _holds_back(
        self, candidate: Candidate, count: int, now_ms: float, chosen: Pool[Candidate] | None
    ) -> bool:
        """Whether a batch that could still grow has to leave the idle slices to others, and sleeps until it cannot."""
        if count >= candidate.size_max:
            return False
        pressed_at_ms = candidate.hold_deadline_at_ms - candidate.hold[count]
        if pressed_at_ms <= now_ms:
            return False
        lead_ms = candidate.lead[count]
        for pool in candidate.pools:
            if pool.reserve <= pool.late:
                return False
            if pool.is_spare(now_ms + lead_ms) and (pool is chosen or self._first_early(pool) is None):
                return False
        candidate.is_early = candidate.was_early = True
        for pool in candidate.pools:
            self._arm_pool(pool, lead_ms, now_ms)
        self._sleep(candidate, pressed_at_ms, now_ms)
        return True

    def _dispatch(
        self,
        candidate: Candidate,
        slice_: Slice,
        size: int,
        now_ms: float,
        out: list[BatchDecision],
    ) -> None:
        """Send the batch, grown to what the slice's own speed allows."""
        state = candidate.model
        queue = state.queue
        lead = candidate.lead
        table = slice_.tables[state.model.model_id]
        if table is not candidate.table:
            slack_ms = candidate.deadline_at_ms - now_ms
            size_max = min(queue.count - candidate.skip_count, candidate.size_max)
            while size < size_max and table[size + 1] + lead[size + 1] <= slack_ms:
                size += 1
        start_at_ms = exec_at_ms(now_ms, lead[size], slice_.free_at_ms)
        exec_ms = table[size]
        waited_ms = 0.0
        reason = self._rule.reason
        if candidate.wanted_at_ms < now_ms:
            waited_ms = now_ms - candidate.wanted_at_ms
            reason = "slice_free"
        elif size == candidate.size_max:
            reason = "full"
        latest_ms = latest_at_ms(candidate.deadline_at_ms, size, table)
        skip_runs = candidate.skip_runs
        if queue.has_priorities and size < queue.count - candidate.skip_count:
            runs = queue.pop_by_priority(skip_runs, size, state.model.priority)
        else:
            runs = queue.pop_after(skip_runs, size) if skip_runs else queue.pop(size)
        assert slice_.pool is not None
        interval_ms = slice_.interval_ms(state.model.model_id, size) if slice_.intervals else None
        slice_.pool.free_from(slice_, start_at_ms + (exec_ms if interval_ms is None else interval_ms))
        self._reset(state, now_ms)
        out.append(
            Dispatch(
                slice_.slice_id,
                state.model.model_id,
                runs,
                size,
                start_at_ms,
                latest_ms,
                exec_ms,
                waited_ms,
                reason,
                interval_ms,
            )
        )

    def _find(self, candidate: Candidate, horizon_ms: float) -> Slice | None:
        if self._is_gathering:
            return None
        best: Slice | None = None
        best_rank = NEVER_MS
        for pool in candidate.pools:
            slice_ = pool.find(horizon_ms)
            if slice_ is None or (pool.waiting and pool.first_waiting() is not None):
                continue
            rank = slice_.order if pool.is_lowest else slice_.free_at_ms
            if rank < best_rank:
                best, best_rank = slice_, rank
        return best

    def _give_up(
        self, state: ModelState, runs: list[RequestRun], start_at_ms: float, out: list[BatchDecision]
    ) -> None:
        """Report dropped runs (in order of their deadlines): first what is expired, then what was given up.

        `start_at_ms`: when they could start at the earliest.
        """
        limit_at_ms = start_at_ms + state.alone_ms
        expired = [run for run in runs if run.deadline_at_ms < limit_at_ms]
        if expired:
            out.append(Drop(state.model.model_id, expired, is_expired=True))
        if len(expired) < len(runs):
            early = [run for run in runs if run.deadline_at_ms >= limit_at_ms]
            out.append(Drop(state.model.model_id, early, is_expired=False))

    def _reset(self, state: ModelState, now_ms: float) -> None:
        guard_ms = self._guard_ms
        for candidate in state.candidates:
            if candidate.is_waiting:
                self._leave(candidate, now_ms)
            candidate.reset(guard_ms)

    def _leave(self, candidate: Candidate, now_ms: float) -> None:
        """Those that stood behind it and, with a longer way, have to be sent earlier are looked at now."""
        for pool in candidate.pools:
            if pool.lead_max_ms > candidate.lead[1] and pool.armed_at_ms > now_ms:
                self._arm(pool, now_ms)

    def _arm_pool(self, pool: Pool[Candidate], lead_ms: float, now_ms: float) -> None:
        at_ms = pool.next_free_at_ms()
        if lead_ms:
            at_ms = just_after(max(now_ms, at_ms - lead_ms))
        if at_ms < pool.armed_at_ms:
            self._arm(pool, at_ms)


def _is_early(entry: tuple[float, int, int, Candidate]) -> bool:
    """Whether an entry of a pool's `early` still counts."""
    _, _, head_no, candidate = entry
    return candidate.is_early and head_no == candidate.head_no
