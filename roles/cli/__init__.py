"""The `tenuto` command. Nothing else is imported before `main` has seen to Ctrl-C."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; see `roles/cli/group.py`. Ctrl-C during its imports ends it without a traceback."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # else it is ignored, or the program that calls this has a handler of its own
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from roles.cli.group import run  # noqa: PLC0415  a tenth of a second

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
