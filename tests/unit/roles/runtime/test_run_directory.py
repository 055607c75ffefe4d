from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from fabric.errors import FabricError
from roles.runtime.process import RunFile, read_run_file, write_run_file
from roles.runtime.run_directory import (
    LOCK_FILE,
    UpFile,
    claim,
    is_claimed,
    read_up_file,
    run_files,
    take,
    write_up_file,
)
from tests.scarcity import read_only_disk

DEAD_PID = 2**22 + 1  # over the kernel's highest


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def living_pid() -> Iterator[int]:
    """Of a role that somebody started by hand."""
    command = [sys.executable, "-c", "input()", "tenuto"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as role:
        yield role.pid
        role.kill()


def test_a_directory_is_claimed_once_and_free_again_afterwards(tmp_path: Path) -> None:
    with claim(tmp_path):
        write_up_file(tmp_path, UpFile(os.getpid(), is_ready=False, endpoints={}))
        assert is_claimed(tmp_path)
        with pytest.raises(FabricError, match=f"already as process {os.getpid()}"), claim(tmp_path):
            pytest.fail("claimed twice")
        assert is_claimed(tmp_path)
        assert read_up_file(tmp_path) is not None
    assert not is_claimed(tmp_path)
    assert names(tmp_path) == []


def test_a_directory_that_was_made_is_removed(tmp_path: Path) -> None:
    with claim(tmp_path / "run"):
        pass
    assert names(tmp_path) == []


def test_a_directory_with_other_peoples_files_stays(tmp_path: Path) -> None:
    with claim(tmp_path / "run"):
        (tmp_path / "run" / "notes.txt").write_text("mine")
    assert names(tmp_path / "run") == ["notes.txt"]


def test_files_that_are_not_ours_stay_whatever_they_end_in(tmp_path: Path) -> None:
    """A user may run a cluster in his project's folder."""
    theirs = [
        "uv.lock",
        "default.yaml",
        "terraform.plan",
        "a.lease",
        "notes.tmp",
        "up",
        "worker.tmp",
        "node.json",
    ]
    for name in theirs:
        (tmp_path / name).write_text("theirs")
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / "their.sock"))
    with claim(tmp_path):
        pass
    assert names(tmp_path) == sorted([*theirs, "their.sock"])


def test_what_dead_processes_left_is_swept_away(tmp_path: Path) -> None:
    write_run_file(tmp_path, RunFile("frontend-0", DEAD_PID, "x", {}))
    (tmp_path / "frontend-0.99.tmp").write_text("{")
    (tmp_path / "frontend-0.control.lock").touch()
    write_up_file(tmp_path, UpFile(DEAD_PID, is_ready=True, endpoints={}))
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / "frontend-0.control"))
    with claim(tmp_path):
        assert names(tmp_path) == ["up.lock"]


def test_a_recycled_pid_does_not_keep_a_run_file(tmp_path: Path, living_pid: int) -> None:
    """Whatever its command says: an editor of tenuto.yaml, another cluster's role."""
    path = write_run_file(tmp_path, RunFile("frontend-0", living_pid, "x", {}))
    former = read_run_file(path)
    assert former is not None
    assert former.is_alive
    assert former.started_at is not None
    path.write_bytes(msgspec.json.encode(replace(former, started_at=former.started_at - 1)))
    with claim(tmp_path):
        assert names(tmp_path) == ["up.lock"]


def test_a_run_file_of_an_older_version_is_told_by_the_command(tmp_path: Path, living_pid: int) -> None:
    for role_id, pid in (("frontend-0", 1), ("node-a", living_pid)):
        content = {"role_id": role_id, "pid": pid, "incarnation": "x", "addresses": {}}
        (tmp_path / f"{role_id}.json").write_bytes(msgspec.json.encode(content))
    assert [found.is_alive for found in run_files(tmp_path)] == [False, True]


def test_a_socket_somebody_listens_on_is_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(tmp_path / "frontend-0.control"))
        living.listen()
        with claim(tmp_path):
            assert "frontend-0.control" in names(tmp_path)


def test_a_stale_lock_file_is_not_a_claim(tmp_path: Path) -> None:
    (tmp_path / "up.lock").touch()
    assert not is_claimed(tmp_path)
    assert not is_claimed(tmp_path / "missing")
    assert not is_claimed(tmp_path / "up.lock")
    with claim(tmp_path):
        assert is_claimed(tmp_path)
    assert names(tmp_path) == []


@pytest.fixture
def looker(tmp_path: Path) -> Iterator[int]:
    """Somebody who looks whether a killed cluster still runs, in the middle of that."""
    (tmp_path / LOCK_FILE).touch()
    descriptor = os.open(tmp_path / LOCK_FILE, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    yield descriptor
    with contextlib.suppress(OSError):
        os.close(descriptor)


def test_who_only_looks_is_not_taken_for_a_cluster(tmp_path: Path, looker: int) -> None:
    del looker
    assert not is_claimed(tmp_path)
    with pytest.raises(FabricError, match="already"):  # it has stopped in the middle of its look
        take(tmp_path)


def test_a_start_waits_for_who_only_looks(
    tmp_path: Path, looker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "select", lambda *_: os.close(looker))
    with claim(tmp_path):
        assert is_claimed(tmp_path)


def test_a_directory_that_cannot_be_made_is_a_readable_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FabricError, match="cannot be made or written to"), claim(tmp_path / "file" / "run"):
        pytest.fail("claimed")


LEFT = ["node-a.123.tmp", "node-a.json", "node-a.lease", "scheduler-0.plan", "up.config.yaml"]


def test_who_is_refused_has_taken_nothing_away(tmp_path: Path, living_pid: int) -> None:
    for name in LEFT:
        (tmp_path / name).touch()
    write_run_file(tmp_path, RunFile("node-a", living_pid, "x", {}))
    with pytest.raises(FabricError, match="node-a runs in"), claim(tmp_path, is_removed=True):
        pytest.fail("claimed")
    assert names(tmp_path) == LEFT


def test_a_page_that_waits_for_a_cluster_keeps_none_from_starting(tmp_path: Path, living_pid: int) -> None:
    """It shows one that is started there. Unless that has a page of its own: there can be one."""
    write_run_file(tmp_path, RunFile("page", living_pid, "x", {}))
    with claim(tmp_path):
        assert names(tmp_path) == ["page.json", LOCK_FILE]
    assert names(tmp_path) == ["page.json"]
    with pytest.raises(FabricError, match="page runs in"), claim(tmp_path, has_page=True):
        pytest.fail("claimed")


def test_a_cluster_that_ends_leaves_what_a_role_beside_it_has(tmp_path: Path, living_pid: int) -> None:
    with claim(tmp_path):
        for name in LEFT:
            (tmp_path / name).touch()
        write_run_file(tmp_path, RunFile("node-a", living_pid, "x", {}))
    assert names(tmp_path) == ["node-a.123.tmp", "node-a.json", "node-a.lease"]


ODD: dict[str, Callable[[Path], None]] = {
    "node-a.control.lock": Path.mkdir,
    "node-a.json": Path.mkdir,
    "node-a.lease": Path.mkdir,
    "node-b.control.lock": lambda path: path.symlink_to("/nowhere/x"),
    "node-c.control.lock": lambda path: path.symlink_to(path),
    "scheduler-0.123.tmp": Path.mkdir,
    "up.config.yaml": Path.mkdir,
}


@pytest.mark.parametrize("is_there_before", [True, False])
def test_what_cannot_be_swept_away_is_logged_and_stays_and_the_rest_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_there_before: bool
) -> None:
    """It stands in nobody's way, or whoever needs that name says so."""

    def leave() -> None:
        for name, make in ODD.items():
            make(tmp_path / name)
        for letter in "az":  # on both sides, in whatever order they are found
            (tmp_path / f"worker-{letter}.tmp").touch()

    if is_there_before:
        leave()
    with claim(tmp_path):
        if not is_there_before:
            leave()
        assert (tmp_path / "worker-a.tmp").exists() != is_there_before
    assert names(tmp_path) == sorted(ODD)
    for name in ODD:
        assert (f"path={tmp_path / name} " in caplog.text) == (name != "node-a.json"), name


def test_a_directory_that_went_away_or_became_read_only_does_not_keep_a_cluster_from_its_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    with claim(path):
        shutil.rmtree(path)
    with read_only_disk(), claim(path):
        pass
    assert names(path) == ["up.lock"]
    assert not is_claimed(path), "the lock goes with who holds it"
