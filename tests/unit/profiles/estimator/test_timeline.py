"""When kernels run, by hand."""

from __future__ import annotations

from profiles.estimator.timeline import Timed, starts_ms


def test_a_slow_host_leaves_gaps_and_a_slow_gpu_a_queue() -> None:
    assert starts_ms([Timed(1, 5), Timed(1, 5), Timed(1, 5)]) == [5, 10, 15]
    assert starts_ms([Timed(10, 1), Timed(10, 1), Timed(10, 1)]) == [1, 11, 21]


def test_branches_overlap_only_where_the_option_says_so() -> None:
    # 0 -> 1, 0 -> 2, (1, 2) -> 3
    kernels = [Timed(2, 0), Timed(5, 0, (0,)), Timed(3, 0, (0,)), Timed(1, 0, (1, 2))]
    assert starts_ms(kernels) == [0, 2, 7, 10]
    assert starts_ms(kernels, "branches") == [0, 2, 2, 7]


def test_the_later_of_two_predecessors_counts_whichever_is_listed_first() -> None:
    kernels = [Timed(1, 0), Timed(9, 0), Timed(1, 0, (0, 1))]
    assert starts_ms(kernels, "branches")[2] == 9
