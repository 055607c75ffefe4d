"""When and whom to tell what the cluster is: one directory for everyone, gathered over a moment."""

from __future__ import annotations

from fabric.ids import PeerId
from policies.batching.base import NEVER_MS
from roles.runtime.core import Send
from roles.scheduler.fleet import Fleet

DIRECTORY_PAUSE_MS = 1.0  # gathers the news of a node whose slices come up together into one directory


class DirectoryUpdates:
    """What `fleet` has become and who has not heard of it. `due_at_ms`: when to tell; inf: nothing is new."""

    __slots__ = ("_fleet", "_greeted_at_ms", "_told_version", "due_at_ms")

    def __init__(self, fleet: Fleet) -> None:
        self.due_at_ms = NEVER_MS
        self._fleet = fleet
        self._told_version = 0
        self._greeted_at_ms = -NEVER_MS

    @property
    def is_behind(self) -> bool:
        """Whether the last directory is not what is known now."""
        return self._told_version != self._fleet.version

    def note_change(self, now_ms: float) -> None:
        """Something has changed that can wait for what else changes in the same moment."""
        self.due_at_ms = min(self.due_at_ms, now_ms + DIRECTORY_PAUSE_MS)

    def greet(self, peer: PeerId, now_ms: float) -> list[Send]:
        """Somebody came: the directory to them at once, unless others came in the same moment, as all do to a scheduler that takes over."""
        self.note_change(now_ms)
        if self._greeted_at_ms == now_ms:
            return []
        self._greeted_at_ms = now_ms
        return [Send(peer, self._fleet.directory())]

    def publish(self) -> list[Send]:
        """The directory to everyone, now: a grant must never name a slice its frontend has not heard of."""
        self.due_at_ms = NEVER_MS
        self._told_version = self._fleet.version
        directory = self._fleet.directory()
        return [Send(peer, directory) for peer in self._fleet.peers_to_tell()]
