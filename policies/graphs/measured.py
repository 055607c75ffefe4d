"""What a graph's stages were seen to take: how long requests waited, how long they ran, how many followed an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.graphs.graph import Graph

WEIGHT = 0.01  # of a new value in a mean: it remembers about the last hundred
WAITS_KEPT = 256  # of a stage, for quantiles


@dataclass(slots=True)
class StageTimes:
    """Of one stage: means, and its last waits."""

    run_ms: float
    waited_ms: float = 0.0
    waits_ms: deque[float] = field(default_factory=lambda: deque(maxlen=WAITS_KEPT))

    def wait_quantile_ms(self, fraction: float) -> float:
        """So long or less that part of the last requests waited; 0 before there were any."""
        ascending = sorted(self.waits_ms)
        return ascending[min(len(ascending) - 1, int(fraction * len(ascending)))] if ascending else 0.0


class Measured:
    """Of all stages of a graph. Before anything was seen a stage takes l(1) and has the fan-out that its user wrote."""

    def __init__(self, graph: Graph, run_ms: Mapping[str, float]) -> None:
        self.stages = {stage.name: StageTimes(run_ms[stage.name]) for stage in graph.stages}
        self.fan_outs = {stage.name: stage.fan_out for stage in graph.stages}

    def ran(self, stage: str, waited_ms: float, run_ms: float) -> None:
        """A request of the stage waited and ran for so long."""
        times = self.stages[stage]
        times.run_ms += WEIGHT * (run_ms - times.run_ms)
        times.waited_ms += WEIGHT * (waited_ms - times.waited_ms)
        times.waits_ms.append(waited_ms)

    def followed(self, stage: str, count: int) -> None:
        """So many requests of the stage followed one answer before it."""
        self.fan_outs[stage] += WEIGHT * (count - self.fan_outs[stage])
