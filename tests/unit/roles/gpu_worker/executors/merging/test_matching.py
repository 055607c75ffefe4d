"""Which pairs of operators are merged: the heaviest that do not cross, against every choice tried."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from roles.gpu_worker.executors.merging.blocks import Block
from roles.gpu_worker.executors.merging.matching import _aligned

Pairs = dict[tuple[int, int], Block]


def pairs(draw: st.DataObject, steps: int, operators: int) -> Pairs:
    every = [(step, operator) for step in range(steps) for operator in range(operators)]
    chosen = draw.draw(st.lists(st.sampled_from(every), unique=True, max_size=7))
    return {pair: Block((0, 0), (0, 0), draw.draw(st.integers(1, 5)), 1) for pair in chosen}


def crosses_not(chosen: list[tuple[int, int]]) -> bool:
    return all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(chosen))


@given(st.integers(1, 5), st.integers(1, 5), st.data())
@settings(max_examples=80, deadline=None)
def test_no_other_pairs_in_order_have_more_in_common(steps: int, operators: int, data: st.DataObject) -> None:
    found = pairs(data, steps, operators)
    chosen = _aligned(steps, operators, found)
    assert crosses_not(chosen)
    best = max(
        sum(found[pair].size for pair in some)
        for count in range(len(found) + 1)
        for some in combinations(sorted(found), count)
        if crosses_not(list(some))
    )
    assert sum(found[pair].size for pair in chosen) == best
