"""How much of an overload reaches the queues: shares of device time, made for `tenuto` (ADR 0031).

A queue that is offered five times what it can serve serves less than one that is offered a little too much: batches are
built of requests that have waited too long, and slices go to whoever is late, not to whoever uses them best. So what
is more than the slices can do is refused as it comes, and queues see an overload of `ADMITTED` at most.

Who is refused is a matter of *shares*. Each model may have lambda times its usual rate, with the one lambda at which all that is
admitted takes just the device time there is. Who asks for less has all of it, and what it leaves goes to the others
(weighted max-min fairness). So a model that floods is refused its flood, and where all grow alike all lose alike. The
usual rate is the mean while there was room for all; in an overload it stays as it is. That of a model that has not been seen so
long is the mean of what it asks for, and nobody counts with less than a part of an equal share.

What a bucket admits evenly comes alone: where a model has few requests its batches were smaller in an overload than below it. So of those
a bucket that was emptied gathers a few tokens before it admits again, and these requests come together, as in a burst: but only if
that is a small part of what the slices do in the time that a request has, else the others would lose by it.

Requests of a higher priority are given their shares first, but for that part of the others.

What a request costs is measured: the device time of the model's batches over their requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Above so many times the device time there is requests are refused, until less than the following is asked for.
CLOSE_AT = 1.1
# So many times that is admitted: queues that are never empty keep slices and batches full.
ADMITTED = 1.02
BURST_MS = 100.0  # of a share may come at once, or …
BURST = 10.0  # … so many requests
CLUMP = 5.0  # requests that an emptied bucket gathers before it admits again, …
FEW = 10.0  # … of a model that is admitted fewer within its SLO: the others meet in the queue anyway, …
CLUMP_PART = 0.05  # … and no more than take so much of the device time that its slices have within its SLO
FLOOR = 0.1  # of an equal share of the slices is everybody's, whatever is usual and whoever is more important
RETRY_MS_MIN, RETRY_MS_MAX = 100.0, 10_000.0
_MEMORY_MS = 500.0  # of what is asked for, and of what it costs
_USUAL_MS = 5_000.0  # memory of the usual rates
_KNOWN_MS = 2_500.0  # so long a model must have been seen while there was room for all
_STARTING_MS = 500.0  # the first batches are small: what requests cost is not known yet
_CALM = 0.02  # of the requests may be lost where a rate counts as usual
_NOTHING = 1e-6  # a rate or a count that is forgotten


@dataclass(slots=True)
class Bucket:
    """Tokens that come at `per_ms`: each request that is admitted takes one. At most `depth` are kept."""

    per_ms: float
    depth: float
    tokens: float
    filled_at_ms: float
    retry_after_ms: float = RETRY_MS_MIN
    clump: float = 0.0
    is_dry: bool = False
    """It was emptied: nothing is admitted before it holds a `clump`."""

    def take(self, count: int, now_ms: float) -> int:
        """How many of so many requests are admitted."""
        self.tokens = min(self.depth, self.tokens + self.per_ms * (now_ms - self.filled_at_ms))
        self.filled_at_ms = now_ms
        if self.is_dry and self.tokens < self.clump:
            return 0
        admitted = min(count, int(self.tokens))
        self.tokens -= admitted
        self.is_dry = self.tokens < 1.0
        return admitted

    def follow(self, per_ms: float, depth: float, asked_per_ms: float, now_ms: float) -> None:
        """Another share from now on. A client may come again when it would have served what was refused in a second."""
        self.take(0, now_ms)
        self.per_ms, self.depth = per_ms, depth
        missing = asked_per_ms / per_ms - 1.0 if per_ms > _NOTHING else math.inf
        self.retry_after_ms = min(RETRY_MS_MAX, max(RETRY_MS_MIN, 1000.0 * missing))


class Clumps(NamedTuple):
    """Buckets of a lower share admit so many requests together."""

    size: float
    below_per_ms: float


@dataclass(slots=True)
class Gate:
    """What one model asks for and costs, and what is admitted of it. `buckets` (by priority): None while there is room for all.

    Counted since the last `roll`: `asked` by priority (of the model's own only what was refused), `admitted_others` of other
    priorities, `served` requests in `busy_ms` of device time, and `lost`.
    """

    asked: Counter[int] = field(default_factory=Counter)
    admitted_others: int = 0
    served: int = 0
    lost: int = 0
    busy_ms: float = 0.0
    per_ms: dict[int, float] = field(default_factory=dict)
    usual_per_ms: dict[int, float] = field(default_factory=dict)
    buckets: dict[int, Bucket] | None = None
    priority: int = 0  # of requests that name none
    _known_ms: float = 0.0
    seen_ms: float = 0.0
    _served: float = 0.0
    _busy_ms: float = 0.0

    def admit(self, count: int, priority: int, now_ms: float) -> int:
        """How many of a run of requests may go to the queue.

        While all may, those of the model's own priority need not come by: they count when they are served or lost.
        """
        bucket = None if self.buckets is None else self.buckets.get(priority)
        admitted = (
            count if bucket is None else bucket.take(count, now_ms)
        )  # a new priority has its share soon
        if priority == self.priority:
            self.asked[priority] += count - admitted
        else:
            self.asked[priority] += count
            self.admitted_others += admitted
        return admitted

    def retry_after_ms(self, priority: int) -> float:
        """When a request that was refused may come again."""
        assert self.buckets is not None
        return self.buckets[priority].retry_after_ms

    def roll(self, elapsed_ms: float) -> None:
        """Take over what was counted."""
        memory = min(1.0, elapsed_ms / _MEMORY_MS)
        self.asked[self.priority] += max(0, self.served + self.lost - self.admitted_others)
        self.admitted_others = 0
        for priority in {*self.asked, *self.per_ms}:
            before = self.per_ms.get(priority, 0.0)
            self.per_ms[priority] = before + memory * (self.asked[priority] / elapsed_ms - before)
        self.per_ms = {priority: rate for priority, rate in self.per_ms.items() if rate > _NOTHING}
        self._served += self.served - memory * self._served
        self._busy_ms += self.busy_ms - memory * self._busy_ms
        self.asked.clear()
        self.served = self.lost = 0
        self.busy_ms = 0.0

    def learn(self, elapsed_ms: float, *, is_calm: bool) -> None:
        """This is what the model usually asks for: what it does while there is room for all, or, until that is known, at all."""
        if is_calm:
            self._known_ms += elapsed_ms
        elif self._known_ms >= _KNOWN_MS:
            return
        self.seen_ms = min(_USUAL_MS, self.seen_ms + elapsed_ms)
        memory = min(1.0, elapsed_ms / self.seen_ms)
        for priority in {*self.per_ms, *self.usual_per_ms}:
            before = self.usual_per_ms.get(priority, 0.0)
            self.usual_per_ms[priority] = before + memory * (self.per_ms.get(priority, 0.0) - before)
        self.usual_per_ms = {one: rate for one, rate in self.usual_per_ms.items() if rate > _NOTHING}

    def cost_ms(self, alone_ms: float) -> float:
        """Of device time, a request; `alone_ms` where none was served lately."""
        return max(_NOTHING, self._busy_ms / self._served if self._served > _NOTHING else alone_ms)

    def open(self) -> None:
        """All are admitted."""
        self.buckets = None

    def close(self, shares: dict[int, float], clumps: Clumps, now_ms: float) -> None:
        """So many requests a ms are admitted, by priority."""
        before = self.buckets or {}
        self.buckets = {}
        for priority, per_ms in shares.items():
            depth = max(BURST, BURST_MS * per_ms)
            bucket = before.get(priority) or Bucket(per_ms, depth, depth, now_ms)
            bucket.clump = clumps.size if per_ms < clumps.below_per_ms else 0.0
            bucket.follow(per_ms, depth, self.per_ms.get(priority, 0.0), now_ms)
            self.buckets[priority] = bucket


class Sharing(NamedTuple):
    """One of the models that share slices: `slices` of them host it, and alone a request takes `alone_ms`."""

    gate: Gate
    alone_ms: float
    slices: float
    slo_ms: float

    def clumps(self, cost_ms: float) -> Clumps:
        """Of its requests, which take so much device time each."""
        size = min(CLUMP, CLUMP_PART * self.slices * self.slo_ms / cost_ms)
        return Clumps(size if size >= 2.0 else 0.0, FEW / self.slo_ms)


def share_out(models: Sequence[Sharing], slices: float, elapsed_ms: float, now_ms: float) -> None:
    """Take over what was counted since the last time, `elapsed_ms` ago, and open or close the gates of models that share `slices`."""
    is_closed = any(one.gate.buckets is not None for one in models)
    lost = sum(one.gate.lost for one in models)
    is_calm = lost <= _CALM * (lost + sum(one.gate.served for one in models))
    for one in models:
        one.gate.roll(elapsed_ms)
    costs_ms = [one.gate.cost_ms(one.alone_ms) for one in models]
    work = sum(cost_ms * sum(one.gate.per_ms.values()) for one, cost_ms in zip(models, costs_ms, strict=True))
    is_known = any(one.gate.seen_ms >= _STARTING_MS for one in models)
    is_short = is_known and work > (ADMITTED if is_closed else CLOSE_AT) * slices
    for one in models:
        one.gate.learn(elapsed_ms, is_calm=is_calm and not is_short)
    if is_short:
        for one, found, cost_ms in zip(models, shares(models, costs_ms, slices), costs_ms, strict=True):
            one.gate.close(found, one.clumps(cost_ms), now_ms)
        return
    for one in models:
        one.gate.open()


def shares(models: Sequence[Sharing], costs_ms: Sequence[float], slices: float) -> list[dict[int, float]]:
    """How many requests a ms of each model, by priority, are admitted to `slices`; `costs_ms` of each request."""
    left = ADMITTED * slices
    floor = FLOOR * slices / len(models)
    own_left = [ADMITTED * one.slices for one in models]
    found: list[dict[int, float]] = [{} for _ in models]
    for priority in sorted({priority for one in models for priority in one.gate.per_ms}, reverse=True):
        # The floors of models that ask for nothing as important are kept for them.
        kept = sum(
            min(floor, cost_ms * sum(one.gate.per_ms.values()))
            for one, cost_ms in zip(models, costs_ms, strict=True)
            if one.gate.per_ms and max(one.gate.per_ms) < priority
        )
        wanted, weights = [], []
        for one, cost_ms, own in zip(models, costs_ms, own_left, strict=True):
            work = cost_ms * one.gate.per_ms.get(priority, 0.0)
            wanted.append(min(work, own))
            weights.append(max(cost_ms * one.gate.usual_per_ms.get(priority, 0.0), min(work, floor)))
        level = _level(wanted, weights, max(0.0, left - kept))
        for number, (cost_ms, weight) in enumerate(zip(costs_ms, weights, strict=True)):
            if priority in models[number].gate.per_ms:
                work = min(own_left[number], level * weight) if weight else 0.0
                found[number][priority] = work / cost_ms
                taken = min(wanted[number], work)
                own_left[number] -= taken
                left -= taken
    return found


def _level(wanted: Sequence[float], weights: Sequence[float], room: float) -> float:
    """Up to which multiple of its weight each may have what it wants, so that all of it has room; inf: all has."""
    full_at = sorted(
        (want / weight, want, weight) for want, weight in zip(wanted, weights, strict=True) if weight > 0.0
    )
    left = sum(weights)
    for at, want, weight in full_at:
        if at * left > room:
            return room / left
        room -= want
        left -= weight
    return math.inf
