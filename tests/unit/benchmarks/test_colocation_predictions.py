from __future__ import annotations

import pytest

from benchmarks.colocation import Measuring, add_groups, measured, shares_of
from benchmarks.colocation_predictions import Group, by_igniter, by_line, by_sm
from benchmarks.figures import Figures
from profiles.measured import MeasuredProfile, Point, Subject
from profiles.requirements import Requirements

BATCHES = (1, 8, 32)
SHARES = ((50.0, 50.0), (20.0, 70.0))


def profiled(model: str, sm_percent: dict[int, float] | None) -> MeasuredProfile:
    """As `tenuto profile` writes it, with that SM use by batch size; None: no kernels were seen."""
    points = [Point(100.0, size, float(size), float(size), float(size), 20, 1_000) for size in BATCHES]
    needs = {size: Requirements(weighted_sm_percent=percent) for size, percent in (sm_percent or {}).items()}
    return MeasuredProfile(Subject(model, "0", "cuda", "h200"), points, 1, 1, needs)


A = profiled("a", {1: 10.0, 8: 50.0, 32: 90.0})
B = profiled("b", {1: 30.0, 8: 35.0, 32: 95.0})
WITHOUT = profiled("c", None)


def on_a_line(batch_size: int, shares: tuple[float, ...]) -> Group:
    """Two that disturb each other by 1 + 0.5 own + 0.8 other, of their use as it counts at their shares."""
    profiles = (A, B)
    used = [
        (profile.requirements[batch_size].weighted_sm_percent or 0.0) * share / 1e4
        for profile, share in zip(profiles, shares, strict=True)
    ]
    slowdowns = (1 + 0.5 * used[0] + 0.8 * used[1], 1 + 0.5 * used[1] + 0.8 * used[0])
    return Group(profiles, batch_size, shares, (10.0, 20.0), (10 * slowdowns[0], 20 * slowdowns[1]))


PAIRS = [on_a_line(batch_size, shares) for batch_size in BATCHES for shares in SHARES]


def test_the_line_through_the_other_groups_finds_the_one_that_was_left_out() -> None:
    for group, predicted in zip(PAIRS, by_line(PAIRS), strict=True):
        assert predicted == pytest.approx(group.beside_ms)


def test_the_group_itself_is_not_in_its_own_prediction() -> None:
    wrong = Group((A, B), 8, SHARES[0], (10.0, 20.0), (999.0, 999.0))
    at = PAIRS.index(on_a_line(8, SHARES[0]))
    found = by_line([*PAIRS[:at], wrong, *PAIRS[at + 1 :]])[at]
    assert found == pytest.approx(PAIRS[at].beside_ms)


@pytest.mark.parametrize(
    "groups",
    [
        PAIRS[:1],
        PAIRS[:2],  # one group is left, with two points
        [Group((A, WITHOUT), size, SHARES[0], (1.0, 1.0), (2.0, 2.0)) for size in BATCHES],
        [Group((A, B), size, None, (1.0, 1.0), (2.0, 2.0)) for size in BATCHES],
        [PAIRS[0]] * 6,  # which say nothing of how one's use counts beside another's
    ],
    ids=["one", "two", "no kernels", "no shares", "all the same"],
)
def test_there_is_no_line_where_the_others_do_not_determine_one(groups: list[Group]) -> None:
    assert by_line(groups) == [None] * len(groups)


def test_of_three_the_neighbour_that_disturbs_most_counts() -> None:
    three = Group((A, B, A), 8, (40.0, 30.0, 30.0), (10.0, 10.0, 10.0), (0.0, 0.0, 0.0))
    found = by_line([*PAIRS, three])[-1]
    assert found is not None
    assert found[0] == pytest.approx(10 * (1 + 0.5 * 0.2 + 0.8 * 0.15))  # A's other copy, with 30 % of 50 %


def test_sm_use_is_told_of_shares_and_of_turns_and_the_share_itself_costs_nothing_more() -> None:
    idle = profiled("idle", dict.fromkeys(BATCHES, 0.0))
    assert by_sm(Group((A, idle), 32, (20.0, 70.0), (10.0, 20.0), (0.0, 0.0))) == pytest.approx([10.0, 20.0])
    turns = by_sm(Group((A, B), 32, None, (10.0, 20.0), (0.0, 0.0)))
    assert turns is not None
    assert turns == pytest.approx([10 * 1.855, 20 * 1.855])  # 1 + 0.9 · 0.95, which is more than 0.9 + 0.95
    assert by_sm(Group((A, WITHOUT), 32, None, (10.0, 20.0), (0.0, 0.0))) is None


def test_igniter_says_nothing_without_coefficients_or_shares() -> None:
    assert by_igniter(PAIRS[0]) is None
    assert by_igniter(Group((A, B), 1, None, (1.0, 1.0), (1.0, 1.0))) is None


def test_figures_have_a_row_for_each_model_and_say_why_gpulet_is_not_there() -> None:
    figures = Figures("")
    add_groups(figures, [*PAIRS, Group((A, B), 1, None, (1.0, 1.0), (2.0, 2.0))])
    runs, errors = figures.tables
    assert len(runs.rows) == 2 * 7
    assert [row[:2] for row in errors.rows] == [("iGniter", 0), ("sm", 14), ("line by SM", 12)]
    assert figures.lines == []  # iGniter predicted nothing that could be held to its line
    assert figures.remarks[0].startswith("gpulet's own model is not fitted")


class Measured(Measuring):
    """Without a device; batches of 32 find no memory at 20 %."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float | None]] = []

    def alone_ms(self, place: int, share: float | None, batch_sizes: object) -> dict[int, float]:
        self.asked.append((place, share))
        return {size: float(size) for size in BATCHES if (size, share) != (32, 20.0)}

    def beside_ms(self, shares: tuple[float, ...] | None, batch_size: int) -> tuple[float, ...]:
        return (2.0 * batch_size, 2.0 * batch_size)


def test_each_is_measured_alone_once_at_each_share_and_what_does_not_fit_is_left_out() -> None:
    measuring = Measured()
    groups = measured((A, B), measuring, BATCHES, [*SHARES, (50.0, 70.0), None])
    assert len(measuring.asked) == len(set(measuring.asked)) == 6
    assert [(group.batch_size, group.shares) for group in groups if group.shares == SHARES[1]] == [
        (1, SHARES[1]),
        (8, SHARES[1]),
    ]
    assert len(groups) == 3 * 4 - 1


def test_shares_are_as_many_as_models() -> None:
    assert shares_of(None, 2) == [(50.0, 50.0), (20.0, 70.0)]
    assert shares_of(None, 3) == [(40.0, 30.0, 30.0)]
    assert shares_of(None, 4) == [(25.0,) * 4]
    for words in ("50:50", "0:50:50", "10:20:101", "10:20"):
        with pytest.raises(ValueError, match="each set has 3 percentages"):
            shares_of(words, 3)
