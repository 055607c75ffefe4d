"""What a placement of single-model slices brings, queueing and neighbours counted.

Each GPU carries a *pattern*, a multiset of items; a cluster is how many GPUs of a class carry which. u[m] is how
busy the replicas of model m are (all equally, as the router shares by capacity). A replica is slowed down by
its neighbours in proportion to how busy those are:

    f = 1 + (slowdown beside all of them - 1) · Σ u[j] e[j] / Σ e[j],   e[j]: what j alone would add

u follows from the rates and the capacities b / (f l(b)), and f from u, so both are iterated. A replica counts only
if its batches keep the SLO:

    deferred    (1 + 1/N) f l(b)                    N replicas take turns (Symphony section 3.2, staggered)
    fixed       b / rate + (1 + u) f l(b)           the batch forms (one of 1 at once), waits for its replica, runs

Under `fixed` no batch is planned that MAX_WAIT would close before it is full, and nothing protects batches in
overload: the queue grows until the oldest request of a batch cannot finish alone, and all that then finish are
those that arrived f (l(b) - l(1)) later than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.placement.tenuto.task import Item, PlacementTask, forming_ms

Pattern = tuple[int, ...]
"""Places in the class's items, ascending."""

Cluster = tuple[Mapping[Pattern, int], ...]
"""By class of GPUs, how many carry which pattern."""

# Above this, chance alone makes queues that eat the SLO (thesis 7.1, intra-cluster queueing).
USABLE = 0.96
_ROUNDS = 6
_SETTLED = 0.005


@dataclass(frozen=True, slots=True)
class _Among:
    """An item in its pattern: what it carries undisturbed, and what its neighbours do to it.

    `excess` is its slowdown over 1 beside all of them when they never idle, `weights` by model whose part of it.
    `left_ms`: of the SLO, for waiting its turn and running.
    """

    item: Item
    alone_rps: float
    excess: float
    weights: tuple[tuple[int, float], ...]
    left_ms: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """By model: requests per second served in time, and how busy its replicas are (over 1: overloaded)."""

    served_rps: tuple[float, ...]
    busy: tuple[float, ...]
    worst_fraction: float
    mean_latency: float
    """Run time with neighbours over the SLO, averaged over the slices."""

    @property
    def total_rps(self) -> float:
        """Over all models."""
        return math.fsum(self.served_rps)


class GoodputModel:
    """Forecasts for one task; what patterns do to each other is remembered."""

    def __init__(self, task: PlacementTask) -> None:
        self._task = task
        self._rates = task.rates_rps
        self._has_fixed_batches = task.conditions.has_fixed_batches
        self._among: dict[tuple[int, Pattern], tuple[_Among, ...]] = {}

    def forecast(self, cluster: Cluster) -> Forecast:
        """Iterate how busy and how slow until both agree."""
        hosted = [
            (among, count)
            for k, patterns in enumerate(cluster)
            for pattern, count in patterns.items()
            for among in self._pattern(k, pattern)
        ]
        replicas = [0] * len(self._rates)
        for among, count in hosted:
            replicas[among.item.model] += count
        loads = [1.0] * len(self._rates)
        carried: list[float] = []
        for _ in range(_ROUNDS):
            carried = [0.0] * len(self._rates)
            for among, count in hosted:
                factor = _factor(among, loads)
                m = among.item.model
                if self._is_in_time(among, factor, replicas[m], loads[m]):
                    carried[m] += count * among.alone_rps / factor
            # Replicas that are always late never idle either; counting them as idle would make them punctual.
            news = [
                min(1.0, rate / rps) if rps else 1.0 for rate, rps in zip(self._rates, carried, strict=True)
            ]
            moved = max(map(abs, (a - b for a, b in zip(news, loads, strict=True))), default=0.0)
            loads = [(a + b) / 2 for a, b in zip(news, loads, strict=True)]
            if moved < _SETTLED:
                break
        return self._summary(hosted, carried, loads)

    def replicas(self, k: int, pattern: Pattern, loads: Sequence[float]) -> list[tuple[Item, float, float]]:
        """Each item of a pattern, how much slower it runs there, and what it carries if it never idles."""
        found = []
        for among in self._pattern(k, pattern):
            factor = _factor(among, loads)
            found.append((among.item, factor, among.alone_rps / factor))
        return found

    def in_time(self, k: int, pattern: Pattern) -> bool:
        """Whether every replica of the pattern keeps its SLO, the only one of its model, all never idle."""
        loads = [1.0] * len(self._rates)
        return all(
            self._is_in_time(among, _factor(among, loads), 1, 1.0) for among in self._pattern(k, pattern)
        )

    def _pattern(self, k: int, pattern: Pattern) -> tuple[_Among, ...]:
        found = self._among.get((k, pattern))
        if found is None:
            items = [self._task.items[k][place] for place in pattern]
            found = self._among[k, pattern] = tuple(
                self._placed(k, item, items[:place] + items[place + 1 :]) for place, item in enumerate(items)
            )
        return found

    def _placed(self, k: int, item: Item, others: Sequence[Item]) -> _Among:
        slowdown = self._task.interference[k].slowdown
        alone = slowdown(item.running, ())
        excess = slowdown(item.running, [other.running for other in others]) / alone - 1
        parts = [slowdown(item.running, (other.running,)) / alone - 1 for other in others]
        whole = sum(parts)
        weights = (
            (other.model, part / whole) for other, part in zip(others, parts, strict=True) if part and whole
        )
        conditions, model = self._task.conditions, self._task.models[item.model]
        left_ms = model.slo_ms - conditions.delay_ms(item.batch)
        if conditions.has_fixed_batches:
            left_ms -= forming_ms(model, item.batch, conditions)
        return _Among(item, 1000 * item.batch / item.exec_ms, excess, tuple(weights), left_ms)

    def _is_in_time(self, among: _Among, factor: float, replicas: int, load: float) -> bool:
        turns = 1 + load if self._has_fixed_batches else 1 + 1 / replicas
        return turns * factor * among.item.exec_ms <= among.left_ms

    def _summary(
        self, hosted: Sequence[tuple[_Among, int]], carried: Sequence[float], loads: Sequence[float]
    ) -> Forecast:
        kept = [1.0] * len(self._rates)
        latency, slices = 0.0, 0
        for among, count in hosted:
            item, factor = among.item, _factor(among, loads)
            latency += count * factor * item.exec_ms / self._task.models[item.model].slo_ms
            slices += count
            kept[item.model] = min(kept[item.model], self._kept_in_overload(item, factor))
        served, busy = [], []
        for rate, rps, keep in zip(self._rates, carried, kept, strict=True):
            usable = USABLE * rps
            busy.append(rate / rps if rps else math.inf)
            served.append(rate if rate <= usable else usable * keep)
        fractions = [rps / rate for rps, rate in zip(served, self._rates, strict=True)]
        return Forecast(
            tuple(served), tuple(busy), min(fractions, default=1.0), latency / slices if slices else 0.0
        )

    def _kept_in_overload(self, item: Item, factor: float) -> float:
        """Of what an overloaded replica runs, the part that is in time."""
        if not self._has_fixed_batches:
            return 1.0
        spread_ms = 1000 * item.batch / self._rates[item.model]
        return max(0.0, 1 - factor * (item.exec_ms - item.single_ms) / spread_ms)


def _factor(among: _Among, loads: Sequence[float]) -> float:
    busy = 0.0
    for m, weight in among.weights:
        busy += weight * loads[m]
    return 1 + busy * among.excess
