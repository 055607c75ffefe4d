"""An agent stops while its scheduler is new: a slice that drains gets no batches, whoever of agent and worker speaks first.

The agent says it once. Its worker refuses batches from its stop on, until what it runs has ended.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fabric.ids import FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId, peer_id
from fabric.messages import (
    Arrivals,
    Dropped,
    FrontendHello,
    ModelSpec,
    NodeHello,
    ReplicaInfo,
    RunBatch,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceState,
    SliceStatus,
)
from policies.batching.registry import make_discipline
from roles.runtime.core import Lost
from roles.scheduler.core import SchedulerCore
from roles.scheduler.settings import SchedulerSettings
from tests.unit.roles.scheduler.test_core import hear, of_type

BORN, NEXT = Incarnation("0"), Incarnation("1")
NODE, MODEL, SLICE = NodeId("a"), ModelId("m"), SliceId("a/gpu0/0")
AGENT, AGENT_AGAIN = PeerId("node-a/0"), PeerId("node-a/1")
FRONTEND = peer_id("frontend-0", BORN)
EXEC_MS = tuple(5.0 + batch for batch in range(1, 9))


class Cluster:
    """One slice."""

    def __init__(self) -> None:
        model = ModelSpec(MODEL, 1_000.0, 8, exec_ms=EXEC_MS)
        planned = ((NODE, SliceSpec(SLICE, 0, "emulated", None, (model,))),)
        self.core = SchedulerCore(SchedulerSettings((model,), planned), make_discipline("eager", {}))
        hear(self.core, FRONTEND, FrontendHello(FrontendId("frontend-0"), BORN, ()), 0.0)
        self._seq = 0

    def hello(self, state: SliceState, agent: PeerId = AGENT) -> None:
        nonce = Incarnation(agent.rpartition("/")[2])
        hear(self.core, agent, NodeHello(NODE, nonce, (), (_status(state),)), 1.0)

    def changed(self, state: SliceState) -> None:
        hear(self.core, AGENT, SliceChanged(NODE, _status(state)), 1.0)

    def slice_ready(self, incarnation: Incarnation = BORN) -> None:
        worker = PeerId(f"worker-a-1/{incarnation}")
        hear(
            self.core,
            worker,
            SliceReady(SLICE, incarnation, NODE, 0, (), (ReplicaInfo(MODEL, 8, EXEC_MS),)),
            1.0,
        )

    def worker_lost(self) -> None:
        self.core.handle(Lost(PeerId("worker-a-1/0"), "silent"), 1.0)

    @property
    def takes_batches(self) -> bool:
        self._seq += 1
        sends = hear(self.core, FRONTEND, Arrivals(MODEL, self._seq, 1, 900.0), 2.0)
        assert bool(of_type(sends, RunBatch)) is not bool(of_type(sends, Dropped))
        return bool(of_type(sends, RunBatch))


def _status(state: SliceState) -> SliceStatus:
    return SliceStatus(SLICE, BORN, state, "its node agent stops")


Story = Callable[[Cluster], None]


def in_its_hello(cluster: Cluster) -> None:
    cluster.hello(SliceState.DRAINING)


def after_its_hello(cluster: Cluster) -> None:
    cluster.hello(SliceState.READY)
    cluster.changed(SliceState.DRAINING)


def before_its_worker_was_lost(cluster: Cluster) -> None:
    cluster.hello(SliceState.READY)
    cluster.slice_ready()
    cluster.changed(SliceState.DRAINING)
    cluster.worker_lost()


@pytest.mark.parametrize("story", [in_its_hello, after_its_hello, before_its_worker_was_lost])
def test_a_slice_that_drains_gets_no_batches_when_its_worker_says_that_it_is_ready(story: Story) -> None:
    cluster = Cluster()
    story(cluster)
    cluster.slice_ready()
    assert not cluster.takes_batches
    cluster.slice_ready()
    assert not cluster.takes_batches, "however often"


@pytest.mark.parametrize("story", [in_its_hello, after_its_hello, before_its_worker_was_lost])
def test_it_does_when_the_next_agent_has_its_worker(story: Story) -> None:
    cluster = Cluster()
    story(cluster)
    cluster.hello(SliceState.READY, AGENT_AGAIN)
    cluster.slice_ready()
    assert cluster.takes_batches


@pytest.mark.parametrize("story", [in_its_hello, after_its_hello, before_its_worker_was_lost])
def test_so_does_its_next_worker(story: Story) -> None:
    cluster = Cluster()
    story(cluster)
    cluster.slice_ready(NEXT)
    assert cluster.takes_batches
