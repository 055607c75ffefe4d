"""Every real core on a virtual clock, beside the fast simulator: each request meets the same fate at the same moment."""

from __future__ import annotations

import pytest

from tests.references.simulations import fates_apart, play, random_cluster

CASES, OF = 1_000, 20
REQUESTS = 60


@pytest.mark.parametrize("first", range(0, CASES, CASES // OF))
def test_both_simulators_give_every_request_the_same_fate(first: int) -> None:
    crossed = 0
    for seed in range(first, first + CASES // OF):
        document = random_cluster(seed)
        fast = play(document, seed, REQUESTS, is_full=False)
        full = play(document, seed, REQUESTS, is_full=True)
        if (
            fast.late_preemptions
        ):  # a stop crossed an end: what follows differs, as docs/operate/replay.md says
            crossed += 1
        else:
            assert fates_apart(fast, full) == [], f"setting {seed}"
    assert crossed < CASES / OF / 5
