"""Importing without getting in anybody's way: what a process does before it is of any use may wait.

Importing our own packages takes some 400 ms of a core. Beside batches that are to leave within milliseconds that is long:
the kernel lets whoever runs finish its turn of some 3 ms, and every hop of every request may wait for one. So
the imports happen on a thread of the policy SCHED_IDLE, which makes way at once. The policy binds that thread
alone; the rest of the process never had it, so no privilege is needed to be rid of it (ADR 0110).

Where no core has a moment to spare such a thread would starve. Then the process begins anew, in the ordinary way.
`TENUTO_AT_ONCE=always` in the environment is for hosts whose cores are always full of something that may wait.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading

LIMIT_S = 2.0  # five times what it takes on a core of its own
AT_ONCE_VARIABLE = "TENUTO_AT_ONCE"
ALWAYS = "always"
_THIS_TIME = "1"


def import_at_idle_priority(module: str, limit_s: float = LIMIT_S) -> None:
    """Import `module`, which an `import` after this finds; call it before anything else of the process has begun.

    When the time is over the process starts itself anew with the same arguments. An import that fails does so again
    where it is needed, and is reported there.
    """
    asked = os.environ.get(AT_ONCE_VARIABLE)
    if asked == _THIS_TIME:
        del os.environ[AT_ONCE_VARIABLE]  # what this process starts is gentle again
    if asked in (_THIS_TIME, ALWAYS):
        return
    # NumPy's BLAS would make a thread for every core, and each spins for a while.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    thread = threading.Thread(target=_import, args=(module,), name="import", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, AT_ONCE_VARIABLE: _THIS_TIME})  # noqa: S606  it is ourselves


def _import(module: str) -> None:
    with contextlib.suppress(OSError):  # a sandbox may not allow it: then it is as it would be without
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread
    with contextlib.suppress(Exception):  # top of process: the thread has nobody to tell
        importlib.import_module(module)
