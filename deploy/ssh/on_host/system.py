"""Running commands, writing files whole, answering: what the rest of this package stands on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "tenuto:"


class Refused(Exception):
    """Something that cannot be done here; its text says what, and what would help."""


def run(
    command: Sequence[str], limit_s: float, *, check: bool = True, env: Mapping[str, str] | None = None
) -> str:
    """A command's output; Refused with its last line where it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{Path(command[0]).name} did not end within {limit_s:g} s") from None
    except OSError as error:
        if not check:
            return ""
        raise Refused(f"{command[0]}: {error.strerror}") from None
    text = done.stdout.decode("utf-8", "replace")
    if check and done.returncode != 0:
        if "No space left" in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise Refused(f"{' '.join(map(str, command[:4]))} …: {(errors or ['it failed'])[-1][-400:]}")
    return text


def until(is_true: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for a state; Refused with `what` when that takes too long."""
    end_at = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > end_at:
            raise Refused(f"{what} within {limit_s:g} s")
        select.select([], [], [], 0.1)


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """A file whole, or not at all."""
    draft = path.with_name(f".{path.name}.part")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as out:
            out.write(content)
        draft.chmod(mode)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def own_directory(path: str) -> str:
    """A shell's command: make a directory, and end with a line to that effect where others may write in what is there.

    In /tmp anybody makes what is not there, also as a link to where only we may write.
    """
    word = quoted([path])
    ours = f"find {word} -prune -type d -user $(id -u) ! -perm -020 ! -perm -002"
    refusal = f"echo {quoted([f'tenuto: {path} is no directory of this user, or others may write in it'])} >&2; exit 1"
    return f'mkdir -p -m 700 {word}; [ -n "$({ours})" ] || {{ {refusal}; }}'


def quoted(words: Sequence[str]) -> str:
    """As a shell's words."""
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def sha256(content: bytes) -> str:
    """Of bytes."""
    return hashlib.sha256(content).hexdigest()


def say(what: str) -> None:
    """Tell how far a request is."""
    tell({"progress": what})


def tell(what: Mapping[str, Any]) -> None:
    """A line for the operator; for nobody once that one went away."""
    try:
        sys.stdout.write(f"{MARK}{json.dumps(what)}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
