"""A user's glue beside a frontend: a process for each application, and a thread that talks with it.

A process, not a thread: code that hangs can be ended, code that holds the interpreter's lock or takes the process down holds up
nobody but its own application. One call runs at a time; one that takes longer than its limit ends the process, and
the next call finds a new one.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fabric.clock import Clock
from fabric.errors import (
    Internal,
    LocalProtocolError,
    Overloaded,
    ProtocolError,
    RequestError,
    code_of_unsendable,
    request_error,
)
from fabric.frames import PAYLOAD_BYTES_MAX
from fabric.link import NamedTensor
from fabric.messages import AnyMessage, GlueAsked, GlueMade, GluePart
from roles.applications.served import GlueSpec
from roles.frontend.graphs.edges import Answers, checked_count
from roles.runtime.message_pipe import Ended, MessagePipe, TooSlow
from roles.runtime.process import child_environment, end_by_force, module_command

COMMAND: Final = module_command("roles.frontend.graphs.glue_process")
JOBS_MAX: Final = 256
"""Of one application that wait or run; a quarter of a second of work at a millisecond each."""
START_LIMIT_MS: Final = 60_000.0  # to import what users import
GIVEN_BYTES_PER_MS: Final = 100_000  # a slow host's pipe: what a call is given is no time of the user's code
REST_MS: Final = 1_000.0  # after a process that did not even start

Made = Sequence[Sequence[NamedTensor]]
Job = tuple[int, str, Answers, Sequence[NamedTensor], float, Callable[[], bool]]

log = logging.getLogger("tenuto")


class GlueRunner:
    """One application's. `done` is called once for each job that is still of use when its turn comes, on this runner's thread."""

    def __init__(
        self,
        name: str,
        glue: Mapping[str, GlueSpec],
        done: Callable[[tuple[int, Made | RequestError]], None],
        clock: Clock,
        bytes_max: int,
    ) -> None:
        """`bytes_max`: of what one call gives; what it is given is bounded part by part, as requests and answers are."""
        self._name = name
        self._glue = glue
        self._done = done
        self._clock = clock
        self._bytes_max = bytes_max
        self._jobs: queue.Queue[Job | None] = queue.Queue(JOBS_MAX)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: MessagePipe | None = None
        self._broken_until_ms = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"glue-{name}", daemon=True)
        self._thread.start()

    def start(
        self,
        job: int,
        stage: str,
        answers: Answers,
        request: Sequence[NamedTensor],
        until_ms: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make inputs of that stage; with `JOBS_MAX` jobs before it, it is refused. `is_wanted` is asked when its turn comes."""
        try:
            self._jobs.put_nowait((job, stage, answers, request, until_ms, is_wanted))
        except queue.Full:
            self._done((job, Overloaded(f"{JOBS_MAX} calls of its application's glue are waiting")))

    def close(self) -> None:
        """End the process, whatever it is doing, and the thread."""
        self._is_closing = True
        child = self._child
        if child is not None:
            child.kill()
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        self._jobs.put(None)
        self._thread.join(5.0)

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            number, stage, answers, request, until_ms, is_wanted = job
            if self._clock.now_ms() < until_ms and is_wanted():
                self._done((number, self._made(stage, answers, request)))
        self._end()

    def _made(self, stage: str, answers: Answers, request: Sequence[NamedTensor]) -> Made | RequestError:
        glue = self._glue[stage]
        if self._pipe is None:
            self._begin()
        if self._pipe is None:
            return Internal(f"the process of its glue {glue.python} does not start")
        after = tuple(name for name, _ in answers)
        parts = [GluePart(name, len(tensors)) for name, of_stage in answers for tensors in of_stage]
        tensors = [one for _, of_stage in answers for own in of_stage for one in own]
        tensors += request
        asked = GlueAsked(stage, after, (*parts, GluePart("", len(request))))
        given_ms = sum(one.array.nbytes for one in tensors) / GIVEN_BYTES_PER_MS
        whose = f"its glue {glue.python}"
        try:
            until_ms = self._clock.now_ms() + given_ms + glue.limit_ms
            self._pipe.send(asked, tensors, until_ms, PAYLOAD_BYTES_MAX)
            message, made = self._pipe.receive(self._clock.now_ms() + glue.limit_ms)
            return _items(message, made, whose)
        except RequestError as error:
            return error
        except LocalProtocolError as error:  # nothing was said
            reason = f"what {whose} is to be given cannot be sent: {error}"
            return request_error(code_of_unsendable(error), reason)
        except TooSlow:
            self._end()
            return Internal(f"{whose} took longer than {glue.limit_ms:g} ms")
        except Ended:
            code = self._end()
            return Internal(f"the process of {whose} ended with code {code}")
        except ProtocolError as error:
            self._end()
            return Internal(f"what the process of {whose} says cannot be read: {error}")

    def _begin(self) -> None:
        """Start a process and wait until it has imported what it needs; `_pipe` stays None where it does not start."""
        if self._is_closing or self._clock.now_ms() < self._broken_until_ms:
            return
        command = [*COMMAND, str(self._bytes_max)]
        command += [f"{stage}={glue.python}" for stage, glue in self._glue.items()]
        try:
            self._child = subprocess.Popen(  # noqa: S603  the command line is ours, and no shell reads it
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                process_group=0,
            )
            assert self._child.stdin is not None, "asked for a pipe"
            assert self._child.stdout is not None, "asked for a pipe"
            pipe = MessagePipe(self._child.stdout.fileno(), self._child.stdin.fileno(), self._clock)
            pipe.receive(self._clock.now_ms() + START_LIMIT_MS)
            self._pipe = pipe
        except (OSError, TooSlow, Ended, ProtocolError) as error:
            self._end()
            self._broken_until_ms = self._clock.now_ms() + REST_MS
            if not self._is_closing:
                log.warning("glue_not_started application=%s error=%r", self._name, str(error))

    def _end(self) -> int | None:
        """End the process by force; its exit code."""
        child, self._child, self._pipe = self._child, None, None
        if child is None:
            return None
        return end_by_force(child)


def _items(message: AnyMessage, made: Sequence[NamedTensor], whose: str) -> Made:
    if not isinstance(message, GlueMade):
        raise ProtocolError(f"a {type(message).__name__}")
    if message.code:
        raise request_error(message.code, f"{whose}: {message.reason}")
    checked_count(len(message.items), whose)
    if sum(message.items) != len(made):
        raise ProtocolError(f"{len(made)} tensors for {sum(message.items)}")
    items, at = [], 0
    for tensors in message.items:
        items.append(made[at : at + tensors])
        at += tensors
    return items
