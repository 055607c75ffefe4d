"""Questions that take a simulation: each is a `tenuto` command in a child process that makes way for everything else.

A child runs at idle priority (SCHED_IDLE: it gets what nobody else wants), alone, for at most `LIMIT_MS`, in at most
`MEMORY_BYTES_MAX`, and it ends with the page. Its answer is what the command prints as JSON, beside what it remarks on stderr. Questions are asked on the
server's thread and run on the page's own, which the kernel ties the child's life to.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import parse_qs

from fabric.clock import Clock
from fabric.errors import InvalidInput, Overloaded
from roles.runtime.process import child_environment, module_command

LIMIT_MS: Final = 180_000.0
MEMORY_BYTES_MAX: Final = 4 << 30
WAITING_MAX: Final = 3
ANSWERED_MAX: Final = 8
ANSWER_BYTES_MAX: Final = 1 << 20
SLO_MS_MAX: Final = 1e6
FACTOR_MIN: Final = 0.1
FACTOR_MAX: Final = 10.0
GPUS_MORE_MAX: Final = 16
NICEST: Final = 19
_OURS: Final = "tenuto: "
"""So begins what a command says on stderr."""
_TOO_LONG: Final = f"it took over {LIMIT_MS / 1e3:.0f} s: this host has no time to spare; in a terminal the command has its turn"


@dataclass(frozen=True, slots=True)
class Question:
    """`arguments`: of the `tenuto` command, without where the cluster is."""

    arguments: tuple[str, ...]


def question_of(kind: str, query: str, models: frozenset[str]) -> Question:
    """What the query of a URL asks. Raises InvalidInput, which says what would be right.

    `why`: `model`. `what-if`: `model` with `slo_ms` or `rate` (a factor), or both; `gpus` (so many more).
    """
    try:
        fields = {
            key: its[-1] for key, its in parse_qs(query, max_num_fields=8, strict_parsing=bool(query)).items()
        }
    except ValueError as error:
        raise InvalidInput(f"the query cannot be read: {error}") from error
    known = {"why": {"model"}, "what-if": {"model", "slo_ms", "rate", "gpus"}}[kind]
    if not fields.keys() <= known:
        raise InvalidInput(f"the query may have {', '.join(sorted(known))}")
    model = fields.get("model", "")
    if model and model not in models:
        raise InvalidInput("no model of that name is served")
    if kind == "why":
        if not model:
            raise InvalidInput("which model? Give model=NAME")
        return Question(("why", "--json", "--", model))
    arguments = ["what-if", "--json"]
    for key, flag, low, high in (
        ("slo_ms", "--slo", 1e-3, SLO_MS_MAX),
        ("rate", "--rate", FACTOR_MIN, FACTOR_MAX),
    ):
        if key in fields:
            if not model:
                raise InvalidInput(f"{key} is of which model? Give model=NAME")
            arguments.append(f"{flag}={model}={_number(fields[key], key, low, high):.12g}")
    if "gpus" in fields:
        arguments.append(f"--gpus={_number(fields['gpus'], 'gpus', 0, GPUS_MORE_MAX):.0f}")
    if len(arguments) == 2:
        raise InvalidInput("what is to be changed? Give slo_ms, rate or gpus")
    return Question(tuple(arguments))


def _number(text: str, key: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise InvalidInput(f"{key} must be a number from {low:g} to {high:g}")
    return value


@dataclass(slots=True)
class _Asked:
    number: int
    question: Question
    answer: bytes | None = None
    """JSON; None: it is not answered yet."""


@dataclass(slots=True)
class _Running:
    asked: _Asked
    process: subprocess.Popen[bytes]
    limit_at_ms: float
    said: IO[bytes]
    complaint: IO[bytes]


class Questions:
    """`ask` and `answer` on the server's thread, `turn` and `close` on the page's own."""

    def __init__(self, run_dir: Path, key_file: Path | None, clock: Clock) -> None:
        self._where = ("--run-dir", str(run_dir), *(() if key_file is None else ("--key", str(key_file))))
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[_Asked] = deque()
        self._known: deque[_Asked] = deque(maxlen=WAITING_MAX + 1 + ANSWERED_MAX)
        self._running: _Running | None = None
        self._number = 0

    def ask(self, question: Question) -> int:
        """Its number. The same one that waits or runs already is not asked twice. Raises Overloaded where too many wait."""
        with self._lock:
            for one in self._known:
                if one.question == question and one.answer is None:
                    return one.number
            if len(self._waiting) >= WAITING_MAX:
                raise Overloaded(f"{WAITING_MAX} other questions wait: ask again in a while")
            self._number += 1
            asked = _Asked(self._number, question)
            self._waiting.append(asked)
            self._known.append(asked)
            return asked.number

    def answer(self, number: int) -> bytes | None:
        """Its answer as JSON, b"" while there is none yet; None for a question that is not known any more."""
        with self._lock:
            for one in self._known:
                if one.number == number:
                    return one.answer or b""
        return None

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or runs."""
        return self._running is not None or bool(self._waiting)

    def turn(self) -> None:
        """Begin what waits, take what is answered, end what takes too long."""
        running = self._running
        if running is not None:
            code = running.process.poll()
            if code is None and self._clock.now_ms() < running.limit_at_ms:
                return
            self._end(running, code)
        with self._lock:
            asked = self._waiting.popleft() if self._waiting else None
        if asked is not None:
            self._begin(asked)

    def close(self) -> None:
        """End what runs."""
        if self._running is not None:
            self._end(self._running, None)

    def _begin(self, asked: _Asked) -> None:
        command, *flags = asked.question.arguments
        with contextlib.ExitStack() as opened:
            try:
                said, complaint = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                process = subprocess.Popen(  # noqa: S603  our own command
                    module_command("roles.cli", command, *self._where, *flags),
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=complaint,
                    env={**child_environment(), "OPENBLAS_NUM_THREADS": "1"},
                )
            except OSError as error:  # no descriptor, process or room for a file is left
                self._answer(asked, _error(f"this host cannot run the command: {error.strerror}"))
                return
            opened.pop_all()  # closed in `_end`
        with contextlib.suppress(OSError):  # a sandbox may not allow it
            os.setpriority(os.PRIO_PROCESS, process.pid, NICEST)
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
            resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        self._running = _Running(asked, process, self._clock.now_ms() + LIMIT_MS, said, complaint)

    def _end(self, running: _Running, code: int | None) -> None:
        if code is None:
            running.process.send_signal(signal.SIGKILL)
            running.process.wait()
        with running.said, running.complaint:
            running.said.seek(0)
            running.complaint.seek(0)
            said = running.said.read(ANSWER_BYTES_MAX + 1)
            complaint = running.complaint.read(2_000).decode(errors="replace").strip()
        if code == 0 and len(said) <= ANSWER_BYTES_MAX:
            lines = complaint.splitlines()
            remarks = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
            answer = b'{"answer": ' + said.strip() + b', "remarks": ' + json.dumps(remarks).encode() + b"}"
        else:
            reason = _TOO_LONG if code is None else complaint.removeprefix(_OURS)
            answer = _error(reason or f"the command ended with {code}")
        self._answer(running.asked, answer)
        self._running = None

    def _answer(self, asked: _Asked, answer: bytes) -> None:
        with self._lock:
            asked.answer = answer


def _error(reason: str) -> bytes:
    return json.dumps({"error": reason}).encode()


KINDS: Final[Mapping[str, str]] = {"/why": "why", "/what-if": "what-if"}
