"""How much of an overload reaches the queues: fair shares of device time, made for `tenuto` (ADR 0031).

A queue that is offered five times what it can serve serves less than one that is offered just a little too much: batches
are built of requests that have waited too long, and whoever batches badly takes the slices from whoever does not. So more than
`HEADROOM` over what the slices can do is refused as it comes. Who is refused is a matter of *shares*: each model may have
lambda times its usual rate, with the one lambda at which all that is admitted takes just that much device time. Whoever asks for
less than that has all of it, and what it leaves goes to the others (weighted max-min fairness). So a model that floods
is refused its flood, and when all models grow alike all lose alike.

The usual rate is the one seen while the slices could carry everything; in an overload nobody's usual rate changes. A model that has
not been seen so long counts with what it asks for, and everyone with a part of an equal share at least.

What a request costs is what was measured: the device time of the batches sent, over their requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HEADROOM = 1.1  # times the device time there is: queues that are never empty keep the slices full
import os
ENTER=float(os.environ.get('ENTER','1.1'))
DEPTH_N=float(os.environ.get('DEPTHN','1'))
DEPTH_MS = 100.0  # of a share may come at once
MEMORY_MS = float(os.environ.get('MEM','500'))  # of what is asked for, and of what it costs
USUAL_MS = 5000.0  # memory of the usual rates
KNOWN_MS = 2500.0  # so long a model must have been seen while nobody was refused
CALM = 0.02  # of the requests may be lost where a rate counts as usual
FLOOR = 0.1  # of an equal share of the slices is everybody's
_BISECTIONS = 30


@dataclass(slots=True)
class Demand:
    """What a model asks for. Counted since the last `roll`: `asked` requests, `served` of them in `busy_ms` of device time."""

    asked: int = 0
    served: int = 0
    busy_ms: float = 0.0
    per_ms: float = 0.0
    served_sum: float = 0.0
    busy_sum_ms: float = 0.0
    usual_per_ms: float = 0.0
    known_ms: float = 0.0

    def roll(self, elapsed_ms: float) -> None:
        """Take over what was counted."""
        memory = min(1.0, elapsed_ms / MEMORY_MS)
        self.per_ms += memory * (self.asked / elapsed_ms - self.per_ms)
        self.served_sum += self.served - memory * self.served_sum
        self.busy_sum_ms += self.busy_ms - memory * self.busy_sum_ms
        self.asked = self.served = 0
        self.busy_ms = 0.0

    def learn(self, elapsed_ms: float) -> None:
        """Nobody loses much: this is how much it usually asks for."""
        self.known_ms += elapsed_ms
        memory = elapsed_ms / min(USUAL_MS, self.known_ms)
        self.usual_per_ms += memory * (self.per_ms - self.usual_per_ms)

    def cost_ms(self, alone_ms: float) -> float:
        """Of device time, a request."""
        return self.busy_sum_ms / self.served_sum if self.served_sum > 1e-3 else alone_ms


class Bucket:
    """Tokens that come at a model's share: each request that is admitted takes one."""

    __slots__ = ("_at_ms", "_per_ms", "_tokens", "depth")

    def __init__(self, now_ms: float) -> None:
        self._tokens = self.depth = 1.0
        self._per_ms = 0.0
        self._at_ms = now_ms

    def fill_at(self, per_ms: float, depth: float, now_ms: float) -> None:
        """From now on so many a ms, up to `depth`; a new one is full."""
        is_new = not self._per_ms
        self._refill(now_ms)
        self._per_ms, self.depth = per_ms, depth
        self._tokens = depth if is_new else min(self._tokens, depth)

    def take(self, count: int, now_ms: float) -> int:
        """How many of so many requests are admitted."""
        self._refill(now_ms)
        admitted = min(count, int(self._tokens))
        self._tokens -= admitted
        return admitted

    def _refill(self, now_ms: float) -> None:
        self._tokens = min(self.depth, self._tokens + self._per_ms * (now_ms - self._at_ms))
        self._at_ms = now_ms


def shares(
    demands: Sequence[Demand], costs_ms: Sequence[float], slices: int, hosting: Sequence[int], is_closed: bool=False
) -> list[float] | None:
    """How many requests a ms each model may have; None: there is room for all.

    `hosting`: on how many of the slices each model is.
    """
    budget = HEADROOM * slices
    wanted = [
        min(demand.per_ms, HEADROOM * own / cost_ms)
        for demand, cost_ms, own in zip(demands, costs_ms, hosting, strict=True)
    ]
    if sum(d.per_ms * cost_ms for d, cost_ms in zip(demands, costs_ms, strict=True)) <= (budget if is_closed else ENTER*slices):
        return None
    floor = FLOOR * slices / len(demands)
    usual = [
        max(demand.usual_per_ms if demand.known_ms >= KNOWN_MS else demand.per_ms, min(rate, floor / cost_ms))
        for demand, cost_ms, rate in zip(demands, costs_ms, wanted, strict=True)
    ]
    # What a model may have grows with lambda until it has all it asks for.
    full = sorted(
        (rate / own if own else 0.0, rate * cost_ms, own * cost_ms)
        for rate, own, cost_ms in zip(wanted, usual, costs_ms, strict=True)
    )
    weight = sum(work for _, _, work in full)
    left = budget
    level = math.inf
    for at, work, unit in full:
        if at * weight > left:
            level = left / weight
            break
        left -= work
        weight -= unit
    return [
        min(level * rate, HEADROOM * own / cost_ms)
        for rate, own, cost_ms in zip(usual, hosting, costs_ms, strict=True)
    ]
