"""The `tenuto` command. Nothing that is not there already when Python starts is imported before `main` has seen to Ctrl-C.

So the built-in `_signal` stands in for `signal`, whose names for numbers take some hundredths of a second on a busy host.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # the type stubs do not know it
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # without `typing`, for the same reason
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


class importing:  # noqa: N801  used as a statement
    """What a command imports when it is called, before anything has begun: Ctrl-C ends the process at once meanwhile."""

    def __enter__(self) -> None:
        if _is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end_at_once)

    def __exit__(self, *_: object) -> None:
        raise_interrupts()


class ending_without_python:  # noqa: N801  used as a statement
    """Ctrl-C ends the process here even where no thread of it gets to run Python: by the signal itself, which a shell tells as 130."""

    def __enter__(self) -> None:
        self._handler = signal.getsignal(signal.SIGINT)
        if _is_ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if _is_ours:
            signal.signal(signal.SIGINT, self._handler)


def _end_at_once(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the handler's signature
    os._exit(128 + number)
