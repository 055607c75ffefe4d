"""Files that roles write for each other: whatever lies in their place, its reader says so or takes it for none."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest

from fabric.errors import FabricError
from fabric.ids import NodeId
from fabric.json_files import read_json, write_whole
from fabric.limits import is_fine
from roles.node_agent.lease import LeaseGrants
from roles.node_agent.lease_file import LeaseFile
from roles.node_agent.workers.adoption import WorkerRecords
from roles.runtime.children import Processes
from roles.runtime.identities import identity_in, read_record
from roles.runtime.process import read_run_file
from roles.runtime.run_directory import read_up_file, run_files, sweep
from roles.scheduler.planning.saved_plan import SavedPlan

GOOD: dict[str, dict[str, object]] = {
    "frontend-0.json": {"role_id": "frontend-0", "pid": 1, "incarnation": "x", "addresses": {"client": []}},
    "up.json": {"pid": 1, "is_ready": True, "endpoints": {}, "problems": [], "warnings": []},
    "node-a.lease": {"epoch": 3, "holder_id": "scheduler-0", "incarnation": "x"},
    "scheduler-0.plan": {"document": "x", "epoch": 1, "number": 1, "about": "{}"},
    "worker-0.record": {"worker": {"pid": 1, "started_at": 5}},
    "workers-a/worker-a-1.json": {
        "process": {"pid": 2**31 - 1, "started_at": 123_456_789_012},  # which nobody has
        "incarnation": "x",
        "gpu": None,
    },
}


def run_file_and_all(path: Path) -> object:
    """What it says, before what the dead left is taken away."""
    found = read_run_file(path), run_files(path.parent)
    sweep(path.parent)
    return found


def lease(path: Path) -> object:
    """What it says can be told to schedulers."""
    record = LeaseFile(path.parent, "a").read()
    assert is_fine(LeaseGrants(NodeId("a"), record).report(0.0))
    return record


def living(path: Path) -> object:
    """Whom an agent that starts finds living: in a file whose process started at another moment, nobody."""
    processes = Processes()
    records = WorkerRecords(path.parents[1], "a")
    try:
        found = records.take_over(processes, (0,), is_adopting=True)
    finally:
        processes.close()
    assert path.is_dir() or not path.exists(), "the next start finds nothing of it"
    return found


READERS: dict[str, Callable[[Path], object]] = {
    "frontend-0.json": run_file_and_all,
    "up.json": lambda path: read_up_file(path.parent),
    "node-a.lease": lease,
    "scheduler-0.plan": lambda path: SavedPlan(path.parent, "scheduler-0", {}).read(),
    "worker-0.record": lambda path: identity_in(read_record(path), "worker"),
    "workers-a/worker-a-1.json": living,
}
ODD_VALUES = (
    "null", "true", "-1", "0", "2147483648", str(1 << 60), '"' + "x" * 600 + '"', "1" + "0" * 30, "1" + "0" * 5_000, "1e999", "NaN", '""', '"\\ud800"', '"\\u0000"',
    "[]", "{}", '[["a"]]', '{"client": ["ipc:///tmp/\\ud800"]}', '{"client": ["ipc:///tmp/\\u0000b"]}', '{"control": [5]}', "[" * 200_000,
)  # fmt: skip
CONTENTS = (
    b"",
    b"{",
    b"[]",
    b"3",
    b"\x00\xff",
    b"[" * 200_000,
    b'{"x": ' + b"[" * 200_000,
    b'{"pid": "\xff"}',
)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def check(name: str, path: Path) -> object:
    """Read it: what there is, nothing, or one of our errors; no descriptor is left."""
    open_before = _descriptors()
    found: object = None
    with contextlib.suppress(FabricError):
        found = READERS[name](path)
    assert _descriptors() == open_before
    return found


def check_none(name: str, path: Path) -> None:
    """There is nothing that could be read."""
    found = check(name, path)
    for part in found if isinstance(found, tuple) else (found,):
        assert not part, part


@pytest.mark.parametrize(
    "name", sorted(READERS.keys() - {"scheduler-0.plan"})
)  # which is read in tests of its own
def test_what_is_right_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(GOOD[name]))
    found = READERS[name](path)
    assert found is not None
    assert not isinstance(found, tuple) or found[0] is not None


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:12]))
def test_whatever_lies_there_is_read_as_none_or_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    check_none(name, path)


def fields_of(record: Mapping[str, object]) -> Iterator[tuple[str, ...]]:
    """Each, and those within one."""
    for field, value in record.items():
        yield (field,)
        if isinstance(value, dict):
            yield from ((field, *inner) for inner in fields_of(value))


@pytest.mark.parametrize(
    ("name", "field"), [(name, one) for name in READERS for one in fields_of(GOOD[name])]
)
def test_whatever_one_field_says_is_read_as_none_or_named(
    tmp_path: Path, name: str, field: tuple[str, ...]
) -> None:
    path = tmp_path / name
    record = json.loads(json.dumps(GOOD[name]))
    holder = record
    for outer in field[:-1]:
        holder = holder[outer]
    holder[field[-1]] = "ODD"
    path.parent.mkdir(exist_ok=True)
    for odd in ODD_VALUES:
        path.write_text(json.dumps(record).replace('"ODD"', odd))
        check(name, path)


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_holds_nobody_up(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    check_none(name, path)
    if path.exists():  # else it is swept
        writer = os.open(path, os.O_RDWR)  # now there is somebody who could write, and does not
        check_none(name, path)
        os.close(writer)
        path.unlink()
    path.mkdir()
    check_none(name, path)


def test_a_file_larger_than_any_such_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than any"):
        read_json(path, dict, bytes_max=1 << 10)


def test_a_file_is_written_for_this_user_alone_and_never_through_a_link(tmp_path: Path) -> None:
    """Not even where somebody has foreseen the name under which it is made."""
    victim, path = tmp_path / "victim", tmp_path / "frontend-0.json"
    victim.write_text("theirs")
    for name in (path.name, f"frontend-0.{os.getpid()}.tmp", f"{path.name}.00000000.tmp"):
        (tmp_path / name).symlink_to(victim)
    former = os.umask(0)
    try:
        write_whole(path, "ours")
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    with mock.patch("os.urandom", bytes), pytest.raises(FileExistsError):
        write_whole(path, "no")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("theirs", "ours", False)
    assert len(list(tmp_path.iterdir())) == 4
