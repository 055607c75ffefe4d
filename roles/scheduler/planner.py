"""Where a live scheduler has its plans made: a process per plan, whose answer is an event of the loop.

A thread would not do: a policy in Python, or a solver that keeps the interpreter's lock, would hold up batches
for as long. The child reads one packed question, writes one packed answer, and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from fabric.errors import FabricError
from fabric.messages import PlanAsked, PlanMade
from roles.core import PLANNER, Heard
from roles.journal import packed, unpacked
from roles.process import child_environment

LIMIT_S = 60.0  # a solver has 10 s; the rest is for a machine that is busy
_WORDS_MAX = 300


class Planner:
    """Makes one plan at a time, as a source of the driver."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._made: deque[PlanMade] = deque()
        self._ending = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, asked: PlanAsked) -> None:
        """Begin; from the main thread, whose end ends the child. The answer comes as a message of `PLANNER`."""
        if self._thread is not None:
            self._thread.join()  # it has answered: the core asks one thing at a time
        child = self._child = subprocess.Popen(
            [sys.executable, "-m", "roles.scheduler.plan_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
        )
        self._thread = threading.Thread(target=self._wait, args=(child, asked), name="planner")
        self._thread.start()

    def fileno(self) -> int:
        """Readable when a plan is made."""
        return self._wake

    @property
    def has_more(self) -> bool:
        """Whether a plan is made."""
        return bool(self._made)

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[Heard]:  # noqa: ARG002  a Source's signature
        """The plan, or why there is none."""
        with self._ending:
            if not self._made:
                return ()
            os.eventfd_read(self._wake)
            return [Heard(PLANNER, self._made.popleft())]

    def close(self) -> None:
        """End what runs; its answer is nobody's."""
        if self._child is not None and self._thread is not None:
            self._child.kill()
            self._thread.join()
        os.close(self._wake)

    def _wait(self, child: subprocess.Popen[bytes], asked: PlanAsked) -> None:  # on the thread
        answer = _answer(child, asked, self._limit_s)
        with self._ending:
            self._made.append(answer)
            os.eventfd_write(self._wake, 1)


def _answer(child: subprocess.Popen[bytes], asked: PlanAsked, limit_s: float) -> PlanMade:
    try:
        out, errors = child.communicate(packed(asked), limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return PlanMade(asked.number, reason=f"the placement was not computed within {limit_s:g} s")
    except FabricError as error:  # a question too large to be asked
        child.kill()
        child.communicate()
        return PlanMade(asked.number, reason=str(error))
    if child.returncode:
        words = errors.decode("utf-8", "replace").strip()[-_WORDS_MAX:]
        return PlanMade(asked.number, reason=f"the planner ended with code {child.returncode}: {words}")
    made = unpacked(out)
    assert isinstance(made, PlanMade), "our own child"
    return made
