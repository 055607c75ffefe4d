"""Partition by search: greedy, then moves and swaps between two sub-clusters, then the same again from nearby.

Between sub-clusters a and b the best exchange of one model of each (or of one for none: a move) is the one whose
difference in (load, memory), both as fractions of the average, lies nearest to half the difference of a
and b. All exchanges of a pair are looked at in one array operation, so 10⁴ of them take some 0.1 ms. Each
exchange makes the sum of squared deviations smaller, so it ends; from there a few exchanges are forced upon the
worst sub-cluster and the descent starts again, and the best partition met is kept.

Everything is bounded by a count of pairs looked at, and what is forced comes from a fixed sequence: the same
problem has the same answer on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.subclusters.base import Partition, Problem, fits

# What the search may look at, in exchanges: some 0.8 s on one slow core. A pair costs its array operations
# besides; with bounds there are four more sums to make of each exchange.
_WORK_MAX = 20_000_000
_WORK_PER_PAIR = 2_000
_BOUNDED = 3
_IN_VAIN_MAX = 400  # times in a row: a few models have no more to be tried than that
_KICKED = 3  # exchanges forced at a time: fewer fall back to where they came from, more forget what was good
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 fall everywhere, evenly and without a pattern
_PENALTY = 1e6  # a bound comes before any balance
_TINY = 1e-15  # of squared fractions: less is rounding, and might go in a circle

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


def search_partition(problem: Problem) -> Partition:
    """The best partition within the bounds that the search meets; what finds no place is left out."""
    state = _State(problem)
    state.start()
    best: tuple[tuple[float, float], list[int]] | None = None
    drawn = in_vain = 0
    while True:
        state.descend()
        score = state.score()
        in_vain += 1
        if best is None or score < best[0]:
            best, in_vain = (score, state.place.tolist()), 0
        elif score > best[0]:
            state.restore(best[1])
        is_hopeless = in_vain > _IN_VAIN_MAX or problem.subclusters == 1 or score <= (0.0, _TINY)
        if is_hopeless or state.work_left <= 0:
            break
        drawn = state.kick(drawn)
    state.restore(best[1])
    place = _within_bounds(problem, [None if j < 0 else j for j in best[1]])
    return problem.judge(place, "search")


class _State:
    """An assignment with its totals. `size[i]` is (load, static memory) of model i over the averages."""

    def __init__(self, problem: Problem) -> None:
        models, count = problem.models, problem.subclusters
        self._problem = problem
        scale = np.array([problem.mean_load or 1.0, problem.mean_static_bytes or 1.0])
        self._size: _Floats = np.array([(m.load, m.static_bytes) for m in models]).reshape(-1, 2) / scale
        self._running: _Floats = np.array([m.dynamic_bytes for m in models]) / scale[1]
        with np.errstate(over="ignore"):  # so many times a load near 0 that it is no bound
            self._bound: _Floats = np.array([problem.bounds.load, problem.bounds.memory_bytes]) / scale
        self._is_bounded = bool(np.isfinite(self._bound).any())
        self._move_cost: _Floats = np.array([m.move_cost for m in models])
        self._home: _Ints = np.array([-1 if j is None else j for j in problem.home], dtype=np.int64)
        self._disruption_left = problem.bounds.disruption
        self._mean = self._size.sum(axis=0) / count
        self.work_left = _WORK_MAX
        self.place: _Ints = np.full(len(models), -1, dtype=np.int64)
        self._total: _Floats = np.zeros((count, 2))
        self._version = [0] * count
        self._settled: dict[tuple[int, int], tuple[int, int]] = {}

    def start(self) -> None:
        """Everyone stays at home; the homeless, largest first, go where they disturb least, if we may."""
        problem = self._problem
        for i, j in enumerate(problem.home):
            if j is not None:
                self._put(i, j)
        homeless = [i for i, j in enumerate(problem.home) if j is None]
        homeless.sort(key=lambda i: (-float(self._size[i].max()), i))
        for i in homeless:
            if not fits(problem.models[i].move_cost, self._disruption_left):
                continue
            after = self._total + self._size[i]
            over = np.maximum(after - self._bound, 0.0).sum(axis=1)
            worse = ((after - self._mean) ** 2 - (self._total - self._mean) ** 2).sum(axis=1)
            self._put(i, int(np.argmin(_PENALTY * over + worse)))
            self._disruption_left -= problem.models[i].move_cost

    def restore(self, place: Sequence[int]) -> None:
        """Go back to an assignment met before."""
        for i, j in enumerate(place):
            if j != int(self.place[i]):
                self._disruption_left += self._cost(i, int(self.place[i])) - self._cost(i, j)
                self._put(i, j)

    def descend(self) -> None:
        """Exchange between all pairs until none of them gains any more."""
        count = len(self._version)
        is_moving = True
        while is_moving and self.work_left > 0:
            is_moving = False
            for a in range(count):
                for b in range(a + 1, count):
                    if self._settled.get((a, b)) == (self._version[a], self._version[b]):
                        continue
                    while self.work_left > 0 and self._exchange(a, b):
                        is_moving = True
                    self._settled[a, b] = (self._version[a], self._version[b])

    def score(self) -> tuple[float, float]:
        """How much the bounds are exceeded, then the objective; both to be small."""
        over = sum(self._excess(j) for j in range(len(self._version)))
        return round(over, 9), float(np.abs(self._total - self._mean).max(axis=0).sum())

    def kick(self, drawn: int) -> int:
        """Force some exchanges upon the sub-cluster that is worst off; says how far the sequence is used up."""
        worst = int(np.argmax(np.abs(self._total - self._mean).sum(axis=1)))
        for _ in range(_KICKED):
            other, theirs, ours = (self._draw(drawn + k) for k in range(3))
            drawn += 3
            self.work_left -= _WORK_PER_PAIR
            b = int(other * (len(self._version) - 1))
            b += b >= worst
            mine, others = np.flatnonzero(self.place == worst), np.flatnonzero(self.place == b)
            if not mine.size or not others.size:
                continue
            i, k = int(mine[int(ours * mine.size)]), int(others[int(theirs * others.size)])
            extra = self._cost(i, b) + self._cost(k, worst) - self._cost(i, worst) - self._cost(k, b)
            if fits(extra, self._disruption_left):
                self._disruption_left -= extra
                self._put(i, b)
                self._put(k, worst)
        return drawn

    @staticmethod
    def _draw(step: int) -> float:
        return (step + 1) * _GOLDEN % 1.0

    def _cost(self, i: int, subcluster: int) -> float:
        return self._problem.cost(i, subcluster) if subcluster >= 0 else 0.0

    def _put(self, i: int, subcluster: int) -> None:
        old = int(self.place[i])
        if old >= 0:
            self._total[old] -= self._size[i]
            self._version[old] += 1
        self.place[i] = subcluster
        if subcluster >= 0:
            self._total[subcluster] += self._size[i]
            self._version[subcluster] += 1

    def _exchange(self, a: int, b: int) -> bool:
        """Make the best exchange between two sub-clusters, if any is better than none.

        Row and column 0 stand for nobody, so a move is an exchange too, and (0, 0) is to leave it.
        """
        ours, theirs = np.flatnonzero(self.place == a), np.flatnonzero(self.place == b)
        exchanges = (ours.size + 1) * (theirs.size + 1)
        self.work_left -= (_WORK_PER_PAIR + exchanges) * (_BOUNDED if self._is_bounded else 1)
        give = np.concatenate(([[0.0, 0.0]], self._size[ours]))
        take = np.concatenate(([[0.0, 0.0]], self._size[theirs]))
        wanted = (self._total[a] - self._total[b]) / 2
        load = give[:, 0, None] - take[None, :, 0]
        memory = give[:, 1, None] - take[None, :, 1]
        distance = (load - wanted[0]) ** 2 + (memory - wanted[1]) ** 2
        if self._is_bounded:
            distance += _PENALTY * self._excess_after(a, b, load, memory, ours, theirs)
        if math.isfinite(self._disruption_left):
            extra = self._extra_cost(ours, a, b)[:, None] + self._extra_cost(theirs, b, a)[None, :]
            distance[extra > self._disruption_left] = math.inf
            distance[0, 0] = min(distance[0, 0], 1e300)
        row, column = divmod(int(np.argmin(distance)), distance.shape[1])
        if not distance[row, column] < distance[0, 0] - _TINY:
            return False
        if row:
            self._change(int(ours[row - 1]), b)
        if column:
            self._change(int(theirs[column - 1]), a)
        return True

    def _change(self, i: int, subcluster: int) -> None:
        self._disruption_left += self._cost(i, int(self.place[i])) - self._cost(i, subcluster)
        self._put(i, subcluster)

    def _extra_cost(self, models: _Ints, here: int, there: int) -> _Floats:
        """What it costs to move each of them, nobody first; negative for one that goes back home."""
        home = self._home[models]
        cost = 2 * self._move_cost[models] * ((home == here) * 1.0 - (home == there) * 1.0)
        return np.concatenate(([0.0], cost))

    def _excess_after(
        self, a: int, b: int, load: _Floats, memory: _Floats, ours: _Ints, theirs: _Ints
    ) -> _Floats:
        """By how much a and b together would be over their bounds after each exchange."""
        left_a, left_b = _max_without_each(self._running[ours]), _max_without_each(self._running[theirs])
        come_a = np.concatenate(([0.0], self._running[theirs]))
        come_b = np.concatenate(([0.0], self._running[ours]))
        running_a = np.maximum(left_a[:, None], come_a[None, :])
        running_b = np.maximum(come_b[:, None], left_b[None, :])
        (load_a, memory_a), (load_b, memory_b) = self._total[a], self._total[b]
        excess: _Floats = np.maximum(load_a - load - self._bound[0], 0.0)
        excess += np.maximum(load_b + load - self._bound[0], 0.0)
        excess += np.maximum(memory_a - memory + running_a - self._bound[1], 0.0)
        excess += np.maximum(memory_b + memory + running_b - self._bound[1], 0.0)
        return excess

    def _excess(self, j: int) -> float:
        load, memory = self._total[j]
        running = self._running[self.place == j].max(initial=0.0)
        over = max(0.0, load - self._bound[0]) + max(0.0, memory + running - self._bound[1])
        return float(over)


def _max_without_each(values: _Floats) -> _Floats:
    """The largest of all, then the largest of all but the first, and so on."""
    if not values.size:
        return np.zeros(1)
    most = values.max()
    second = np.partition(values, -2)[-2] if values.size > 1 else 0.0
    without = np.where(values == most, second, most)
    return np.concatenate(([most], without))


def _within_bounds(problem: Problem, place: list[int | None]) -> list[int | None]:
    """Take out what is over a bound, and put it where it fits if there is such a sub-cluster."""
    members: list[list[int]] = [[] for _ in range(problem.subclusters)]
    for i, j in enumerate(place):
        if j is not None:
            members[j].append(i)
    gone: list[int] = []
    for inside in members:
        while any(over := problem.excess(inside)):
            gone.append(_to_take_out(problem, inside, over))
            inside.remove(gone[-1])
    gone.sort(key=lambda i: _largeness(problem, i), reverse=True)
    for i in gone:
        place[i] = None
        for j in _home_first(problem, i):
            if not any(problem.excess([*members[j], i])) and problem.affords(
                [*place[:i], j, *place[i + 1 :]]
            ):
                members[j].append(i)
                place[i] = j
                break
    return place


def _to_take_out(problem: Problem, members: list[int], over: tuple[float, float]) -> int:
    """The smallest that alone is enough, else the largest: so few are taken out, and little."""
    models = problem.models
    enough = [i for i in members if models[i].load >= over[0] and models[i].static_bytes >= over[1]]
    if enough:
        return min(enough, key=lambda i: _largeness(problem, i))
    return max(members, key=lambda i: _largeness(problem, i))


def _largeness(problem: Problem, i: int) -> float:
    model = problem.models[i]
    return model.load / (problem.mean_load or 1.0) + model.static_bytes / (problem.mean_static_bytes or 1.0)


def _home_first(problem: Problem, i: int) -> list[int]:
    return sorted(range(problem.subclusters), key=lambda j: j != problem.home[i])
