"""`look` at a host whose schedulers stand by: it waits for a take-over, and for nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fabric.errors import PeerLost
from fabric.ids import Incarnation
from fabric.messages import SchedulerStanding, StatusAsked, StatusListed
from fabric.sockets import RouterLink
from roles.runtime.environment import RunDir
from roles.runtime.process import RunFile, write_run_file
from roles.runtime.running_cluster import LOOK_MS, look
from tests.integration.proc import CLOCK

BORN = Incarnation("00000001")


@contextmanager
def schedulers(run_dir: Path, *standings: SchedulerStanding) -> Iterator[None]:
    """Each answers as scheduler 0, 1, … of this host."""
    ended = threading.Event()

    def serve(number: int, standing: SchedulerStanding) -> None:
        role_id = f"scheduler-{number}"
        link = RouterLink.bind([RunDir(run_dir).ipc_address(f"{role_id}.control")])
        write_run_file(run_dir, RunFile(role_id, os.getpid(), BORN, {"control": list(link.addresses)}))
        started.release()
        while not ended.wait(0.002):
            for received in link.receive(16):
                if isinstance(received.message, StatusAsked):
                    link.send(received.peer, StatusListed(role_id, 1, (), (), {}, standing=standing))
        link.close()

    started = threading.Semaphore(0)
    threads = [threading.Thread(target=serve, args=pair) for pair in enumerate(standings)]
    for thread in threads:
        thread.start()
        started.acquire()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def standing(shard: int, *, active: str, is_active: bool = False) -> SchedulerStanding:
    state = "active" if is_active else "standby"
    return SchedulerStanding(state, 16, 1, 1, 1, shard=shard, shards=2, active=active)


def test_a_shard_whose_active_scheduler_is_on_another_host_is_not_waited_for(tmp_path: Path) -> None:
    here = standing(0, active="scheduler-0", is_active=True)
    with schedulers(tmp_path, here, standing(1, active="scheduler-7")):
        began_ms = CLOCK.now_ms()
        report = look(tmp_path)
        assert CLOCK.now_ms() - began_ms < LOOK_MS
    assert [one.scheduler for one in report.shards] == ["scheduler-0", ""]


def test_nor_is_a_cluster_whose_schedulers_here_all_stand_by(tmp_path: Path) -> None:
    with schedulers(tmp_path, standing(0, active="scheduler-5"), standing(1, active="scheduler-7")):
        began_ms = CLOCK.now_ms()
        with pytest.raises(
            PeerLost,
            match="scheduler-0 and scheduler-1 stand by; the active one is scheduler-5 and scheduler-7: ask",
        ):
            look(tmp_path)
        assert CLOCK.now_ms() - began_ms < LOOK_MS


@pytest.mark.parametrize("active", ["", "scheduler-1"])
def test_a_take_over_is_waited_for(tmp_path: Path, active: str) -> None:
    """Nobody is known to be active, or one of this host that does not answer: the next one will be one of those here."""
    with schedulers(tmp_path, standing(0, active=active), standing(1, active=active)):
        began_ms = CLOCK.now_ms()
        with pytest.raises(PeerLost):
            look(tmp_path)
        assert CLOCK.now_ms() - began_ms >= LOOK_MS


def test_a_host_that_only_has_other_roles_says_so(tmp_path: Path) -> None:
    write_run_file(tmp_path, RunFile("node-b", os.getpid(), BORN, {}))
    with pytest.raises(PeerLost, match="no scheduler runs here, only node-b"):
        look(tmp_path)
