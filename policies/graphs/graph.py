"""A graph of models: one request of an application asks several of them, one after another or side by side.

A *stage* asks one model. A stage with one predecessor starts `fan_out` requests whenever a request of the
predecessor is answered. One with several predecessors, a *join*, starts once all of them are done with this request of the
application. One without any, a *root*, starts when the request comes. Stages that none comes after are leaves; the
request is answered when all that was started is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from msgspec import Struct

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.policy_options import shown, suggestion

RunTimes = Mapping[str, Sequence[float]]
"""By stage: l(b) of its model at index b - 1, never falling."""
Budgets = dict[str, float]
"""By stage: ms."""
SEGMENTS = 500
"""Of an SLO that is cut into budgets: Nexus' own example has as many."""
STAGES_MAX = 64
FAN_OUT_MAX = 64
"""Requests of one stage that one answer may start. What is drawn beyond them is cut off; data or a glue that asks for more is an error."""
REQUESTS_MAX = 1024
"""Requests of all stages that one request of an application may come to, expected and in any single case."""


class Stage(Struct, frozen=True):
    """One model in a graph. `fan_out`: how many requests of it one answer before it starts, on average; with `may_be_none` perhaps none.

    `is_optional`: a request does without what this stage does not answer. `is_answer`: its outputs are in the answer, though stages come after it.
    """

    name: str
    model_id: ModelId
    after: tuple[str, ...] = ()
    fan_out: float = 1.0
    is_optional: bool = False
    is_answer: bool = False
    may_be_none: bool = False


@dataclass(slots=True, frozen=True)
class Graph:
    """Checked stages, predecessors first. Made by `graph_of`."""

    stages: tuple[Stage, ...]
    successors: Mapping[str, tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        following = {
            one.name: tuple(other.name for other in self.stages if one.name in other.after)
            for one in self.stages
        }
        object.__setattr__(self, "successors", following)

    @property
    def is_tree(self) -> bool:
        """Whether no stage is a join; of several roots each has a tree of its own."""
        return all(len(stage.after) <= 1 for stage in self.stages)

    def stage(self, name: str) -> Stage:
        """The stage of that name, which must be there."""
        return next(stage for stage in self.stages if stage.name == name)

    @property
    def always_asked(self) -> tuple[Stage, ...]:
        """Those that no request does without: others are optional, may have no request, or come after such a one alone.

        A join behind it starts all the same.
        """
        found: dict[str, Stage] = {}
        for stage in self.stages:
            starts = len(stage.after) != 1 or stage.after[0] in found
            if starts and not stage.is_optional and not stage.may_be_none:
                found[stage.name] = stage
        return tuple(found.values())

    def demand(self, fan_outs: Mapping[str, float] | None = None) -> dict[str, float]:
        """How many requests of each stage one request of the application comes to, on average.

        `fan_outs`: measured ones, where they differ from the stages' own.
        """
        found: dict[str, float] = {}
        for stage in self.stages:
            fan_out = stage.fan_out if fan_outs is None else fan_outs.get(stage.name, stage.fan_out)
            # A join starts once however many requests came before it.
            before = found[stage.after[0]] if len(stage.after) == 1 else 1.0
            found[stage.name] = before * fan_out
        return found

    def behind_ms(self, times_ms: Mapping[str, float]) -> dict[str, float]:
        """The longest way from the end of each stage to the end of the graph, if each stage takes its time of `times_ms`."""
        found: dict[str, float] = {}
        for stage in reversed(self.stages):
            found[stage.name] = max(
                (times_ms[name] + found[name] for name in self.successors[stage.name]), default=0.0
            )
        return found

    def least_behind_ms(self, times_ms: Mapping[str, float]) -> dict[str, float]:
        """As `behind_ms`, but of what surely runs once the stage has answered.

        A stage that is optional or may have no request may be left out, and with it what comes after it alone. A join
        behind it starts all the same.
        """
        by_name = {stage.name: stage for stage in self.stages}
        behind: dict[str, float] = {}
        left_out: dict[str, float] = {}  # the longest way behind a stage that has not run
        for stage in reversed(self.stages):
            after = [by_name[name] for name in self.successors[stage.name]]
            least = {
                one.name: left_out[one.name]
                if one.is_optional or one.may_be_none
                else times_ms[one.name] + behind[one.name]
                for one in after
            }
            behind[stage.name] = max(least.values(), default=0.0)
            left_out[stage.name] = max(
                (least[one.name] if len(one.after) > 1 else left_out[one.name] for one in after), default=0.0
            )
        return behind

    def through_ms(self, times_ms: Mapping[str, float]) -> dict[str, float]:
        """The longest way through the whole graph that leads over each stage."""
        before: dict[str, float] = {}
        for stage in self.stages:
            before[stage.name] = max((before[name] + times_ms[name] for name in stage.after), default=0.0)
        behind = self.behind_ms(times_ms)
        return {name: before[name] + times_ms[name] + behind[name] for name in before}

    def longest_ms(self, times_ms: Mapping[str, float]) -> float:
        """The longest way through the graph."""
        return max(self.through_ms(times_ms).values())


def graph_of(stages: Sequence[Stage], moments: Sequence[Mapping[str, float]] = ({},)) -> Graph:
    """A graph of stages in any order. `moments`: the fan-outs at each at which one changes; without them those of the stages hold throughout.

    Raises ConfigError, whose message begins with the stage, for a predecessor that is not there or named twice, a circle, too many
    stages, too many requests or none.
    """
    if not stages:
        raise ConfigError("stages: is empty; it must have at least one stage")
    if len(stages) > STAGES_MAX:
        raise ConfigError(f"stages: has {len(stages)} stages; it must have at most {STAGES_MAX}")
    by_name = {stage.name: stage for stage in stages}
    for stage in stages:
        for name in stage.after:
            if name not in by_name:
                raise ConfigError(
                    f"stages.{stage.name}.after: there is no stage {shown(name)}{suggestion(name, list(by_name))}"
                )
        if len(set(stage.after)) < len(stage.after):
            raise ConfigError(f"stages.{stage.name}.after: names a stage twice")
    try:
        order = TopologicalSorter({stage.name: stage.after for stage in stages}).static_order()
        graph = Graph(tuple(by_name[name] for name in order))
    except CycleError as error:
        circle: list[str] = list(reversed(error.args[1]))  # each is followed by one that comes after it
        raise ConfigError(
            f"stages.{circle[0]}.after: is a circle: {' after '.join(circle)}; a stage cannot wait for itself"
        ) from error
    total = max(sum(graph.demand(fan_outs).values()) for fan_outs in moments)
    if not total:
        raise ConfigError("stages: one request never comes to a request of any model; it must come to some")
    if total > REQUESTS_MAX:
        raise ConfigError(
            f"stages: one request comes to {total:,.0f} requests of models; it must come to at most {REQUESTS_MAX:,}"
        )
    return graph
