"""Eager batching: a batch goes whenever a slice is free (Symphony section 2.2; its timeout 0)."""

from __future__ import annotations

from typing import Final

from fabric.policy_options import Choice
from policies.batching.base import NEVER_MS
from policies.batching.batch_moments import Table
from policies.batching.disciplines.deferred import never
from policies.batching.matchmaking.central import PICK, Central, central_options
from policies.batching.matchmaking.send_rule import SendRule
from policies.registry import Registered


def no_hold(cost: Table) -> Table:
    """Hold nothing."""
    return [NEVER_MS] * len(cost)


EAGER = SendRule(reason="eager", hold=no_hold, timeout_ms=never)


class Eager(Central):
    """One central queue per model, the most urgent one first at every free slice."""

    def __init__(self, *, is_window_drop: bool = False, is_lowest_id: bool = True) -> None:
        super().__init__(EAGER, is_window_drop=is_window_drop, is_lowest_id=is_lowest_id)


# Its batches are small, so a drop rule that protects a large target gives up too much (ADR 0010).
REGISTERED: Final = Registered(
    {"drop": Choice(("simple", "window")), "pick": PICK}, lambda options: Eager(**central_options(options))
)
