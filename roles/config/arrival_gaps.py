"""Gaps between requests as a placement's own simulation is to see them: as bursty as the file says."""

from __future__ import annotations

import random
from collections.abc import Iterator

_LEAST = 1e-9  # a gamma draw of a tiny shape may be 0, and time must go on


def drawn_gaps(process: str, shape: float, seed: str) -> Iterator[float]:
    """In mean gaps, without end. A trace, which nobody has looked at by then, counts as a Poisson process."""
    draw = random.Random(seed)
    if process == "uniform":
        shape = 0.0
    elif process != "gamma":
        shape = 1.0
    while True:
        yield max(_LEAST, draw.gammavariate(shape, 1.0 / shape)) if shape else 1.0
