"""What agents and their workers say of an epoch before their scheduler has it: kept until then, in bounds."""

from __future__ import annotations

from typing import Final

from fabric.ids import PeerId
from fabric.messages import SliceReady
from roles.runtime.core import Heard
from roles.runtime.journal import packed_or_empty

EARLY_MAX: Final = 4_096
EARLY_BYTES_MAX: Final = 32 << 20
"""As messages have it: in memory up to four times that. 1,500 slices of one model each take half a MiB."""


class EarlyWords:
    """The last of each peer and slice ("": of the peer itself). What there is no room for is said again."""

    def __init__(self) -> None:
        self._events: dict[tuple[PeerId, str], tuple[Heard, int]] = {}
        self._bytes = 0

    def keep(self, event: Heard, slice_id: str) -> None:
        """In place of what it said before, if there is room."""
        key = event.peer, slice_id
        self._drop(key)
        size = len(packed_or_empty(event.message))
        if size and len(self._events) < EARLY_MAX and self._bytes + size <= EARLY_BYTES_MAX:
            self._events[key] = event, size
            self._bytes += size

    def forget(self, peer: PeerId) -> None:
        """It is lost."""
        for key in [key for key in self._events if key[0] == peer]:
            self._drop(key)

    def take(self) -> list[Heard]:
        """All of them, those of slices last; none is kept any more."""
        events = [event for event, _ in self._events.values()]
        self._events.clear()
        self._bytes = 0
        return sorted(events, key=lambda one: isinstance(one.message, SliceReady))

    def _drop(self, key: tuple[PeerId, str]) -> None:
        _, size = self._events.pop(key, (None, 0))
        self._bytes -= size
