"""The process that rehearses: ``python -m roles.scheduler.rehearsing.rehearsal_process``.

On stdin packed questions, on stdout packed answers, each after its length in four bytes, until stdin ends. It has what
nobody else on its cores wants: batches come first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO

from roles.runtime.idle_import import import_at_idle_priority

NICENESS = 19
LENGTH_BYTES = 4


def main() -> None:
    """Answer until nobody asks any more."""
    import_at_idle_priority("roles.scheduler.rehearsing.make_rehearsal")
    from fabric.messages import RehearsalAsked  # noqa: PLC0415  after the gentle way
    from roles.runtime.journal import packed, unpacked  # noqa: PLC0415  as above
    from roles.runtime.process import die_with_parent  # noqa: PLC0415  as above
    from roles.scheduler.rehearsing.make_rehearsal import make_rehearsal  # noqa: PLC0415  as above

    die_with_parent()
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a sandbox may not allow it: then niceness has to do
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while (question := received(sys.stdin.buffer)) is not None:
        asked = unpacked(question)
        assert isinstance(asked, RehearsalAsked), "our own parent"
        send(sys.stdout.buffer, packed(make_rehearsal(asked)))


def received(pipe: IO[bytes]) -> bytes | None:
    """The next message; None where the other end has closed."""
    length = pipe.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    size = int.from_bytes(length)
    message = pipe.read(size)
    return message if len(message) == size else None


def send(pipe: IO[bytes], message: bytes) -> None:
    """Write it whole."""
    pipe.write(len(message).to_bytes(LENGTH_BYTES) + message)
    pipe.flush()


if __name__ == "__main__":
    main()
