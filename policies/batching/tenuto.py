"""Tenuto's own discipline: it holds a batch only while holding pays (ADR 0030).

Holding saves GPU time: requests that come while a batch is held join it for alpha each instead of opening a batch
of their own for another beta. It costs slack: what was held has less time left to wait for a slice. So each model
gets a time T for which the first request of its batch is held, and every 100 ms all of them are planned together:

- A model with rate r that is held for T opens a batch every T + 1/r, so its GPU work is alpha·r + beta/(T + 1/r). The
  longest T that still makes the deadline is `H`, where deferral would send it.
- The shortest holds are wanted whose work fits the GPU time there is. Of all choices with the same work those with
  the same marginal saving beta/(T + 1/r)² waste the least slack, so T = sqrt(beta·k) - 1/r with one k for all: models
  that batch well or are asked for often are held, the others go at once.
- Going early makes room only in front of the *others*: what follows of the same model joins either way. So a model
  that is the share s of all work is held for (1 - s)·T + s·H; a single model is deferred in full.
- While slices are plentiful, holding pays by leaving GPUs idle that can be released: the plan may exceed the
  work of full deferral by `SPARE` of the slices. As far as batches are found to suffer from waiting for slices, it
  may use all of the GPU time, as idle slices are then worth nothing and slack is.

Heads are given up to protect the batch size that the plan itself reckons with, 1 + r·T.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from fabric.ids import ModelId
from policies.batching.base import NEVER_MS, Decision, RequestRun
from policies.batching.candidate import Candidate, ModelState, Want
from policies.batching.central import Central
from policies.batching.deferred import frontrun_hold
from policies.batching.drop import target_size
from policies.batching.pools import Slice

PLAN_EVERY_MS = 100.0
SPARE = 0.01  # of the slices: what going early may cost while slices are plentiful
FULL = 1.3  # planned work that uses all slices: batches that find none free are held longer than planned
SUFFERING_FULL = 0.02  # when so many of the requests suffer from waiting, all GPU time is used
SUFFERING_MEMORY = 0.05  # weight of the newest 100 ms: the last 2 s count
SHARE_POWER = 2.0
CROWDED = 0.8
EXCESS = 1.0
OWN_LEFT = 1.0
TARGET_FULL = 1.0
IDLE = 0.2  # of the slices may be busy whatever the load, but
IDLE_SLICES_MAX = 0.5  # no more than this: a cluster that serves anything keeps one slice anyway
_BISECTIONS = 18


def at_once(slo_ms: float) -> float:  # noqa: ARG001  a timeout of the shape `Want` asks for
    """Before anything is known of a model nothing is held."""
    return 0.0


TENUTO = Want(reason="hold_over", hold=frontrun_hold, timeout_ms=at_once)


@dataclass(slots=True)
class Prospect:
    """What planning needs of one model: its rate per ms, l(b) = alpha·b + beta, the longest hold, its work."""

    state: ModelState
    per_ms: float
    beta_ms: float
    hold_max_ms: float
    target: int
    work_deferred: float

    def hold_ms(self, price: float) -> float:
        """The hold at which a longer one would save less than 1/price per ms."""
        return max(0.0, min(self.hold_max_ms, math.sqrt(self.beta_ms * price) - 1.0 / self.per_ms))

    def opening_work(self, hold_ms: float) -> float:
        """The slices kept busy by opening batches alone."""
        return self.beta_ms / (hold_ms + 1.0 / self.per_ms)


@dataclass(slots=True)
class Suffering:
    """Of the requests of some models that share slices, how many lost by waiting for one."""

    requests: int = 0
    suffered: int = 0
    share: float = 0.0

    def roll(self) -> float:
        """Take over what was counted since the last time."""
        if self.requests:
            self.share += SUFFERING_MEMORY * (self.suffered / self.requests - self.share)
            self.requests = self.suffered = 0
        return self.share


class Tenuto(Central):
    """`drop`: window or simple forces one of the usual rules; None protects what is planned."""

    def __init__(self, *, drop: str | None = None, is_lowest_id: bool = True) -> None:
        super().__init__(TENUTO, is_window_drop=drop != "simple", is_lowest_id=is_lowest_id)
        self._plans_target = drop is None
        self._plan_at_ms = 0.0
        self._groups: list[tuple[list[ModelId], int, Suffering]] = []
        self._group_of: dict[ModelId, Suffering] = {}
        self._own: dict[ModelId, Suffering] = {}
        self._is_regrouped = True

    def _dispatch(
        self,
        candidate: Candidate,
        slice_: Slice,
        size: int,
        ready_at_ms: float,
        now_ms: float,
        out: list[Decision],
    ) -> None:
        if now_ms >= self._plan_at_ms:
            self._plan(now_ms)
        group = self._group_of.get(candidate.model.model.model_id)
        if group is not None:
            group.requests += size
            own = self._own[candidate.model.model.model_id]
            own.requests += size
            left = candidate.model.queue.count - candidate.skip_count - size
            if left and size < candidate.size_max and candidate.wanted_at_ms < now_ms:
                group.suffered += left
                own.suffered += left * OWN_LEFT
        super()._dispatch(candidate, slice_, size, ready_at_ms, now_ms, out)

    def _give_up(self, state: ModelState, runs: list[RequestRun], now_ms: float, out: list[Decision]) -> None:
        group = self._group_of.get(state.model.model_id)
        if group is not None:
            count = sum(run.count for run in runs)
            group.requests += count
            group.suffered += count
            own = self._own[state.model.model_id]
            own.requests += count
            own.suffered += count
        super()._give_up(state, runs, now_ms, out)

    def _repool(self, model_ids: Iterable[ModelId], now_ms: float, out: list[Decision]) -> None:
        self._is_regrouped = True
        super()._repool(model_ids, now_ms, out)

    def _plan(self, now_ms: float) -> None:
        """Set every model's hold from the rates as they are."""
        self._plan_at_ms = now_ms + PLAN_EVERY_MS
        if self._is_regrouped:
            self._regroup()
        for model_ids, slices, suffering in self._groups:
            known = (self._models.get(model_id) for model_id in model_ids)
            prospects = [one for state in known if state is not None for one in _prospects(state, now_ms)]
            self._hold(prospects, slices, suffering.roll())

    def _hold(self, prospects: list[Prospect], slices: int, suffering: float) -> None:
        fixed = sum(one.work_deferred - one.opening_work(one.hold_max_ms) for one in prospects)
        deferred = sum(one.work_deferred for one in prospects)
        frugal = max(deferred + SPARE * slices, min(IDLE * slices, IDLE_SLICES_MAX))
        urgency = min(1.0, suffering / SUFFERING_FULL)
        allowed = frugal + urgency * max(0.0, FULL * slices - frugal)
        price = _price(prospects, allowed - fixed)
        needed = _price(prospects, TARGET_FULL * slices - fixed)
        crowd = min(1.0, deferred / (CROWDED * slices))
        for one in prospects:
            share = crowd * (one.work_deferred / deferred) ** SHARE_POWER
            share *= 1.0 - 1.0 / max(1.0, one.work_deferred) ** 2
            own = self._own[one.state.model.model_id].roll()
            excess = min(1.0, max(0.0, (own - suffering) / SUFFERING_FULL))
            hold_ms = (1.0 - share) * one.hold_ms(price) + share * one.hold_max_ms
            hold_ms *= 1.0 - excess * EXCESS
            is_deferred = hold_ms >= 0.999 * one.hold_max_ms
            kept_ms = max(hold_ms, one.hold_ms(needed))
            others = 1.0 - one.work_deferred / deferred
            gathered = 1 + one.per_ms * kept_ms
            target = one.target if is_deferred else max(1, int(gathered - others * math.sqrt(gathered)))
            for candidate in one.state.candidates:
                candidate.timeout_ms = NEVER_MS if is_deferred else hold_ms
                if self._plans_target:
                    candidate.target_planned = min(target, candidate.size_max)

    def _regroup(self) -> None:
        """Models that share slices, directly or through others, are planned together."""
        self._is_regrouped = False
        group_of: dict[ModelId, list[ModelId]] = {}
        pools = {pool for state in self._models.values() for one in state.candidates for pool in one.pools}
        for pool in pools:
            merged: list[ModelId] = []
            for class_ in pool.classes:
                group = group_of.get(class_.model_id, [class_.model_id])
                if group is not merged:
                    merged.extend(group)
                    for model_id in group:
                        group_of[model_id] = merged
        slices: dict[int, int] = {}
        for pool in pools:
            key = id(group_of[pool.classes[0].model_id])
            slices[key] = slices.get(key, 0) + pool.size
        groups = {id(group): group for group in group_of.values()}
        self._groups = [(sorted(group), slices[key], Suffering()) for key, group in groups.items()]
        self._own = {model_id: Suffering() for ids, _, _ in self._groups for model_id in ids}
        self._group_of = {model_id: suffering for ids, _, suffering in self._groups for model_id in ids}


def _prospects(state: ModelState, now_ms: float) -> Iterable[Prospect]:
    """The model as planning sees it; nothing while it has no rate, and then nothing is held."""
    rate_rps = state.rate.rate_rps(now_ms)
    candidate = state.candidates[0]
    if not rate_rps or not candidate.pools:
        for one in state.candidates:
            one.timeout_ms = 0.0
            one.target_planned = 1
        return
    spec, table, lead = state.model, candidate.table, candidate.lead
    per_ms = rate_rps / 1000.0
    size_max = max(1, bisect_right(candidate.cost, spec.slo_ms) - 1)
    alpha_ms = (table[size_max] - table[1]) / max(1, size_max - 1)
    beta_ms = max(0.0, table[1] - alpha_ms)
    each_ms = alpha_ms + spec.delay.data_ms_per_item
    hold_max_ms = max(0.0, (spec.slo_ms - beta_ms - lead[0] - 2 * each_ms) / (1.0 + each_ms * per_ms))
    size = target_size(table, rate_rps, spec.slo_ms - spec.delay.control_ms, spec.delay.data_ms_per_item)
    work = alpha_ms * per_ms + beta_ms / (hold_max_ms + 1.0 / per_ms)
    yield Prospect(state, per_ms, beta_ms, hold_max_ms, size, work)


def _price(prospects: list[Prospect], allowed: float) -> float:
    """The lowest price at which opening batches keeps no more than `allowed` slices busy."""
    high = max(
        ((one.hold_max_ms + 1.0 / one.per_ms) ** 2 / one.beta_ms for one in prospects if one.beta_ms),
        default=0.0,
    )
    low = 0.0
    if sum(one.opening_work(0.0) for one in prospects) <= allowed:
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(one.opening_work(one.hold_ms(middle)) for one in prospects) > allowed:
            low = middle
        else:
            high = middle
    return high
