"""The process that rehearses: ``python -m roles.scheduler.rehearsing.rehearsal_process``.

Questions on stdin, answers on stdout, until stdin ends. It has what nobody else on its cores wants: batches come first.
"""

from __future__ import annotations

import contextlib
import os
import sys

from roles.runtime.idle_import import import_at_idle_priority

NICENESS = 19


def main() -> None:
    """Answer until nobody asks any more."""
    import_at_idle_priority("roles.scheduler.rehearsing.make_rehearsal")
    from fabric.clock import MonotonicClock  # noqa: PLC0415  after the gentle way
    from fabric.frames import PAYLOAD_BYTES_MAX  # noqa: PLC0415  as above
    from fabric.messages import RehearsalAsked  # noqa: PLC0415  as above
    from roles.runtime.message_pipe import Ended, MessagePipe  # noqa: PLC0415  as above
    from roles.runtime.process import die_with_parent  # noqa: PLC0415  as above
    from roles.scheduler.rehearsing.make_rehearsal import make_rehearsal  # noqa: PLC0415  as above

    die_with_parent()
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a sandbox may not allow it: then niceness has to do
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    pipe = MessagePipe(sys.stdin.fileno(), sys.stdout.fileno(), MonotonicClock())
    with contextlib.suppress(Ended):
        while True:
            asked, _ = pipe.receive(None)
            assert isinstance(asked, RehearsalAsked), "our own parent"
            pipe.send(make_rehearsal(asked), (), None, PAYLOAD_BYTES_MAX)


if __name__ == "__main__":
    main()
