"""The `tenuto` command. Nothing else is imported before `main` has seen to Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_is_ours = False
"""Whether Ctrl-C is for this module to see to: not where it is ignored, nor where another program calls a command."""


def main() -> None:
    """Run the command line; see `roles/cli/group.py`. Ctrl-C ends it with 130 and without a traceback, from here on.

    Where SIGINT is ignored, or the program that calls this has a handler of its own, that stands.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        from roles.cli.group import run  # noqa: PLC0415  a tenth of a second

        run()
        return
    global _is_ours  # noqa: PLW0603  of the process, as its handlers are
    _is_ours = True
    signal.signal(signal.SIGINT, _end_at_once)
    from roles.cli.group import run  # noqa: PLC0415  as above

    try:
        try:
            run()
        finally:
            signal.signal(signal.SIGINT, _end_at_once)  # the interpreter's own end takes a moment, too
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def raise_interrupts() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: something begins that would have to be put in order.

    Not sooner: an exception that is raised where C calls Python, as imports do for hashes and weak references, may be lost there.
    For the same reason not within `importing`.
    """
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def importing() -> Iterator[None]:
    """What a command imports when it is called, before anything has begun: Ctrl-C ends the process at once meanwhile."""
    if _is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        raise_interrupts()


def _end_at_once(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the handler's signature
    os._exit(128 + number)
