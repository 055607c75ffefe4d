"""Heartbeats, sans-IO: alive -> suspect -> lost.

Whatever a peer sends is a sign of life; who is quiet for the heartbeat interval is asked for one. Two peers that are both quiet
ask in turn, and who has many asks those together whose time comes soon. Silence turns a peer
suspect, silence as long as the patience makes it lost, and lost is final: the same name heard again has to be watched
anew. Both are in the configuration (`cluster.heartbeats`). A connection that is closed is news at once and needs no
heartbeat (`fabric/sockets/monitor.py`): these are for hosts that vanish, links that are cut, and loops that are stuck.
A process that was itself stopped (suspended, starved, collecting garbage) has heard nothing and judges nobody:
such a gap is taken off everybody's silence.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fabric.ids import PeerId
from fabric.messages import Ping
from fabric.transit_time import ASK_EVERY_MS

INTERVAL_MS: Final = 250.0
PATIENCE_MS: Final = 1_500.0
"""What a cluster has whose file does not say otherwise."""
_PINGS_KEPT: Final = 64
"""Of each peer, without an answer: on a long or busy way the next one leaves before the last one is answered."""


class PeerState(enum.IntEnum):  # the hash of a plain Enum is Python's own work, and each message needs two
    """What we take a peer for."""

    ALIVE = enum.auto()
    SUSPECT = enum.auto()
    LOST = enum.auto()


class Sign(enum.IntEnum):
    """What can change that."""

    HEARD = enum.auto()
    QUIET = enum.auto()
    SILENT = enum.auto()


NEXT: Final[Mapping[tuple[PeerState, Sign], PeerState]] = {
    (PeerState.ALIVE, Sign.HEARD): PeerState.ALIVE,
    (PeerState.ALIVE, Sign.QUIET): PeerState.SUSPECT,
    (PeerState.ALIVE, Sign.SILENT): PeerState.LOST,
    (PeerState.SUSPECT, Sign.HEARD): PeerState.ALIVE,
    (PeerState.SUSPECT, Sign.QUIET): PeerState.SUSPECT,
    (PeerState.SUSPECT, Sign.SILENT): PeerState.LOST,
}


@dataclass(slots=True, frozen=True)
class HeartbeatTiming:
    """When a quiet peer is asked, and when a silent one is given up, in ms. `rtt_every_ms`: busy ones are asked too."""

    interval_ms: float = INTERVAL_MS
    patience_ms: float = PATIENCE_MS
    rtt_every_ms: float = 5_000.0

    @property
    def suspect_after_ms(self) -> float:
        """Two heartbeats were not answered, or most of the patience is used up."""
        return min(2.4 * self.interval_ms, 0.8 * self.patience_ms)

    @property
    def together_ms(self) -> float:
        """Heartbeats that are due so soon go now: each moment wakes the process, and it may have many peers."""
        return 0.2 * self.interval_ms


@dataclass(slots=True)
class _Watched:
    heard_at_ms: float
    pinged_at_ms: float = -math.inf
    number: int = 0
    unanswered: list[float] = field(default_factory=list)
    """When our last pings left, up to that number, since the newest that was answered."""
    has_answered: bool = False
    """Our last ping, and has not asked us since."""
    state: PeerState = PeerState.ALIVE


class Liveness:
    """Watches any number of peers. Call `due` and `lost` at `wake_at_ms` and whenever convenient."""

    def __init__(self, heartbeats: HeartbeatTiming | None = None) -> None:
        self._timing = heartbeats or HeartbeatTiming()
        self._watched: dict[PeerId, _Watched] = {}
        self._wake_at_ms = math.inf
        self._looked_at_ms = -math.inf

    def watch(self, peer: PeerId, now_ms: float) -> bool:
        """Start to watch a peer, alive as of now; False, and nothing changes, if it is watched already."""
        if peer in self._watched:
            return False
        if not self._watched:
            self._looked_at_ms = now_ms
        self._watched[peer] = _Watched(heard_at_ms=now_ms)
        self._wake_at_ms = min(self._wake_at_ms, now_ms)
        return True

    def forget(self, peer: PeerId) -> None:
        """Stop watching."""
        self._watched.pop(peer, None)

    def heard(self, peer: PeerId, now_ms: float) -> None:
        """Something came from the peer; of no interest if it is not watched."""
        watched = self._watched.get(peer)
        if watched is not None:
            watched.heard_at_ms = now_ms
            watched.state = NEXT[watched.state, Sign.HEARD]

    def pinged(self, peer: PeerId, now_ms: float) -> None:
        """The peer asked for a sign of life, and so gave one."""
        self.heard(peer, now_ms)
        watched = self._watched.get(peer)
        if watched is not None:
            watched.has_answered = False
            self._plan_for_the_only_one()

    def pong(self, peer: PeerId, number: int, now_ms: float) -> float | None:
        """The answer to a ping of ours came: its round trip in ms. None for one that is not awaited, or a stranger's."""
        self.heard(peer, now_ms)
        watched = self._watched.get(peer)
        if watched is None:
            return None
        later = watched.number - number
        if not 0 <= later < len(watched.unanswered):
            return None
        pinged_at_ms = watched.unanswered[-1 - later]
        watched.unanswered = watched.unanswered[len(watched.unanswered) - later :]
        if not later:
            watched.has_answered = True
            self._plan_for_the_only_one()
        return now_ms - pinged_at_ms

    def due(self, now_ms: float) -> list[tuple[PeerId, Ping]]:
        """Pings to send now: to whom one is due, and soon due."""
        pings = []
        until_ms = now_ms + self._timing.together_ms
        for peer, watched in self._watched.items():
            if self._ping_at_ms(watched) <= until_ms:
                pings.append((peer, _ping(watched, now_ms)))
        self._plan()
        return pings

    def ask(self, peer: PeerId, now_ms: float) -> Ping | None:
        """A ping to send out of turn, for its round trip; None: the peer is not watched, or was pinged within the last second."""
        watched = self._watched.get(peer)
        if watched is None or now_ms < watched.pinged_at_ms + ASK_EVERY_MS:
            return None
        return _ping(watched, now_ms)

    def lost(self, now_ms: float) -> list[PeerId]:
        """Peers that have been silent for too long, each told once and then no longer watched."""
        self._forgive_our_own_gap(now_ms)
        for watched in self._watched.values():
            sign = self._sign(watched.heard_at_ms, now_ms)
            if sign is not None:
                watched.state = NEXT[watched.state, sign]
        gone = [peer for peer, watched in self._watched.items() if watched.state is PeerState.LOST]
        for peer in gone:
            del self._watched[peer]
        self._plan()
        return gone

    def state(self, peer: PeerId) -> PeerState:
        """What we take a peer for; one that is not watched is lost."""
        watched = self._watched.get(peer)
        return PeerState.LOST if watched is None else watched.state

    @property
    def wake_at_ms(self) -> float | None:
        """The next moment worth asking; it may turn out too early, never too late. None: nobody is watched."""
        return self._wake_at_ms if self._watched else None

    def _sign(self, heard_at_ms: float, now_ms: float) -> Sign | None:
        # The sums of `_plan`: a difference may be rounded to less than the patience at the very moment we asked to be woken.
        if now_ms >= heard_at_ms + self._timing.patience_ms:
            return Sign.SILENT
        return Sign.QUIET if now_ms >= heard_at_ms + self._timing.suspect_after_ms else None

    def _ping_at_ms(self, watched: _Watched) -> float:
        quiet_at_ms = max(watched.heard_at_ms, watched.pinged_at_ms) + self._timing.interval_ms
        if (
            watched.has_answered
        ):  # both ends of a quiet link would ask at once, again and again: it is the peer's turn
            quiet_at_ms += self._timing.together_ms
        return min(quiet_at_ms, watched.pinged_at_ms + self._timing.rtt_every_ms)

    def _plan_for_the_only_one(self) -> None:
        """Its heartbeats put ours off: else a process that has only this peer wakes up for nothing."""
        if len(self._watched) == 1:
            self._plan()

    def _plan(self) -> None:
        # Not per message heard: hearing only moves moments later.
        self._wake_at_ms = min(
            (
                min(self._ping_at_ms(watched), watched.heard_at_ms + self._timing.patience_ms)
                for watched in self._watched.values()
            ),
            default=math.inf,
        )

    def _forgive_our_own_gap(self, now_ms: float) -> None:
        gap_ms = now_ms - self._looked_at_ms
        self._looked_at_ms = now_ms
        if gap_ms > self._timing.suspect_after_ms:
            for watched in self._watched.values():
                watched.heard_at_ms = min(now_ms, watched.heard_at_ms + gap_ms)


def _ping(watched: _Watched, now_ms: float) -> Ping:
    watched.number += 1
    watched.unanswered = [*watched.unanswered[1 - _PINGS_KEPT :], now_ms]
    watched.has_answered = False
    watched.pinged_at_ms = now_ms
    return Ping(watched.number)
