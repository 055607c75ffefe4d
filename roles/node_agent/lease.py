"""Whose commands count on this node: the highest epoch that the agent granted, and until when no other gets one.

The agent grants an epoch if it is higher than all it granted before, and the scheduler that holds the lease has not
renewed it for `LEASE_MS`, or its connection was closed, or it asks itself, or gave it up to the asker. What is granted
is written down before it is answered (`KeepLease`, `LeaseKept`), so that no restart takes it back: an agent that starts
again counts the lease that it finds as granted just now.

Workers take commands of the epoch that their agent told them last and of no other, so two schedulers never command one
worker, whatever they believe. That is the one it granted last; where a scheduler hands over, once its successor
commands. The lease only keeps a scheduler that serves well from being replaced.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from fabric.ids import Epoch, Incarnation, NodeId
from fabric.link import NO_EPOCH
from fabric.messages import LeaseAsked, LeaseReport
from roles.runtime.epochs import LEASE_MS


class LeaseRecord(Struct, frozen=True):
    """What is on the disk: an epoch, and the scheduler that it was granted to. Epoch 0: none ever was."""

    epoch: Epoch
    holder_id: str
    incarnation: Incarnation


NO_LEASE: Final = LeaseRecord(NO_EPOCH, "", Incarnation(""))


class KeepLease(Struct, frozen=True):
    """Write it down, so that it is there after a loss of power; `LeaseKept` follows."""

    record: LeaseRecord


class LeaseKept(Struct, frozen=True):
    """It is written, or cannot be."""

    record: LeaseRecord
    is_written: bool


class LeaseGrants:
    """One agent's. `record` is what a former process of this agent wrote down."""

    def __init__(self, node_id: NodeId, record: LeaseRecord = NO_LEASE) -> None:
        self.record = record
        self.is_handed_over = False
        """Its holder was granted it in the place of one that may serve on until it commands."""
        self._node_id = node_id
        # None: granted before we started, so from the first event on it counts as granted then.
        self._until_ms: float | None = None if record.epoch else 0.0
        self._asked: LeaseAsked | None = None  # what is being written down
        self._is_asker_gone = False  # since then: what it is granted is free at once
        self._is_known_free = not record.epoch

    @property
    def epoch(self) -> Epoch:
        """The highest one granted."""
        return self.record.epoch

    @property
    def wake_at_ms(self) -> float | None:
        """When the lease ends by itself; None: it has."""
        return None if self._is_known_free else 0.0 if self._until_ms is None else self._until_ms

    def begin(self, now_ms: float) -> None:
        """To be called before anything else at each event."""
        if self._until_ms is None:
            self._until_ms = now_ms + LEASE_MS

    def asked(self, asked: LeaseAsked, now_ms: float) -> KeepLease | LeaseReport | None:
        """What to do for a scheduler that wants an epoch; None: that is under way."""
        record = self.record
        if self._is_held_by(asked) and asked.epoch == record.epoch:
            self._grant_until(now_ms + LEASE_MS)
        elif (
            asked.epoch > record.epoch
            and self._asked is None
            and (
                self.is_free(now_ms)
                or asked.scheduler_id == record.holder_id
                or asked.in_place_of == record.epoch
            )
        ):
            self._asked, self._is_asker_gone = asked, False
            return KeepLease(LeaseRecord(Epoch(asked.epoch), asked.scheduler_id, asked.incarnation))
        elif self._asked is not None and asked.epoch == self._asked.epoch:
            return None
        return self.report(now_ms, asked.number)

    def kept(self, kept: LeaseKept, now_ms: float) -> LeaseReport | None:
        """The answer to who asked for what is on the disk now; None: it could not be written, and nothing is granted.

        Where it could not be written the holder, which asked for a higher epoch, has its lease renewed with the one that it has.
        """
        asked, self._asked = self._asked, None
        assert asked is not None, "it is written because somebody asked"
        if kept.is_written:
            self.is_handed_over = 0 < asked.in_place_of == self.record.epoch
            self.record = kept.record
        elif not self._is_held_by(asked):
            return None
        self._grant_until(now_ms + LEASE_MS)
        if self._is_asker_gone:
            self._free()
        return self.report(now_ms, asked.number)

    def closed(self, scheduler_id: str) -> bool:
        """A connection to that scheduler was closed; True if it held the lease, which is free now."""
        if self._asked is not None and self._asked.scheduler_id == scheduler_id:
            self._is_asker_gone = True
        if scheduler_id != self.record.holder_id or self._is_known_free:
            return False
        self._free()
        return True

    def tick(self, now_ms: float) -> bool:
        """Whether the lease has ended since it was last looked at."""
        if self._is_known_free or not self.is_free(now_ms):
            return False
        self._is_known_free = True
        return True

    def is_free(self, now_ms: float) -> bool:
        """Whether another scheduler may have a higher epoch."""
        return self._until_ms is not None and now_ms >= self._until_ms

    def report(self, now_ms: float, number: int = 0) -> LeaseReport:
        """How it is now, for any scheduler."""
        record = self.record
        return LeaseReport(
            self._node_id, record.epoch, record.holder_id, record.incarnation, self.is_free(now_ms), number
        )

    def _is_held_by(self, asked: LeaseAsked) -> bool:
        return (asked.scheduler_id, asked.incarnation) == (self.record.holder_id, self.record.incarnation)

    def _grant_until(self, until_ms: float) -> None:
        self._until_ms = until_ms
        self._is_known_free = False

    def _free(self) -> None:
        self._until_ms = 0.0
        self._is_known_free = True
