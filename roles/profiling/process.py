"""A measuring process from outside: what it is asked, its answers in bounded time, its end."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Self

from fabric.clock import MonotonicClock
from fabric.errors import ConfigError, FabricError
from fabric.messages import PREFIX, HeadSpec, LoaderSpec
from roles.runtime.process import child_environment, module_command

END_WITHIN_S = 5.0
READ_BYTES = 1 << 16


class ProfilingFailed(FabricError):
    """A measuring process could not do its work; says why."""


@dataclass(frozen=True, slots=True)
class MeasuringRequest:
    """What to measure; `limit_ms` bounds the wait for every single answer, loading included."""

    loader: LoaderSpec
    device: str
    batch_sizes: Sequence[int]
    traced: Sequence[int] = ()
    for_ms: float = 1_000.0
    threads: int = 1
    is_group: bool = False
    limit_ms: float = 300_000.0
    stages: Sequence[int] = ()
    """Numbers of stages into which it is cut and measured as well."""
    heads: Sequence[HeadSpec] = ()
    """Of a model that has any: what is loaded instead of `loader`."""
    merge: str = PREFIX

    def document(self) -> str:
        """One line of JSON."""
        heads = [(head.model_id, _loader_document(head.loader)) for head in self.heads if head.loader]
        words = asdict(self) | {"loader": _loader_document(self.loader), "heads": heads}
        del words["limit_ms"]
        return json.dumps(words) + "\n"


def _loader_document(loader: LoaderSpec) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in loader.__struct_fields__}


class MeasuringProcess:
    """Started by `with`; ended at its end, whatever it does."""

    def __init__(self, request: MeasuringRequest, environment: Mapping[str, str]) -> None:
        self._request = request
        self._environment = {**child_environment(), **environment}
        self._clock = MonotonicClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._buffer = b""

    def __enter__(self) -> Self:
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(  # noqa: S603  our own command
            module_command("roles.profiling.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self._environment,
        )
        self.tell(self._request.document())
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._stderr is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.close()
        try:
            self._process.wait(END_WITHIN_S if exc[0] is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_WITHIN_S)
        self._process.stdout.close()
        self._stderr.close()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._process is not None and self._process.poll() is not None

    def tell(self, line: str) -> None:
        """A line to its stdin; one that has ended is found out at the next answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next answer. Raises ConfigError or ProfilingFailed where there will be none, or it took too long."""
        line = self._line()
        if not line:
            raise ProfilingFailed(f"a measuring process ended without a word: {self._last_words()}")
        said: dict[str, Any] = json.loads(line)
        if said["event"] == "error":
            raise ConfigError(str(said["reason"]))
        return said

    def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        until_ms = self._clock.now_ms() + self._request.limit_ms
        while b"\n" not in self._buffer:
            left_ms = until_ms - self._clock.now_ms()
            if left_ms <= 0 or not select.select([self._process.stdout], [], [], left_ms / 1e3)[0]:
                raise ProfilingFailed(
                    f"a measuring process has said nothing for {self._request.limit_ms / 1e3:g} s and was ended"
                )
            read = self._process.stdout.read1(READ_BYTES)  # type: ignore[attr-defined]  # of a buffered pipe
            if not read:
                return b""
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line)

    def _last_words(self) -> str:
        assert self._process is not None
        assert self._stderr is not None
        self._process.wait(END_WITHIN_S)
        self._stderr.seek(0)
        words = self._stderr.read()[-2_000:].decode("utf-8", "replace").strip().splitlines()
        return f"exit code {self._process.returncode}; {' | '.join(words[-3:])}"
