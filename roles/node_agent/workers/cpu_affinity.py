"""Which cores each worker process may use, where its node says that they should have their own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from roles.runtime.process import log


class CorePins:
    """Hands out cores of those that this process may use: the least taken first, then the lowest.

    `cores_each` None: workers go where the kernel puts them.
    """

    def __init__(self, cores_each: int | None, cores: Iterable[int] | None = None) -> None:
        self._each = cores_each
        self._taken = Counter(dict.fromkeys(os.sched_getaffinity(0) if cores is None else cores, 0))
        self._of: dict[str, frozenset[int]] = {}

    @property
    def are_shared(self) -> bool:
        """Whether some core is more than one worker's."""
        return any(count > 1 for count in self._taken.values())

    def take(self, name: str) -> frozenset[int] | None:
        """The cores of a new worker; None: any."""
        if self._each is None:
            return None
        free_first = sorted(self._taken, key=lambda core: (self._taken[core], core))
        cores = frozenset(free_first[: self._each])
        self.note(name, cores)
        return cores

    def note(self, name: str, cores: Iterable[int]) -> None:
        """A worker that was adopted has these."""
        if self._each is not None:
            self._of[name] = frozenset(cores) & self._taken.keys()
            self._taken.update(self._of[name])

    def give_back(self, name: str) -> None:
        """That worker has ended; nothing if it had none."""
        self._taken.subtract(self._of.pop(name, ()))


def pin(pid: int, cores: frozenset[int]) -> None:
    """Right after its start, while the process has one thread: those it starts later inherit it.

    It runs unpinned where that cannot be, as when the cores that this host gives us are others by now.
    """
    try:
        os.sched_setaffinity(pid, cores)
    except ProcessLookupError:
        pass  # it ended at once
    except OSError as error:
        told = ",".join(map(str, sorted(cores)))
        log.warning("worker_not_pinned pid=%d cores=%s reason=%r", pid, told, error.strerror)


def cores_of(pid: int) -> frozenset[int]:
    """Those it may use; none when it is gone."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except ProcessLookupError:
        return frozenset()
