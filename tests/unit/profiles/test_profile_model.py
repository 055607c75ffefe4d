from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ProfileError
from profiles.model import LinearProfile, TableProfile, table_of


def test_a_line_is_alpha_times_batch_plus_beta() -> None:
    profile = LinearProfile(1.053, 5.072, 64)
    assert profile.exec_ms(16) == pytest.approx(1.053 * 16 + 5.072)
    assert profile.exec_table()[15] == profile.exec_ms(16)
    assert len(profile.exec_table()) == profile.batch_size_max == 64
    assert profile.memory_bytes(64) == 0


def test_a_line_holds_for_every_share() -> None:
    profile = LinearProfile(1, 5)
    assert profile.exec_ms(8, 12.5) == profile.exec_ms(8) == 13


def test_a_table_is_linear_between_its_entries_and_ends_at_its_last() -> None:
    profile = table_of({"1": 5.0, 2: 7.0, "6": 11.0})
    assert profile.exec_table() == (5, 7, 8, 9, 10, 11)
    with pytest.raises(ProfileError, match="batch 7 is over the largest one profiled, 6"):
        profile.exec_ms(7)
    assert profile.exec_ms(8, extrapolate=True) == 13


def test_a_table_of_one_entry_serves_batches_of_one() -> None:
    assert table_of({1: 5.9}).exec_table() == (5.9,)


def test_a_padded_table_takes_its_first_entry_for_smaller_batches() -> None:
    profile = TableProfile({100: {4: 6.8, 8: 9.6}}, is_padded=True)
    assert profile.exec_table()[:5] == pytest.approx((6.8, 6.8, 6.8, 6.8, 7.5))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({}, "empty"),
        ({2: 5.0, 4: 6.0}, "hole: it starts at batch 2"),
        ({1: 5.0, 2: 4.0}, "batch 2 takes 4 ms, less than batch 1 with 5 ms"),
        ({1: 5.0, 2: 0.0}, "batch 2 takes 0 ms; every entry must be over 0"),
        ({1: -1.0}, "every entry must be over 0"),
        ({1: math.nan}, "every entry must be over 0"),
        ({1: math.inf}, "every entry must be over 0"),
        ({"one": 5.0}, "'one' is not a batch size"),
        ({0: 5.0}, "'0' is not a batch size"),
        ({10**9: 5.0}, "is not a batch size"),
        ({1: 5.0, "1": 6.0}, "twice"),
    ],
)
def test_a_malformed_table_says_which_entries_are_wrong(entries: dict[str | int, float], reason: str) -> None:
    with pytest.raises(ProfileError, match=reason):
        table_of(entries)


@pytest.mark.parametrize(
    ("alpha_ms", "beta_ms", "batch_size_max"),
    [(-1, 5, 8), (1, -5, 8), (0, 0, 8), (math.nan, 1, 8), (1, math.inf, 8), (1, 1, 0), (1, 1, 10**6)],
)
def test_a_malformed_line_is_refused(alpha_ms: float, beta_ms: float, batch_size_max: int) -> None:
    with pytest.raises(ProfileError):
        LinearProfile(alpha_ms, beta_ms, batch_size_max)


def test_shares_are_joined_linearly_and_not_guessed_below_the_smallest() -> None:
    profile = TableProfile({20: {1: 10.0, 2: 20.0}, 40: {1: 6.0, 2: 12.0}})
    assert profile.exec_ms(2, 20) == 20
    assert profile.exec_ms(2, 30) == 16
    assert profile.exec_ms(2) == profile.exec_ms(2, 40) == 12
    with pytest.raises(ProfileError, match="share 10 % is under the smallest"):
        profile.exec_ms(2, 10)
    assert profile.exec_ms(2, 10, extrapolate=True) == 40


@pytest.mark.parametrize("share_percent", [0.0, -5.0, 101.0, math.nan])
def test_a_share_is_a_part_of_one_gpu(share_percent: float) -> None:
    with pytest.raises(ProfileError):
        LinearProfile(1, 1).exec_ms(1, share_percent)


def test_a_batch_has_at_least_one_request() -> None:
    with pytest.raises(ProfileError):
        LinearProfile(1, 1).exec_ms(0)


def test_memory_is_linear_between_measured_batches_and_flat_outside() -> None:
    profile = TableProfile({100: {1: 1.0, 8: 2.0}}, memory_by_batch={2: 100, 4: 200})
    assert [profile.memory_bytes(b) for b in (1, 2, 3, 4, 8)] == [100, 100, 150, 200, 200]


def test_memory_of_a_batch_is_never_less_than_was_measured_for_a_smaller_one() -> None:
    profile = TableProfile({100: {1: 1.0, 12: 2.0}}, memory_by_batch={1: 10, 4: 100, 8: 80, 12: 140})
    assert [profile.memory_bytes(b) for b in (1, 2, 4, 5, 8, 10, 12)] == [10, 40, 100, 100, 100, 120, 140]


@st.composite
def tables(draw: st.DrawFn) -> dict[str | int, float]:
    sizes = draw(st.lists(st.integers(2, 300), unique=True, max_size=8))
    values = draw(
        st.lists(st.floats(0.01, 1000), min_size=len(sizes) + 1, max_size=len(sizes) + 1).map(sorted)
    )
    return dict(zip([1, *sorted(sizes)], values, strict=True))


@given(tables())
def test_run_time_never_falls_as_the_batch_grows(entries: dict[str | int, float]) -> None:
    profile = table_of(entries)
    table = profile.exec_table()
    assert list(table) == sorted(table)
    assert all(table[int(size) - 1] == exec_ms for size, exec_ms in entries.items())
    assert profile.exec_ms(profile.batch_size_max + 1, extrapolate=True) >= table[-1]


@given(st.floats(0, 100), st.floats(0.001, 100), st.integers(1, 600))
def test_a_line_never_falls_either(alpha_ms: float, beta_ms: float, batch_size_max: int) -> None:
    table = LinearProfile(alpha_ms, beta_ms, batch_size_max).exec_table()
    assert list(table) == sorted(table)
