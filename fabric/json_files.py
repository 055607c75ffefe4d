"""JSON files of our own: written whole, and read with what else may lie in their place in mind. And how any file is seen to have changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final, TypeVar

import msgspec

BYTES_MAX: Final = 64 << 20
TypeT = TypeVar("TypeT")
FileStamp = tuple[int, int, int, int]
"""Of one state of a file: another one has another stamp."""


def stamp_of(status: os.stat_result) -> FileStamp:
    """Not by the time of its content alone, which whoever replaces it may carry over (`cp -p`, `rsync -t`): the system's own is new then."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


def read_json(path: Path, type_: type[TypeT], bytes_max: int = BYTES_MAX) -> TypeT:
    """What a file says, as that type: fields it does not know are skipped.

    Raises OSError where it cannot be read, and ValueError for whatever else is there: what is larger, no JSON, nested too
    deep, or of another type. A pipe of that name does not hold us up.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        content = file.read(bytes_max + 1) or b""  # None: an open pipe in which there is nothing
    if len(content) > bytes_max:
        raise ValueError("it is larger than any such file")
    try:
        return msgspec.json.decode(content, type=type_)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no such file: {error}") from error


def as_json(struct: msgspec.Struct) -> str:
    """A struct with all of its fields, in ASCII: also half characters, as in an error about a path's odd bytes."""
    return json.dumps(msgspec.to_builtins(struct), separators=(",", ":"))


def as_struct(read: object, type_: type[TypeT]) -> TypeT:
    """What `as_json` wrote, as `json.loads` has it. Raises ValueError for whatever else it is."""
    try:
        return msgspec.convert(read, type_)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def write_whole(path: Path, text: str, *, is_synced: bool = False) -> None:
    """Write a file that only this user can read, whole or not at all; readers never see half a one.

    It is made under a name that nobody can foresee, and never where something is already: a link there would lead us to write elsewhere.
    `is_synced`: it is on the disk when this returns. Raises OSError, and leaves nothing then.
    """
    draft = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
