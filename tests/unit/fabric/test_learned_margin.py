"""A margin ends where the chosen share comes late, whatever lateness looks like."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fabric.learned_margin import STEP_MS, Margin

MOST_MS = 100.0
LATENESS: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda draw: draw.expovariate(1.0),
    "half normal": lambda draw: abs(draw.gauss(0.0, 2.0)),
    "heavy tail": lambda draw: 0.1 * draw.paretovariate(1.5),
    "mostly none": lambda draw: draw.random() * 8 if draw.random() < 0.05 else 0.0,
}


@pytest.mark.parametrize("name", LATENESS)
@pytest.mark.parametrize("late_share", [0.002, 0.02])
def test_the_share_that_comes_late_is_the_chosen_one(name: str, late_share: float) -> None:
    margin, draw, late, draws = Margin(late_share), random.Random(name), 0, 200_000
    for _ in range(draws):
        needed_ms = LATENESS[name](draw)
        if needed_ms > margin.ms:
            late += 1
            margin.note_late(needed_ms - margin.ms, MOST_MS)
        else:
            margin.note_in_time()
    # A late one that needed less than a step widens by less, so a few more than chosen are late.
    assert 0.9 * late_share < late / draws < 3 * late_share


def test_a_margin_is_never_negative_and_widens_by_a_step_at_most() -> None:
    margin = Margin(0.01)
    margin.note_in_time(1_000)
    assert margin.ms == 0.0
    margin.note_late(50.0, MOST_MS)
    assert margin.ms == STEP_MS
    margin.note_late(0.25, MOST_MS)
    assert margin.ms == STEP_MS + 0.25


def test_what_no_margin_would_have_saved_teaches_nothing() -> None:
    margin = Margin(0.01, start_ms=1.0)
    margin.note_late(5.0, most_ms=5.5)
    assert margin.ms == 1.0
    margin.note_late(4.5, most_ms=5.5)
    assert margin.ms == 1.0 + STEP_MS
