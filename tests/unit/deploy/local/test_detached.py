from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from deploy.local import detached
from deploy.local.detached import not_ready, start_detached, stop_running
from fabric.errors import FabricError, PeerLost
from roles.runtime.run_directory import (
    LOCK_FILE,
    LOG_FILE,
    OLD_LOG_FILE,
    UP_FILE,
    UpFile,
    claim,
    give_back,
    is_claimed,
    read_up_file,
    take,
    write_up_file,
)

MOMENT = "2026-07-01 10:00:00,123"
BARE = "the cluster was not ready within 900 s"
DEFECT = "tenuto: a defect of Tenuto ended scheduler-0: no room"
STARTED_AGAIN = (
    f"{MOMENT} level=WARNING role=up role_restarts scheduler-0 was killed by signal 9; starting it again"
)
FAILED = f"{MOMENT} level=ERROR role=node-a gpu_lost gpu=0"
TOLD = f"{MOMENT} level=INFO role=frontend-0 listening address=x"
DUE = "up: role_restarts scheduler-0 was killed by signal 9; starting it again"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], ""),
        ([TOLD], ""),
        (["Traceback (most recent call last):", TOLD], ""),
        ([DEFECT, TOLD], DEFECT.removeprefix("tenuto: ")),
        ([DEFECT, STARTED_AGAIN, TOLD], DUE),
        ([STARTED_AGAIN, DEFECT, "", TOLD], DEFECT.removeprefix("tenuto: ")),
        ([STARTED_AGAIN, FAILED], "node-a: gpu_lost gpu=0"),
        ([STARTED_AGAIN, *[TOLD] * 100], DUE),
    ],
)
def test_a_start_that_takes_too_long_is_told_with_what_its_log_says_last(
    tmp_path: Path, lines: list[str], why: str
) -> None:
    (tmp_path / LOG_FILE).write_text("".join(f"{line}\n" for line in lines))
    assert str(not_ready(tmp_path, 900_000.0)) == BARE + (
        f"; the last that its log says: {why}" if why else ""
    )


def test_a_long_log_is_read_at_its_end_and_one_that_is_gone_not_at_all(tmp_path: Path) -> None:
    assert str(not_ready(tmp_path, 900_000.0)) == BARE
    (tmp_path / LOG_FILE).write_text(f"{TOLD}\n" * 50_000 + f"{FAILED} \xff\n{TOLD}\n", encoding="latin-1")
    assert "node-a: gpu_lost" in str(not_ready(tmp_path, 900_000.0))


class Subprocess:
    """Its cluster ends at once, after something else happened."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def Popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: N802  its name
        assert command[-2] == "--lock"
        assert options["pass_fds"] == (int(command[-1]),)
        self._meanwhile()
        says = "import sys; sys.exit('tenuto: no room')"
        return subprocess.Popen([sys.executable, "-c", says], **options)


def test_the_log_is_made_under_the_claim_and_goes_with_a_start_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    monkeypatch.setattr(detached, "subprocess", Subprocess(lambda: held.append(is_claimed(tmp_path))))
    with pytest.raises(FabricError, match="no room"):
        start_detached([], tmp_path, is_removed=False)
    assert held == [True]
    assert not list(tmp_path.iterdir())


def test_the_log_of_who_has_the_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_one_begins() -> None:
        (tmp_path / LOCK_FILE).unlink()  # by its own, when it had ended
        (tmp_path / LOG_FILE).unlink()
        held.append(take(tmp_path))
        (tmp_path / LOG_FILE).write_text("the other")

    held: list[int] = []

    monkeypatch.setattr(detached, "subprocess", Subprocess(another_one_begins))
    with pytest.raises(FabricError, match="no room"):
        start_detached([], tmp_path, is_removed=True)
    assert (tmp_path / LOG_FILE).read_text() == "the other"
    assert (tmp_path / LOCK_FILE).exists()
    os.close(*held)
    with claim(tmp_path), pytest.raises(FabricError, match="already"):
        start_detached([], tmp_path, is_removed=True)
    assert (tmp_path / LOG_FILE).read_text() == "the other"


@pytest.mark.parametrize("is_readable", [True, False])
def test_what_a_killed_cluster_said_is_not_taken_for_what_the_next_one_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    """Pids begin again with a container; after a loss of power the file may be empty."""
    write_up_file(tmp_path, UpFile(os.getpid(), is_ready=True, endpoints={}))
    if not is_readable:
        (tmp_path / UP_FILE).write_bytes(b"")
    for name in (LOG_FILE, OLD_LOG_FILE):
        (tmp_path / name).write_text(f"{TOLD}\n")
    seen: dict[str, int] = {}
    monkeypatch.setattr(
        detached,
        "subprocess",
        Subprocess(lambda: seen.update({path.name: path.stat().st_size for path in tmp_path.iterdir()})),
    )
    with pytest.raises(FabricError, match="no room"):
        start_detached([], tmp_path, is_removed=False)
    assert seen == {LOCK_FILE: 0, LOG_FILE: 0}


class Interrupted(subprocess.Popen[bytes]):
    """It heeds no SIGTERM, and who waits for it presses Ctrl-C. Not even SIGKILL ends it if `is_stuck`."""

    is_stuck = False
    waits = 0

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        del command
        deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
        super().__init__([sys.executable, "-c", deaf], **{**options, "stdout": subprocess.PIPE})

    def wait(self, timeout: float | None = None) -> int:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        if self.is_stuck:
            raise subprocess.TimeoutExpired("", 0.0)
        return super().wait(timeout)

    def kill(self) -> None:
        if not self.is_stuck:
            super().kill()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_second_ctrl_c_kills_and_the_directory_is_given_back_when_nothing_runs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    started: list[Interrupted] = []

    def is_interrupted(process: Interrupted, run_dir: Path) -> None:
        del run_dir
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        raise KeyboardInterrupt

    monkeypatch.setattr(Interrupted, "is_stuck", is_stuck)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    monkeypatch.setattr(detached, "_until_ready", is_interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            start_detached([], tmp_path, is_removed=False)
        assert (started[0].poll() is None) == is_claimed(tmp_path) == is_stuck
        assert [path.name for path in tmp_path.iterdir()] == ([LOCK_FILE] if is_stuck else [])
    finally:
        (process,) = started
        monkeypatch.undo()
        process.is_stuck = False
        process.kill()
        process.communicate()


def test_who_has_the_pid_of_a_killed_cluster_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the next one's lock and what it says itself, the killed one's file is there."""
    with claim(tmp_path), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        write_up_file(tmp_path, UpFile(other.pid, is_ready=True, endpoints={}))
        former = read_up_file(tmp_path)
        assert former is not None
        assert former.started_at is not None
        content = msgspec.json.encode(replace(former, started_at=former.started_at - 1))
        (tmp_path / UP_FILE).write_bytes(content)
        monkeypatch.setattr(detached, "BEGIN_LIMIT_MS", 0.0)
        with pytest.raises(FabricError, match="is being started"):
            stop_running(tmp_path)
        assert other.poll() is None
        other.kill()


def test_a_cluster_that_has_not_said_yet_who_it_is_is_waited_for_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background that takes as long as its imports."""
    looks = 0

    def look_again(*_: object) -> tuple[list[int], list[int], list[int]]:
        nonlocal looks
        looks += 1
        if looks == 3:
            write_up_file(tmp_path, UpFile(cluster.pid, is_ready=False, endpoints={}))
            monkeypatch.setattr(select, "select", real)
        return [], [], []

    real = select.select
    command = [sys.executable, "-c", "input()"]
    with claim(tmp_path), subprocess.Popen(command, stdin=subprocess.PIPE) as cluster:
        monkeypatch.setattr(select, "select", look_again)
        stop_running(tmp_path)
        assert (looks, cluster.wait()) == (3, -signal.SIGTERM)


def test_a_cluster_that_ends_already_is_waited_for_and_not_signalled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal means: at once."""

    def ends(handle: int, limit_ms: float) -> bool:
        cluster.communicate(b"\n")
        return real(handle, limit_ms)

    real = detached._has_ended
    monkeypatch.setattr(detached, "_has_ended", ends)
    command = [sys.executable, "-c", "input()"]
    with claim(tmp_path), subprocess.Popen(command, stdin=subprocess.PIPE) as cluster:
        write_up_file(tmp_path, UpFile(cluster.pid, is_ready=True, endpoints={}, is_ending=True))
        stop_running(tmp_path)
        assert cluster.returncode == 0


def test_a_start_that_ends_before_it_said_who_it_is_was_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = take(tmp_path)
    monkeypatch.setattr(select, "select", lambda *_: give_back(tmp_path, lock, is_removed=False))
    with pytest.raises(PeerLost, match="no cluster runs"):
        stop_running(tmp_path)


def test_a_cluster_that_ends_in_the_moment_of_its_signal_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_gone(handle: int, number: int) -> None:
        cluster.kill()
        cluster.wait()
        real(handle, number)

    real = signal.pidfd_send_signal
    monkeypatch.setattr(signal, "pidfd_send_signal", is_gone)
    command = [sys.executable, "-c", "input()"]
    with claim(tmp_path), subprocess.Popen(command, stdin=subprocess.PIPE) as cluster:
        write_up_file(tmp_path, UpFile(cluster.pid, is_ready=True, endpoints={}))
        stop_running(tmp_path)
