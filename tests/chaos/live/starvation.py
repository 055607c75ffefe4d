"""How long the kernel let processes wait for a core: on a busy host that is no fault of theirs."""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from fabric.clock import MonotonicClock

SAMPLE_EVERY_S = 0.025
HOST = "host"
"""By how much this very thread was late: a host that stands still as a whole counts nobody's waiting."""


class Waits:
    """Samples while the block lasts. `pids` says by name who is watched now; a name's processes follow each other."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._clock = MonotonicClock()
        self._at_ms: dict[str, list[float]] = {}
        self._waited_ms: dict[str, list[dict[int, float]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, name="waits", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def waited_ms(self, name: str, from_ms: float, to_ms: float) -> float:
        """How long the thread of that name waited that waited most in this span, and a little around it."""
        at_ms, samples = self._at_ms.get(name, []), self._waited_ms.get(name, [])
        if not at_ms:
            return 0.0
        first = samples[max(bisect_right(at_ms, from_ms) - 1, 0)]
        last = samples[min(bisect_left(at_ms, to_ms), len(at_ms) - 1)]
        return max((waited_ms - first.get(thread, 0.0) for thread, waited_ms in last.items()), default=0.0)

    def _sample_on(self) -> None:
        behind_ms = 0.0
        while True:
            began_ms = self._clock.now_ms()
            if self._stop.wait(SAMPLE_EVERY_S):
                return
            behind_ms += self._clock.now_ms() - began_ms - 1e3 * SAMPLE_EVERY_S
            self._note(HOST, {0: behind_ms})
            for name, pid in self._pids().items():
                self._note(name, _waited_ms(pid))

    def _note(self, name: str, waited_ms: dict[int, float]) -> None:
        self._waited_ms.setdefault(name, []).append(waited_ms)
        self._at_ms.setdefault(name, []).append(self._clock.now_ms())


def _waited_ms(pid: int) -> dict[int, float]:
    """By thread, since it began (Documentation/scheduler/sched-stats.rst: the second number, in ns)."""
    waited: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited[int(task.name)] = (
                    int((task / "schedstat").read_text(encoding="ascii").split()[1]) / 1e6
                )
    return waited
