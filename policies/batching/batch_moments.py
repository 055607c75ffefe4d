"""The moments of a batch (Symphony sections 3.1 and 3.2, appendix D), and the tables that answer them fast.

A batch of b requests with the tightest deadline d may start between

    frontrun = d - l(b + 1)    before it, one more request would still fit: starting gains nothing but idle time
    latest   = d - l(b)        after it, the deadline is lost

and starts at exec = max(now + delay(b), slice free). Everything here is pure.

A *table* is a list indexed by the batch size itself: entry 0 is -inf or 0, entries 1 … b_max are the values, and
entry b_max + 1 is inf, so that "one more" of a full batch never fits and needs no test. `cost` is
delay(b) + l(b): what must be left of the deadline when the batch is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.batching.base import Delay

Table = list[float]

# A batch is sent this much before the moment after which it would be late, so that float rounding of moments
# (an ulp is 1e-6 ms on a clock that shows 100 days) cannot turn "just in time" into "too late". On a clock that shows
# years an ulp is more than that, and a moment plus this would be the same moment: so by one ulp at least.
_EPSILON_MS = 1e-5


def just_after(at_ms: float) -> float:
    """The moment at which what may be done until `at_ms` cannot be done any more."""
    return max(at_ms + _EPSILON_MS, math.nextafter(at_ms, math.inf))


def just_before(at_ms: float) -> float:
    """The moment at which what must be done by `at_ms` is certainly in time."""
    return min(at_ms - _EPSILON_MS, math.nextafter(at_ms, -math.inf))


def latest_at_ms(deadline_at_ms: float, batch_size: int, exec_table: Table) -> float:
    """The last moment to start in time."""
    return deadline_at_ms - exec_table[batch_size]


def exec_at_ms(now_ms: float, delay_ms: float, free_at_ms: float) -> float:
    """When a batch that is sent now will start: not before its inputs can be there and the slice is free."""
    at_ms = now_ms + delay_ms
    return free_at_ms if free_at_ms > at_ms else at_ms


def delay_ms(delay: Delay, batch_size: int) -> float:
    """From the decision to the inputs on the device: control plus data per request (appendix D)."""
    return delay.control_ms + delay.data_ms_per_item * batch_size


def exec_table(exec_ms: Sequence[float]) -> Table:
    """`exec_ms[b - 1]` = l(b), as a table."""
    return [0.0, *exec_ms, math.inf]


def lead_table(delay: Delay, batch_size_max: int) -> Table:
    """delay(b) as a table, one entry beyond the largest batch included."""
    return [delay_ms(delay, size) for size in range(batch_size_max + 2)]


def cost_table(exec_times: Table, leads: Table) -> Table:
    """delay(b) + l(b) as a table; entry 0 is -inf, so that an empty batch always fits."""
    return [-math.inf, *(run + lead for run, lead in zip(exec_times[1:], leads[1:], strict=True))]
