"""Deferred batch scheduling (Symphony section 3): a batch goes when nobody more would fit into it."""

from __future__ import annotations

from typing import Final

from fabric.policy_options import Choice
from policies.batching.base import NEVER_MS
from policies.batching.batch_moments import Table
from policies.batching.matchmaking.central import PICK, Central, central_options
from policies.batching.matchmaking.send_rule import SendRule
from policies.registry import Registered


def frontrun_hold(cost: Table) -> Table:
    """Hold n requests until the frontrun moment, when n + 1 could no longer be sent in time; a full batch never."""
    return cost[1:]


def never(slo_ms: float) -> float:  # noqa: ARG001  a timeout of the shape `SendRule` asks for
    """No timeout."""
    return NEVER_MS


FRONTRUN = SendRule(reason="frontrun", hold=frontrun_hold, timeout_ms=never)


class Deferred(Central):
    """Symphony's discipline, with the drop rule of its implementation."""

    def __init__(self, *, is_window_drop: bool = True, is_lowest_id: bool = True) -> None:
        super().__init__(FRONTRUN, is_window_drop=is_window_drop, is_lowest_id=is_lowest_id)


REGISTERED: Final = Registered(
    {"drop": Choice(("window", "simple")), "pick": PICK}, lambda options: Deferred(**central_options(options))
)
