"""Children that the host does not let us start or watch, and when a process has ended."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from roles.runtime.children import Processes
from roles.runtime.identities import end, identity_of
from tests.integration.proc import until
from tests.scarcity import limited, no_descriptors


def started(processes: Processes, name: str = "child") -> list[tuple[str, int, str]]:
    processes.spawn(name, [sys.executable, "-c", "import time; time.sleep(60)"])
    return [(ended.name, ended.code, ended.last_words) for ended in processes.take(10, 0.0)]


def test_no_descriptors_for_a_child_end_it_and_not_us() -> None:
    processes = Processes()
    try:
        with no_descriptors():
            (ended,) = started(processes)
        assert ended[:2] == ("child", 127)
        assert "Too many open files" in ended[2]
        assert started(processes) == [], "the name is free again"
    finally:
        processes.close()


def in_use() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_whichever_descriptor_is_the_one_too_many_for_a_child_it_ends_it_and_not_us() -> None:
    before = in_use()
    refused = []
    for left in range(12):
        processes = Processes()
        free = sorted(set(range(1024)) - in_use())
        try:
            with limited(resource.RLIMIT_NOFILE, free[left]):
                refused.append(bool(started(processes)))
        finally:
            processes.close()
    assert refused == sorted(refused, reverse=True)
    assert (refused[0], refused[-1]) == (True, False)
    until(lambda: in_use() == before, what="the end of what was opened")


UNREAD = """
import sys
from roles.runtime.children import Processes
from roles.runtime.process import log, set_up_logging
set_up_logging("node-a")
for number in range(200):
    log.info("line %d %s", number, "x" * 1_000)
talk = "for _ in range(400): print('y' * 1_000, flush=True)\\nprint('the end')"
processes = Processes()
processes.spawn("talker", [sys.executable, "-c", talk])
ended = []
while not ended:
    ended = processes.take(64, 0.0)
print(ended[0].code, ended[0].last_words.split()[-2:])
"""


def test_output_that_nobody_reads_holds_up_neither_a_role_nor_its_child() -> None:
    """As where a terminal was stopped by Ctrl-S, or the parent by Ctrl-Z."""
    with subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as role:
        assert role.stdout is not None
        watchdog = threading.Timer(60.0, role.kill)
        watchdog.start()
        try:
            assert role.stdout.read() == "0 ['the', 'end']\n"
        finally:
            watchdog.cancel()
            role.kill()


EXIT_OF_ONE_THREAD = {"x86_64": 60, "aarch64": 93}
"""The number of the system call: no library function ends the main thread of a Python process alone."""

MAIN_THREAD_ENDS = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(60.0,)).start()
ctypes.CDLL(None).syscall(int(sys.argv[1]), 0)
"""


@pytest.mark.skipif(
    platform.machine() not in EXIT_OF_ONE_THREAD, reason="the system call's number is not known"
)
def test_a_process_is_there_as_long_as_any_of_its_threads() -> None:
    """Its sockets and locks are, so whoever clears up after it has to wait: threads of a killed process end one after the other."""
    number = str(EXIT_OF_ONE_THREAD[platform.machine()])
    process = subprocess.Popen([sys.executable, "-c", MAIN_THREAD_ENDS, number])
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", what="the main thread's end")
        identity = identity_of(process.pid)
        assert identity is not None
        assert end(identity, 10.0)
        assert identity_of(process.pid) is None
    finally:
        os.kill(process.pid, 9)
        process.wait(10)
