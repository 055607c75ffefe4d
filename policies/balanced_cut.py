"""Where to cut a chain of layers so that the slowest part is as fast as may be: min-max dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced_cut(times_ms: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first layer of each stage but the first one; every stage has at least one layer.

    Of all ways to make `stages` of the layers, one whose slowest stage takes least; the earliest cuts of equals. As AlpaServe
    balances a model (section 4.1). `stages` is 1 to the number of layers. O(layers² · stages).
    """
    layers = len(times_ms)
    assert 1 <= stages <= layers, "the caller has counted"
    ends = [0.0, *accumulate(times_ms)]
    # least[i]: the slowest of the stages so far, where they are the first i layers; then how they are cut.
    least: list[tuple[float, tuple[int, ...]]] = [(ends[i], ()) for i in range(layers + 1)]
    for stage in range(2, stages + 1):
        least = [
            min(
                (
                    (max(least[cut][0], ends[i] - ends[cut]), (*least[cut][1], cut))
                    for cut in range(stage - 1, i)
                ),
                default=(float("inf"), ()),
            )
            for i in range(layers + 1)
        ]
    return least[layers][1]
