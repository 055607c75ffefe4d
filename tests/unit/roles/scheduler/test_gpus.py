"""What the scheduler knows of nodes and their GPUs."""

from __future__ import annotations

from fabric.ids import FrontendId, Incarnation, NodeId, PeerId
from fabric.messages import (
    Directory,
    FrontendHello,
    GpuInfo,
    GpuReport,
    GpuSample,
    GpuSharing,
    NodeHello,
    SliceStatus,
    StatusAsked,
    StatusListed,
    Telemetry,
)
from roles.runtime.core import Lost
from roles.scheduler.core import SchedulerCore
from tests.unit.roles.scheduler.test_core import (
    AGENT,
    FIRST,
    FRONTEND,
    NODE,
    hear,
    new_core,
    of_type,
    ready,
    slice_id,
)

GPU = GpuInfo(0, "a100", "cuda", 40 << 30, "GPU-0")
SAMPLE = GpuSample(0, busy_percent=42.0)
SHARING = GpuSharing(0, "mps")
WORKER = PeerId("worker-local-0/00000001")


def listed(core: SchedulerCore, now_ms: float) -> tuple[GpuReport, ...]:
    (answer,) = of_type(hear(core, PeerId("someone"), StatusAsked(), now_ms), StatusListed)
    return answer.gpus


def test_telemetry_is_kept_for_the_status_with_its_age() -> None:
    core = new_core()
    hear(core, AGENT, NodeHello(NODE, FIRST, (GPU,), ()))
    assert listed(core, 10.0) == (GpuReport(NODE, GPU),)
    hear(core, AGENT, Telemetry(NODE, (SAMPLE,), (SHARING,)), 100.0)
    assert listed(core, 350.0) == (GpuReport(NODE, GPU, SHARING, SAMPLE, 250.0),)
    hear(core, AGENT, Telemetry(NODE, (), (SHARING,)), 400.0)
    assert listed(core, 500.0) == (GpuReport(NODE, GPU, SHARING, None, 400.0),)


def test_telemetry_of_a_former_agent_or_an_unknown_node_does_not_count() -> None:
    core = new_core()
    hear(core, AGENT, NodeHello(NODE, FIRST, (GPU,), ()))
    hear(core, PeerId("node-local/former"), Telemetry(NODE, (SAMPLE,), (SHARING,)))
    hear(core, AGENT, Telemetry(NodeId("elsewhere"), (SAMPLE,), (SHARING,)))
    assert listed(core, 0.0) == (GpuReport(NODE, GPU),)


def test_slices_whose_workers_outlive_their_agent_are_not_lost_with_it() -> None:
    core = new_core()
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",)))
    hear(core, AGENT, NodeHello(NODE, FIRST, (), (), workers_outlive_agent=True))
    hear(core, WORKER, ready())
    assert [send.peer for send in core.handle(Lost(AGENT, "its connection is closed"), 1.0)] == [AGENT]
    next_agent = PeerId("node-local/00000002")
    alive = (SliceStatus(slice_id(), FIRST, "starting"),)
    hello = NodeHello(NODE, Incarnation("00000002"), (), alive, workers_outlive_agent=True)
    sends = hear(core, next_agent, hello, 2.0)
    assert of_type(sends, Directory) == [], "nothing is news"
    (directory, *_) = of_type(core.handle(Lost(WORKER, "silent"), 3.0), Directory)
    assert directory.slices == ()
