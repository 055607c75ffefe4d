"""A worker that may outlive its agent, on virtual time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fabric.ids import NodeId
from fabric.messages import Host, SliceFailed, SliceReady, WorkerHello
from roles.gpu_worker.adoption import HELLO_EVERY_MS, LAST_GRACE_MS
from roles.gpu_worker.agent_watch import AgentWatch
from roles.gpu_worker.core import TELL_AGAIN_MS, WorkerCore
from roles.gpu_worker.events import (
    AgentGone,
    AgentUntold,
    End,
    Execute,
    JoinScheduler,
    SchedulerAnswers,
    WatchAgent,
)
from roles.gpu_worker.executors.base import LoadFailed
from roles.gpu_worker.peer_checks import AGENT
from roles.gpu_worker.registration import WorkerIdentity
from roles.runtime.core import Heard, Send, Tick
from tests.scarcity import no_descriptors
from tests.worker_builders import BOOT, SCHEDULER_AT, actions_of, inputs, loaded, run_batch, sent, slice_spec

OUTLIVE_MS = 30_000.0
X, Y = slice_spec("node-0/gpu0/0"), slice_spec("node-0/gpu1/0")


def told(agent_pid: int, addresses: tuple[str, ...] = SCHEDULER_AT) -> Heard:
    return Heard(AGENT, Host(NodeId("node-0"), (X, Y), addresses, agent_pid))


def orphan() -> WorkerCore:
    """Hosts X, ready, and Y, whose loader failed; its agent goes at 1000 ms."""
    core = WorkerCore(WorkerIdentity("worker-0", BOOT, 4242, ("ipc:///w",)), OUTLIVE_MS)
    core.handle(Tick(), 0.0)
    assert actions_of(WatchAgent, core.handle(told(7), 0.0)) == [WatchAgent(7)]
    core.handle(SchedulerAnswers(), 0.0)
    core.handle(loaded(X), 0.0)
    core.handle(LoadFailed(Y.slice_id, "it raised"), 0.0)
    (hello,) = sent(WorkerHello, core.handle(AgentGone(), 1_000.0))
    assert hello == WorkerHello("worker-0", BOOT, 4242, (X, Y))
    return core


def test_an_orphan_says_what_it_hosts_until_it_is_adopted_and_then_how_it_is() -> None:
    core = orphan()
    assert len(sent(WorkerHello, core.handle(Tick(), 1_000.0 + HELLO_EVERY_MS))) == 1
    actions = core.handle(told(8), 2_000.0)
    assert actions_of(WatchAgent, actions) == [WatchAgent(8)]
    assert [ready.slice_id for ready in sent(SliceReady, actions)] == [X.slice_id]
    assert [(failed.slice_id, failed.reason) for failed in sent(SliceFailed, actions)] == [
        (Y.slice_id, "it raised")
    ]
    assert not actions_of(JoinScheduler, actions), "the scheduler is where it was"
    assert not actions_of(End, core.handle(Tick(), 2_000.0 + 2 * OUTLIVE_MS))


def test_the_connection_to_an_agent_that_is_gone_is_nothing_to_tell_the_next_one_of() -> None:
    core = orphan()
    core.handle(AgentUntold(), 1_001.0)
    to_agent = [
        one for one in core.handle(Tick(), 1_001.0 + TELL_AGAIN_MS) if getattr(one, "peer", "") == AGENT
    ]
    assert [type(one.message) for one in actions_of(Send, to_agent)] == [WorkerHello]
    assert len(sent(SliceReady, core.handle(told(8), 2_000.0))) == 1


def test_an_agent_that_has_not_found_the_scheduler_yet_does_not_take_it_away() -> None:
    core = orphan()
    assert not actions_of(JoinScheduler, core.handle(told(8, ()), 2_000.0))


def test_an_orphan_serves_on() -> None:
    core = orphan()
    core.handle(run_batch(), 1_100.0)
    assert actions_of(Execute, core.handle(inputs(0, 1), 1_101.0))


def test_an_orphan_that_nobody_adopts_ends_in_order() -> None:
    core = orphan()
    assert not actions_of(End, core.handle(Tick(), 1_000.0 + OUTLIVE_MS - 1.0))
    (end,) = actions_of(End, core.handle(Tick(), 1_000.0 + OUTLIVE_MS))
    assert end.exit_code == 0


def test_an_orphan_lets_a_running_batch_finish_before_it_ends() -> None:
    core = orphan()
    late_ms = 1_000.0 + OUTLIVE_MS
    core.handle(run_batch(start_in_ms=0.0), late_ms - 1.0)
    core.handle(inputs(0, 1), late_ms - 1.0)
    assert not actions_of(End, core.handle(Tick(), late_ms))
    assert actions_of(End, core.handle(Tick(), late_ms + LAST_GRACE_MS))


def test_who_hosts_nothing_ends_with_its_agent() -> None:
    core = WorkerCore(WorkerIdentity("worker-0", BOOT, 4242, ()), OUTLIVE_MS)
    core.handle(Tick(), 0.0)
    assert actions_of(End, core.handle(AgentGone(), 10.0))


def test_a_worker_that_dies_with_its_agent_watches_nobody() -> None:
    core = WorkerCore(WorkerIdentity("worker-0", BOOT, 4242, ()))
    core.handle(Tick(), 0.0)
    assert not actions_of(WatchAgent, core.handle(told(7), 0.0))


# ---------------------------------------------------------------- the watch


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import select; select.select([], [], [], 60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def streams() -> Iterator[None]:
    """A watch redirects this process's streams and sets its alarm: neither may outlast the test."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for descriptor, copy in zip((1, 2), kept, strict=True):
        os.dup2(copy, descriptor)
        os.close(copy)


@pytest.mark.usefixtures("streams")
def test_the_end_of_the_agent_is_told_once_and_sets_an_alarm(child: subprocess.Popen[bytes]) -> None:
    watch = AgentWatch(OUTLIVE_MS)
    watch.watch(child.pid)
    watch.watch(child.pid)
    assert watch.take(8, 0.0) == ()
    child.kill()
    child.wait()
    assert watch.take(8, 0.0) == (AgentGone(),)
    assert watch.take(8, 0.0) == ()
    assert 30.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 35.0
    watch.watch(os.getpid())  # the next agent
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    assert not watch.has_more
    watch.close()


@pytest.mark.usefixtures("streams")
def test_an_agent_that_was_gone_before_it_was_watched_is_told_too(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    watch = AgentWatch(OUTLIVE_MS)
    watch.watch(child.pid)
    assert watch.take(8, 0.0) == (AgentGone(),)
    watch.close()


@pytest.mark.usefixtures("streams")
def test_an_agent_of_the_same_number_as_one_that_was_gone_is_watched(child: subprocess.Popen[bytes]) -> None:
    """As where there was no descriptor for the first watch, or where an agent is started again in a container."""
    watch = AgentWatch(OUTLIVE_MS)
    with no_descriptors():
        watch.watch(child.pid)
    assert watch.take(8, 0.0) == (AgentGone(),)
    watch.watch(child.pid)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0, "nothing ends us"
    assert watch.take(8, 0.0) == ()
    child.kill()
    child.wait()
    assert watch.take(8, 0.0) == (AgentGone(),)
    watch.close()


def test_a_worker_that_may_not_outlive_its_agent_watches_nothing() -> None:
    watch = AgentWatch()
    watch.watch(1)
    assert not watch.has_more
    watch.close()
