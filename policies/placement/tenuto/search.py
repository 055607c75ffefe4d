"""Local search over what each GPU carries: add a slice, take one away, exchange one for another.

A step changes one GPU of those that carry a pattern, or all of them, so its cost does not grow with the cluster.
The first step that helps is taken; it ends where none does, or after so many forecasts: never by the clock, so
that the same task has the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policies.placement.tenuto.goodput import Cluster, Forecast, GoodputModel, Pattern
from policies.placement.tenuto.task import PlacementTask

# Requests per second that a step must bring, in parts of the total rate: less is noise of the iteration.
_STEP = 1e-4


class Search:
    """From a cluster to a better one. `fairness`: what the worst served fraction weighs, of the total rate."""

    def __init__(self, task: PlacementTask, model: GoodputModel, fairness: float, floor: float) -> None:
        self._task = task
        self._model = model
        self._ideal_rps = sum(task.rates_rps)
        self._fairness = fairness
        self._floor = floor
        self._seen: dict[object, float] = {}

    def improve(self, start: Cluster, forecasts_max: int) -> Cluster:
        """The best cluster that steps from `start` lead to."""
        best, score = start, self.score(start)
        limit = len(self._seen) + forecasts_max
        is_moving = True
        while is_moving and len(self._seen) < limit:
            is_moving = False
            for cluster in self._steps(best):
                found = self.score(cluster)
                if found > score + _STEP * self._ideal_rps:
                    best, score, is_moving = cluster, found, True
                    break
                if len(self._seen) >= limit:
                    break
        return best

    def score(self, cluster: Cluster) -> float:
        """Goodput, what fairness asks for, and a little for short batches and few slices."""
        key = tuple(frozenset(patterns.items()) for patterns in cluster)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._worth(self._model.forecast(cluster), cluster)
        return found

    def _worth(self, forecast: Forecast, cluster: Cluster) -> float:
        lacking = sum(
            max(0.0, self._floor * rate - served)
            for rate, served in zip(self._task.rates_rps, forecast.served_rps, strict=True)
        )
        # Equal goodput: room to spare first, then short batches (thesis 6.2.1, observation 3), then few slices.
        tight = sum(max(0.0, min(1.0, busy) - 0.7) for busy in forecast.busy) / len(forecast.busy)
        slices = sum(len(p) * count for patterns in cluster for p, count in patterns.items())
        spent = 0.01 * tight + 0.002 * forecast.mean_latency + 1e-5 * slices
        return (
            forecast.total_rps
            - 2 * lacking
            + self._ideal_rps * (self._fairness * forecast.worst_fraction - spent)
        )

    def _steps(self, cluster: Cluster) -> Iterator[Cluster]:
        for k, patterns in enumerate(cluster):
            for pattern, count in sorted(patterns.items()):
                for other in self._neighbours(k, pattern):
                    for moved in (count, 1) if count > 1 else (1,):
                        changed = _moved(patterns, pattern, other, moved)
                        yield (*cluster[:k], changed, *cluster[k + 1 :])

    def _neighbours(self, k: int, pattern: Pattern) -> Iterator[Pattern]:
        items = range(len(self._task.items[k]))
        for place in items:
            yield from self._if_fits(k, (*pattern, place))
        for gone in sorted(set(pattern)):
            rest = list(pattern)
            rest.remove(gone)
            yield tuple(rest)
            for place in items:
                if place != gone:
                    yield from self._if_fits(k, (*rest, place))

    def _if_fits(self, k: int, pattern: Pattern) -> Iterator[Pattern]:
        if len(pattern) <= self._task.slices_max:
            needed = sum(self._task.items[k][place].memory_bytes for place in pattern)
            if needed <= self._task.classes[k].slot.memory_bytes:
                yield tuple(sorted(pattern))


def empty_cluster(task: PlacementTask) -> Cluster:
    """Nothing on any GPU."""
    return tuple({(): len(gpus.gpus)} for gpus in task.classes)


def _moved(patterns: Mapping[Pattern, int], old: Pattern, new: Pattern, count: int) -> dict[Pattern, int]:
    changed = dict(patterns)
    changed[old] -= count
    if not changed[old]:
        del changed[old]
    changed[new] = changed.get(new, 0) + count
    return changed
