"""How long each of several models is held that share slices: pure planning, made for `tenuto` (ADR 0030).

Of one model with rate r and l(b) = alpha·b + beta a batch opens every T + 1/r if its first request is held for T. So
holding costs slack and saves GPU time: the model keeps alpha·r + beta/(T + 1/r) slices busy. `hold_max_ms` is the T
that deferral has, where T and the run together just fill the SLO.

Of all choices of T that keep equally many slices busy, the one that wastes the least slack has the same marginal
saving beta/(T + 1/r)² everywhere, so T = sqrt(beta·price) - 1/r with one price for all: what batches well or is asked
for often is held, the rest goes at once. The price follows from how many slices may be busy.

Only whole slices can be released. So while nobody loses by waiting, all may be busy that full deferral keeps busy at least
in part: what it leaves of the last of them is there to answer sooner. The slices beyond those are kept for batches that can wait no longer.

1/r is the gap of requests that come one by one. Under bursts batches fill by themselves, and cost a part of
beta/(T + 1/r): `opening_ratio`, which the discipline counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from policies.batching.base import BatchModel
from policies.batching.batch_moments import Table
from policies.batching.drop import target_size

# Batches that find all slices busy are held longer than planned, the longer the more models wait for a slice. So
# planning for more than there is fills them: for so much more per model and slice, but …
OVERBOOKED = 0.15
OVERBOOKED_MAX = 0.4  # … no more than this
CROWDED = 0.8  # of the slices busy under deferral: there is no idle time worth going early for
ALL_LOSE = 0.005  # of the requests lose by waiting (half of what may go bad): everything idle is used
CALM_LOST = (
    0.001  # of the requests lose by waiting: then slices that could be released are not kept idle any more
)
RESERVE = 0.35  # of the square root of the slices: so far do the needs of many swing about their mean
RELIEF = 0.01  # of the slices: where there is no room for all, a model that stops holding may not take more
_NEARLY = 0.95  # of the longest hold is full deferral, and its drop rule applies
_UNFAIR = 1.5  # times the mean is more than chance
_ROUNDING = 1e-12  # of a run time
_NEGLIGIBLE = 1e-6  # of a chance
_NOTHING_MS = 1e-6  # nothing takes less than a nanosecond, and an intercept below it is rounding


class Prospect(Struct, frozen=True):
    """One model as planning sees it. `target`: the batch size that full deferral protects."""

    per_ms: float
    alpha_ms: float
    beta_ms: float
    hold_max_ms: float
    target: int

    def work_deferred(self, opening_ratio: float = 1.0) -> float:
        """The slices kept busy by full deferral."""
        return self.alpha_ms * self.per_ms + opening_ratio * self.opening(self.hold_max_ms)

    def opening(self, hold_ms: float) -> float:
        """The slices kept busy by opening batches alone."""
        return self.beta_ms / (hold_ms + 1.0 / self.per_ms)

    def opening_ms_per_request(self, hold_ms: float) -> float:
        """What opening batches costs each of 1 + r·T requests."""
        return self.beta_ms / (1.0 + self.per_ms * hold_ms)

    def hold_ms(self, price: float) -> float:
        """Hold until a ms more would save less than 1 / price."""
        return max(0.0, min(self.hold_max_ms, math.sqrt(self.beta_ms * price) - 1.0 / self.per_ms))


class Hold(NamedTuple):
    """A model's plan: how long the first request of a batch waits, and the batch size that drops protect.

    `is_full`: until frontrun, which is about as long. `spares_reserve`: what it would send early takes no slice of the
    reserve.
    """

    hold_ms: float
    target: int
    spares_reserve: bool
    is_full: bool = False


def prospect(model: BatchModel, run_times: Table, cost: Table, rate_rps: float) -> Prospect:
    """The model at that rate (over 0), its tables linear between batches of 1 and the largest within the SLO."""
    per_ms = rate_rps / 1000.0
    size_max = max(1, bisect_right(cost, model.slo_ms) - 1)
    alpha_ms = (run_times[size_max] - run_times[1]) / max(1, size_max - 1)
    beta_ms = run_times[1] - alpha_ms
    if beta_ms < max(_NOTHING_MS, _ROUNDING * run_times[1]):
        beta_ms = 0.0
        alpha_ms = max(alpha_ms, _NOTHING_MS)
    delay = model.delay
    each_ms = alpha_ms + delay.data_ms_per_item
    # A batch of 1 + r·T leaves at its frontrun: T + l(2 + r·T) + its delay = SLO.
    slack_ms = model.slo_ms - delay.control_ms - beta_ms - 2 * each_ms
    target = target_size(run_times, rate_rps, model.slo_ms - delay.control_ms, delay.data_ms_per_item)
    return Prospect(per_ms, alpha_ms, beta_ms, max(0.0, slack_ms / (1.0 + each_ms * per_ms)), target)


class Demand:
    """What models ask of the slices that they share, at the rates as they are: reckoned once for all that is planned with it.

    `opening_ratio`: what opening their batches really costs, over what their rates let expect.
    """

    def __init__(self, prospects: Sequence[Prospect], slices: float, opening_ratio: float = 1.0) -> None:
        self.prospects = prospects
        self.slices = slices
        self.opening_ratio = opening_ratio
        self.work = [one.work_deferred(opening_ratio) for one in prospects]
        self.deferred = sum(self.work)
        self.foreseen = _foreseen_loss(prospects, self.work, self.deferred, slices)
        """The part of the requests (0 to 1) that full deferral would lose because no slice is idle when their batch has to go, as far as going early helps."""
        self._fixed = sum(one.alpha_ms * one.per_ms for one in prospects)
        self._openings = Openings(prospects)

    def price(self, busy: float, opening_ratio: float = 1.0) -> float:
        """At which the models keep so many slices busy; see `Openings`."""
        return self._openings.price((busy - self._fixed) / opening_ratio)


class Openings:
    """How many slices opening batches keeps busy, for every price of holding.

    As the price rises a model is not held at first, then for sqrt(beta·price) - 1/r, and in the end for as long as may be. So between two prices at
    which some model passes from one to the next, what all keep busy is a constant and a part that falls with the root of the price.
    """

    def __init__(self, prospects: Sequence[Prospect]) -> None:
        # (price, what the constant changes by there, what the falling part's factor changes by)
        turns: list[tuple[float, float, float]] = []
        flat = root = 0.0
        for one in prospects:
            if one.beta_ms:  # else there is nothing to save
                gap_ms, longest_ms = 1.0 / one.per_ms, one.hold_max_ms + 1.0 / one.per_ms
                flat += one.beta_ms / gap_ms
                root_of_beta = math.sqrt(one.beta_ms)
                turns.append((gap_ms * gap_ms / one.beta_ms, -one.beta_ms / gap_ms, root_of_beta))
                turns.append((longest_ms * longest_ms / one.beta_ms, one.beta_ms / longest_ms, -root_of_beta))
        turns.sort()
        self._unheld = flat
        self._prices = [price for price, _, _ in turns]
        self._parts: list[tuple[float, float]] = []
        self._saved: list[float] = []
        for price, flat_change, root_change in turns:
            flat += flat_change
            root += root_change
            self._parts.append((flat, root))
            self._saved.append(self._unheld - flat - root / math.sqrt(price))

    def price(self, allowed: float) -> float:
        """The lowest at which no more than `allowed` slices are busy, or the highest of use.

        Models without an intercept have nothing to save: where all are like that, no price holds them.
        """
        if self._unheld <= max(0.0, allowed):
            return 0.0
        after = bisect_left(self._saved, self._unheld - allowed)
        if after == len(self._prices):
            return self._prices[-1]
        if not after:
            return self._prices[0]
        flat, root = self._parts[after - 1]
        if allowed <= flat:
            return self._prices[after]
        root_of_price = root / (allowed - flat)
        return min(max(root_of_price * root_of_price, self._prices[after - 1]), self._prices[after])


def plan_holds(
    demand: Demand, lost_shares: Sequence[float], mean: float, *, is_short: bool = False
) -> list[Hold]:
    """The holds of models that share slices.

    `lost_shares`: of each model's requests, the part that lost by waiting for a slice; `mean`: the same of all together.
    `is_short`: requests are refused, as there is no room for all. What can be foreseen (`Demand.foreseen`) counts as if it had been lost, but overbooks nothing.
    """
    if not demand.prospects:
        return []
    slices, deferred = demand.slices, demand.deferred
    frugal = whole_slices(deferred, slices)
    models = deferred**2 / sum(own**2 for own in demand.work)  # equally large ones, as it were
    lavish = max(frugal, slices + min(OVERBOOKED * models, OVERBOOKED_MAX * slices))
    allowed = max(
        frugal + min(1.0, mean / ALL_LOSE) * (lavish - frugal),
        frugal + min(1.0, demand.foreseen / ALL_LOSE) * (slices - frugal),
    )
    leaves_idle = frugal < slices
    price = demand.price(allowed, demand.opening_ratio)
    price_of_whole = demand.price(frugal, demand.opening_ratio) if leaves_idle else price
    price_of_need = demand.price(slices)
    crowd = min(1.0, deferred / (CROWDED * slices))
    holds = []
    for one, own, lost_share in zip(demand.prospects, demand.work, lost_shares, strict=True):
        # What follows of the same model joins its batches sooner or later: going early makes room for others only.
        # With less than a slice's worth of work it would let its only slice idle.
        selfish = crowd * (own / deferred) ** 2 * (1.0 - 1.0 / own**2) if own > 1.0 else 0.0
        own_ms = one.hold_ms(price_of_whole) if leaves_idle else one.hold_max_ms
        hold_ms = (1.0 - selfish) * one.hold_ms(price) + selfish * own_ms
        # Who loses more than the others stops holding and giving up heads: it lacks slack more than they do.
        relief = min(1.0, max(0.0, (lost_share - _UNFAIR * mean) / ALL_LOSE))
        extra = demand.opening_ratio * (one.opening(0.0) - one.opening(hold_ms))
        if is_short and relief * extra > RELIEF * slices:
            relief = RELIEF * slices / extra
        held_share = 1.0 - relief
        hold_ms *= held_share
        needed_ms = one.hold_ms(price_of_need)
        spares_reserve = held_share == 1.0 and (
            needed_ms > 0.0 or (leaves_idle and max(mean, demand.foreseen) < CALM_LOST)
        )
        if hold_ms >= _NEARLY * one.hold_max_ms:
            target = max(1, int(1 + (one.target - 1) * held_share))
            holds.append(Hold(one.hold_max_ms, target, spares_reserve, is_full=True))
        else:
            gathered = one.per_ms * max(hold_ms, needed_ms)
            holds.append(Hold(hold_ms, max(1, int(1 + gathered * held_share)), spares_reserve))
    return holds


def _foreseen_loss(
    prospects: Sequence[Prospect], work: Sequence[float], deferred: float, slices: float
) -> float:
    """See `Demand.foreseen`; `work`: the slices that deferral keeps busy, of each model.

    A model that keeps 2.3 slices busy has two batches under way all the time and a third one for 0.3 of it, at moments that have nothing to do
    with other models'. So what is taken is a sum of coins that each model throws, here as many equal ones as have the same mean and variance, without
    the coin of whoever asks: a model's own batches come one after another. Going early costs slices: it helps in the measure in which
    deferral leaves them idle.
    """
    whole = mean = variance = 0.0
    for own in work:
        part = own % 1.0
        whole += own - part
        mean += part
        variance += part * (1.0 - part)
    # Nothing is left to chance; or it is too much, which will be measured.
    if mean <= variance or slices <= deferred:
        return 0.0
    bias = 1.0 - variance / mean
    all_taken = _at_least(math.ceil(slices - whole - _ROUNDING), mean / bias - 1.0, bias)
    if not all_taken:
        return 0.0
    lost = asked = 0.0
    for one in prospects:
        size = 1.0 + one.per_ms * one.hold_max_ms
        # All slices are busy, so one becomes free each run time / slices; what can wait no longer has about alpha left.
        freed_ms = (one.alpha_ms * size + one.beta_ms) / slices
        heads = min(size, 1.0 + one.per_ms * freed_ms)
        lost += one.per_ms * math.exp(-one.alpha_ms / freed_ms) * heads / size
        asked += one.per_ms
    return (1.0 - deferred / slices) * all_taken * lost / asked


def _at_least(count: int, coins: float, bias: float) -> float:
    """The chance that at least so many of `coins` (a count, whole or not) show what each shows with the chance `bias`.

    1 where it is what to expect: nobody asks how near.
    """
    if count <= coins * bias:
        return 1.0
    if count > coins + _ROUNDING:
        return 0.0
    ways = math.lgamma(coins + 1.0) - math.lgamma(count + 1.0) - math.lgamma(max(0.0, coins - count) + 1.0)
    chance = math.exp(ways + count * math.log(bias) + max(0.0, coins - count) * math.log1p(-bias))
    found = 0.0
    while chance > _NEGLIGIBLE * found:
        found += chance
        chance *= max(0.0, coins - count) / (count + 1.0) * bias / (1.0 - bias)
        count += 1
    return found


def whole_slices(needed: float, slices: float) -> float:
    """So many cannot be released where `needed` of them are busy, counted in slices at a time."""
    return min(slices, math.ceil(needed - _ROUNDING))


def plan_reserves(demand: Demand, pools: Sequence[float], mean: float = 0.0) -> list[int]:
    """How many slices of each of these pools, the demand's in all, are kept for batches that can wait no longer; counted in batches at a time.

    While nobody loses by waiting, those that full deferral leaves idle: they could be released.

    Else they pay where full deferral is what carries the load: who goes early there takes the slice from somebody who has
    waited for a large batch, and both are small then. Never more than deferral saves. `mean` as for `plan_holds`.
    """
    if not demand.deferred:
        return [0] * len(pools)
    slices = demand.slices
    price_of_need = demand.price(slices, demand.opening_ratio)
    saved = needed = 0.0
    for one, own in zip(demand.prospects, demand.work, strict=True):
        saved += one.opening(0.0) - one.opening(one.hold_max_ms)
        if one.hold_max_ms > 0.0:
            needed += own * one.hold_ms(price_of_need) / one.hold_max_ms
    share = RESERVE * (needed / demand.deferred) ** 2
    suffered = max(mean, demand.foreseen)
    idle = (1.0 - min(1.0, suffered / CALM_LOST)) * (slices - whole_slices(demand.deferred, slices)) / slices
    return [int(max(idle * pool, min(saved * pool / slices, share * math.sqrt(pool)))) for pool in pools]
