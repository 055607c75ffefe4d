"""What nobody could beat, against trying everything on a few requests, and against what every discipline serves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.disciplines import CONTENDERS, OTHERS, made
from benchmarks.foreseen import device_time
from benchmarks.foreseen.asked import Asked
from benchmarks.foreseen.highest import asked_of, foreseen_rps, may_be_served
from roles.lab.scheduler_only import Case, Model, play
from roles.workload.outcomes import Window

LONG_MS = 1000.0


def asked(
    at_ms: Sequence[float],
    alpha_ms: float,
    beta_ms: float,
    slo_ms: float,
    size_max: int,
    given_up_max: int = 0,
) -> Asked:
    return Asked(np.array(at_ms, dtype=np.float64), slo_ms, alpha_ms, beta_ms, size_max, given_up_max)


def batches_of(requests: frozenset[int]) -> Iterator[frozenset[int]]:
    for size in range(1, len(requests) + 1):
        yield from map(frozenset, itertools.combinations(sorted(requests), size))


def all_served(models: Sequence[Asked], devices: int) -> set[tuple[int, ...]]:
    """How many of each model are served, in every schedule there is: any requests together, in any order, on any device."""
    found: set[tuple[int, ...]] = set()
    seen = set()
    everything = tuple(frozenset(range(one.arrived_at_ms.size)) for one in models)
    open_ones: list[tuple[tuple[frozenset[int], ...], tuple[float, ...]]] = [(everything, (0.0,) * devices)]
    while open_ones:
        state = open_ones.pop()
        if state in seen:
            continue
        seen.add(state)
        left, free_at_ms = state
        found.add(tuple(len(all_) - len(rest) for all_, rest in zip(everything, left, strict=True)))
        for number, one in enumerate(models):
            for batch in batches_of(left[number]):
                if len(batch) > one.size_max:
                    continue
                came = [float(one.arrived_at_ms[place]) for place in batch]
                for device in range(devices):
                    ends_at_ms = max(free_at_ms[device], *came) + one.alpha_ms * len(batch) + one.beta_ms
                    if ends_at_ms <= min(came) + one.slo_ms:
                        rest = (*left[:number], left[number] - batch, *left[number + 1 :])
                        free = (*free_at_ms[:device], ends_at_ms, *free_at_ms[device + 1 :])
                        open_ones.append((rest, tuple(sorted(free))))
    return found


def least_by_trying(one: Asked) -> float:
    """The least device time with as many devices as one likes, by sets of requests served."""
    count = one.arrived_at_ms.size
    least = {frozenset[int](): 0.0}
    for size in range(count):
        for served in [known for known in least if len(known) == size]:
            for batch in batches_of(frozenset(range(count)) - served):
                came = [float(one.arrived_at_ms[place]) for place in batch]
                took_ms = one.alpha_ms * len(batch) + one.beta_ms
                if len(batch) <= one.size_max and max(came) + took_ms <= min(came) + one.slo_ms:
                    after = served | batch
                    least[after] = min(least.get(after, np.inf), least[served] + took_ms)
    return min(
        (took for served, took in least.items() if len(served) >= count - one.given_up_max), default=np.inf
    )


@st.composite
def models_asked(draw: st.DrawFn, count_max: int) -> Asked:
    gaps_ms = draw(st.lists(st.integers(0, 9), min_size=1, max_size=count_max))
    alpha_ms, beta_ms = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    slo_ms = draw(st.integers(alpha_ms + beta_ms, 40))
    at_ms = list(itertools.accumulate(gaps_ms))
    return asked(at_ms, alpha_ms, beta_ms, slo_ms, draw(st.integers(1, 6)))


@given(first=models_asked(4), second=models_asked(2), devices=st.integers(1, 2))
def test_whatever_can_be_served_is_not_refuted(first: Asked, second: Asked, devices: int) -> None:
    models = (first, second)
    until_ms = max(float(one.arrived_at_ms[-1]) + one.slo_ms for one in models)
    for served in all_served(models, devices):
        allowing = [
            replace(one, given_up_max=one.arrived_at_ms.size - count)
            for one, count in zip(models, served, strict=True)
        ]
        for counted_until_ms in (until_ms, until_ms / 2, LONG_MS):
            assert may_be_served(allowing, devices, counted_until_ms)


@given(one=models_asked(7), given_up_max=st.integers(0, 3))
def test_no_schedule_needs_less_device_time(one: Asked, given_up_max: int) -> None:
    one = replace(one, given_up_max=given_up_max)
    assert device_time.least_ms(one) <= least_by_trying(one) + 1e-9


@given(one=models_asked(7))
def test_device_time_is_exact_where_batches_hold_two_and_all_are_served(one: Asked) -> None:
    one = replace(one, size_max=min(one.size_max, 2))
    assert device_time.least_ms(one) == pytest.approx(least_by_trying(one))


def test_a_large_batch_may_lie_inside_the_span_of_a_small_one() -> None:
    one = asked([0, 5, 5, 5, 10], alpha_ms=10, beta_ms=2, slo_ms=32, size_max=3)
    assert least_by_trying(one) == 5 * 10 + 2 * 2  # unbroken runs need three batches
    assert device_time.least_ms(one) == 5 * 10 + 2 * 2


def test_a_burst_that_keeps_the_devices_busy_for_longer_than_its_slo_is_refuted() -> None:
    burst = asked([0.0] * 40, alpha_ms=1, beta_ms=2, slo_ms=10, size_max=8)
    assert not may_be_served([burst], 4, LONG_MS)  # 1.25 ms each, 40 of them in four times 10 ms
    assert may_be_served([replace(burst, given_up_max=8)], 4, LONG_MS)


def test_lone_requests_on_too_few_devices_are_refuted() -> None:
    alone = asked([20.0 * place for place in range(100)], alpha_ms=1, beta_ms=9, slo_ms=19, size_max=8)
    others = [replace(alone, arrived_at_ms=alone.arrived_at_ms + number) for number in range(3)]
    assert may_be_served([alone, *others[1:2]], 1, 2000.0)
    assert not may_be_served([alone, *others[1:]], 1, 2000.0)  # three times 10 ms in every 20 ms


CASE = Case(
    "two models, 2 GPUs",
    (Model("quick", 1.0, 4.0, 20.0, 2.0), Model("slow", 2.0, 9.0, 45.0)),
    gpus=2,
    shape=0.5,
)
WINDOW = Window(1000.0, 4000.0)


@pytest.mark.parametrize("contender", [*CONTENDERS, *OTHERS])
@pytest.mark.parametrize("load", [0.5, 0.8, 1.3])
def test_what_a_discipline_serves_is_not_refuted(contender: str, load: float) -> None:
    rate_rps = load * CASE.bound_rps
    played = play(CASE, made(CASE, contender), CASE.arrivals(7, rate_rps, WINDOW.until_ms))
    achieved = []
    for one, model in zip(asked_of(CASE, 7, rate_rps, WINDOW), CASE.models, strict=True):
        fate = played.fates[model.name]
        lost = np.isnan(fate.finished_at_ms) | (
            fate.finished_at_ms > fate.arrived_at_ms + model.slo_ms + 1e-6
        )
        achieved.append(replace(one, given_up_max=int(np.count_nonzero(lost & fate.inside(WINDOW)))))
    assert may_be_served(achieved, CASE.gpus, WINDOW.until_ms)


def test_every_rate_above_is_refuted_and_the_bound_itself_is_not() -> None:
    found_rps = foreseen_rps(CASE, 7, WINDOW)
    assert 0.5 * CASE.bound_rps < found_rps < CASE.bound_rps
    assert may_be_served(asked_of(CASE, 7, found_rps, WINDOW), CASE.gpus, WINDOW.until_ms)
    for factor in (1.005, 1.01, 1.1):
        assert not may_be_served(asked_of(CASE, 7, found_rps * factor, WINDOW), CASE.gpus, WINDOW.until_ms)
