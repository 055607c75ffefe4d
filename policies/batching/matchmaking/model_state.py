"""One model as matchmaking sees it: its queue, and one candidate batch per speed class of the slices that host it.

A candidate is never stored as a list of requests. It is the head of the queue, the moments that follow from the
head's deadline, and how far the model's timer may sleep: most arrivals only add to a count.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from policies.batching.base import NEVER_MS, BatchModel
from policies.batching.batch_moments import cost_table, just_before, lead_table
from policies.batching.drop import fallback_target, target_size
from policies.batching.matchmaking.pools import Pool
from policies.batching.matchmaking.send_rule import SendRule
from policies.batching.matchmaking.speed_classes import STEP, SpeedClass
from policies.batching.preparing import Preparing
from policies.batching.run_queue import RunQueue
from policies.rates import RateMeter


class ModelPlan(NamedTuple):
    """What is planned for a model, in place of what `SendRule` says of all.

    `timeout_ms` as there. `target`: the batch size that drops protect; 0: the usual one. `spares_reserve`: what it
    would send early takes no slice of a pool's reserve.
    """

    timeout_ms: float
    target: int
    spares_reserve: bool


class ModelState:
    """One model: its queue, its rate, its plan if it has one, its candidates.

    `preparing`: what is not queued yet, as its inputs are not ready.

    The class that is fastest for the largest batch comes first. `is_crossed`: another one is faster for a single request, as
    a CPU beside a GPU may be.
    """

    __slots__ = (
        "alone_ms",
        "candidates",
        "is_crossed",
        "is_gated",
        "model",
        "per_ms",
        "plan",
        "preparing",
        "queue",
        "rate",
        "sole",
        "version",
    )

    def __init__(self, model: BatchModel) -> None:
        self.model = model
        self.queue = RunQueue()
        self.preparing = Preparing()
        self.rate = RateMeter()
        self.is_gated = False  # what arrives may be refused
        self.version = -1
        self.per_ms = 0.0  # the rate of `version`, in requests a millisecond
        self.plan: ModelPlan | None = None
        self.candidates: list[Candidate] = []
        self.sole: Candidate | None = None  # the only candidate, where there is only one
        self.is_crossed = False
        self.alone_ms = 0.0  # a request with less than this left cannot finish even alone

    def follow(self, plan: ModelPlan) -> None:
        """The plan of all candidates, and of those that take their place."""
        self.plan = plan
        for candidate in self.candidates:
            candidate.follow(plan)

    def set_pools(self, pools: dict[SpeedClass, list[Pool[Candidate]]], rule: SendRule) -> None:
        """The model is hosted by other pools than before."""
        known = {candidate.class_: candidate for candidate in self.candidates}
        self.candidates = []
        for class_, its_pools in pools.items():
            candidate = known.get(class_) or Candidate(self, class_, rule)
            candidate.pools = its_pools
            self.candidates.append(candidate)
        if not self.candidates:
            # Hosted nowhere: requests wait until their deadline, as for a slice that is never free.
            self.candidates = [
                Candidate(self, SpeedClass(self.model.model_id, [0.0, 0.0, NEVER_MS], 0), rule)
            ]
        common = min(candidate.size_max for candidate in self.candidates)
        self.candidates.sort(key=lambda candidate: candidate.table[common])
        self.sole = self.candidates[0] if len(self.candidates) == 1 else None
        self.alone_ms = min(candidate.cost[1] for candidate in self.candidates)
        fastest_ms = min(candidate.table[1] for candidate in self.candidates)
        self.is_crossed = self.candidates[0].table[1] > STEP * fastest_ms  # tables are rounded up by as much

    @property
    def classes(self) -> set[SpeedClass]:
        """Of its candidates."""
        return {candidate.class_ for candidate in self.candidates}

    def refresh_rate(self, now_ms: float) -> None:
        """Take over the rate if a sample was completed since."""
        rate_rps = self.rate.rate_rps(now_ms)
        if self.rate.version != self.version and rate_rps is not None:
            self.version = self.rate.version
            self.per_ms = rate_rps / 1000.0


class Candidate:
    """The batch a model would run on a slice of one speed class.

    `deadline_at_ms` is that of the first request in it. `hold_deadline_at_ms` is what its hold is counted back from: the
    same less the guard and, with a plan, never later than the model's SLO after the arrival. The timer is due at
    `hold_deadline_at_ms - hold[n]`. `armed_at_ms` is when the timer that counts will fire; an arrival that leaves the due
    moment at or after `alarm_at_ms` needs no attention. While the candidate waits for a slice, `rank_at_ms` is the
    last rank that it was given. `skip_runs` runs with `skip_count` requests at the head of the queue are too urgent for
    this class and left to others. `is_early`: it stands in its pools' `early`, with its `head_no`, which counts the
    heads that the queue has had; `was_early`: it has stood there since this head came.
    """

    __slots__ = (
        "alarm_at_ms",
        "armed_at_ms",
        "class_",
        "cost",
        "deadline_at_ms",
        "head_no",
        "hold",
        "hold_deadline_at_ms",
        "is_early",
        "is_waiting",
        "lead",
        "model",
        "pools",
        "rank_at_ms",
        "size_max",
        "skip_count",
        "skip_runs",
        "slope_ms",
        "spares_reserve",
        "stamp",
        "table",
        "target",
        "target_planned",
        "target_version",
        "timeout_at_ms",
        "timeout_ms",
        "wanted_at_ms",
        "was_early",
    )

    def __init__(self, model: ModelState, class_: SpeedClass, rule: SendRule) -> None:
        spec = model.model
        self.model = model
        self.class_ = class_
        self.pools: list[Pool[Candidate]] = []
        self.table = class_.table
        self.size_max = len(self.table) - 2
        self.lead = lead_table(spec.delay, self.size_max)
        self.cost = cost_table(self.table, self.lead)
        self.hold = rule.hold(self.cost)
        self.slope_ms = (self.table[self.size_max] - self.table[1]) / max(1, self.size_max - 1)
        self.timeout_ms = rule.timeout_ms(spec.slo_ms)
        self.target = fallback_target(self.table, spec.slo_ms)
        self.target_planned = 0
        self.spares_reserve = False
        if model.plan is not None:
            self.follow(model.plan)
        self.target_version = -1
        self.stamp = 0
        self.head_no = 0
        self.is_early = False
        self.is_waiting = False
        self.rank_at_ms = NEVER_MS
        self.armed_at_ms = NEVER_MS
        self.reset(0.0)

    def follow(self, plan: ModelPlan) -> None:
        """From the next head on."""
        self.timeout_ms = plan.timeout_ms
        self.target_planned = min(plan.target, self.size_max)
        self.spares_reserve = plan.spares_reserve

    def reset(self, guard_ms: float) -> None:
        """The head of the queue is another one: start again with it."""
        if self.is_waiting:
            self.is_waiting = False
            self.stamp += 1
        self.armed_at_ms = NEVER_MS
        self.alarm_at_ms = NEVER_MS
        self.wanted_at_ms = NEVER_MS
        self.skip_runs = 0
        self.skip_count = 0
        self.is_early = self.was_early = False
        self.head_no += 1
        self.aim(guard_ms)

    def aim(self, guard_ms: float) -> None:
        """Take the moments from the first request that is not skipped."""
        runs = self.model.queue.runs
        if self.skip_runs < len(runs):
            run = runs[self.skip_runs]
            self.deadline_at_ms = hold_deadline_at_ms = run.deadline_at_ms
            if self.model.plan is not None:
                # More time than the model's SLO is no reason to hold a request longer than the others.
                hold_deadline_at_ms = min(hold_deadline_at_ms, run.arrived_at_ms + self.model.model.slo_ms)
            self.hold_deadline_at_ms = just_before(hold_deadline_at_ms - guard_ms)
            self.timeout_at_ms = run.arrived_at_ms + self.timeout_ms
        else:
            self.deadline_at_ms = self.hold_deadline_at_ms = self.timeout_at_ms = NEVER_MS

    def skip_before(self, deadline_at_ms: float, guard_ms: float) -> None:
        """Leave the requests with deadlines before that moment to other classes."""
        runs = self.model.queue.runs
        for run in islice(runs, self.skip_runs, None):
            if run.deadline_at_ms >= deadline_at_ms:
                break
            self.skip_runs += 1
            self.skip_count += run.count
        if self.is_waiting:
            self.is_waiting = False
            self.stamp += 1
        self.aim(guard_ms)

    def due_at_ms(self, count: int) -> float:
        """When a batch should be sent if `count` requests wait and no more come."""
        if count >= self.size_max:
            return -NEVER_MS
        pressed_at_ms = self.hold_deadline_at_ms - self.hold[count]
        if self.is_early or pressed_at_ms < self.timeout_at_ms:
            return pressed_at_ms
        return self.timeout_at_ms

    def window_target(self, now_ms: float) -> int:
        """The batch size worth protecting: a planned one, else computed again when the rate has changed."""
        if self.target_planned:
            return self.target_planned
        model = self.model
        if model.version != model.rate.version or now_ms >= model.rate.due_at_ms:
            model.refresh_rate(now_ms)
        if self.target_version != model.version:
            self.target_version = model.version
            spec = model.model
            self.target = target_size(
                self.table,
                1000.0 * model.per_ms,
                spec.slo_ms - spec.delay.control_ms,
                spec.delay.data_ms_per_item,
            )
        return self.target
