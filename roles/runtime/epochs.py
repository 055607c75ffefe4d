"""Epochs: who commands since when. A scheduler's epoch is granted to it by a majority of the agents (docs/operate/availability.md).

An epoch names its scheduler: the scheduler's number is its last four bits, so no two schedulers ever ask for the same
one. Whoever asks takes a higher one than all that it has heard of. 0 is the epoch of a scheduler that has none yet.
"""

from __future__ import annotations

from typing import Final

from fabric.ids import Epoch
from fabric.limits import INTEGER_MAX

SCHEDULERS_MAX: Final = 16
LEASE_MS: Final = 500.0
"""How long an agent grants no other scheduler a higher epoch, on the agent's clock, from when it granted."""
HELD_MS: Final = 450.0
"""How long a scheduler counts on it, on its own clock, from before it asked: clocks may differ by a tenth in speed."""
RENEW_EVERY_MS: Final = 150.0
"""Two of three of these may be lost, or late."""
BELIEVED_LEAP_MAX: Final = 1 << 28
"""How far above what a majority of the agents has reached one agent's epoch may be, for schedulers to ask for more.

16 million campaigns of which only that agent knows: weeks of them without a pause.
"""
GRANTED_LEAP_MAX: Final = 1 << 40
"""How far above its own an agent grants an epoch: schedulers that believed what they should not may get that far."""
EPOCH_MAX: Final = Epoch(INTEGER_MAX - 2 * SCHEDULERS_MAX)
"""Above a higher one there is none that a message can hold."""


def epoch_above(highest: int, number: int) -> Epoch:
    """The lowest epoch over `highest` of the scheduler with that number."""
    return Epoch((highest // SCHEDULERS_MAX + 1) * SCHEDULERS_MAX + number)
