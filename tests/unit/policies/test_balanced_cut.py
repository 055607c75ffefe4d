"""Cutting a chain: as good as the best of all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from policies.balanced_cut import balanced_cut


def slowest(times_ms: list[float], cuts: tuple[int, ...]) -> float:
    bounds = [0, *cuts, len(times_ms)]
    return max(sum(times_ms[a:b]) for a, b in pairwise(bounds))


@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(times_ms: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(times_ms)))
    cuts = balanced_cut(times_ms, stages)
    assert len(cuts) == stages - 1
    assert [0, *cuts, len(times_ms)] == sorted({0, *cuts, len(times_ms)}), "every stage has a layer"
    every = combinations(range(1, len(times_ms)), stages - 1)
    assert slowest(times_ms, cuts) == min(slowest(times_ms, other) for other in every)


def test_an_uneven_chain_by_hand() -> None:
    assert balanced_cut([9, 1, 1, 1, 9], 3) == (1, 4)
    assert balanced_cut([5], 1) == ()
