from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest

from roles.node_agent.workers.cpu_affinity import CorePins, pin
from roles.runtime.identities import ProcessIdentity, end, identity_of, open_handle, processes_with


def shared(pins: CorePins) -> bool:
    """A call, as a property's former value is believed."""
    return pins.are_shared


def test_workers_get_cores_of_their_own_while_there_are_some() -> None:
    pins = CorePins(2, range(5))
    assert pins.take("a") == frozenset({0, 1})
    assert pins.take("b") == frozenset({2, 3})
    assert shared(pins) is False
    assert pins.take("c") == frozenset({4, 0})
    assert shared(pins) is True
    pins.give_back("a")
    assert pins.take("d") == frozenset({1, 0})


def test_without_a_word_workers_go_where_the_kernel_puts_them() -> None:
    pins = CorePins(None, range(4))
    assert pins.take("a") is None
    pins.give_back("a")


def test_cores_of_adopted_workers_are_taken() -> None:
    pins = CorePins(1, range(3))
    pins.note("orphan", {0, 7})
    assert pins.take("a") == frozenset({1})
    pins.give_back("nobody")


def test_a_worker_whose_cores_are_not_ours_any_more_runs_unpinned(caplog: pytest.LogCaptureFixture) -> None:
    """The host's manager of cores has changed them meanwhile."""
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.WARNING):
        pin(os.getpid(), frozenset({max(before) + 1_000}))
    assert [record.getMessage() for record in caplog.records] == [
        f"worker_not_pinned pid={os.getpid()} cores={max(before) + 1_000} reason='Invalid argument'"
    ]
    assert os.sched_getaffinity(0) == before


def test_a_recycled_pid_is_not_the_same_process() -> None:
    own = identity_of(os.getpid())
    assert own is not None
    handle = open_handle(own)
    assert handle is not None
    os.close(handle)
    other = ProcessIdentity(own.pid, own.started_at + 1)
    assert open_handle(other) is None
    assert end(other, 0.0), "as good as gone, and nobody was hurt"


def test_processes_are_found_by_what_they_were_started_with_and_ended_by_handle() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import select; select.select([], [], [], 60)"],
        env={**os.environ, "TENUTO_TEST_MARK": f"here-{os.getpid()}"},
    )
    try:
        found: list[ProcessIdentity] = []
        while not found:  # between fork and exec it still has our own environment
            found = list(processes_with("TENUTO_TEST_MARK", f"here-{os.getpid()}"))
        assert [one.pid for one in found] == [child.pid]
        assert end(found[0], 5.0)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == -signal.SIGKILL
    assert identity_of(child.pid) is None
