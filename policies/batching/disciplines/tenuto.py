"""Tenuto's own discipline: it holds a batch only while holding pays (ADR 0030).

Deferral with a timeout per model, planned for all models together every 100 ms, more rarely where there are over a hundred (`policies/batching/holding.py`). While slices are
plentiful, models are held as long as saves a whole slice, so that GPUs stay idle and can be released; what is left of the
last one that is needed is spent on going earlier, so on one GPU with little to do a request goes at once. As far as requests are found to *lose by waiting*, i.e. to be
dropped, or left behind by a batch that had to wait for a slice, idle slices are worth nothing and slack is: batches
go earlier, those first whose holding saves the least. Heads are given up to protect the batch size at which
the slices just carry the load, and by models that lose more than others not at all.

How long a hold must be follows from what batches cost: the work of opening them is counted, not taken from the rate alone,
for a burst fills its batches without being held.

Where full deferral is what carries the load, a few idle slices are a *reserve*: a batch that could still grow leaves
them to those that cannot, and goes when one more is idle or it has to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Final

from fabric.ids import ModelId, SliceId
from fabric.policy_options import Choice
from policies.batching.base import NEVER_MS, BatchDecision, BatchModel, BatchSlice, Drop, RequestRun
from policies.batching.disciplines.deferred import frontrun_hold
from policies.batching.holding import Demand, Prospect, plan_holds, plan_reserves, prospect
from policies.batching.matchmaking.central import PICK, Central
from policies.batching.matchmaking.model_state import Candidate, ModelPlan, ModelState
from policies.batching.matchmaking.pools import Pool, Slice
from policies.batching.matchmaking.send_rule import SendRule
from policies.batching.model_groups import Group, ModelCounts, groups_of
from policies.batching.overload_shares import share_out
from policies.batching.rehearsing.question import PLANNED, Question, Rehearsed, RehearsedModel, Variant
from policies.batching.rehearsing.rehearsals import Rehearsals
from policies.batching.run_queue import cut
from policies.registry import Registered

PLAN_EVERY_MS = 100.0
PLAN_MS_PER_MODEL = 1.0  # with more than a hundred models less often, as a plan takes longer, …
MODELS_A_PART = 100  # … and in parts, each a third of the work for so many: batches that are due wait while planning goes on
LEFT_BEHIND = 0.3  # of a loss: a request that a batch left behind because it had to wait for its slice
_MEMORY = 0.04  # of the newest count, a plan every 100 ms: the last 2.5 s


def at_once(slo_ms: float) -> float:  # noqa: ARG001  a timeout of the shape `SendRule` asks for
    """A model of which nothing is known yet is not held."""
    return 0.0


TENUTO = SendRule(reason="held", hold=frontrun_hold, timeout_ms=at_once)


class Tenuto(Central):
    """`drop`: window or simple forces one of the usual rules; None protects what is planned.

    While requests are lost it asks for rehearsals (`Rehearses`), and uses another variant where one has shown a better one. `variant`:
    use that one; it asks for none.
    """

    def __init__(
        self, *, drop: str | None = None, is_lowest_id: bool = True, variant: Variant | None = None
    ) -> None:
        super().__init__(TENUTO, is_window_drop=drop != "simple", is_lowest_id=is_lowest_id)
        self._plans_target = drop is None
        self._is_lowest_id = is_lowest_id
        self._variant = variant or PLANNED
        self._rehearsals = Rehearsals() if variant is None and drop is None else None
        self._slices_given: dict[SliceId, BatchSlice] = {}
        self._plan_at_ms = 0.0
        self._groups: list[Group] = []
        self._counts: dict[ModelId, ModelCounts] = {}
        self._is_regrouped = True
        self._planned_at_ms = NEVER_MS
        self._parts: Generator[None, float] | None = None  # of the plan that is being made

    def _admit(self, state: ModelState, run: RequestRun, now_ms: float) -> Sequence[BatchDecision]:
        """What is more than the model's share is given up at once (`overload_shares.py`)."""
        gate = self._counts[state.model.model_id].gate
        if gate.buckets is not None and now_ms >= self._plan_at_ms:
            self._plan(now_ms)
        priority = gate.priority if run.priority is None else run.priority
        admitted = gate.admit(run.count, priority, now_ms)
        if admitted == run.count:
            self._note(state, run, now_ms)
            return self._take_on(state, run, now_ms)
        # Now, as a batch that leaves with what is taken on may go on with the plan, which may open the gate.
        retry_after_ms = gate.retry_after_ms(priority)
        taken: Sequence[BatchDecision] = ()
        if admitted:
            piece = cut(run, admitted)
            self._note(state, piece, now_ms)
            taken = self._take_on(state, piece, now_ms)
        return (*taken, Drop(state.model.model_id, [run], is_expired=False, retry_after_ms=retry_after_ms))

    def _now_ready(self, state: ModelState, run: RequestRun, now_ms: float) -> None:
        self._note(state, run, now_ms)
        super()._now_ready(state, run, now_ms)

    def _note(self, state: ModelState, run: RequestRun, now_ms: float) -> None:
        """A rehearsal plays it as it comes to the queue: when it is ready."""
        if self._rehearsals is not None and self._rehearsals.is_recording and run.ready_at_ms <= now_ms:
            self._rehearsals.note(state.model.model_id, run, now_ms)

    @property
    def rehearsal_at_ms(self) -> float:
        """See `Rehearses`."""
        return NEVER_MS if self._rehearsals is None else self._rehearsals.due_at_ms

    def rehearsal(self, now_ms: float) -> Question | None:
        """See `Rehearses`."""
        if self._rehearsals is None or now_ms < self._rehearsals.due_at_ms:
            return None
        models = [
            RehearsedModel(
                state.model,
                state.rate.rate_rps(now_ms) or 0.0,
                counts.losses.share,
                counts.openings_ms,
                counts.expected_ms,
                counts.gate.buckets is not None,
            )
            for state, counts in (
                (self._models[model_id], self._counts[model_id]) for model_id in self._planned_models()
            )
        ]
        given = self._slices_given
        return self._rehearsals.question(
            models,
            lambda: tuple(given.values()),
            self._lost_share(),
            now_ms,
            is_lowest_id=self._is_lowest_id,
        )

    def rehearsed(self, answer: Rehearsed, now_ms: float) -> None:
        """See `Rehearses`."""
        if self._rehearsals is not None and self._rehearsals.judge(answer, now_ms):
            self._variant = self._rehearsals.variant
            self._plan_at_ms = now_ms
            self._parts = None

    def begin_as(self, question: Question) -> None:
        """With what was known when it was asked, at moment 0: models and slices are there."""
        for one in question.models:
            counts = self._counts[one.model.model_id]
            counts.losses.share = one.lost_share
            counts.openings_ms, counts.expected_ms = one.openings_ms, one.expected_ms
            counts.is_over_share = one.is_over_share
            self._models[one.model.model_id].rate.begin_at(one.rate_rps, 0.0)
        self._regroup()
        for group in self._groups:
            group.wait_losses.share = question.lost_share
        self._plan(0.0)
        while self._parts is not None:
            self._plan(0.0)

    def _planned_models(self) -> list[ModelId]:
        """Of which there is a slice, when the last plan was made."""
        return [
            model_id for group in self._groups for model_id in group.model_ids if model_id in self._models
        ]

    def _lost_share(self) -> float:
        return max((group.wait_losses.share for group in self._groups), default=0.0)

    def add_slice(self, slice_: BatchSlice, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        self._slices_given[slice_.slice_id] = slice_
        return super().add_slice(slice_, now_ms)

    def remove_slices(self, slice_ids: Collection[SliceId], now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        for slice_id in slice_ids:
            self._slices_given.pop(slice_id, None)
        return super().remove_slices(slice_ids, now_ms)

    def add_model(self, model: BatchModel, now_ms: float) -> None:
        """See `Discipline`."""
        self._counts.setdefault(model.model_id, ModelCounts()).gate.priority = model.priority
        self._is_regrouped = True
        super().add_model(model, now_ms)

    def remove_model(self, model_id: ModelId, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        self._counts.pop(model_id, None)
        self._is_regrouped = True
        return super().remove_model(model_id, now_ms)

    def _dispatch(
        self,
        candidate: Candidate,
        slice_: Slice,
        size: int,
        now_ms: float,
        out: list[BatchDecision],
    ) -> None:
        if now_ms >= self._plan_at_ms:
            self._plan(now_ms)
        counts = self._counts.get(candidate.model.model.model_id)
        if counts is not None:
            counts.losses.requests += size
            counts.gate.served += size
            counts.gate.busy_ms += slice_.tables[candidate.model.model.model_id][size]
            if candidate.wanted_at_ms >= now_ms:
                if not candidate.was_early:
                    counts.openings_ms += counts.opening_ms
                    counts.expected_ms += counts.expected_ms_per_request * size
            elif size < candidate.size_max:
                left = candidate.model.queue.count - candidate.skip_count - size
                counts.losses.lost += LEFT_BEHIND * left
        super()._dispatch(candidate, slice_, size, now_ms, out)

    def _give_up(
        self, state: ModelState, runs: list[RequestRun], start_at_ms: float, out: list[BatchDecision]
    ) -> None:
        lost = sum(run.count for run in runs)
        counts = self._counts.get(state.model.model_id)
        if counts is not None:
            counts.losses.requests += lost
            counts.losses.lost += lost
            counts.gate.lost += lost
        super()._give_up(state, runs, start_at_ms, out)

    def _repool(self, model_ids: Iterable[ModelId], now_ms: float, out: list[BatchDecision]) -> None:
        self._is_regrouped = True  # also where only the number of slices has changed
        super()._repool(model_ids, now_ms, out)

    def _plan(self, now_ms: float) -> None:
        """Go on with the plan, or begin the next: where there are many models, a part at a time.

        A plan that has begun goes on with the groups of its beginning: slices change more often than a long plan takes.
        """
        try:
            if self._parts is None:
                if self._is_regrouped:
                    self._regroup()
                self._parts = self._plan_in_parts(now_ms)
                next(self._parts)
            else:
                self._parts.send(now_ms)
        except StopIteration:
            self._parts = None

    def _plan_in_parts(self, now_ms: float) -> Generator[None, float]:
        """Set every model's hold and target from the rates as they are. What goes on later is told the time."""
        every_ms = max(PLAN_EVERY_MS, PLAN_MS_PER_MODEL * len(self._counts))
        at_once = math.inf if len(self._counts) <= MODELS_A_PART else MODELS_A_PART
        handled = 0
        next_at_ms = now_ms + every_ms
        elapsed_ms = now_ms - self._planned_at_ms
        # Where little is asked plans are rare, and a loss must not count for longer than where they are not.
        memory = min(1.0, _MEMORY * max(every_ms, elapsed_ms) / PLAN_EVERY_MS)
        self._planned_at_ms = now_ms
        for group in self._groups:
            size = len(group.model_ids)
            if elapsed_ms > 0.0:  # not the first time
                share_out(group.sharing, group.slices, elapsed_ms, now_ms)
                self._open_or_close(group)
                if (handled := handled + size) > at_once:
                    now_ms, handled = (yield), 0
            # A plan that was begun before may go on with a model that has been removed since.
            model_ids = [model_id for model_id in group.model_ids if model_id in self._models]
            counts_of = [self._counts[model_id] for model_id in model_ids]
            opening_ratio = group.roll(counts_of, memory)
            mean = group.wait_losses.share
            asked: list[tuple[ModelState, ModelCounts, Prospect]] = []
            for model_id, counts in zip(model_ids, counts_of, strict=True):
                state = self._models[model_id]
                rate_rps = state.rate.rate_rps(now_ms)
                fastest = state.candidates[0]
                if rate_rps and fastest.table[1] > 0:
                    one = prospect(state.model, fastest.table, fastest.cost, rate_rps)
                    asked.append((state, counts, one))
                else:
                    counts.opening_ms = counts.expected_ms_per_request = 0.0
                    plan = ModelPlan(0.0, 1 if self._plans_target else 0, spares_reserve=False)
                    self._follow(state, plan, now_ms)
            if (handled := handled + size) > at_once:
                now_ms, handled = (yield), 0
            pools = [pool for pool in group.pools if pool.size]
            demand = Demand([one for _, _, one in asked], group.slices, opening_ratio)
            lost_shares = [counts.losses.share for _, counts, _ in asked]
            is_short = any(counts.is_over_share or counts.gate.buckets is not None for counts in counts_of)
            holds = plan_holds(demand, lost_shares, mean, is_short=is_short)
            reserves = plan_reserves(demand, [pool.at_once for pool in pools], mean)
            if (handled := handled + size) > at_once:
                now_ms, handled = (yield), 0
            for pool, batches in zip(pools, reserves, strict=True):
                if pool.size:  # still
                    self._keep(pool, batches, now_ms)
            for (state, counts, one), hold in zip(asked, holds, strict=True):
                counts.opening_ms = one.beta_ms
                if self._variant.hold_share is None:
                    timeout_ms = NEVER_MS if hold.is_full else hold.hold_ms
                    target = hold.target if self._plans_target else 0
                    plan = ModelPlan(timeout_ms, target, hold.spares_reserve)
                else:
                    timeout_ms = self._variant.timeout_ms(state.model.slo_ms)
                    plan = ModelPlan(timeout_ms, self._variant.target, spares_reserve=False)
                counts.expected_ms_per_request = one.opening_ms_per_request(min(timeout_ms, one.hold_max_ms))
                self._follow(state, plan, now_ms)
        if self._rehearsals is not None:
            self._rehearsals.follow(self._lost_share(), now_ms)
            self._variant = self._rehearsals.variant
            for group in self._groups:
                self._open_or_close(group)
        self._plan_at_ms = next_at_ms

    def _open_or_close(self, group: Group) -> None:
        """Look at each of the group's requests as it comes, where not all are admitted or a rehearsal is to play them."""
        is_recording = self._rehearsals is not None and self._rehearsals.is_recording
        for model_id in group.model_ids:
            if model_id in self._models:
                self._models[model_id].is_gated = (
                    is_recording or self._counts[model_id].gate.buckets is not None
                )

    def _keep(self, pool: Pool[Candidate], batches: float, now_ms: float) -> None:
        """Set a reserve; a pipeline is one slice, whole or not at all."""
        reserve = int(batches * pool.size / pool.at_once)
        if reserve < pool.reserve and pool.early:
            self._arm(pool, now_ms)  # what is spare now goes to those who would like it
        pool.reserve = reserve

    def _follow(self, state: ModelState, plan: ModelPlan, now_ms: float) -> None:
        """The plan, in which another target may let a waiting batch give up more heads, and make it more urgent."""
        is_new_target = state.plan is None or plan.target != state.plan.target
        state.follow(plan)
        if is_new_target:
            for candidate in state.candidates:
                if candidate.is_waiting:
                    self._queue_anew(candidate, now_ms)

    def _regroup(self) -> None:
        self._is_regrouped = False
        self._groups = groups_of(self._models, self._counts, self._groups)
        grouped = {model_id for group in self._groups for model_id in group.model_ids}
        for model_id in self._counts.keys() - grouped:  # hosted nowhere
            self._counts[model_id].gate.open()
            self._models[model_id].is_gated = False


REGISTERED: Final = Registered(
    {"drop": Choice(("window", "simple"), is_default_given=False), "pick": PICK},
    lambda options: Tenuto(drop=options.get("drop"), is_lowest_id=options["pick"] == "lowest_id"),
)
