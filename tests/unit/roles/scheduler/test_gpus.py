"""What the scheduler knows of nodes and their GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fabric.ids import FrontendId, Incarnation, NodeId, PeerId
from fabric.messages import (
    Arrivals,
    Directory,
    Done,
    FrontendHello,
    GpuInfo,
    GpuReport,
    GpuSample,
    GpuSharing,
    NodeHello,
    RunBatch,
    SliceSpec,
    SliceStatus,
    StatusAsked,
    StatusListed,
    Telemetry,
)
from policies.batching.registry import make_discipline
from roles.runtime.core import Lost
from roles.scheduler.core import SchedulerCore
from tests.unit.roles.scheduler.test_core import (
    AGENT,
    FIRST,
    FRONTEND,
    MODEL,
    NODE,
    hear,
    new_core,
    of_type,
    ready,
    run_until,
    serving,
    settings,
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


@pytest.mark.parametrize(
    ("changes", "expected_ms"),
    [
        ({}, 12.0),
        ({"share_percent": 25.0}, 3.0),
        ({"following": (1, 2)}, 12.0),  # its stages run one after the other
        ({"following": (1, 2), "is_gang": True}, 36.0),  # its ranks all at once
    ],
    ids=["a GPU", "a share", "a pipeline", "a gang"],
)
def test_the_gpu_time_of_a_batch_is_that_of_all_gpus_that_it_took(
    changes: dict[str, Any], expected_ms: float
) -> None:
    """Advice on GPUs took those of a gang for idle, all but one."""
    begun = settings()
    ((node_id, spec),) = begun.slices
    stages_ms = (spec.models[0].exec_ms,) * 3 if changes.get("following") and "is_gang" not in changes else ()
    models = tuple(replace(model, stages_ms=stages_ms) for model in spec.models)
    changed: SliceSpec = replace(spec, models=models, **changes)
    core = SchedulerCore(replace(begun, slices=((node_id, changed),)), make_discipline("eager", {}))
    serving(core, 1)
    sent = [
        *hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 100.0), 3.0),
        *(one for _, one in run_until(core, 50.0)),
    ]
    (batch,) = of_type(sent, RunBatch)
    done = Done(batch.batch_id, batch.slice_id, MODEL, "ok", 1, (), 0.0, 0.0, 12.0)
    hear(core, WORKER, done, 60.0)
    assert core._batches.tallies[MODEL].busy_gpu_ms == pytest.approx(expected_ms)
