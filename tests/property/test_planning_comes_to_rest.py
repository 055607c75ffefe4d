"""Whatever goes and comes while plans are made and moves run: once all is calm, every GPU hosts what is wanted there.

Beside the plans stands what `symphony` says in one sentence: every GPU that is not drained hosts every model.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.ids import Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    Changed,
    DrainAsked,
    ModelsRemove,
    NodeHello,
    PlanAsked,
    PlanChange,
    PlanMade,
    SliceChanged,
    SliceStatus,
)
from roles.runtime.core import PLANNER, Lost
from roles.scheduler.planning.make_plan import make_plan
from tests.unit.roles.scheduler.test_controller import FIRST, OPERATOR, Stage, add, model

NODES = ("left", "right", "more")
ADDED = ("x", "y")
WAITS_MS = (1.0, 100.0, 600.0, 3_000.0, 12_000.0, 45_000.0)
CALM_MS = 2_400_000.0  # what was given up many times in a row is planned again every eight minutes


class Cluster(Stage):
    """Agents with incarnations, a planner that answers when it is told to, and slices that start when they are told to."""

    def __init__(self) -> None:
        self.agents: dict[NodeId, int] = {}
        self.is_planner_slow = False
        self.asked_last: PlanAsked | None = None
        self.models = {"a"}
        self.drained: set[NodeId] = set()
        self.changes: dict[int, PlanChange] = {}
        super().__init__(model("a"), nodes=[{"host": host} for host in NODES], placement="symphony")
        self.make_plan = self._plan

    def agent(self, node_id: NodeId) -> PeerId:
        return PeerId(f"node-{node_id}/{self.agents[node_id]:08x}")

    def node_comes(self, host: str) -> None:
        node_id = NodeId(host)
        if node_id in self.running:
            return
        self.agents[node_id] = self.agents.get(node_id, 0) + 1
        self.running[node_id] = {}
        incarnation = Incarnation(f"{self.agents[node_id]:08x}")
        self.hear(self.agent(node_id), NodeHello(node_id, incarnation, (), ()))

    def node_goes(self, host: str) -> None:
        node_id = NodeId(host)
        if self.running.pop(node_id, None) is not None:
            self.take(self.core.handle(Lost(self.agent(node_id), "silent"), self.now_ms))

    def _plan(self, asked: PlanAsked) -> PlanMade:
        if not self.is_planner_slow:
            return make_plan(asked)
        self.asked_last = asked
        return PlanMade(0)  # of another question: the core waits on

    def planner_answers(self, *, is_in_time: bool) -> None:
        asked, self.asked_last = self.asked_last, None
        if asked is not None:
            made = make_plan(asked) if is_in_time else PlanMade(asked.number, reason="not within 60 s")
            self.hear(PLANNER, made)

    def slices_start(self) -> None:
        for node_id, hosted in self.running.items():
            for spec in list(hosted.values()):
                self.start(node_id, spec)

    def slice_dies(self, draw: random.Random) -> None:
        """Its agent starts it again, now or with the others."""
        there = [(node_id, slice_id) for node_id, hosted in self.running.items() for slice_id in hosted]
        if there:
            node_id, slice_id = draw.choice(there)
            self.says_of(node_id, slice_id, draw.choice(("lost", "lost", "failed")))
            spec = self.running.get(node_id, {}).get(slice_id)
            if spec is not None and not self.is_starting_slow:
                self.start(node_id, spec)

    def says_of(self, node_id: NodeId, slice_id: SliceId, state: str) -> None:
        status = SliceStatus(slice_id, FIRST, state, "killed")
        self.hear(self.agent(node_id), SliceChanged(node_id, status))

    def ask(self, change: PlanChange) -> None:
        change = replace(change, request_no=len(self.changes) + 1)
        self.changes[change.request_no] = change
        self.hear(OPERATOR, change)

    def answers(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {number: [] for number in self.changes}
        for send in self.sent:
            if isinstance(send.message, Changed):
                found[send.message.request_no].append(send.message.status)
        return found


def step(on: Cluster, kind: str, draw: random.Random) -> None:
    match kind:
        case "run":
            on.run(draw.choice(WAITS_MS))
        case "goes":
            on.node_goes(draw.choice(NODES))
        case "comes":
            on.node_comes(draw.choice(NODES))
        case "planner":
            on.is_planner_slow = draw.random() < 0.5
            on.planner_answers(is_in_time=draw.random() < 0.5)
        case "starts":
            on.is_starting_slow = draw.random() < 0.5
            if not on.is_starting_slow:
                on.slices_start()
        case "dies":
            on.slice_dies(draw)
        case "fails":
            on.failing = set(draw.sample(ADDED, draw.randint(0, 2)))
        case "change":
            node_id, name = NodeId(draw.choice(NODES)), draw.choice(ADDED)
            changes = (
                DrainAsked(0, node_id, is_back=draw.random() < 0.5),
                add(name),
                ModelsRemove(0, (ModelId(name),)),
            )
            on.ask(draw.choice(changes))


KINDS = ("run", "run", "goes", "comes", "comes", "planner", "planner", "starts", "dies", "fails", "change")


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**16)), max_size=40))
@settings(max_examples=60)
def test_once_all_is_calm_every_gpu_hosts_what_is_wanted_and_every_change_is_answered_once(
    script: list[tuple[str, int]],
) -> None:
    on = Cluster()
    for kind, number in script:
        step(on, kind, random.Random(number))
    on.is_planner_slow, on.is_starting_slow, on.failing = False, False, set()
    on.planner_answers(is_in_time=True)
    for host in NODES:
        on.node_comes(host)
    on.slices_start()
    on.run(CALM_MS)
    controller = on.scheduler.controller
    assert controller is not None
    assert controller.is_steady
    assert all(len(statuses) == 1 for statuses in on.answers().values()), on.answers()
    desired = controller.settings().desired
    wanted = sorted(desired.model_ids)
    assert "a" in wanted
    drained = {ref.node_id for ref in desired.drained}
    assert len(drained) < len(NODES)
    hosted = {slice_id.partition("/")[0]: models for slice_id, models in on.hosted().items()}
    assert hosted == {host: wanted for host in NODES if host not in drained}
    assert [on.code_of(name) for name in wanted] == [""] * len(wanted)
