"""The `tenuto` command. This file is all that is imported before Ctrl-C ends it without a traceback."""

from __future__ import annotations

import signal

_WAS_DEFAULT = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _WAS_DEFAULT:  # else it is ignored, or the program that imports this has a handler of its own
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command line; see `roles/cli/group.py`."""
    from roles.cli.group import run  # noqa: PLC0415  the imports take a tenth of a second, and may be interrupted

    if _WAS_DEFAULT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
