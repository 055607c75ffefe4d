"""The bound that foresees every arrival, against trying everything: any requests together, in any order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.foreseen.one_device import is_schedulable


def most_in_time(arrivals_ms: Sequence[float], exec_ms: Sequence[float], slo_ms: float) -> int:
    """By sets of requests served: the earliest moment at which the device is free after them."""
    count = len(arrivals_ms)
    free_ms = {0: 0.0}
    for served in range(1 << count):  # ascending: a set comes after all its subsets
        if served not in free_ms:
            continue
        for batch in range(1, 1 << count):
            size = batch.bit_count()
            if batch & served or size > len(exec_ms):
                continue
            members = [arrivals_ms[k] for k in range(count) if batch >> k & 1]
            end_ms = max(free_ms[served], *members) + exec_ms[size - 1]
            if end_ms <= min(members) + slo_ms:
                free_ms[served | batch] = min(end_ms, free_ms.get(served | batch, end_ms))
    return max(served.bit_count() for served in free_ms)


@given(
    gaps_ms=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    each_ms=st.integers(1, 4),
    once_ms=st.integers(1, 10),
    size_max=st.integers(1, 4),
    slo_ms=st.integers(5, 40),
)
def test_it_gives_up_as_few_as_trying_everything_does(
    gaps_ms: list[int], each_ms: int, once_ms: int, size_max: int, slo_ms: int
) -> None:
    arrivals_ms = [float(sum(gaps_ms[: k + 1])) for k in range(len(gaps_ms))]
    exec_ms = [float(each_ms * size + once_ms) for size in range(1, size_max + 1)]
    most = most_in_time(arrivals_ms, exec_ms, slo_ms)
    fewest_given_up = len(arrivals_ms) - most
    assert is_schedulable(arrivals_ms, exec_ms, slo_ms, fewest_given_up)
    if fewest_given_up:
        assert not is_schedulable(arrivals_ms, exec_ms, slo_ms, fewest_given_up - 1)
