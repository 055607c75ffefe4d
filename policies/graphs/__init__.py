"""Deadlines of applications: how one SLO rules the stages of a graph of models. Chosen by name (`graph_deadlines`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fabric.errors import ConfigError
from fabric.policy_options import Number, Schema, checked_options, shown, suggestion
from policies.graphs.deadline_rules import Carried, DeadlineRule, Pard, Split
from policies.graphs.fan_outs import FanOut as FanOut
from policies.graphs.graph import SEGMENTS, Budgets, Graph, RunTimes
from policies.graphs.stage_times import Measured

DEFAULT = "carried"
SEGMENTS_MAX = 5_000
"""The program looks at every pair of a stage's segments with those behind it."""
GRAPH_DEADLINES: Mapping[str, Schema] = {
    "carried": {},
    "nexus": {
        "segments": Number(SEGMENTS, minimum=2, maximum=SEGMENTS_MAX, is_minimum_allowed=True, is_whole=True)
    },
    "equal": {},
    "proportional": {},
    "pard": {},
}
"""The rules by name, with the options that each one knows."""
_SPLITTING = ("nexus", "equal", "proportional")


def rule_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a rule with the defaults filled in; ConfigError where name or options are wrong."""
    known = GRAPH_DEADLINES.get(name)
    if known is None:
        raise ConfigError(f"graph_deadlines: there is no {shown(name)}{suggestion(name, GRAPH_DEADLINES)}")
    return checked_options(known, given, f"graph_deadlines.{name}")


class ApplicationPlan(Struct, frozen=True):
    """What is known of an application before it starts. `gpus`: how many serve it. `segments`: into which `nexus` cuts the SLO.

    `run_ms`: l(b) by stage, on the slowest type of GPU; empty where a model has no profile: then budgets are equal ones, and `carried` goes by what is
    measured. `fastest_ms`: l(1) by stage on the fastest type; None: there is one type.
    """

    name: str
    graph: Graph
    slo_ms: float
    run_ms: RunTimes
    gpus: int
    fastest_ms: Mapping[str, float] | None = None
    segments: int = SEGMENTS

    @property
    def least_ms(self) -> dict[str, float]:
        """What nobody can undercut from the start of each stage to the end of the graph: l(1) of all that surely runs on the longest way.

        Nothing where run times are not known.
        """
        fastest_ms = self._fastest_ms
        behind_ms = self.graph.least_behind_ms(fastest_ms)
        return {name: fastest_ms[name] + behind_ms[name] for name in fastest_ms}

    @property
    def longest_ms(self) -> float:
        """The same of the longest way that there is, if all stages have requests; optional ones count only where it begins."""
        fastest_ms = self._fastest_ms
        needed_ms = {one.name: 0.0 if one.is_optional else fastest_ms[one.name] for one in self.graph.stages}
        behind_ms = self.graph.behind_ms(needed_ms)
        return max(fastest_ms[name] + behind_ms[name] for name in fastest_ms)

    @property
    def is_known(self) -> bool:
        """Whether the run times of all its models are."""
        return bool(self.run_ms)

    @property
    def _alone_ms(self) -> dict[str, float]:
        return {one.name: self.run_ms[one.name][0] if self.run_ms else 0.0 for one in self.graph.stages}

    @property
    def _fastest_ms(self) -> Mapping[str, float]:
        return self._alone_ms if self.fastest_ms is None else self.fastest_ms

    def budgets(self, rule: str) -> Budgets:
        """What `rule` plans for each stage; `carried` and `pard` may give a request more or less as it goes.

        Raises ConfigError where the graph or its SLO are not for that rule.
        """
        from policies.graphs.budgets import (  # noqa: PLC0415  NumPy: few roles have applications
            equal,
            nexus,
            pooled,
            proportional,
        )

        graph, demand = self.graph, self.graph.demand()
        if rule == "nexus" and not graph.is_tree:
            raise ConfigError(
                "graph_deadlines: nexus divides trees only, and a stage here comes after several others"
            )
        if rule == "equal" or not self.is_known:
            return equal(graph, self.slo_ms)
        found: Budgets | None = None
        if rule == "nexus":
            found = nexus(graph, self.slo_ms, self.run_ms, demand, self.segments)
        elif rule == "carried":
            found = pooled(graph, self.slo_ms, self.run_ms, demand, self.gpus)
        return found or proportional(graph, self.slo_ms, self.run_ms)

    def split(self, rule: str) -> Budgets | None:
        """Each stage's part of the SLO, in ms; None under a rule that does not split it. Raises as `budgets`."""
        return self.budgets(rule) if rule in _SPLITTING else None

    def rule(self, rule: str) -> tuple[DeadlineRule, Measured]:
        """The rule for a run from its beginning, and what it is to be told."""
        measured = Measured(self.graph, self._alone_ms)
        if rule == "carried" and self.is_known:
            return Carried(
                self.graph,
                self.slo_ms,
                self.run_ms,
                self.gpus,
                self.budgets(rule),
                self._fastest_ms,
                measured,
            ), measured
        if rule in ("carried", "pard"):
            return Pard(self.graph, measured), measured
        return Split(self.budgets(rule)), measured
