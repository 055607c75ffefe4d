"""Plans that change while the scheduler serves, on virtual time: a core, its planner, and agents that obey."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.codec import checked
from fabric.ids import FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    LEAVING_TERM,
    AnyMessage,
    Arrivals,
    Changed,
    ChangedSlice,
    DesiredSlices,
    Directory,
    Done,
    DrainAsked,
    Dropped,
    FrontendHello,
    GpuRef,
    Left,
    LeftOut,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    MoveInfo,
    NewSlice,
    NodeHello,
    Parcel,
    PlanAsked,
    PlanChange,
    PlanCopy,
    PlanMade,
    ReplicaHint,
    ReplicaInfo,
    RunBatch,
    SeqRun,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceStatus,
    StatusAsked,
    StatusListed,
)
from roles.config.cluster import ClusterConfig, PolicyChoice
from roles.config.read_config import parse_config
from roles.runtime.core import PLANNER, Heard, Lost, Send, Tick
from roles.runtime.journal import Journal, MessageCore, Recorded, replay
from roles.scheduler.build import scheduler_core
from roles.scheduler.core import SchedulerCore
from roles.scheduler.planning.carried_over import carried_over
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.planning.make_plan import make_plan
from roles.scheduler.planning.saved_plan import Begun, SavedPlan
from roles.scheduler.replay_start import about_scheduler, scheduler_from, settings_of
from roles.scheduler.settings import settings_from

FIRST = Incarnation("00000001")
FRONTEND, OPERATOR = PeerId("frontend-0/00000001"), PeerId("operator/bbbbbbbb")
LINE = {"alpha_ms": 1.0, "beta_ms": 5.0, "max_batch": 8}


def model(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "slo_ms": 100, "rate_rps": 20, "profile": LINE, **more}


class Stage:
    """One scheduler core with everything around it. `failing` models do not load. `ran`: the stage of the file before.

    `takes_over`: that of the same file; it goes on from what the former one wrote down. `elsewhere`: models of its other shards.
    `measured_ms`: what workers say of a model, instead of its profile.
    """

    def __init__(
        self,
        *models: dict[str, Any],
        nodes: Sequence[dict[str, Any]],
        placement: str | Mapping[str, Any],
        recorded_in: Path | None = None,
        ran: Stage | None = None,
        takes_over: bool = False,
        elsewhere: Sequence[str] = (),
        measured_ms: tuple[float, ...] = (),
    ) -> None:
        self.measured_ms = measured_ms
        document: dict[str, Any] = {"models": list(models), "cluster": {"nodes": list(nodes)}}
        document |= {"placement": placement, "batching": "eager"}
        config = parse_config(document, Path())
        placed = config.place()
        settings = settings_from(config, placed)
        planning = controller_settings(config, document, "", placed, settings)
        self.batching = config.batching
        if ran is not None:
            assert ran.scheduler.controller is not None
            wrote = ran.scheduler.controller.settled_plan()
            about = about_scheduler(wrote.settings, ran.batching, wrote.planning)
            settings, _, before = settings_of(about)
            assert before is not None
            found: Begun | None = settings, before
            if not takes_over:
                ids = tuple(map(ModelId, elsewhere))
                found = carried_over(config, document, Path(), (settings, before), ids)
            assert found is not None
            settings, planning = found
        self.scheduler: SchedulerCore = scheduler_core(settings, config.batching, planning)
        self.core: MessageCore = self.scheduler
        self.journal: Journal | None = None
        if recorded_in is not None:
            self.journal = Journal(recorded_in, about_scheduler(settings, config.batching, planning))
            self.core = Recorded(self.scheduler, self.journal)
        self.now_ms = 0.0
        self.failing: set[str] = set()
        self.given_up: dict[SliceId, SliceSpec] = {}
        """What the agents do not start again as it is."""
        self.is_starting_slow = False
        self.make_plan: Callable[[PlanAsked], PlanMade] = make_plan
        self.running: dict[NodeId, dict[SliceId, SliceSpec]] = {}
        self.sent: list[Send] = []
        self.asked: list[PlanAsked] = []
        self.under_way: deque[Send] = deque()
        self.is_delivering = False
        self.hear(FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",)))
        self.ended: set[SliceId] = set()
        for node in nodes:
            if ran is None or node["host"] not in ran.running:
                self.node_comes(node["host"])
            else:
                self.node_goes_on(NodeId(node["host"]), ran.running[NodeId(node["host"])])

    def agent(self, node_id: NodeId) -> PeerId:
        return PeerId(f"node-{node_id}/{FIRST}")

    def node_goes_on(self, node_id: NodeId, hosted: dict[SliceId, SliceSpec]) -> None:
        """With what it ran for a former scheduler."""
        self.running[node_id] = dict(hosted)
        statuses = tuple(SliceStatus(slice_id, FIRST, "ready") for slice_id in hosted)
        self.hear(self.agent(node_id), NodeHello(node_id, FIRST, (), statuses))
        for spec in hosted.values():
            self.start(node_id, spec)

    def node_comes(self, host: str) -> None:
        self.running[NodeId(host)] = {}
        self.hear(self.agent(NodeId(host)), NodeHello(NodeId(host), FIRST, (), ()))

    def node_goes(self, host: str) -> None:
        del self.running[NodeId(host)]
        self.take(self.core.handle(Lost(self.agent(NodeId(host)), "silent"), self.now_ms))

    def hear(self, peer: PeerId, message: AnyMessage) -> None:
        self.take(self.core.handle(Heard(peer, message), self.now_ms))

    def take(self, actions: Sequence[Send]) -> None:
        self.under_way.extend(actions)
        if self.is_delivering:
            return  # in the order in which it was sent
        self.is_delivering = True
        while self.under_way:
            action = self.under_way.popleft()
            checked(Parcel((), action.message))  # by the codec, which every message passes
            self.sent.append(action)
            if isinstance(action.message, PlanAsked):
                self.asked.append(action.message)
                made = self.make_plan(action.message)
                checked(Parcel((), made))
                self.hear(PLANNER, made)
            elif isinstance(action.message, DesiredSlices):
                self.obey(action.peer, action.message)
        self.is_delivering = False

    def obey(self, peer: PeerId, want: DesiredSlices) -> None:
        node_id = NodeId(peer.partition("/")[0].removeprefix("node-"))
        wanted = {spec.slice_id: spec for spec in want.slices}
        hosted = self.running[node_id]
        for slice_id in hosted.keys() - wanted.keys():
            self.ended.add(slice_id)
            del hosted[slice_id]
        for slice_id, spec in wanted.items():
            if spec == hosted.get(slice_id) == self.given_up.get(slice_id):
                self.fail(node_id, spec, "it failed")
        for spec in [spec for slice_id, spec in wanted.items() if hosted.get(slice_id) != spec]:
            hosted[spec.slice_id] = spec
            if not self.is_starting_slow:
                self.start(node_id, spec)

    def fail(self, node_id: NodeId, spec: SliceSpec, reason: str) -> None:
        """Each time that it is wanted as it is its agent says so again."""
        self.given_up[spec.slice_id] = spec
        self.hear(
            self.agent(node_id),
            SliceChanged(node_id, SliceStatus(spec.slice_id, FIRST, "failed", reason)),
        )

    def start(self, node_id: NodeId, spec: SliceSpec) -> None:
        broken = [one.model_id for one in spec.models if one.model_id in self.failing]
        if len(broken) == len(spec.models):
            self.fail(node_id, spec, f"{broken[0]} does not load")
            return
        replicas = tuple(
            ReplicaInfo(one.model_id, len(exec_ms), exec_ms)
            for one in spec.models
            for exec_ms in (self.measured_ms or one.exec_ms,)
            if one.model_id not in broken
        )
        left_out = tuple(LeftOut(spec.slice_id, model_id, f"{model_id} does not load") for model_id in broken)
        ready = SliceReady(spec.slice_id, FIRST, node_id, spec.gpu, ("ipc:///w",), replicas, left_out)
        self.hear(PeerId(f"worker-{node_id}-0/00000001"), ready)

    def run(self, for_ms: float) -> None:
        until_ms = self.now_ms + for_ms
        while self.core.wake_at_ms is not None and self.core.wake_at_ms <= until_ms:
            self.now_ms = max(self.now_ms, self.core.wake_at_ms)
            self.take(self.core.handle(Tick(), self.now_ms))
        self.now_ms = until_ms

    def hosted(self) -> dict[str, list[str]]:
        """What the agents run."""
        return {
            slice_id: sorted(one.model_id for one in spec.models)
            for hosted in self.running.values()
            for slice_id, spec in hosted.items()
        }

    def answer(self) -> Changed:
        (found,) = [one.message for one in self.sent if isinstance(one.message, Changed)]
        return found

    def status(self) -> StatusListed:
        self.hear(OPERATOR, StatusAsked())
        listed = self.sent[-1].message
        assert isinstance(listed, StatusListed)
        return listed

    def code_of(self, name: str) -> str:
        """How a request of that model is refused; empty: it is not."""
        self.sent.clear()
        self.hear(FRONTEND, Arrivals(ModelId(name), 0, 1, 100.0))
        codes = [one.message.code for one in self.sent if isinstance(one.message, Dropped)]
        return codes[0] if codes else ""


def two_nodes(*models: dict[str, Any], placement: str = "exclusive") -> Stage:
    return Stage(*models, nodes=[{"host": "left"}, {"host": "right"}], placement=placement)


def add(name: str) -> ModelsAdd:
    return ModelsAdd(1, f'[{{"name": "{name}", "slo_ms": 100, "profile": {{"alpha_ms": 1, "beta_ms": 5}}}}]')


def test_a_model_that_is_added_is_served_when_its_slice_is_ready() -> None:
    stage = two_nodes(model("a"))
    assert stage.code_of("b") == "ModelNotFound"
    stage.is_starting_slow = True
    stage.hear(OPERATOR, add("b"))
    assert stage.code_of("b") == "NoReplica"
    stage.start(NodeId("right"), stage.running[NodeId("right")][SliceId("right/gpu0/0")])
    assert stage.code_of("b") == "", "from that moment"
    stage.run(10)
    assert stage.answer().status == "ok"
    assert stage.hosted() == {"left/gpu0/0": ["a"], "right/gpu0/0": ["b"]}


def test_a_removed_model_is_refused_from_that_moment_and_what_waits_too() -> None:
    stage = two_nodes(model("a"), model("b"))
    stage.run(2)
    for number in range(3):  # the first is a batch at once
        stage.hear(FRONTEND, Arrivals(ModelId("b"), number, 1, 100.0))
    stage.sent.clear()
    stage.hear(OPERATOR, ModelsRemove(1, (ModelId("b"),)))
    dropped = [one.message for one in stage.sent if isinstance(one.message, Dropped)]
    assert [(one.code, one.runs) for one in dropped] == [("ModelNotFound", (SeqRun(1, 2),))]
    assert stage.hosted().keys() == {"left/gpu0/0", "right/gpu0/0"}, "its batches are not over"
    assert stage.code_of("b") == "ModelNotFound"
    stage.run(20_000)
    assert stage.hosted() == {"left/gpu0/0": ["a"]}


def test_an_old_slice_ends_after_its_last_batch_and_gets_no_more() -> None:
    stage = two_nodes(model("a"), placement="symphony")
    stage.run(2)
    for number in range(2):
        stage.hear(FRONTEND, Arrivals(ModelId("a"), number, 1, 100.0))
    (old,) = {one.message.slice_id for one in stage.sent if isinstance(one.message, RunBatch)} - {
        SliceId("right/gpu0/0")
    }
    batches = [one.message for one in stage.sent if isinstance(one.message, RunBatch)]
    stage.sent.clear()
    stage.hear(OPERATOR, DrainAsked(1, NodeId("left")))
    stage.run(1_000)
    assert old in stage.hosted(), "a batch is in flight"
    for number in range(2, 6):
        stage.hear(FRONTEND, Arrivals(ModelId("a"), number, 1, 100.0))
    later = {one.message.slice_id for one in stage.sent if isinstance(one.message, RunBatch)}
    assert later <= {SliceId("right/gpu0/0")}
    for batch in batches:
        done = Done(batch.batch_id, batch.slice_id, batch.model_id, "ok", 1, (), 0.0, 0.0, 6.0)
        node = batch.slice_id.partition("/")[0]
        stage.hear(PeerId(f"worker-{node}-0/00000001"), done)
    stage.run(1_000)
    assert stage.hosted() == {"right/gpu0/0": ["a"]}
    directory = [one.message for one in stage.sent if isinstance(one.message, Directory)][-1]
    assert {one.slice_id for one in directory.slices} == stage.hosted().keys()


def test_a_move_that_fails_leaves_everything_as_it_was() -> None:
    stage = two_nodes(model("a"), placement="symphony")
    stage.failing = {"b"}
    before = stage.hosted()
    stage.hear(OPERATOR, add("b"))
    stage.run(1_000)
    assert stage.answer().status == "failed"
    assert "b does not load" in stage.answer().reason
    assert stage.hosted() == before
    assert stage.code_of("a") == ""
    assert stage.code_of("b") == "ModelNotFound"
    plan = stage.status().plan
    assert plan is not None
    assert (plan.moves_done, plan.moves_failed, plan.state) == (0, 1, "steady")


def test_models_move_off_a_node_that_stays_away_and_back_when_it_returns() -> None:
    stage = two_nodes(model("a"), model("b"), placement="symphony")
    stage.run(2_000)
    stage.node_goes("right")
    stage.run(5_000)
    assert stage.asked == [], "it may only have been started again"
    stage.run(10_000)
    assert [ref.node_id for ref in stage.asked[-1].gpus_out] == ["right"]
    assert stage.scheduler.controller is not None
    played = stage.scheduler.controller.settings_played()
    assert played.desired.drained == {GpuRef(NodeId("right"), 0)}, "for a simulator it is as good as drained"
    assert stage.scheduler.controller.settings().desired.drained == set()
    assert stage.hosted() == {"left/gpu0/0": ["a", "b"]}
    stage.node_comes("right")
    stage.run(2_000)
    assert stage.hosted() == {"left/gpu0/0": ["a", "b"], "right/gpu0/1": ["a", "b"]}


def test_a_drained_gpu_stays_empty_until_it_is_taken_back() -> None:
    stage = two_nodes(model("a"), placement="symphony")
    stage.hear(OPERATOR, DrainAsked(1, NodeId("left")))
    stage.run(1_000)
    assert stage.hosted() == {"right/gpu0/0": ["a"]}
    plan = stage.status().plan
    assert plan is not None
    assert plan.drained == (GpuRef(NodeId("left"), 0),)
    stage.sent.clear()
    stage.hear(OPERATOR, DrainAsked(2, NodeId("left"), is_back=True))
    stage.run(1_000)
    assert stage.answer().status == "ok"
    plan = stage.status().plan
    assert plan is not None
    assert plan.drained == ()
    assert stage.hosted().keys() == {"right/gpu0/0", "left/gpu0/1"}


def started_anew(asked: PlanAsked) -> PlanMade:
    """The plan where there is no memory for both."""
    made = make_plan(asked)
    ((change,),) = [move.changes for move in made.moves]
    spec = SliceSpec(SliceId(""), 0, "emulated", None, change.models)
    start = NewSlice(NodeId("left"), spec, change.hints, (change.slice_id,))
    return replace(made, moves=(MoveInfo(0, (start,), (change.slice_id,)),))


def test_where_there_is_no_memory_for_both_the_old_slice_ends_first() -> None:
    stage = one_slice("a")
    stage.make_plan = started_anew
    stage.run(2)
    stage.is_starting_slow = True
    stage.hear(OPERATOR, add("b"))
    stage.run(1_000)
    assert stage.hosted() == {"left/gpu0/1": ["a", "b"]}, "the new one was not started beside the old one"
    stage.start(NodeId("left"), stage.running[NodeId("left")][SliceId("left/gpu0/1")])
    stage.run(10)
    assert stage.answer().status == "ok"


def test_after_a_roll_back_of_that_the_old_slice_is_started_again() -> None:
    stage = one_slice("a")
    stage.make_plan = started_anew
    stage.failing = {"b"}
    stage.hear(OPERATOR, add("b"))
    stage.run(2_000)
    assert stage.answer().status == "failed"
    assert stage.hosted() == {"left/gpu0/2": ["a"]}
    assert stage.code_of("a") == ""


def test_a_new_slo_is_told_to_everyone_and_moves_nothing() -> None:
    stage = two_nodes(model("a"))
    stage.run(2)
    before = stage.hosted()
    stage.sent.clear()
    stage.hear(OPERATOR, ModelSet(1, ModelId("a"), slo_ms=150.0))
    stage.run(10)
    assert stage.answer().status == "ok"
    assert stage.hosted() == before
    directory = [one.message for one in stage.sent if isinstance(one.message, Directory)][-1]
    assert [one.slo_ms for one in directory.models] == [150.0]


def test_an_slo_that_would_take_a_model_out_of_service_is_refused_unless_it_is_forced() -> None:
    stage = two_nodes(model("a"), model("b"))
    stage.run(2)
    before = stage.hosted()
    for number, is_dry in enumerate((True, False), start=1):
        stage.sent.clear()
        stage.hear(OPERATOR, ModelSet(number, ModelId("a"), slo_ms=1.0, dry_run=is_dry))
        stage.run(10)
        refused = stage.answer()
        assert (refused.status, refused.code) == ("refused", "InvalidConfig")
        assert "a is served, and would have no place: its SLO of 1 ms is below the " in refused.reason
    assert stage.hosted() == before
    assert {one.model_id: one.slo_ms for one in stage.status().models} == {"a": 100.0, "b": 100.0}
    stage.sent.clear()
    stage.hear(OPERATOR, ModelSet(3, ModelId("a"), slo_ms=1.0, is_forced=True))
    stage.run(1_000)
    assert stage.answer().status == "partial"
    stage.sent.clear()
    stage.hear(OPERATOR, ModelSet(4, ModelId("a"), slo_ms=2.0))
    stage.run(1_000)
    assert stage.answer().status == "partial", "it is out of service anyway"


def test_an_slo_below_what_a_real_device_takes_is_refused_with_the_least_that_could_be_met() -> None:
    """It has no profile: what its worker measured is all there is to judge by."""
    real = {"name": "a", "slo_ms": 100, "loader": {"zoo": "torchvision", "arch": "resnet18"}}
    stage = Stage(
        real, nodes=[{"host": "left", "device": "cpu"}], placement="exclusive", measured_ms=(3.0, 4.0)
    )
    stage.run(2)
    stage.hear(OPERATOR, ModelSet(1, ModelId("a"), slo_ms=2.5))
    stage.run(10)
    refused = stage.answer()
    assert (refused.status, refused.code) == ("refused", "InvalidConfig")
    assert refused.reason == (
        "a is served, and a single request runs for 3 ms: an SLO of 2.5 ms is below 3 ms, the least that could be met;"
        " --force sets it all the same"
    )
    for number, slo_ms, is_forced in ((2, 3.5, False), (3, 2.5, True)):
        stage.sent.clear()
        stage.hear(OPERATOR, ModelSet(number, ModelId("a"), slo_ms, is_forced=is_forced))
        stage.run(10)
        assert stage.answer().status == "ok"


def test_nobody_but_the_planner_can_hand_in_a_plan() -> None:
    stage = two_nodes(model("a"))
    stage.is_starting_slow = True
    stage.hear(OPERATOR, add("b"))
    plan = make_plan(stage.asked[-1])
    before = stage.hosted()
    stage.hear(OPERATOR, plan)
    assert stage.hosted() == before
    assert stage.status().counters["offences_wrong_type"] == 1


def test_a_scheduler_that_goes_on_from_there_wants_the_very_same_slices(tmp_path: Path) -> None:
    """Anything else would end workers that serve."""
    stage = two_nodes(model("a"))
    stage.hear(OPERATOR, add("b"))
    stage.run(1_000)
    stage.hear(OPERATOR, DrainAsked(2, NodeId("left")))
    stage.run(1_000)
    controller = stage.scheduler.controller
    assert controller is not None
    about = about_scheduler(stage.scheduler.settings(), PolicyChoice("eager"), controller.settings())
    kept = SavedPlan(tmp_path, "scheduler-0", {"of": "this"})
    assert kept.read() is None
    kept.write(PlanCopy(16, 1, kept.digest, about.decode()), 0.0)
    assert SavedPlan(tmp_path, "scheduler-0", {"of": "that"}).read() is None
    read = kept.read()
    assert read is not None
    settings, planning = read
    assert planning == controller.settings()
    assert settings == stage.scheduler.settings()
    standby = SavedPlan(tmp_path, "scheduler-1", {"of": "this"}, role_ids=["scheduler-0"])
    assert standby.read() == read, "on the same host it finds the active one's file"
    (tmp_path / "scheduler-0.plan").write_text("{", encoding="utf-8")
    assert SavedPlan(tmp_path, "scheduler-0", {"of": "this"}).read() is None


def test_a_host_more_in_the_file_is_planned_with_and_what_serves_goes_on() -> None:
    """A scheduler that is started with a changed file."""
    ran = two_nodes(model("a", rate_rps=300), model("b"), placement="symphony")
    ran.run(1_000)
    nodes = [{"host": "left"}, {"host": "right"}, {"host": "more"}]
    before = ran.hosted()
    stage = Stage(model("a", rate_rps=300), model("b"), nodes=nodes, placement="symphony", ran=ran)
    assert stage.hosted() == before
    stage.run(1_000)
    assert stage.hosted() == {**before, "more/gpu0/0": ["a", "b"]}
    assert not stage.ended
    assert stage.scheduler.controller is not None
    assert not stage.scheduler.controller.settings().is_carried_over, "once"


def test_a_host_less_in_the_file_takes_nothing_else_along() -> None:
    ran = two_nodes(model("a"), model("b"), placement="symphony")
    ran.hear(OPERATOR, DrainAsked(2, NodeId("right")))
    ran.run(1_000)
    assert set(ran.hosted()) == {"left/gpu0/0"}
    stage = Stage(model("a"), model("b"), nodes=[{"host": "left"}], placement="symphony", ran=ran)
    stage.run(1_000)
    assert stage.hosted() == {"left/gpu0/0": ["a", "b"]}
    assert not stage.ended


def test_a_pipeline_that_lost_one_of_its_gpus_with_the_file_does_not_go_on() -> None:
    pipeline = {
        "name": "m",
        "slo_ms": 100,
        "profile": {"table": {1: 20}, "stages": {2: [11, 11]}},
        "rate_rps": 5,
    }
    slices: list[dict[str, Any]] = [
        {"gpu": 0, "following": [1], "models": [{"model": "m"}]},
        {"gpu": 2, "models": [{"model": "a"}]},
    ]
    nodes = [{"host": "left", "gpus": 2}, {"host": "right", "gpus": 1}]
    ran = Stage(pipeline, model("a"), nodes=nodes, placement={"given": {"slices": slices}})
    ran.run(1_000)
    slices = [
        {"gpu": 0, "models": [{"model": "m"}]},
        {"gpu": 1, "models": [{"model": "a"}]},
    ]
    nodes = [{"host": "left", "gpus": 1}, {"host": "right", "gpus": 1}]
    stage = Stage(pipeline, model("a"), nodes=nodes, placement={"given": {"slices": slices}}, ran=ran)
    stage.run(2_000)
    hosted = [(spec.gpus, slice_id) for of in stage.running.values() for slice_id, spec in of.items()]
    assert sorted(hosted) == [((0,), "left/gpu0/1"), ((0,), "right/gpu0/0")]
    assert stage.ended == {"left/gpu0/0"}
    assert [stage.code_of(name) for name in ("m", "a")] == ["", ""]


def test_models_that_came_and_went_with_the_file_change_slices_that_serve_on() -> None:
    ran = two_nodes(model("a"), model("b"), placement="symphony")
    ran.run(1_000)
    nodes = [{"host": "left"}, {"host": "right"}]
    stage = Stage(model("b", slo_ms=70), model("c"), nodes=nodes, placement="symphony", ran=ran)
    stage.run(2_000)
    assert set(map(tuple, stage.hosted().values())) == {("b", "c")}
    assert not stage.ended
    assert stage.code_of("a") == "ModelNotFound"
    assert stage.code_of("c") == ""


def test_a_model_that_the_file_gives_to_another_shard_is_served_until_frontends_have_it_there() -> None:
    ran = two_nodes(model("a"), model("b"), placement="symphony")
    ran.run(1_000)
    nodes = [{"host": "left"}, {"host": "right"}]
    stage = Stage(model("b"), nodes=nodes, placement="symphony", ran=ran, elsewhere=["a", "z"])
    stage.run(5_000)
    assert set(map(frozenset, stage.hosted().values())) == {frozenset("ab")}
    assert {one.model_id: one.term for one in stage.status().models} == {"a": LEAVING_TERM, "b": 0}
    stage.hear(FRONTEND, Left(ModelId("a")))
    stage.run(2_000)
    assert set(map(tuple, stage.hosted().values())) == {("b",)}
    assert stage.code_of("a") == "ModelNotFound"
    assert not stage.ended


def test_it_stays_where_no_frontend_is_or_one_has_come_back() -> None:
    ran = two_nodes(model("a"), model("b"), placement="symphony")
    ran.run(1_000)
    nodes = [{"host": "left"}, {"host": "right"}]
    stage = Stage(model("b"), nodes=nodes, placement="symphony", ran=ran, elsewhere=["a"])
    stage.take(stage.core.handle(Lost(FRONTEND, "silent"), stage.now_ms))
    stage.run(5_000)
    assert "a" in {one.model_id for one in stage.status().models}
    stage.hear(FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",)))
    stage.hear(FRONTEND, Left(ModelId("a"), is_back=True))
    stage.run(5_000)
    assert "a" in {one.model_id for one in stage.status().models}


def test_a_term_does_not_begin_anew_with_another_file() -> None:
    """Another shard may list the model in the term before: it would be asked there, where it is about to be removed."""
    ran = two_nodes(model("a"), model("b"), placement="symphony")
    ran.run(1_000)
    ran.hear(OPERATOR, ModelSet(8, ModelId("a"), term=3))
    nodes = [{"host": "left"}, {"host": "right"}]
    stage = Stage(model("a"), model("b", slo_ms=70), nodes=nodes, placement="symphony", ran=ran)
    assert {one.model_id: one.term for one in stage.status().models} == {"a": 3, "b": 0}
    stage.run(2_000)
    assert {one.model_id: one.term for one in stage.status().models} == {"a": 3, "b": 0}


def test_a_model_that_comes_back_to_this_shard_is_not_leaving_any_more() -> None:
    ran = two_nodes(model("a"), model("b"), placement="symphony")
    ran.run(1_000)
    nodes = [{"host": "left"}, {"host": "right"}]
    leaving = Stage(model("b"), nodes=nodes, placement="symphony", ran=ran, elsewhere=["a"])
    leaving.run(1_000)
    stage = Stage(model("a"), model("b"), nodes=nodes, placement="symphony", ran=leaving)
    stage.hear(FRONTEND, Left(ModelId("a")))
    stage.run(2_000)
    assert {one.model_id: one.term for one in stage.status().models} == {"a": 0, "b": 0}


def test_a_slice_whose_model_the_file_has_changed_does_not_go_on_as_it_was() -> None:
    ran = two_nodes(model("a"), placement="exclusive")
    ran.run(1_000)
    nodes = [{"host": "left"}, {"host": "right"}]
    document = {"models": [model("a", profile={**LINE, "beta_ms": 7.0})], "cluster": {"nodes": nodes}}
    config = parse_config(document, Path())
    assert ran.scheduler.controller is not None
    before = (ran.scheduler.settings(), ran.scheduler.controller.settings())
    assert carried_over(config, document, Path(), before) is None


@pytest.mark.parametrize("loader", [{"stages": 2}, {"ranks": 2}])
def test_a_slice_on_several_gpus_goes_on_under_a_new_slo(loader: Mapping[str, Any]) -> None:
    def file(slo_ms: float) -> tuple[ClusterConfig, dict[str, Any]]:
        keys = {"loader": {"python": "a.b:C", **loader}, "profile": {"table": {1: 10, 2: 15}}}
        nodes = [{"host": "left", "gpus": 2, "device": "cpu"}]
        document = {"models": [{"name": "a", "slo_ms": slo_ms, **keys}], "cluster": {"nodes": nodes}}
        return parse_config({**document, "placement": "exclusive"}, Path()), document

    config, document = file(100.0)
    settings = settings_from(config)
    before = settings, controller_settings(config, document, "", config.place(), settings)
    found = carried_over(*file(200.0), Path(), before)
    assert found is not None
    assert found[0].slices == settings.slices


def test_a_journal_of_a_change_gives_the_same_decisions_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    nodes = [{"host": "left"}, {"host": "right"}]
    stage = Stage(model("a"), nodes=nodes, placement="exclusive", recorded_in=path)
    stage.hear(OPERATOR, add("b"))
    stage.run(2_000)
    stage.hear(OPERATOR, ModelsRemove(1, (ModelId("a"),)))
    stage.run(2_000)
    assert stage.journal is not None
    stage.journal.close()
    assert stage.hosted() == {"right/gpu0/0": ["b"]}
    played = replay(path, scheduler_from)
    assert played.difference is None
    assert played.actions > 10


def test_a_model_may_be_named_twice_when_it_is_removed() -> None:
    stage = two_nodes(model("a"), model("b"))
    stage.hear(OPERATOR, ModelsRemove(1, (ModelId("b"), ModelId("b"))))
    assert stage.code_of("b") == "ModelNotFound"
    assert stage.code_of("a") == ""


# ------------------------------------------------------------ changes in place


def test_a_model_more_moves_no_slice_and_serves_when_it_is_loaded() -> None:
    stage = one_slice("a", nodes=("left", "right"))
    stage.run(2)
    before = set(stage.hosted())
    stage.is_starting_slow = True
    stage.sent.clear()
    stage.hear(OPERATOR, add("b"))
    told = [one.message for one in stage.sent if isinstance(one.message, Directory)]
    assert len({one.version for one in told}) == 1, "only of the model"
    assert stage.code_of("a") == ""
    assert stage.code_of("b") == "NoReplica"
    for node_id in map(NodeId, ("left", "right")):
        stage.start(node_id, stage.running[node_id][SliceId(f"{node_id}/gpu0/0")])
    assert stage.code_of("b") == ""
    stage.sent.clear()
    stage.run(10)
    answer = stage.answer()
    assert (answer.status, answer.started, answer.ended, answer.changed, answer.kept) == ("ok", 0, 0, 2, 0)
    assert stage.hosted() == {key: ["a", "b"] for key in sorted(before)}


def test_a_model_less_is_let_go_where_it_was_after_its_last_batch_and_moves_no_slice() -> None:
    stage = one_slice("a", "b")
    stage.run(2)
    stage.hear(FRONTEND, Arrivals(ModelId("b"), 0, 1, 100.0))
    (batch,) = [one.message for one in stage.sent if isinstance(one.message, RunBatch)]
    stage.hear(OPERATOR, ModelsRemove(1, (ModelId("b"),)))
    stage.run(1_000)
    assert stage.hosted() == {"left/gpu0/0": ["a", "b"]}, "its batch has not ended"
    done = Done(batch.batch_id, batch.slice_id, batch.model_id, "ok", 1, (), 0.0, 0.0, 6.0)
    stage.hear(PeerId("worker-left-0/00000001"), done)
    stage.run(1_000)
    assert stage.hosted() == {"left/gpu0/0": ["a"]}
    assert stage.code_of("a") == ""


def test_a_model_that_moves_from_one_slice_to_another_is_served_throughout() -> None:
    stage = one_slice("a", "b", nodes=("left", "right"))
    spec = stage.running[NodeId("left")][SliceId("left/gpu0/0")]

    def swapped(asked: PlanAsked) -> PlanMade:
        """`b` on the right only, `a` on the left only."""
        made = make_plan(asked)
        hosts = {"left/gpu0/0": "a", "right/gpu0/0": "b"}
        changes = tuple(
            ChangedSlice(
                SliceId(slice_id),
                tuple(one for one in spec.models if one.model_id == name),
                (ReplicaHint(ModelId(name)),),
            )
            for slice_id, name in hosts.items()
        )
        return replace(made, kept=(), moves=(MoveInfo(0, (), (), changes),))

    stage.make_plan = swapped
    stage.run(2)
    stage.hear(OPERATOR, ModelSet(1, ModelId("a"), slo_ms=150.0))
    stage.run(1_000)
    assert stage.answer().status == "ok"
    assert stage.hosted() == {"left/gpu0/0": ["a"], "right/gpu0/0": ["b"]}
    stage.sent.clear()
    for number, name in enumerate("abab"):
        stage.hear(FRONTEND, Arrivals(ModelId(name), number, 1, 100.0))
    sent = [one.message for one in stage.sent if isinstance(one.message, RunBatch)]
    assert {(one.model_id, one.slice_id) for one in sent} == {
        ("a", SliceId("left/gpu0/0")),
        ("b", SliceId("right/gpu0/0")),
    }


def test_a_model_moves_away_from_a_slice_that_has_failed() -> None:
    stage = one_slice("a", "b", nodes=("left", "right"))
    slice_id, node_id = SliceId("left/gpu0/0"), NodeId("left")
    spec = stage.running[node_id][slice_id]

    def without_b(asked: PlanAsked) -> PlanMade:
        """`b` on another slice of that GPU."""
        made = make_plan(asked)
        alone = {one.model_id: (one,) for one in spec.models}
        hints = {name: (ReplicaHint(name),) for name in alone}
        change = ChangedSlice(slice_id, alone[ModelId("a")], hints[ModelId("a")])
        start = replace(spec, slice_id=SliceId(""), models=alone[ModelId("b")])
        move = MoveInfo(0, (NewSlice(node_id, start, hints[ModelId("b")]),), (), (change,))
        return replace(made, kept=tuple(one for one in made.kept if one.slice_id != slice_id), moves=(move,))

    stage.run(2)
    stage.fail(node_id, spec, "its process ends")
    stage.make_plan = without_b
    stage.hear(OPERATOR, ModelSet(1, ModelId("a"), slo_ms=150.0))
    stage.run(1_000)
    assert stage.answer().status == "ok"
    assert stage.hosted() == {slice_id: ["a"], "left/gpu0/1": ["b"], "right/gpu0/0": ["a", "b"]}


def test_a_slice_that_dies_while_a_model_loads_comes_back_with_it() -> None:
    stage = one_slice("a")
    stage.run(2)
    stage.is_starting_slow = True
    stage.hear(OPERATOR, add("b"))
    slice_id = SliceId("left/gpu0/0")
    lost = SliceStatus(slice_id, FIRST, "lost", "its worker was killed by signal 9")
    stage.hear(PeerId("node-left/00000001"), SliceChanged(NodeId("left"), lost))
    stage.run(1_000)
    assert stage.code_of("a") == "NoReplica"
    stage.start(NodeId("left"), stage.running[NodeId("left")][slice_id])
    stage.run(10)
    assert [stage.code_of(name) for name in "ab"] == ["", ""]
    assert stage.hosted() == {"left/gpu0/0": ["a", "b"]}


def test_where_one_of_two_slices_cannot_load_the_model_both_go_back_and_serve_on() -> None:
    stage = one_slice("a", nodes=("left", "right"))
    stage.run(2)
    stage.is_starting_slow = True
    stage.hear(OPERATOR, add("b"))
    stage.start(NodeId("left"), stage.running[NodeId("left")][SliceId("left/gpu0/0")])
    stage.failing = {"b"}
    stage.start(NodeId("right"), stage.running[NodeId("right")][SliceId("right/gpu0/0")])
    stage.run(1_000)
    answer = stage.answer()
    assert (answer.status, answer.reason) == (
        "failed",
        "slice right/gpu0/0 cannot host b: b does not load",
    )
    assert stage.hosted() == {"left/gpu0/0": ["a"], "right/gpu0/0": ["a"]}
    assert [stage.code_of(name) for name in "ab"] == ["", "ModelNotFound"]
    assert [one.reason for one in stage.status().slices] == ["", ""], "nobody misses a model"


def test_what_a_slice_has_learned_of_its_models_it_knows_when_it_gets_another() -> None:
    stage = one_slice("a")
    stage.run(2)
    record = stage.scheduler._fleet.slices[SliceId("left/gpu0/0")]
    for number in range(8):
        stage.sent.clear()
        stage.hear(FRONTEND, Arrivals(ModelId("a"), number, 1, 100.0))
        (batch,) = [one.message for one in stage.sent if isinstance(one.message, RunBatch)]
        done = Done(batch.batch_id, batch.slice_id, batch.model_id, "ok", 1, (), 0.0, 0.0, 9.0)
        stage.hear(PeerId("worker-left-0/00000001"), done)
        stage.run(20)
    learned = record.speeds[ModelId("a")].factor
    assert learned > 1
    stage.hear(OPERATOR, add("b"))
    stage.run(10)
    assert record.speeds[ModelId("a")].factor == learned


def one_slice(*names: str, nodes: Sequence[str] = ("left",)) -> Stage:
    return Stage(*map(model, names), nodes=[{"host": host} for host in nodes], placement="symphony")


def test_a_slice_that_leaves_a_model_out_serves_the_others_and_says_why() -> None:
    stage = two_nodes(model("a"), model("b"), placement="symphony")
    spec = stage.running[NodeId("left")][SliceId("left/gpu0/0")]
    stage.hear(PeerId("worker-left-0/00000002"), left_out_of(spec, "a"))
    (report, *_) = stage.status().slices
    assert (report.state, report.reason) == ("ready", "without b: it does not load")
    assert [one.model_id for one in report.left_out] == ["b"]
    assert stage.code_of("a") == ""


def left_out_of(spec: SliceSpec, *hosted: str) -> SliceReady:
    replicas = tuple(ReplicaInfo(ModelId(name), 8, (6.0,) * 8) for name in hosted)
    left_out = (LeftOut(spec.slice_id, ModelId("b"), "it does not load"),)
    second = Incarnation("00000002")
    return SliceReady(spec.slice_id, second, NodeId("left"), spec.gpu, ("ipc:///w",), replicas, left_out)


def test_a_model_that_cannot_be_loaded_is_not_added_and_its_neighbours_stay_as_they_are() -> None:
    stage = one_slice("a")
    before = stage.hosted()
    stage.failing = {"b"}
    stage.hear(OPERATOR, add("b"))
    stage.run(1_000)
    answer = stage.answer()
    assert (answer.status, answer.code) == ("failed", "MoveFailed")
    assert "cannot host b: b does not load" in answer.reason
    assert stage.hosted() == before
    assert stage.code_of("a") == ""


def test_a_model_that_is_left_out_anyway_holds_no_move_of_its_neighbours_up() -> None:
    stage = one_slice("a", "b")
    stage.failing = {"b"}
    for node_id, hosted in stage.running.items():
        for spec in list(hosted.values()):
            stage.hear(PeerId(f"worker-{node_id}-0/00000002"), left_out_of(spec, "a"))
    assert stage.code_of("b") == "NoReplica"
    stage.hear(OPERATOR, add("c"))
    stage.run(1_000)
    assert stage.answer().status == "ok"
    assert [stage.code_of(name) for name in "abc"] == ["", "NoReplica", ""]


@pytest.mark.parametrize(
    "change",
    [
        add("c"),
        ModelsRemove(1, (ModelId("b"),)),
        ModelSet(1, ModelId("a"), slo_ms=50.0),
        ModelSet(1, ModelId("a"), rate_rps=70.0),
        DrainAsked(1, NodeId("left")),
        DrainAsked(1, NodeId("nowhere")),
        ModelsRemove(1, (ModelId("nobody"),)),
        add("a"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("placement", ["exclusive", "symphony"])
def test_a_dry_run_is_answered_like_the_change_and_changes_nothing(
    change: PlanChange, placement: str
) -> None:
    dry, real = (two_nodes(model("a"), model("b"), placement=placement) for _ in range(2))
    before, served = dry.hosted(), [dry.code_of(name) for name in "abc"]
    dry.sent.clear()
    dry.hear(OPERATOR, replace(change, dry_run=True))
    dry.run(20_000)
    told = dry.answer()
    real.sent.clear()
    real.hear(OPERATOR, change)
    real.run(20_000)
    assert told == real.answer()
    assert dry.hosted() == before
    assert not any(isinstance(one.message, DesiredSlices | Dropped) for one in dry.sent)
    assert [dry.code_of(name) for name in "abc"] == served
    after = dry.status()
    assert {one.model_id: one.slo_ms for one in after.models} == {"a": 100.0, "b": 100.0}
    assert after.plan is not None
    assert after.plan.state == "steady"
    dry.sent.clear()
    dry.hear(OPERATOR, change)  # and it can be done for real then
    dry.run(20_000)
    assert (dry.answer(), dry.hosted()) == (told, real.hosted())


def test_what_has_no_place_is_still_told_of_after_one_slice_has_grown() -> None:
    hosts = [{"model": "a", "batch": 4}]
    given = [{"gpu": 0, "share_percent": 25, "models": hosts}]
    nodes = [{"host": "left", "gpus": 1}]
    stage = Stage(model("a"), model("b"), nodes=nodes, placement={"given": {"slices": given}})
    stage.run(100)
    controller = stage.scheduler.controller
    assert controller is not None
    for _ in range(40):
        for record in list(stage.scheduler._fleet.slices.values()):
            controller._run_time_watch.note(record, ModelId("a"), 1, 11.0)
        stage.run(100)
    plan = stage.status().plan
    assert plan is not None
    assert plan.moves_done == 1
    assert [one.model_id for one in plan.unplaced] == ["b"]
