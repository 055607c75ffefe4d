"""Looking at real processes: waiting for a state, and finding what is left of a tree."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path

from fabric.clock import MonotonicClock

CLOCK = MonotonicClock()
WAIT_MS = 60_000.0  # what passes does not wait for it; on a host that starves a test, all else takes long


def until(is_true: Callable[[], bool], limit_ms: float = WAIT_MS, what: str = "it") -> float:
    """Wait for a state; how long that took, in ms."""
    began_ms = CLOCK.now_ms()
    while not is_true():
        assert CLOCK.now_ms() - began_ms < limit_ms, f"{what} did not happen within {limit_ms:g} ms"
        select.select([], [], [], 0.002)
    return CLOCK.now_ms() - began_ms


def processes_naming(text: str) -> dict[int, str]:
    """Living processes (zombies too) whose command line has `text` in it, but this one: pid -> command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if text in command:
                found[int(entry.name)] = command
    return found


def zombies_of(pid: int) -> list[int]:
    """Children of a process that ended and were not reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state == "Z":
                found.append(int(entry.name))
    return found


def rss_mb(pid: int) -> float:
    """Memory a process has resident now, in MB."""
    return _status_mb(pid, "VmRSS")


def peak_rss_mb(pid: int) -> float:
    """The most it has had since its start, or since `forget_peak`."""
    return _status_mb(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Count its peak from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _status_mb(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024
