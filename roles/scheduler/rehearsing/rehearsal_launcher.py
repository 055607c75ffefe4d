"""Where a live scheduler has its rehearsals played: one process at idle priority, whose answers are events of the loop.

It is started at the first question, as most schedulers never lose a request, and stays: a rehearsal takes less than starting
Python does. A process that does not answer in time is ended, and the next question starts another one.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence

from fabric.clock import MonotonicClock
from fabric.errors import FabricError
from fabric.frames import PAYLOAD_BYTES_MAX
from fabric.messages import RehearsalAsked, RehearsalMade
from roles.runtime.core import REHEARSER, Heard
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.message_pipe import Ended, MessagePipe, TooSlow
from roles.runtime.process import child_environment, end_by_force, log, module_command

LIMIT_S = 30.0  # a rehearsal takes a second of a core; idle priority may have to wait for one
REHEARSAL_COMMAND = module_command("roles.scheduler.rehearsing.rehearsal_process")


class RehearsalLauncher(Mailbox[Heard]):
    """Has one question answered at a time, as a source of the driver. Whatever becomes of the process, there is one answer."""

    def __init__(self, limit_s: float = LIMIT_S, command: Sequence[str] = REHEARSAL_COMMAND) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._command = command
        self._clock = MonotonicClock()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, asked: RehearsalAsked) -> None:
        """Begin; from the main thread, whose end ends the child. The answer comes as a message of `REHEARSER`."""
        if self._thread is not None:
            self._thread.join()  # it has answered: the core asks one thing at a time
            self._thread = None
        try:
            child = self._child_there()
            thread = threading.Thread(target=self._exchange, args=(child, asked), name="rehearser")
            thread.start()
        except (OSError, RuntimeError) as error:  # no memory, no descriptors, no processes or threads left
            self.post(_none(asked, f"the rehearser could not be started: {error}"))
            return
        self._thread = thread

    def abandon(self) -> None:
        """End what runs; its answer is nobody's."""
        self._end()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.forget()

    def close(self) -> None:
        """End what runs, and give everything back."""
        self.abandon()
        super().close()

    def _child_there(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        self._child = subprocess.Popen(  # noqa: S603  the command line is ours, and no shell reads it
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
        )
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        if self._thread is not None:
            self._thread.join()  # it hears the end
            self._thread = None
        end_by_force(child)

    def _exchange(self, child: subprocess.Popen[bytes], asked: RehearsalAsked) -> None:  # on the thread
        made: Heard | None = None
        try:
            made = self._answer(child, asked)
        finally:  # whatever happened: the core waits for it
            self.post(made or _none(asked, "the rehearser could not be heard"))

    def _answer(self, child: subprocess.Popen[bytes], asked: RehearsalAsked) -> Heard:
        assert child.stdin is not None and child.stdout is not None, "asked for pipes"  # noqa: PT018
        pipe = MessagePipe(child.stdout.fileno(), child.stdin.fileno(), self._clock)
        until_ms = self._clock.now_ms() + self._limit_s * 1e3
        try:
            pipe.send(asked, (), until_ms, PAYLOAD_BYTES_MAX)
            made, _ = pipe.receive(until_ms)
            if isinstance(made, RehearsalMade):
                return Heard(REHEARSER, made)
            reason = "the rehearser did not answer what it was asked"
        except (TooSlow, Ended):
            reason = f"the rehearser ended, or took more than {self._limit_s:g} s"
        except FabricError as error:
            reason = f"the rehearser could not be asked: {error}"
        child.kill()  # what it reads or says next could be of this question
        if child is not self._child:  # abandoned: nobody waits for it
            return Heard(REHEARSER, RehearsalMade(asked.number, reason=reason))
        return _none(asked, reason)


def _none(asked: RehearsalAsked, reason: str) -> Heard:
    log.warning("rehearsal_failed number=%d reason=%r", asked.number, reason)
    return Heard(REHEARSER, RehearsalMade(asked.number, reason=reason))
