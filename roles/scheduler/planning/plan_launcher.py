"""Where a live scheduler has its plans made: a process per plan, whose answer is an event of the loop.

A thread would not do: a policy in Python, or a solver that keeps the interpreter's lock, would hold up batches
for as long. The child reads one packed question, writes one packed answer, and ends.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence

from fabric.errors import FabricError
from fabric.messages import PlanAsked, PlanMade
from policies.placement.registry import PLACEMENTS
from policies.solver import TIME_LIMIT_S
from roles.config.cluster import PolicyChoice
from roles.runtime.core import PLANNER, Heard
from roles.runtime.journal import packed, unpacked
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.process import child_environment, end_by_force, module_command

BESIDE_SOLVER_S = 50.0  # to read, search and find moves, on cores where others come first
PLAN_COMMAND = module_command("roles.scheduler.planning.plan_process")
_WORDS_MAX = 300
_READ_BYTES = 65_536
_WORDS_WITHIN_S = 1.0  # a process that the child left behind may hold its stderr open


def plan_limit_s(placement: PolicyChoice) -> float:
    """How long the process of one plan may take: what the policy gives its solver, and 50 s."""
    given = placement.options.get("time_limit_s") if placement.name in PLACEMENTS else None
    return BESIDE_SOLVER_S + (TIME_LIMIT_S if given is None else given)


class PlanLauncher(Mailbox[Heard]):
    """Makes one plan at a time, as a source of the driver, each within `limit_s`. Whatever becomes of the process, there is one answer."""

    def __init__(self, limit_s: float, command: Sequence[str] = PLAN_COMMAND) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, asked: PlanAsked) -> None:
        """Begin; from the main thread, whose end ends the child. The answer comes as a message of `PLANNER`."""
        if self._thread is not None:
            self._thread.join()  # it has answered: the core asks one thing at a time
            self._thread = None
        try:
            child = subprocess.Popen(  # noqa: S603  the command line is ours, and no shell reads it
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(),
            )
        except OSError as error:  # no memory, no descriptors, no processes left
            self._refuse(asked, f"the planner could not be started: {error}")
            return
        self._child = child
        thread = threading.Thread(target=self._wait, args=(child, asked), name="planner")
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            end_by_force(child)
            self._refuse(asked, f"the planner could not be waited for: {error}")
            return
        self._thread = thread

    def abandon(self) -> None:
        """End what runs; its answer is nobody's."""
        if self._child is not None and self._thread is not None:
            self._child.kill()
            self._thread.join()
            self._thread = None
        self.forget()

    def close(self) -> None:
        """End what runs, and give everything back."""
        self.abandon()
        super().close()

    def _refuse(self, asked: PlanAsked, reason: str) -> None:
        self.post(Heard(PLANNER, PlanMade(asked.number, reason=reason)))

    def _wait(self, child: subprocess.Popen[bytes], asked: PlanAsked) -> None:  # on the thread
        answer = PlanMade(asked.number, reason="the planner could not be heard")
        try:
            answer = _answer(child, asked, self._limit_s)
        finally:  # whatever happened: a controller without an answer would plan for ever
            self.post(Heard(PLANNER, answer))


def _answer(child: subprocess.Popen[bytes], asked: PlanAsked, limit_s: float) -> PlanMade:
    words = _Words(child)
    try:
        out, _ = child.communicate(packed(asked), limit_s)
    except subprocess.TimeoutExpired:
        return PlanMade(asked.number, reason=f"the placement was not computed within {limit_s:g} s")
    except FabricError as error:  # a question too large to be asked
        return PlanMade(asked.number, reason=str(error))
    finally:
        end_by_force(child)
    if child.returncode:
        why = f"the planner ended with code {child.returncode}: {words.last()}"
        return PlanMade(asked.number, reason=why)
    try:
        made = unpacked(out)
    except FabricError as error:
        return PlanMade(asked.number, reason=f"what the planner answered is not a plan: {error}")
    if not isinstance(made, PlanMade):
        return PlanMade(asked.number, reason="what the planner answered is not a plan")
    return made


class _Words:
    """The last that a process says on stderr, however much it says: read on a thread of its own."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None, "asked for a pipe"
        self._pipe, child.stderr = child.stderr, None
        self._last = b""
        self._thread = threading.Thread(target=self._read, name="planner-words", daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Of a process that has ended."""
        self._thread.join(_WORDS_WITHIN_S)
        return self._last.decode("utf-8", "replace").strip()[-_WORDS_MAX:]

    def _read(self) -> None:
        with self._pipe:
            while said := os.read(self._pipe.fileno(), _READ_BYTES):
                self._last = (self._last + said)[-4 * _WORDS_MAX :]
