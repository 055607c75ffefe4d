"""By when a stage's request should be done: what its scheduler is told as its deadline.

Batching disciplines know nothing of graphs. To them a stage's request is a request with a budget, and a rule here
says how large that is. A request that nobody can bring to its end any more is given up by whoever runs the graph, whatever the
rule says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from policies.graphs.graph import Budgets, Graph, RunTimes
from policies.graphs.stage_times import Measured

EPOCH_MS = 1_000.0
"""Between two looks of `carried` at what has been measured."""
_EXPECTED = 0.7
"""Of what stages behind may take that much is kept for them. Runs are half of a budget, waits come anywhere in the other half. With
more of it a stage loses what those behind it could have made good, with less they lose what was paid for."""
_DRIFT = 0.05  # of a stage's demand is worth a new plan


class DeadlineRule(Protocol):
    """Of one application."""

    def due_at_ms(
        self, stage: str, deadline_at_ms: float, now_ms: float, budget_ms: float = math.inf
    ) -> float:
        """When a request of `stage` that starts now should be done, of a request of the application with that deadline.

        `budget_ms`: what that had when it came.
        """
        ...


class Split:
    """Every stage has its own budget from when it starts; what a stage did not use is lost to those behind it."""

    def __init__(self, budgets_ms: Mapping[str, float]) -> None:
        self._budgets_ms = budgets_ms

    def due_at_ms(
        self, stage: str, deadline_at_ms: float, now_ms: float, budget_ms: float = math.inf
    ) -> float:
        """See `DeadlineRule`."""
        del budget_ms
        return min(deadline_at_ms, now_ms + self._budgets_ms[stage])


class Carried:
    """One deadline is carried through the graph; each stage leaves those behind it what they are expected to need.

    What they need is planned for the fan-outs that are measured now, as if all GPUs were busy (`pooled`). A plan's budgets
    are for the longest waits that it allows; `_EXPECTED` of them is left. The shorter than the SLO a request's own budget is, the
    less is left, down to what surely runs there (`fastest_ms`: l(1) by stage): otherwise an idle cluster would refuse it.
    """

    def __init__(
        self,
        graph: Graph,
        slo_ms: float,
        run_ms: RunTimes,
        gpus: float,
        budgets_ms: Budgets,
        fastest_ms: Mapping[str, float],
        measured: Measured,
    ) -> None:
        self._graph = graph
        self._slo_ms = slo_ms
        self._run_ms = run_ms
        self._gpus = gpus
        self._measured = measured
        self._demand = graph.demand()
        self._least_behind_ms = graph.least_behind_ms(fastest_ms)
        self._behind_ms = graph.behind_ms(budgets_ms)
        self._longest_ms = graph.longest_ms(fastest_ms)
        self._looked_at_ms = 0.0

    def due_at_ms(
        self, stage: str, deadline_at_ms: float, now_ms: float, budget_ms: float = math.inf
    ) -> float:
        """See `DeadlineRule`."""
        if now_ms >= self._looked_at_ms + EPOCH_MS:
            self._looked_at_ms = now_ms
            self._follow()
        least_ms = self._least_behind_ms[stage]
        wait_ms = max(0.0, _EXPECTED * self._behind_ms[stage] - least_ms)
        if budget_ms < self._slo_ms:  # of what the plan has beyond runs of one the request has this part
            wait_ms *= max(0.0, budget_ms - self._longest_ms) / (
                self._slo_ms - min(self._longest_ms, budget_ms)
            )
        return deadline_at_ms - least_ms - wait_ms

    def _follow(self) -> None:
        demand = self._graph.demand(self._measured.fan_outs)
        if all(abs(demand[name] - known) <= _DRIFT * known for name, known in self._demand.items()):
            return
        from policies.graphs.budgets import pooled  # noqa: PLC0415  NumPy: few roles have applications

        budgets_ms = pooled(self._graph, self._slo_ms, self._run_ms, demand, self._gpus)
        if budgets_ms is not None:
            self._demand, self._behind_ms = demand, self._graph.behind_ms(budgets_ms)


class Pard:
    """PARD's estimate of what is behind a stage (Zhao et al. 2026): the longest way of mean waits and run times measured there.

    A stage's request is given up early if it could be done in time here, but the end could not.
    """

    def __init__(self, graph: Graph, measured: Measured) -> None:
        self._graph = graph
        self._measured = measured
        self._behind_ms: dict[str, float] = {}
        self._looked_at_ms = float("-inf")

    def due_at_ms(
        self, stage: str, deadline_at_ms: float, now_ms: float, budget_ms: float = math.inf
    ) -> float:
        """See `DeadlineRule`."""
        del budget_ms
        if now_ms >= self._looked_at_ms + _STATE_MS:
            self._looked_at_ms = now_ms
            takes_ms = {name: one.waited_ms + one.run_ms for name, one in self._measured.stages.items()}
            self._behind_ms = self._graph.behind_ms(takes_ms)
        return deadline_at_ms - self._behind_ms[stage]


_STATE_MS = 100.0  # how old a stage's knowledge of those behind it may be
