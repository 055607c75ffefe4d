"""Epochs: who commands since when. A scheduler's epoch is granted to it by a majority of the agents (docs/operate/availability.md).

An epoch names its scheduler: the scheduler's number is its last four bits, so no two schedulers ever ask for the same
one. Whoever asks takes a higher one than all that it has heard of. 0 is the epoch of a scheduler that has none yet.
"""

from __future__ import annotations

from typing import Final

from fabric.ids import Epoch

SCHEDULERS_MAX: Final = 16
LEASE_MS: Final = 500.0
"""How long an agent grants no other scheduler a higher epoch, on the agent's clock, from when it granted."""
HELD_MS: Final = 450.0
"""How long a scheduler counts on it, on its own clock, from before it asked: clocks may differ by a tenth in speed."""
RENEW_EVERY_MS: Final = 150.0
"""Two of three of these may be lost, or late."""


def epoch_above(highest: int, number: int) -> Epoch:
    """The lowest epoch over `highest` of the scheduler with that number."""
    return Epoch((highest // SCHEDULERS_MAX + 1) * SCHEDULERS_MAX + number)
