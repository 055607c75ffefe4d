"""Processes that are not our children, named so that a recycled pid is never taken for one of them.

A pid alone names whoever has it at the moment. Together with the moment at which the process started it names one
process for as long as the host runs; a pidfd, once opened and checked, keeps naming it after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from fabric.json_files import read_json, write_whole

_STATE, _THREADS, _STARTED_AT = 0, 17, 19  # fields of /proc/<pid>/stat behind the name in brackets


class ProcessIdentity(Struct, frozen=True):
    """One process of this host. `started_at`: in the kernel's ticks since it booted."""

    pid: int
    started_at: int


def identity_of(pid: int) -> ProcessIdentity | None:
    """Who has that pid now; None: nobody, or only the remains of somebody.

    A process whose main thread has ended before the others, as one that is killed may for a moment, has its files and locks still.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    parts = fields.split()
    has_ended = parts[_STATE] in "ZX" and int(parts[_THREADS]) <= 1
    return None if has_ended else ProcessIdentity(pid, int(parts[_STARTED_AT]))


def started_at(pid: int) -> int | None:
    """For a file that names a process; None: nobody has that pid."""
    identity = identity_of(pid)
    return None if identity is None else identity.started_at


def named_process(pid: int, started_at: int | None) -> ProcessIdentity | None:
    """The living process that a file names; None: it is gone, whoever has its pid now.

    `started_at` None: a file of an older version, whose process is taken for living if a command of ours has its pid.
    """
    identity = identity_of(pid)
    if identity is None:
        return None
    is_it = _is_ours(pid) if started_at is None else started_at == identity.started_at
    return identity if is_it else None


def is_running(pid: int, started_at: int | None) -> bool:
    """Whether the process that a file names lives; see `named_process`."""
    return named_process(pid, started_at) is not None


def _is_ours(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"tenuto" in command or b"roles.cli" in command


def open_handle(identity: ProcessIdentity) -> int | None:
    """A pidfd of that very process; None when it is gone. The caller closes it."""
    try:
        handle = os.pidfd_open(identity.pid)
    except (OSError, OverflowError):  # the latter of what no kernel has for a pid, in a file that is not ours
        return None
    if identity_of(identity.pid) == identity:  # looked at after opening: from here on it cannot be another
        return handle
    os.close(handle)
    return None


def is_over(handle: int, within_s: float) -> bool:
    """Wait for the end of a process by its pidfd."""
    poll = select.poll()  # `select.select` cannot hold descriptors over 1023
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> None:
    """To that very process; nothing if it is gone."""
    handle = open_handle(identity)
    if handle is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
        os.close(handle)


def end(identity: ProcessIdentity, within_s: float) -> bool:
    """SIGKILL, and wait for the end; True when it is gone."""
    handle = open_handle(identity)
    if handle is None:
        return True
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return is_over(handle, within_s)
    finally:
        os.close(handle)


def processes_with(variable: str, value: str) -> Iterator[ProcessIdentity]:
    """This user's processes that were started with ``variable=value`` in their environment."""
    wanted = f"{variable}={value}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        identity = identity_of(int(entry.name))
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it ended just now
            continue
        if wanted in environment and identity is not None and identity_of(identity.pid) == identity:
            yield identity


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write it whole or not at all, with OSError then; identities become mappings."""
    plain = {key: asdict(v) if isinstance(v, ProcessIdentity) else v for key, v in record.items()}
    write_whole(path, json.dumps(plain))


def read_record(path: Path) -> dict[str, Any]:
    """What was written; empty where there is nothing, or nothing that we wrote."""
    try:
        return read_json(path, dict[str, Any])
    except (OSError, ValueError):
        return {}


def identity_in(record: Mapping[str, Any], key: str) -> ProcessIdentity | None:
    """A process that a record names; None where it does not."""
    named = record.get(key)
    try:
        return None if named is None else ProcessIdentity(int(named["pid"]), int(named["started_at"]))
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
