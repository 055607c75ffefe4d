"""A free slice goes to the most urgent batch that waits for it, plans and reserves included.

The ranks that the central disciplines keep in heaps are corrected late. Here every candidate is looked at afresh
whenever a slice is given away.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from policies.batching.disciplines.deferred import Deferred
from policies.batching.disciplines.eager import Eager
from policies.batching.disciplines.tenuto import Tenuto
from policies.batching.disciplines.timeout import Timeout
from policies.batching.matchmaking.central import Central
from policies.batching.matchmaking.model_state import Candidate
from policies.batching.matchmaking.pools import Slice
from tests.references.playing import Gpu, Model, Request, Setting, play_ours, random_setting

ROUNDING_MS = 1e-9


def rank_at_ms(candidate: Candidate, now_ms: float, *, is_window: bool) -> float | None:
    """The latest moment of what it would send now; None: nothing can run in time.

    The window drop takes the heads that cannot run in a batch of the longest tail that can, up to the target.
    """
    runs = list(candidate.model.queue.runs)[candidate.skip_runs :]
    slack_ms = [run.deadline_at_ms - now_ms for run in runs for _ in range(run.count)]
    target = candidate.window_target(now_ms) if is_window else 1
    tail = 0
    while tail < min(target, len(slack_ms)) and candidate.cost[tail + 1] <= slack_ms[-tail - 1]:
        tail += 1
    if tail == 0:
        return None
    left = [slack for slack in slack_ms if slack >= candidate.cost[tail]]
    size = min(len(left), bisect_right(candidate.cost, left[0]) - 1)
    return now_ms + left[0] - candidate.table[size]


def pressed_at_ms(candidate: Candidate) -> float:
    """Until when it may hold back."""
    count = min(candidate.model.queue.count - candidate.skip_count, candidate.size_max)
    return candidate.hold_deadline_at_ms - candidate.hold[count]


class Watched(Central):
    """Checks every batch before it goes. `seen`: how many had somebody to be compared with."""

    seen: Counter[str]

    def _dispatch(
        self,
        candidate: Candidate,
        slice_: Slice,
        size: int,
        now_ms: float,
        out: list[Any],
    ) -> None:
        others = [
            one
            for state in self._models.values()
            for one in state.candidates
            if one.model is not candidate.model and slice_.pool in one.pools
        ]
        own_ms = rank_at_ms(candidate, now_ms, is_window=self._is_window_drop)
        assert own_ms is not None
        for other in others:
            other_ms = rank_at_ms(other, now_ms, is_window=self._is_window_drop) if other.is_waiting else None
            if other_ms is not None:
                self.seen["waiting"] += 1
                assert other_ms >= own_ms - ROUNDING_MS, f"{other.model.model.model_id} is more urgent"
        is_early = (
            candidate.spares_reserve and pressed_at_ms(candidate) > now_ms and size < candidate.size_max
        )
        if is_early and slice_.pool is not None and slice_.pool.reserve:
            own_ms = pressed_at_ms(candidate)
            for other in others:
                if other.is_early:
                    self.seen["early"] += 1
                    other_ms = pressed_at_ms(other)
                    assert other_ms >= own_ms - ROUNDING_MS, f"{other.model.model.model_id} is more pressed"
        super()._dispatch(candidate, slice_, size, now_ms, out)


class WatchedEager(Watched, Eager):
    pass


class WatchedDeferred(Watched, Deferred):
    pass


class WatchedTimeout(Watched, Timeout):
    pass


class WatchedTenuto(Watched, Tenuto):
    pass


MAKERS: dict[str, Callable[[], Watched]] = {
    "eager": WatchedEager,
    "deferred": WatchedDeferred,
    "deferred simple": lambda: WatchedDeferred(is_window_drop=False),
    "timeout": lambda: WatchedTimeout(lambda slo_ms: slo_ms / 4),
    "tenuto": WatchedTenuto,
}


@pytest.mark.parametrize("name", MAKERS)
def test_nobody_more_urgent_waits_for_the_slice(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        discipline = MAKERS[name]()
        discipline.seen = seen
        is_crossed = seed % 2 == 1
        play_ours(discipline, random_setting(seed, requests=600, is_crossed=is_crossed))
    assert seen["waiting"] > 1000


@pytest.mark.parametrize("rate_rps", [7500, 8000, 8500])
def test_nobody_more_pressed_waits_for_a_slice_beyond_the_reserve(rate_rps: int) -> None:
    """Twenty equal models on 32 slices, near the peak: there `tenuto` keeps a reserve."""
    rng = random.Random(rate_rps)
    run_ms = {f"m{number}": [2.05 * size + 5.378 for size in range(1, 10)] for number in range(20)}
    models = tuple(Model(name, 20.0) for name in run_ms)
    at_ms = 0.0
    requests = []
    for number in range(6000):
        at_ms += rng.expovariate(rate_rps / 1000)
        requests.append(Request(number, rng.choice(models).name, at_ms, at_ms + 20.0))
    discipline = WatchedTenuto()
    discipline.seen = Counter()
    gpus = tuple(Gpu(f"g{order}", run_ms) for order in range(32))
    play_ours(discipline, Setting(models, gpus, tuple(requests)))
    assert discipline.seen["early"] > 100
