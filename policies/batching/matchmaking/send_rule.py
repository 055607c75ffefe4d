"""When a batch goes: the one rule in which `deferred`, `eager`, `timeout` and `tenuto` differ."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from policies.batching.batch_moments import Table


class SendRule(Struct, frozen=True):
    """When a discipline wants a batch to go: the one thing in which the central disciplines differ.

    `hold(cost)[n]`: with n requests waiting, the batch is not sent before `deadline - hold[n]`, so a value that
    grows with n makes it go earlier; inf: at once, as always for the largest batch. `timeout_ms(slo_ms)`: it
    goes at the latest so long after its first request arrived.
    """

    reason: str
    hold: Callable[[Table], Table]
    timeout_ms: Callable[[float], float]
