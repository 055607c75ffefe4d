"""Streams, events and graphs of the stand-in of CUDA.

Work is done as it is asked for, except copies from and to pinned memory that need not wait (`non_blocking`): these are done as late as
CUDA may, when the stream gets something else to do or somebody waits for it. So what reads or overwrites memory too early is seen.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tests.stand_ins.cuda import gpus

_LOCK = threading.RLock()
_of_thread = threading.local()
_numbers = itertools.count(1)
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


def spoil(tensor: Tensor) -> None:
    """What memory holds that nothing was written to yet."""
    with torch.inference_mode():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


class Stream:
    """A queue of copies; `graph` is what captures it."""

    def __init__(self, device: Any = None, priority: int = 0, **_: object) -> None:
        self.device = gpus.device(device)
        self.priority = priority
        self.cuda_stream = next(_numbers)
        self.graph: CUDAGraph | None = None
        self._queued: deque[tuple[int, Callable[[], object]]] = deque()
        self._asked = 0
        with _LOCK:
            _streams.add(self)

    @property
    def asked(self) -> int:
        return self._asked

    def put(self, copy: Callable[[], object]) -> None:
        with _LOCK:
            self._asked += 1
            self._queued.append((self._asked, copy))

    def do(self, until: int | None = None) -> None:
        """All that was asked, or what was asked before."""
        with _LOCK:
            while self._queued and (until is None or self._queued[0][0] <= until):
                self._queued.popleft()[1]()

    def synchronize(self) -> None:
        if self.graph is not None:
            self.graph.refuse()
        gpus.check()
        self.do()

    def query(self) -> bool:
        return not self._queued

    def wait_event(self, event: Event) -> None:
        event.happen()

    def wait_stream(self, stream: Stream) -> None:
        stream.do()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        self._within = stream(self)
        self._within.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._within.__exit__(*exc)


class Event:
    """What a stream had been asked when it was recorded."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._has_time = enable_timing
        self._stream: Stream | None = None
        self._is_captured = False
        self._asked = 0
        self._at_ms = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._is_captured = self._stream.graph is not None
        if self._stream.query():
            self._reached()
        else:
            self._stream.put(self._reached)
        self._asked = self._stream.asked

    def _reached(self) -> None:
        self._at_ms = time.perf_counter() * 1e3

    def happen(self) -> None:
        if self._stream is not None:
            self._stream.do(self._asked)

    def synchronize(self) -> None:
        gpus.check()
        if self._is_captured:  # also when the capture is over
            raise RuntimeError(
                "CUDA error: operation not permitted on an event last recorded in a capturing stream"
            )
        self.happen()

    def wait(self, stream: Stream | None = None) -> None:
        self.happen()

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, later: Event) -> float:
        """In ms; with a share it takes as much longer as the share is smaller."""
        if not (self._has_time and later._has_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return max(later._at_ms - self._at_ms, 1e-3) * 100.0 / gpus.share_percent()


def refuse_while_capturing(device: torch.device) -> None:
    """What concerns a whole device ends the captures of all its streams, whichever thread's. Raises RuntimeError."""
    with _LOCK:
        graphs = [one.graph for one in _streams if one.graph is not None and one.device == device]
    if graphs:
        CUDAGraph.refuse(*graphs)


def do_all() -> None:
    """Of all streams."""
    with _LOCK:
        for one in list(_streams):
            one.do()


_default: dict[int, Stream] = {}


def default_stream(device: Any = None) -> Stream:
    number = gpus.device(device).index
    return _default.setdefault(number, Stream(number))


def current_stream(device: Any = None) -> Stream:
    own: Stream | None = getattr(_of_thread, "stream", None)
    return own if own is not None else default_stream(device)


def set_stream(stream: Stream) -> None:
    _of_thread.stream = stream


class stream:  # noqa: N801  torch's name
    """Inside, it is the current one of this thread."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = getattr(_of_thread, "stream", None)
        if self._stream is not None:
            _of_thread.stream = self._stream

    def __exit__(self, *exc: object) -> None:
        _of_thread.stream = self._before


class CUDAGraph:
    """Calls of operators in their order; `replay` does them again with what their inputs hold then."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._calls: list[tuple[Callable[[], Any], list[tuple[int, Tensor]]]] = []
        self._stream: Stream | None = None
        self._is_refused = False

    def capture_begin(self, *pool: object, **_: object) -> None:
        self._stream = current_stream()
        assert self._stream is not default_stream(), "CUDA captures no default stream"
        self._stream.do()
        self._stream.graph = self

    def refuse(self, *others: CUDAGraph) -> None:
        """Raises RuntimeError, and the capture has failed, and those of others."""
        for graph in (self, *others):
            graph._is_refused = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def record(self, call: Callable[[], Any], made: Sequence[tuple[int, Tensor]]) -> None:
        """`made`: which of its results are new memory, not views of what was there."""
        self._calls.append((call, list(made)))

    def capture_end(self) -> None:
        assert self._stream is not None
        self._stream.graph = None
        if self._is_refused:
            self._calls.clear()
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        for _, made in self._calls:  # as nothing has run on a GPU yet
            for _, tensor in made:
                spoil(tensor)

    def replay(self) -> None:
        stream = current_stream()
        stream.do()
        with torch.inference_mode():
            for call, made in self._calls:
                results = call()
                for place, tensor in made:
                    tensor.copy_(results[place])

    def reset(self) -> None:
        self._calls.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 1)
