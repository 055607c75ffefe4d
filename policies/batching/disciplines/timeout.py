"""Timeout batching (Symphony sections 2.2 and 3.4): a batch goes when its first request has waited long enough.

As in Symphony's implementation never after the batch's latest moment, so a timeout that is too long makes it the
variant that always waits until the last moment, not one that loses whole batches (ADR 0010).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from fabric.policy_options import Number
from policies.batching.base import NEVER_MS
from policies.batching.batch_moments import Table
from policies.batching.matchmaking.central import Central
from policies.batching.matchmaking.send_rule import SendRule
from policies.registry import Registered


def latest_hold(cost: Table) -> Table:
    """Hold n requests until they must go; a full batch never."""
    return [*cost[:-2], NEVER_MS]


class Timeout(Central):
    """`timeout_ms(slo_ms)`: how long the first request of a batch waits at most."""

    def __init__(
        self,
        timeout_ms: Callable[[float], float],
        *,
        is_window_drop: bool = True,
        is_lowest_id: bool = True,
    ) -> None:
        rule = SendRule(reason="timeout", hold=latest_hold, timeout_ms=timeout_ms)
        super().__init__(rule, is_window_drop=is_window_drop, is_lowest_id=is_lowest_id)


def _timeout(options: Mapping[str, Any]) -> Timeout:
    if "timeout_ms" in options:
        constant_ms: float = options["timeout_ms"]
        return Timeout(lambda _: constant_ms)
    share = options["slo_percent"] / 100.0
    return Timeout(lambda slo_ms: share * slo_ms)


REGISTERED: Final = Registered(
    {
        "timeout_ms": Number(None, is_minimum_allowed=True),
        "slo_percent": Number(None, maximum=100.0),
    },
    _timeout,
)
