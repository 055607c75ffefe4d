"""What frontends hear first of a scheduler that takes over: every slice that serves, also of nodes whose agents grant a moment later.

Whatever that directory leaves out they take for lost: what runs there would run twice, or be refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from fabric.ids import FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId, peer_id
from fabric.messages import (
    AnyMessage,
    Arrivals,
    Directory,
    Dropped,
    FrontendHello,
    LeaseAsked,
    LeaseReport,
    ModelSpec,
    NodeHello,
    PlanCopy,
    ReplicaInfo,
    RunBatch,
    SliceReady,
    SliceSpec,
    SliceState,
    SliceStatus,
)
from policies.batching.registry import make_discipline
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.runtime.loop.sources import CLOSED
from roles.scheduler.availability.election import Electorate
from roles.scheduler.availability.replica import (
    GATHER_FIRST_MS,
    GATHER_MS,
    ReplicaAction,
    ReplicaSettings,
    SchedulerReplica,
)
from roles.scheduler.core import SchedulerCore
from roles.scheduler.settings import SchedulerSettings

BORN = Incarnation("0")
FRONTEND = peer_id("frontend-0", BORN)
NODES = tuple(map(NodeId, "abc"))
EXEC_MS = tuple(5.0 + batch for batch in range(1, 9))
SCHEDULERS = [1, 2]


def slice_on(node: str) -> SliceId:
    return SliceId(f"{node}/gpu0/0")


class Cluster:
    """A scheduler, with a standby that was the active one before or alone, and what agents and workers say to it.

    Each node has one slice; `models`: of each of them, else each has its own.
    """

    def __init__(self, schedulers: int, models: str = "abc") -> None:
        self.models = dict(zip(NODES, models, strict=True))
        specs = {name: ModelSpec(ModelId(name), 1_000.0, 8, exec_ms=EXEC_MS) for name in models}
        slices = {
            node: SliceSpec(slice_on(node), 0, "emulated", None, (specs[name],))
            for node, name in self.models.items()
        }
        started = SchedulerSettings(tuple(specs.values()), tuple(slices.items()))
        electorate = Electorate(frozenset(NODES), schedulers)
        self.number = schedulers - 1
        self.replica = SchedulerReplica(
            ReplicaSettings(BORN, electorate, self.number),
            lambda: SchedulerCore(started, make_discipline("eager", {})),
        )
        self.now_ms = 0.0
        self.told: list[tuple[float, Directory]] = []
        """The directories that list the frontend, and when it heard of them."""
        self.workers_told: list[PeerId] = []
        """Who else heard of one."""
        self.directories: Counter[PeerId] = Counter()
        """How many each of all heard."""
        self.asks: dict[PeerId, LeaseAsked] = {}
        self.hear(FRONTEND, FrontendHello(FrontendId("frontend-0"), BORN, ()))
        if schedulers > 1:
            self.hear(PeerId("scheduler-0"), PlanCopy(16, 1, "digest", "{}"))

    def hear(self, peer: PeerId, message: AnyMessage) -> list[AnyMessage]:
        return self._note(self.replica.handle(Heard(peer, message), self.now_ms))

    def lose(self, peer: PeerId) -> None:
        self._note(self.replica.handle(Lost(peer, CLOSED), self.now_ms))

    def run_until(self, until_ms: float) -> None:
        while (at_ms := self.replica.wake_at_ms) is not None and at_ms <= until_ms:
            self.now_ms = max(self.now_ms, at_ms)
            self._note(self.replica.handle(Tick(), self.now_ms))
        self.now_ms = until_ms

    def connect(self, node: str, *ready: str, epoch: int = 16) -> None:
        """An agent introduces itself; what it granted last was another scheduler's."""
        hello = NodeHello(NodeId(node), BORN, (), _ready(ready), False, epoch, "scheduler-9", BORN, True)
        self.hear(self.agent(node), hello)

    def grant(self, node: str, state: SliceState = SliceState.READY) -> None:
        """The agent has written its epoch down: it says so, and which slice is there."""
        asked = self.asks[self.agent(node)]
        holder = f"scheduler-{self.number}"
        report = LeaseReport(NodeId(node), asked.epoch, holder, BORN, is_free=False, number=asked.number)
        self.hear(self.agent(node), report)
        slices = (SliceStatus(slice_on(node), BORN, state),)
        self.hear(
            self.agent(node),
            NodeHello(NodeId(node), BORN, (), slices, False, asked.epoch, holder, BORN, False),
        )

    def slice_ready(self, node: str) -> list[AnyMessage]:
        """Its worker has heard of the epoch too."""
        replicas = (ReplicaInfo(ModelId(self.models[NodeId(node)]), 8, EXEC_MS),)
        epoch = self.asks[self.agent(node)].epoch
        ready = SliceReady(
            slice_on(node), BORN, NodeId(node), 0, ("tcp://127.0.0.1:2",), replicas, epoch=epoch
        )
        return self.hear(self.worker(node), ready)

    def agent(self, node: str) -> PeerId:
        return PeerId(f"node-{node}/0")

    def worker(self, node: str) -> PeerId:
        return PeerId(f"worker-{node}-1/0")

    def take_over(self, *nodes: str) -> None:
        """These agents are there and are asked; nobody has granted anything yet."""
        for node in nodes:
            self.connect(node)
        self.run_until(self.now_ms + 50.0)
        assert set(map(self.agent, nodes)) <= self.asks.keys()

    @property
    def listed(self) -> list[set[str]]:
        """The nodes whose slices each directory lists."""
        return [{info.node_id for info in directory.slices} for _, directory in self.told]

    def _note(self, actions: Sequence[ReplicaAction]) -> list[AnyMessage]:
        sends = [action for action in actions if isinstance(action, Send)]
        self.directories.update(send.peer for send in sends if isinstance(send.message, Directory))
        for send in sends:
            if isinstance(send.message, LeaseAsked):
                self.asks[send.peer] = send.message
            elif send.peer == FRONTEND and isinstance(send.message, Directory) and send.message.frontends:
                self.told.append((self.now_ms, send.message))
            elif isinstance(send.message, Directory):
                self.workers_told.append(send.peer)
        return [send.message for send in sends]


def _ready(nodes: Sequence[str]) -> tuple[SliceStatus, ...]:
    return tuple(SliceStatus(slice_on(node), BORN, SliceState.READY) for node in nodes)


@pytest.mark.parametrize("schedulers", SCHEDULERS)
@pytest.mark.parametrize("late_ms", [0.0, 1.0, 30.0, 240.0])
def test_the_first_directory_lists_what_is_on_nodes_whose_agents_grant_later(
    schedulers: int, late_ms: float
) -> None:
    """Agents write an epoch down before they grant it, and one disk is slower than the others."""
    cluster = Cluster(schedulers)
    cluster.take_over("a", "b", "c")
    for node in "ab":
        cluster.grant(node)
    for node in "ab":
        cluster.slice_ready(node)
    cluster.run_until(cluster.now_ms + late_ms)
    cluster.grant("c")
    assert cluster.listed == []
    cluster.slice_ready("c")
    assert cluster.listed[0] == {"a", "b", "c"}
    assert cluster.told[0][0] == cluster.now_ms


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_it_lists_what_is_on_nodes_whose_agents_connect_later(schedulers: int) -> None:
    """All schedulers were started again: agents find the next one each in its own time."""
    cluster = Cluster(schedulers)
    cluster.take_over("a", "b")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    cluster.run_until(cluster.now_ms + 20.0)
    cluster.connect("c")
    cluster.grant("c")
    cluster.slice_ready("c")
    assert cluster.listed[0] == {"a", "b", "c"}


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_who_does_not_grant_is_waited_for_no_longer_than_that(schedulers: int) -> None:
    """A node without power, of which nobody knows yet, or one with a full disk."""
    cluster = Cluster(schedulers)
    cluster.take_over("a", "b", "c")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    began_ms = cluster.now_ms
    cluster.run_until(began_ms + GATHER_FIRST_MS)
    assert cluster.told[0][0] == began_ms + GATHER_MS
    assert cluster.listed[0] == {"a", "b"}


@pytest.mark.parametrize("lost_when", ["before the take-over", "while it is waited for"])
@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_an_agent_that_is_known_to_be_lost_is_not_waited_for(schedulers: int, lost_when: str) -> None:
    cluster = Cluster(schedulers)
    cluster.connect("c")
    if lost_when == "before the take-over":
        cluster.lose(cluster.agent("c"))
    cluster.take_over("a", "b")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    if lost_when == "while it is waited for":
        assert cluster.told == []
        cluster.lose(cluster.agent("c"))
    assert [at_ms for at_ms, _ in cluster.told[:1]] == [cluster.now_ms]


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_an_agent_that_has_not_come_for_long_is_not_waited_for(schedulers: int) -> None:
    """Its node is away: each take-over would take longer for as long as that lasts."""
    cluster = Cluster(schedulers)
    cluster.run_until(GATHER_FIRST_MS)
    cluster.take_over("a", "b")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    assert cluster.told[-1][0] == cluster.now_ms
    assert cluster.listed[-1] == {"a", "b"}


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_what_an_agent_said_is_not_gone_by_once_its_node_has_another_one(is_lost_first: bool) -> None:
    cluster = Cluster(2)
    cluster.connect("c", "c")
    cluster.take_over("a", "b")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    former, following = cluster.agent("c"), PeerId("node-c/1")
    if is_lost_first:
        cluster.lose(former)
    cluster.hear(
        following,
        NodeHello(NodeId("c"), Incarnation("1"), (), (), False, 16, "scheduler-9", BORN, True),
    )
    if not is_lost_first:
        cluster.lose(former)
    cluster.run_until(cluster.now_ms + GATHER_MS)
    cluster.lose(following)
    (dropped,) = cluster.hear(FRONTEND, Arrivals(ModelId("c"), 0, 1, 900.0, 0.0, 0.0, 0.0))
    assert isinstance(dropped, Dropped)
    assert dropped.code == "NoReplica"


def test_a_model_waits_for_a_slice_whose_agent_said_before_that_it_is_there() -> None:
    """With a standby it says so when it connects, and again when it has granted."""
    cluster = Cluster(2)
    cluster.connect("c", "c")
    cluster.take_over("a", "b")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    cluster.run_until(cluster.now_ms + GATHER_MS)
    assert cluster.listed[-1] == {"a", "b"}
    said = cluster.hear(FRONTEND, Arrivals(ModelId("c"), 0, 1, 900.0, 0.0, 0.0, 0.0))
    cluster.run_until(cluster.now_ms + 50.0)
    assert not [one for one in said if isinstance(one, Dropped)]
    cluster.grant("c")
    assert [type(one) for one in cluster.slice_ready("c")].count(RunBatch) == 1


def test_what_an_agent_said_before_it_granted_is_not_gone_by_where_it_grants_in_time() -> None:
    """Its slice has ended since: nobody is to wait for that one."""
    cluster = Cluster(2)
    cluster.connect("c", "c")
    cluster.take_over("a", "b")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    cluster.grant("c", SliceState.STARTING)
    (dropped,) = cluster.hear(FRONTEND, Arrivals(ModelId("c"), 0, 1, 900.0, 0.0, 0.0, 0.0))
    assert isinstance(dropped, Dropped)
    assert dropped.code == "NoReplica"


def test_a_slice_that_drains_is_waited_for_too() -> None:
    """Its agent stops: what was granted there runs on."""
    cluster = Cluster(2)
    cluster.take_over("a", "b", "c")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    cluster.grant("c", SliceState.DRAINING)
    assert cluster.told == []
    cluster.slice_ready("c")
    assert cluster.listed[0] == {"a", "b", "c"}


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_nobody_hears_of_a_take_over_more_often_because_there_are_many_frontends(schedulers: int) -> None:
    """All of their hellos are taken up in one turn: a directory to all for each of them took longer than a lease lasts."""
    cluster = Cluster(schedulers)
    frontends = {k: peer_id(f"frontend-{k}", BORN) for k in range(40)}
    for k, peer in frontends.items():
        cluster.hear(peer, FrontendHello(FrontendId(f"frontend-{k}"), BORN, ()))
    cluster.directories.clear()
    cluster.take_over(*NODES)
    for node in NODES:
        cluster.grant(node)
        cluster.slice_ready(node)
    cluster.run_until(cluster.now_ms + 2 * GATHER_FIRST_MS)
    assert cluster.directories.keys() >= set(frontends.values())
    assert max(cluster.directories.values()) <= 1 + len(NODES)


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_a_frontend_that_comes_alone_hears_at_once(schedulers: int) -> None:
    cluster = Cluster(schedulers)
    cluster.take_over(*NODES)
    for node in NODES:
        cluster.grant(node)
        cluster.slice_ready(node)
    cluster.run_until(cluster.now_ms + 5.0)
    said = cluster.hear(peer_id("frontend-1", BORN), FrontendHello(FrontendId("frontend-1"), BORN, ()))
    (directory,) = [one for one in said if isinstance(one, Directory)]
    assert {info.frontend_id for info in directory.frontends} == {"frontend-0", "frontend-1"}
