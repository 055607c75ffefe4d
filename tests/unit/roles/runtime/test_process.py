"""What a role's process asks of the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from fabric.errors import FabricError
from roles.runtime.identities import started_at
from roles.runtime.process import (
    RunFile,
    child_environment,
    read_run_file,
    remove_run_file,
    wake_exactly,
    write_run_file,
)
from tests.scarcity import full_disk, read_only_disk


def timer_slack_ns() -> int:
    """Of this thread."""
    return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text(encoding="ascii"))


def test_only_the_thread_that_asks_for_it_wakes_exactly() -> None:
    before_ns = timer_slack_ns()
    seen_ns: list[int] = []

    def ask() -> None:
        wake_exactly()
        seen_ns.append(timer_slack_ns())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen_ns == [1]
    assert timer_slack_ns() == before_ns


def test_a_role_may_have_as_many_descriptors_as_the_kernel_lets_it_and_its_standard_streams_are_taken() -> (
    None
):
    code = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4_000))\n"
        "os.close(0); os.close(2)\n"
        "from roles.runtime.process import set_up_descriptors\n"
        "set_up_descriptors()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE), os.readlink('/proc/self/fd/0'), os.readlink('/proc/self/fd/2'))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout == "(4000, 4000) /dev/null /dev/null\n"


TOLD = """
import os, select, signal, sys
from roles.runtime.process import StopSignal
# However the suite itself was started.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
told = 0
with StopSignal(is_child=sys.argv[1] == "child") as stop:
    for name in sys.argv[2:]:
        os.kill(os.getpid(), signal.Signals[name])
        while select.select([stop], [], [], 0)[0]:
            told += len(stop.take(64, 0.0))
if sys.argv[1] == "child":
    os.kill(os.getpid(), signal.SIGTERM)
print(told, [signal.getsignal(number).__class__.__name__ for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)])
"""


@pytest.mark.parametrize(
    ("how", "signals", "code", "told"),
    [
        ("", "SIGTERM", 0, 1),
        ("", "SIGINT", 0, 1),
        ("", "SIGHUP", 0, 1),
        ("", "SIGTERM SIGTERM", 143, None),
        ("", "SIGINT SIGINT", 130, None),
        ("", "SIGTERM SIGINT", 130, None),
        ("", "SIGHUP SIGHUP SIGHUP", 0, 1),
        ("", "SIGHUP SIGTERM SIGHUP", 0, 1),
        ("", "SIGTERM SIGHUP SIGHUP", 0, 1),
        ("", "SIGHUP SIGTERM SIGTERM", 143, None),
        ("nohup", "SIGHUP", 0, 0),
        ("nohup", "SIGHUP SIGTERM", 0, 1),
        ("child", "SIGTERM SIGTERM SIGTERM", 0, 1),
        ("child", "SIGINT SIGTERM SIGHUP", 0, 1),
    ],
)
def test_a_wish_to_end_is_told_once_and_only_a_second_one_of_a_person_ends_at_once(
    how: str, signals: str, code: int, told: int | None
) -> None:
    command = [sys.executable, "-c", TOLD, how, *signals.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code, ended.stderr
    of_interrupts = "Handlers" if how == "child" else "builtin_function_or_method"
    after = f"['Handlers', '{of_interrupts}', 'Handlers']"  # as a process begins, but a child of ours
    assert ended.stdout == ("" if told is None else f"{told} {after}\n")


LEFT_TO_PARENT = """
import os, signal, subprocess, sys
from roles.runtime.process import leave_the_end_to_parent
leave_the_end_to_parent()
os.kill(os.getpid(), signal.SIGTERM)
says = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
print(subprocess.run([sys.executable, "-c", says]).returncode)
"""


def test_what_its_parent_kills_lives_on_when_everybody_is_told_to_end_but_what_it_starts_does_not() -> None:
    command = [sys.executable, "-c", LEFT_TO_PARENT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"{-signal.SIGTERM}\n"), ended.stderr


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_process_knows_whether_one_of_ours_has_started_it(is_ours: bool) -> None:
    says = "from roles.runtime.process import die_with_parent; print(die_with_parent())"
    environment = child_environment() if is_ours else dict(os.environ)
    ended = subprocess.run(
        [sys.executable, "-c", says], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == f"{is_ours}\n", ended.stderr


def test_a_run_file_on_a_full_disk_is_refused_with_a_reason_and_leaves_nothing(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(FabricError, match="cannot write the run file"):
        write_run_file(tmp_path, RunFile("frontend-0", os.getpid(), "x", {}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        '{"role_id": "x"}',
        '{"role_id": 1, "pid": "one", "incarnation": "", "addresses": {}}',
        '{"role_id": "frontend-0", "pid": 1, "incarnation": "", "addresses": []}',
        "\x00\xff",
        *(
            f'{{"role_id": "frontend-0", "pid": 1, "incarnation": "", "addresses": {{"{purpose}": {addresses}}}}}'
            for purpose in ("control", "client")
            for addresses in (
                "5",
                '"tcp://127.0.0.1:5"',
                "[5]",
                '[""]',
                '["127.0.0.1:80"]',
                '["tcp://127.0.0.1"]',
                '["tcp://127.0.0.1:0"]',
                '["ipc://run/frontend.sock"]',
            )
        ),
    ],
)
def test_what_is_no_run_file_is_nobodys(tmp_path: Path, content: str) -> None:
    path = tmp_path / "frontend-0.json"
    path.write_text(content, encoding="latin-1")
    assert read_run_file(path) is None
    path.unlink()
    path.mkdir()
    assert read_run_file(path) is None
    remove_run_file(tmp_path, RunFile("frontend-0", 1, "x", {}))
    assert path.is_dir()


def test_a_run_file_that_cannot_be_removed_stays(tmp_path: Path) -> None:
    own = RunFile("frontend-0", os.getpid(), "x", {})
    write_run_file(tmp_path, own)
    with read_only_disk():
        remove_run_file(tmp_path, own)
    found = read_run_file(tmp_path / "frontend-0.json")
    assert found == replace(own, started_at=started_at(os.getpid()))
