from __future__ import annotations

import pytest

from policies.scaling import advised_gpus


@pytest.mark.parametrize(
    ("gpus", "bad_rate", "idle_fraction", "advised"),
    [
        (8, 0.0, 0.0, 8),
        (8, 0.009, 0.24, 7),  # idle: 8 x 0.24 = 1.9 released, rounded down
        (8, 0.0, 0.25, 6),
        (8, 0.5, 0.0, 16),  # half is lost: as many again
        (8, 0.01, 0.5, 9),  # bad before idle
        (10, 0.2, 0.0, 13),  # 10 x 0.25 = 2.5, rounded up
        (8, 0.75, 0.0, 32),
        (8, 0.0, 1.0, 1),
        (0, 0.0, 0.0, 0),
    ],
)
def test_advice_follows_the_two_signals(
    gpus: int, bad_rate: float, idle_fraction: float, advised: int
) -> None:
    assert advised_gpus(gpus, bad_rate, idle_fraction) == advised
