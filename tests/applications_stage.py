"""A frontend's core with one application around stand-ins that answer for scheduler and worker: shared by tests of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import Answer, Arrivals, Refusal, TensorSpec
from policies.graphs import ApplicationPlan, FanOut
from policies.graphs.graph import Stage, graph_of
from roles.applications.served import GlueSpec, ServedApplication
from roles.frontend.core import FrontendCore
from roles.frontend.events import (
    Computed,
    FrontendAction,
    FrontendEvent,
    InputsMade,
    KeepRow,
    MadeInputs,
    MakeInputs,
    Release,
    Reply,
    ReplyWithAll,
    Tell,
    TurnEnded,
)
from roles.runtime.core import Handle, Tick
from tests.builders import asked, directory, frontend_settings, model_info

SPECS = (TensorSpec("image", "float32", (1, 8, 8)),)


def served(*stages: Stage, slo_ms: float = 100.0, rule: str = "carried") -> ServedApplication:
    """Named app; run times are not known, and data decide every fan-out."""
    graph = graph_of(stages)
    plan = ApplicationPlan("app", graph, slo_ms, {}, 1)
    fan_outs = {stage.name: FanOut("fixed", ((0.0, 1.0),)) for stage in stages}
    return ServedApplication(
        plan, fan_outs, rule, glue={stage.name: GlueSpec("a:B", 100.0) for stage in stages}
    )


class ApplicationStage:
    """Handles of payload are counted: what is kept must be given back, once. Answers and refusals are gathered by number."""

    def __init__(self, application: ServedApplication) -> None:
        self.application = application
        self.models = sorted({stage.model_id for stage in application.plan.graph.stages})
        self.core = FrontendCore(replace(frontend_settings(), applications=(application,)))
        self.jobs: list[MakeInputs] = []
        self.announced: list[tuple[ModelId, int]] = []
        self.told: list[object] = []
        self.answers: dict[int, Answer] = {}
        self.refusals: dict[int, Refusal] = {}
        self.finals: Counter[int] = Counter()
        self.kept: Counter[Handle] = Counter()
        self._next_handle = 1_000_000
        self.do(Tick(), 0.0)
        self.do(directory([model_info(str(name)) for name in self.models]), 0.0)

    def do(self, event: FrontendEvent, now_ms: float) -> Sequence[FrontendAction]:
        if isinstance(event, Computed):
            self.kept[event.payload] += 1
        actions = [*self.core.handle(event, now_ms)]
        if self.core.has_gathered:
            actions += self.core.handle(TurnEnded(), now_ms)
        for action in actions:
            match action:
                case MakeInputs():
                    self.jobs.append(action)
                case KeepRow(kept=kept):
                    self.kept[kept] += 1
                case Release(payload):
                    self.kept[payload] -= 1
                case ReplyWithAll(message=answer):
                    self.answers[answer.request_no] = answer
                    self.finals[answer.request_no] += 1
                case Reply(message=Refusal() as refusal):
                    self.refusals[refusal.request_no] = refusal
                    self.finals[refusal.request_no] += 1
                case Tell(message):
                    self.told.append(message)
                    if isinstance(message, Arrivals):
                        seqs = range(message.first_seq, message.first_seq + message.count)
                        self.announced += [(message.model_id, seq) for seq in seqs]
                case _:
                    pass
        return actions

    def ask(self, number: int, now_ms: float, budget_ms: float | None = None, way_ms: float = 0.0) -> None:
        event = asked(number, "app", budget_ms, specs=SPECS, way_ms=way_ms)
        self.kept[event.payload] += 1
        self.do(event, now_ms)

    def make(self, job: MakeInputs, count: int, now_ms: float) -> None:
        """So many requests of that stage follow."""
        self.jobs.remove(job)
        made = []
        for _ in range(count):
            self._next_handle += 1
            self.kept[Handle(self._next_handle)] += 1
            made.append(MadeInputs(Handle(self._next_handle), SPECS, 256))
        self.do(InputsMade(job.job, made), now_ms)

    def job(self, stage: str) -> MakeInputs:
        return next(one for one in self.jobs if one.stage == stage)

    def take(self, wanted: Callable[[ModelId], bool] = lambda _: True) -> tuple[ModelId, int]:
        """The first that was announced, of those models."""
        found = next(one for one in self.announced if wanted(one[0]))
        self.announced.remove(found)
        return found
