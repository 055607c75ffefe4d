"""The caching allocator's rules, by hand; and that it never holds less than what is alive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.estimator.graph import Allocation, OperatorCall, OperatorGraph
from profiles.estimator.memory import CachingAllocator, live_peak_bytes, reserved_bytes
from profiles.gpu import MIB


def graph(
    allocations: list[Allocation], calls: int, weights: tuple[int, ...] = (), inputs: tuple[int, ...] = ()
) -> OperatorGraph:
    call = OperatorCall("relu", ((1,),), ((1,),), 8)
    return OperatorGraph(1, [call] * calls, allocations, weights, inputs, 0)


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),  # still out of the small pool
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from here on a segment of its own
        (11 * MIB, 12 * MIB),
        (30 * MIB + 1, 32 * MIB),
    ],
)
def test_a_segment_is_as_large_as_its_pool_says(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved_bytes == reserved


def test_small_blocks_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * 1024)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_what_was_given_back_is_used_again_and_neighbours_join() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    allocator.release(first, is_large=True)
    allocator.release(second, is_large=True)
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_two_results_that_are_never_alive_together_share_their_memory() -> None:
    one_after_another = [Allocation(40 * MIB, 0, 1), Allocation(40 * MIB, 2, 3)]
    together = [Allocation(40 * MIB, 0, 2), Allocation(40 * MIB, 1, 3)]
    assert reserved_bytes(graph(one_after_another, 4), None) == (40 * MIB, 0)
    assert reserved_bytes(graph(together, 4), None) == (80 * MIB, 0)


def test_a_work_space_counts_while_its_operator_runs() -> None:
    results = [Allocation(40 * MIB, 0, 2)]
    assert reserved_bytes(graph(results, 3), {1: 30 * MIB}) == (70 * MIB, 0)


def test_weights_stay_and_are_told_apart() -> None:
    found = graph([Allocation(40 * MIB, 0, 0)], 1, weights=(100 * MIB, 3 * MIB), inputs=(12 * MIB,))
    # 3 MiB take the start of a segment of 20 MiB; the input finds room behind them.
    assert reserved_bytes(found) == ((100 + 20 + 40) * MIB, 120 * MIB)
    assert live_peak_bytes(found) == (103 + 40 + 12) * MIB


@given(
    st.lists(
        st.tuples(st.integers(1, 40 * MIB), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30
    )
)
def test_no_less_is_reserved_than_is_alive_at_once(drawn: list[tuple[int, int, int]]) -> None:
    results = [Allocation(size, min(a, b), max(a, b)) for size, a, b in drawn]
    found = graph(sorted(results, key=lambda one: one.born), 10)
    assert reserved_bytes(found)[0] >= live_peak_bytes(found)
