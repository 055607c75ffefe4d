"""How many requests of a stage follow an answer before it: written by the user, or drawn where nothing decides it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct

from policies.graphs.graph import FAN_OUT_MAX


class FanOut(Struct, frozen=True):
    """`process` is fixed | poisson | share.

    `steps` are (from_ms, value), ascending from 0: the number, the mean, or the part of the answers that one request follows.
    `source`: the output of the stage before that decides it in a living cluster; the process is what is expected of it.
    """

    process: str
    steps: tuple[tuple[float, float], ...]
    source: str | None = None

    @property
    def may_be_none(self) -> bool:
        """Whether an answer may have no request after it."""
        return self.process != "fixed" or self.source is not None

    def mean(self, at_ms: float) -> float:
        """On average, at a moment from the start of the run."""
        return next(value for from_ms, value in reversed(self.steps) if from_ms <= at_ms)

    def count(self, uniform: float, at_ms: float) -> int:
        """How many for a draw from 0 to 1; at most `FAN_OUT_MAX`."""
        mean = self.mean(at_ms)
        if self.process == "fixed":
            return int(mean)
        if self.process == "share":
            return int(uniform < mean)
        # The smallest count whose probability of as many or fewer reaches the draw.
        count, term = 0, math.exp(-mean)
        reached = term
        while reached < uniform and count < FAN_OUT_MAX:
            count += 1
            term *= mean / count
            reached += term
        return count


def moments_ms(fan_outs: Iterable[FanOut]) -> list[float]:
    """From the start of the run on, those at which one of them changes."""
    return sorted({0.0, *(from_ms for one in fan_outs for from_ms, _ in one.steps)})


def means(fan_outs: Mapping[str, FanOut], at_ms: float) -> dict[str, float]:
    """By stage, `FanOut.mean` at that moment."""
    return {stage: fan_out.mean(at_ms) for stage, fan_out in fan_outs.items()}
