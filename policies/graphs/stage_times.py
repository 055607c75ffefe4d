"""What a graph's stages were seen to take: how long requests waited, how long they ran, how many followed an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.graphs.graph import Graph

WEIGHT = 0.01  # of a new value in a mean: it remembers about the last hundred


@dataclass(slots=True)
class StageTimes:
    """Of one stage: means."""

    run_ms: float
    waited_ms: float = 0.0


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

    def followed(self, stage: str, count: int) -> None:
        """So many requests of the stage followed one answer before it."""
        self.fan_outs[stage] += WEIGHT * (count - self.fan_outs[stage])
