"""How a Tenuto process ends: 0 is a result, 2 is click's own for a wrong usage (design section 10)."""

from typing import Final

EXIT_FAILURE: Final = 1
"""Failure: a change was rolled back, `demo` was under 97 %, `doctor` or `replay` found something, `bench` sent too late."""
EXIT_CONFIG: Final = 3
"""The configuration, or a change that was asked for, cannot be."""
EXIT_SLO_MISSED: Final = 4
"""An SLO was missed: `bench`, or `simulate`, `goodput` and `plan` with `--check`."""
EXIT_UNREACHABLE: Final = 5
"""There is no cluster, or it does not answer."""
EXIT_PARTIAL: Final = 6
"""Partly done: `up`, `models`, `drain`, `reproduce`, `deploy`."""
EXIT_DEFECT: Final = 70
"""A defect of ours; a report was written (EX_SOFTWARE of sysexits.h)."""
EXIT_HUNG: Final = 71
"""Of a worker whose model hung: its agent starts it again."""
EXIT_NOT_STARTED: Final = 127
"""Of a command that the system does not let us start, as a shell says it."""
EXIT_INTERRUPTED: Final = 130
"""Interrupted by Ctrl-C (SIGINT). Roles, `up`, `gateway` and `page` end in order then, and `record` writes what it has: 0.

A second one ends them at once, with 130, but for roles that `up` started; files that stay in the run directory are in nobody's way.
SIGTERM ends these likewise; any other command it ends at once, and a shell says 143. Before Tenuto's first line runs, in the
hundredths of a second in which Python itself starts, Ctrl-C may end with Python's own traceback.
"""
EXIT_UNKNOWN: Final = 256
"""No process can end with that code: of one that was adopted nobody is told."""
EXIT_GUARD_REFUSED: Final = EXIT_CONFIG
"""Of an MPS guard: no other try will do better. After `EXIT_FAILURE` one may."""
