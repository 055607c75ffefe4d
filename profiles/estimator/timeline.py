"""When each kernel of a batch runs, from its duration and what the host takes to launch it (Usher section 3.2).

One stream, torch's default: a kernel starts when its launch has come through and the one before has ended. With `branches`, as
Usher's paper has it, a kernel waits only for those whose results it takes, so parallel branches overlap; what overlaps
is found by a sweep over starts and ends (`profiles/occupancy.py`), not by the paper's "starts within 0.001 ms".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Streams = Literal["one", "branches"]


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel to be: `host_ms` is how long its launch keeps the host, `waits_for` are earlier ones by index."""

    duration_ms: float
    host_ms: float
    waits_for: tuple[int, ...] = ()


def starts_ms(kernels: Sequence[Timed], streams: Streams = "one") -> list[float]:
    """When each starts, from the first launch on."""
    launched_ms = 0.0
    starts: list[float] = []
    ends: list[float] = []
    for index, kernel in enumerate(kernels):
        launched_ms += kernel.host_ms
        if streams == "one":
            before = ends[index - 1] if index else 0.0
        else:
            before = max((ends[one] for one in kernel.waits_for), default=0.0)
        starts.append(max(launched_ms, before))
        ends.append(starts[-1] + kernel.duration_ms)
    return starts
