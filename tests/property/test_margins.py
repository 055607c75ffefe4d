"""Margins come to where the whole history says they should, whatever lateness looks like, and return after a stall."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.random import RandomState

from fabric.learned_margin import LearnedWay
from roles.frontend.return_margin import ReturnPath
from tests.references.margins import (
    LATE_SHARE,
    Needed,
    late_share,
    least_kept_ms,
    newest_mean_ms,
    right_kept_ms,
)

ANSWERS = 80_000
SETTLED = ANSWERS // 4  # what comes before teaches


def now_and_then(draws: RandomState, share: float, answers: int) -> Needed:
    """1 for rows of so many answers, in that share of the time; else 0."""
    return np.repeat(draws.random_sample(ANSWERS // answers) < share, answers).astype(np.float64)


STEADY: Mapping[str, Callable[[RandomState], Needed]] = {
    "constant": lambda draws: np.full(ANSWERS, 1.5),
    "exponential": lambda draws: draws.exponential(1.0, ANSWERS),
    "short tail": lambda draws: 1.0 + draws.exponential(0.1, ANSWERS),
    "half normal": lambda draws: 1.0 + np.abs(draws.normal(0.0, 1.5, ANSWERS)),
    "heavy tail": lambda draws: 0.3 * (1.0 + draws.pareto(1.8, ANSWERS)),
    "drifting": lambda draws: (
        2.0 + np.sin(np.arange(ANSWERS) * 2 * np.pi / 20_000) + draws.exponential(0.5, ANSWERS)
    ),
    "stalls": lambda draws: (
        0.5 + draws.exponential(0.3, ANSWERS) + 50.0 * now_and_then(draws, 0.002, answers=20)
    ),
}


def bursts(draws: RandomState) -> Needed:
    """A hundredth of the time fifty in a row are late together."""
    in_burst = now_and_then(draws, 0.01, answers=50)
    return draws.exponential(0.3, ANSWERS) + in_burst * draws.uniform(1.0, 4.0, ANSWERS)


def kept_by_a_frontend(needed_ms: Needed, budget_ms: float) -> Needed:
    """What a frontend kept back of each budget, where every answer leaves at its last moment."""
    path, kept_ms = ReturnPath(), []
    for took_ms in needed_ms.tolist():
        kept_ms.append(budget_ms - path.budget_ms(budget_ms))
        path.note_batch(took_ms)
        path.note_answer(took_ms - kept_ms[-1], budget_ms)
    return np.array(kept_ms)


def kept_by_a_client(needed_ms: Needed, budget_ms: float) -> Needed:
    """What a client said with each request, of which a frontend heeds a quarter of the budget at most."""
    way, kept_ms = LearnedWay(), []
    for took_ms in needed_ms.tolist():
        kept_ms.append(min(way.planned_ms, LearnedWay.SHARE_MAX * budget_ms))
        way.note(took_ms)
        way.note_end(took_ms - kept_ms[-1], budget_ms)
    return np.array(kept_ms)


@pytest.mark.parametrize("budget_ms", [10.0, 60.0])
@pytest.mark.parametrize("name", STEADY)
def test_a_frontend_keeps_back_what_the_history_says(name: str, budget_ms: float) -> None:
    needed_ms = STEADY[name](RandomState(1))
    kept_ms = kept_by_a_frontend(needed_ms, budget_ms)[SETTLED:]
    assert kept_ms.max() <= budget_ms / 4
    right_ms = right_kept_ms(needed_ms[SETTLED:], budget_ms, least_kept_ms(budget_ms))
    check(needed_ms[SETTLED:], kept_ms, right_ms)


@pytest.mark.parametrize("name", STEADY)
def test_a_client_keeps_back_what_the_history_says(name: str) -> None:
    needed_ms = STEADY[name](RandomState(2))
    kept_ms = kept_by_a_client(needed_ms, 25.0)[SETTLED:]
    check(needed_ms[SETTLED:], kept_ms, right_kept_ms(needed_ms[SETTLED:], 25.0, 0.0))


def check(needed_ms: Needed, kept_ms: Needed, right_ms: float) -> None:
    assert kept_ms.mean() == pytest.approx(right_ms, rel=0.15)
    expected = late_share(needed_ms, right_ms)
    assert 0.5 * expected - 1e-3 <= late_share(needed_ms, kept_ms) <= 1.6 * expected + 1e-3


def test_one_of_400_is_late_where_lateness_is_of_milliseconds_and_more_where_it_is_shorter() -> None:
    """A late one widens a margin by what it was late: the share is 1/400 over the mean of that, at most 1 ms."""
    for scale_ms, share in ((3.0, 1 / 400), (1.0, 1 / 400), (0.2, 1 / 400 / 0.2), (0.1, 1 / 400 / 0.1)):
        needed_ms = RandomState(3).exponential(scale_ms, ANSWERS)
        found = late_share(needed_ms[SETTLED:], kept_by_a_client(needed_ms, 200.0)[SETTLED:])
        mean_of_late_ms = scale_ms * -np.expm1(-1.0 / scale_ms)  # of min(late, 1), for an exponential tail
        assert found == pytest.approx(LATE_SHARE / mean_of_late_ms, rel=0.25)
        assert found >= 0.75 * share


def test_what_is_late_together_is_prepared_for_in_part() -> None:
    """A margin forgets between bursts, so it keeps back less than would be right, and more is late."""
    needed_ms = bursts(RandomState(4))
    kept_ms = kept_by_a_client(needed_ms, 25.0)[SETTLED:]
    right_ms = right_kept_ms(needed_ms[SETTLED:], 25.0, 0.0)
    assert 0.4 * right_ms < kept_ms.mean() < 1.1 * right_ms
    assert late_share(needed_ms[SETTLED:], kept_ms) < 0.01


@pytest.mark.parametrize("late", [1, 5, 20, 100])
@pytest.mark.parametrize("late_ms", [0.5, 2.0, 4.0])
def test_a_stall_within_the_margin_is_forgotten_400_answers_for_each_late_one(
    late: int, late_ms: float
) -> None:
    path, budget_ms = ReturnPath(), 40.0
    for _ in range(100):
        path.note_batch(1.0)
    for _ in range(late):
        path.note_answer(late_ms, budget_ms)
    widest_ms = path.reserve_ms
    assert widest_ms <= min(1.0 + late * min(late_ms, 1.0), budget_ms / 4)
    for _ in range(int(400 * (widest_ms - 1.0)) + 1):
        path.note_answer(-1.0, budget_ms)
    assert path.reserve_ms == pytest.approx(1.0, abs=1e-6)


def test_a_stall_beyond_any_margin_is_not_prepared_for_and_drops_narrow_four_times_as_fast() -> None:
    path = ReturnPath()
    for _ in range(100):
        path.note_batch(1.0)
    for _ in range(50):
        path.note_answer(50.0, 40.0)
    assert path.reserve_ms == pytest.approx(1.0)
    for _ in range(5):
        path.note_answer(1.0, 40.0)
    assert path.reserve_ms == pytest.approx(6.0)
    path.note_dropped(100)
    assert path.reserve_ms == pytest.approx(5.0)


@pytest.mark.parametrize("start_ms", [None, 4.0])
@pytest.mark.parametrize("name", STEADY)
def test_the_mean_is_that_of_the_newest_and_a_plain_one_at_first(name: str, start_ms: float | None) -> None:
    took_ms = STEADY[name](RandomState(5))[:300]
    way = LearnedWay(start_ms)
    for heard, one_ms in enumerate(took_ms.tolist(), start=1):
        way.note(one_ms)
        assert way.mean_ms == pytest.approx(newest_mean_ms(took_ms[:heard], start_ms), rel=1e-9)
