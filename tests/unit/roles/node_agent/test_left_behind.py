from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fabric.ids import Incarnation
from roles.node_agent.events import Orphan
from roles.node_agent.left_behind import end_what_agents_left
from roles.node_agent.mps.control import MARK, MpsPlace
from roles.node_agent.workers.adoption import WorkerRecords
from roles.runtime.identities import identity_of, write_record
from roles.runtime.process import RunFile, write_run_file


@pytest.mark.parametrize("has_agent", [False, True])
def test_what_an_agent_left_ends_with_the_cluster_unless_another_one_has_it(
    tmp_path: Path, *, has_agent: bool
) -> None:
    command = [sys.executable, "-c", "import select; select.select([], [], [], 60)"]
    with subprocess.Popen(command) as worker, subprocess.Popen(command) as guard:
        try:
            WorkerRecords(tmp_path, "a").write(Orphan("worker-a-1", worker.pid, Incarnation("i"), True), 0)
            place = MpsPlace.of(tmp_path, "a", 0)
            place.make()
            write_record(place.owner_file, {"owner": identity_of(os.getpid())})
            write_record(place.record_file, {"guard": identity_of(guard.pid)})
            notes = [tmp_path / folder / "notes.json" for folder in ("workers-of-mine", "mps-notes")]
            for path in notes:
                path.parent.mkdir()
                path.write_text("{}")
            if has_agent:
                write_run_file(tmp_path, RunFile("node-a", os.getpid(), "i", {}))
            end_what_agents_left(tmp_path)
            assert [one.poll() is None for one in (worker, guard)] == [has_agent, has_agent]
            left = {path.name for path in tmp_path.iterdir()} - {path.parent.name for path in notes}
            assert left == ({"workers-a", "mps-a", "node-a.json"} if has_agent else set())
            assert all(path.exists() for path in notes), "somebody else's"
        finally:
            worker.kill()
            guard.kill()


def test_what_a_guard_left_that_was_killed_ends_with_the_cluster(tmp_path: Path) -> None:
    """Its MPS server, which no agent comes to end."""
    place = MpsPlace.of(tmp_path, "a", 0)
    place.make()
    write_record(place.owner_file, {"owner": identity_of(os.getpid())})
    environment = os.environ | {MARK: str(place.directory)}
    command = [sys.executable, "-c", "import select; print(flush=True); select.select([], [], [], 60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            end_what_agents_left(tmp_path)
            assert server.wait(10) == -signal.SIGKILL
        finally:
            server.kill()
    assert list(tmp_path.iterdir()) == []
