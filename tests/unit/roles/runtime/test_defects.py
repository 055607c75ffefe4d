"""A loop that raises: what is written down, what is said, and how soon it is over."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from fabric.clock import MonotonicClock
from fabric.errors import ConfigError
from roles.cli.replay import replay
from roles.runtime.core import Tick
from roles.runtime.defects import EVENT_CHARS_MAX, FILES_MAX, DefectReport
from roles.runtime.exit_codes import EXIT_DEFECT
from roles.runtime.loop.driver import RECENT_MAX, Driver, Role
from tests.scarcity import full_disk


class Numbers:
    """A source without a descriptor: 0, 1, 2, …"""

    has_more = True
    wake_at_ms: float | None = None

    def __init__(self) -> None:
        self.next = 0

    def fileno(self) -> int:
        return -1

    def take(self, limit: int, now_ms: float) -> Sequence[int]:
        self.next += 1
        return [self.next - 1]


class Fragile:
    """Does not take this one."""

    wake_at_ms: float | None = None

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def handle(self, event: int | Tick, now_ms: float) -> Sequence[None]:
        assert event != self.bad, "planted"
        return ()


def broken(bad: int = 5_000) -> tuple[Exception, Sequence[Role[int, None]]]:
    """What a loop tells of its end."""
    told: list[tuple[Exception, Sequence[Role[int, None]]]] = []
    role = Role[int, None](Fragile(bad), [Numbers()], lambda _: None)
    driver = Driver([role], MonotonicClock(), on_defect=lambda error, roles: told.append((error, roles)))
    try:
        with pytest.raises(AssertionError, match="planted"):
            driver.run(lambda: False)
    finally:
        driver.close()
    ((error, roles),) = told
    return error, roles


def test_the_report_has_the_traceback_and_the_last_events_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error, roles = broken()
    DefectReport("scheduler-0", tmp_path, tmp_path / "j").tell(error, roles)
    (path,) = tmp_path.iterdir()
    assert path.name == f"scheduler-0-{os.getpid()}.defect"
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert f"tenuto replay {tmp_path / 'j'}" in text
    assert "AssertionError: planted" in text
    assert 'assert event != self.bad, "planted"' in text
    events = [line.split()[1] for line in text[text.index("The last") :].splitlines()[1:] if line]
    assert events == [str(5_000 - step) for step in range(RECENT_MAX)]
    assert capsys.readouterr().err == (
        f"tenuto: a defect of Tenuto ended scheduler-0 (AssertionError); what is known of it is in {path}\n"
    )


def test_it_takes_no_longer_than_it_may_however_much_there_is_to_say(tmp_path: Path) -> None:
    class Slow:
        def __repr__(self) -> str:
            until_ms = clock.now_ms() + 5.0
            while clock.now_ms() < until_ms:
                pass
            return "x" * 100_000

    clock = MonotonicClock()
    role = Role[object, None](Fragile(0), [], lambda _: None)  # type: ignore[arg-type]
    for _ in range(RECENT_MAX):
        role.feed(Slow(), clock.now_ms())
    DefectReport("x", tmp_path).tell(ValueError("planted"), [role])
    text = next(tmp_path.iterdir()).read_text()
    assert "and older ones, for which there was no time" in text
    assert text.count("\n") < 40
    assert max(map(len, text.splitlines())) < EVENT_CHARS_MAX + 20


def test_only_the_newest_reports_are_kept(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 3):
        DefectReport(f"worker-{number}", tmp_path).tell(ValueError("planted"))
    assert len(list(tmp_path.iterdir())) == FILES_MAX
    assert not list(tmp_path.glob("worker-0-*"))
    assert list(tmp_path.glob(f"worker-{FILES_MAX + 2}-*"))


def test_what_lies_under_its_name_is_neither_followed_nor_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command's report is among all users' temporary files, under a name that can be foreseen."""
    folder, precious = tmp_path / "tmp", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    foreseen = folder / f"status-{os.getpid()}.defect"
    foreseen.symlink_to(precious)
    for number in range(2):
        DefectReport("status", folder).tell(ValueError(f"planted {number}"))
    assert precious.read_text() == "precious"
    reports = sorted(set(folder.iterdir()) - {foreseen}, key=lambda path: path.stat().st_mtime_ns)
    said = capsys.readouterr().err.splitlines()
    for number, (path, line) in enumerate(zip(reports, said, strict=True)):
        assert line.endswith(f" is in {path}")
        assert path.stat().st_mode & 0o777 == 0o600
        assert f"planted {number}" in path.read_text()


def test_reports_of_others_stay_and_stand_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(FILES_MAX):
        (tmp_path / f"theirs-{number}.defect").touch()
    (tmp_path / "theirs.defect").symlink_to("/nowhere")
    theirs = set(tmp_path.iterdir())
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    DefectReport("status", tmp_path).tell(ValueError("planted"))
    assert len(set(tmp_path.iterdir()) - theirs) == 1
    assert theirs < set(tmp_path.iterdir())


def test_where_it_cannot_be_written_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error, roles = broken(3)
    DefectReport("x", tmp_path / "gone").tell(error, roles)
    said = capsys.readouterr().err
    assert "AssertionError: planted" in said
    assert said.splitlines()[-1].endswith("cannot be written: No such file or directory")


def test_a_process_ends_at_once_with_its_own_code_and_one_line(tmp_path: Path) -> None:
    code = f"""
        import atexit, sys, threading, time
        from pathlib import Path
        from fabric.clock import MonotonicClock
        from roles.runtime.defects import DefectReport
        from roles.runtime.loop.driver import Driver
        from tests.unit.roles.runtime.test_defects import Fragile, Numbers
        from roles.runtime.loop.driver import Role
        threading.Thread(target=time.sleep, args=(60,)).start()
        atexit.register(print, "an end in order")
        def say_when(): print(time.monotonic(), flush=True)
        report = DefectReport("x", Path({str(tmp_path)!r}), before_end=say_when)
        Driver([Role(Fragile(3_000), [Numbers()], lambda _: None)], MonotonicClock(), on_defect=report.end).run(bool)
    """
    clock = MonotonicClock()
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=False
    )
    ended_at_ms = clock.now_ms()
    assert process.returncode == EXIT_DEFECT
    (path,) = tmp_path.iterdir()
    assert process.stderr == (
        f"tenuto: a defect of Tenuto ended x (AssertionError); what is known of it is in {path}\n"
    )
    (raised_at_s,) = process.stdout.splitlines()
    assert ended_at_ms - 1e3 * float(raised_at_s) < 1_000.0, "the machine may be busy: 100 ms where it is not"


def test_a_full_disk_leaves_no_half_report_unmentioned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error, roles = broken(3)
    read, write = os.pipe()
    stderr, sys.stderr = sys.stderr, os.fdopen(write, "w")
    try:
        with full_disk():
            DefectReport("x", tmp_path).tell(error, roles)
    finally:
        sys.stderr.close()
        sys.stderr = stderr
    with os.fdopen(read) as said:
        assert "cannot be written: File too large" in said.read()


def test_a_replay_of_a_report_says_what_it_is(tmp_path: Path) -> None:
    DefectReport("scheduler-0", tmp_path).tell(ValueError("planted"))
    (path,) = tmp_path.iterdir()
    result = CliRunner().invoke(replay, [str(path)])
    assert isinstance(result.exception, ConfigError)
    assert "is the report of a defect" in str(result.exception)
