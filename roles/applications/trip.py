"""One request on its way through the graph: what is open, what was answered, and which way decided how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from policies.graphs.graph import Graph

Place = tuple[int, ...]
"""Which of the tasks after one answer, at each stage of the way from a root or a join."""


@dataclass(slots=True, eq=False)
class Leg:
    """A part of a way: from the moment on which a stage could start until one of its tasks was answered.

    `task` 0: nothing followed. `asked_at_ms`: from then on a model was asked, before that its inputs were made.
    """

    stage: str
    before: Leg | None
    begun_at_ms: float
    asked_at_ms: float
    ended_at_ms: float
    task: int = 0


class Lost(Struct, frozen=True):
    """What an optional stage lacks: so many of its tasks ended without outputs, or none of them could be asked. Why, of the last."""

    count: int
    code: str
    reason: str


@dataclass(slots=True, eq=False)
class Trip:
    """`open`: of each stage that was reached, its tasks and `Follow`s without an answer. `answered`: its answers, each with its place."""

    begun_at_ms: float
    deadline_at_ms: float
    open: dict[str, int] = field(default_factory=dict)
    tasks: set[int] = field(default_factory=set)
    follows: set[int] = field(default_factory=set)
    asked: dict[str, int] = field(default_factory=dict)
    asked_in_all: int = 0
    answered: dict[str, list[tuple[Place, int]]] = field(default_factory=dict)
    lost: dict[str, Lost] = field(default_factory=dict)
    last: Leg | None = None

    def lose(self, stage: str, tasks: int, code: str, reason: str) -> None:
        """So many tasks more of that stage have ended without outputs; 0: there is none to ask."""
        known = self.lost.get(stage)
        self.lost[stage] = Lost(tasks + (0 if known is None else known.count), code, reason)

    def tasks_of(self, stage: str) -> tuple[int, ...]:
        """Those that were answered, in the order of their places."""
        return tuple(task for _, task in sorted(self.answered.get(stage, ())))

    def results(self, graph: Graph) -> list[tuple[str, Place, int]]:
        """What the answer consists of: stage, place and task of each answer that the user gets."""
        return [
            (stage.name, place, task)
            for stage in graph.stages
            if stage.is_answer or not graph.successors[stage.name]
            for place, task in sorted(self.answered.get(stage.name, ()))
        ]

    def path(self) -> Sequence[Leg]:
        """The way that ended last, from its root on. Each leg begins when the one before it ends, so together they take all the time."""
        legs: list[Leg] = []
        leg = self.last
        while leg is not None:
            legs.append(leg)
            leg = leg.before
        return legs[::-1]
