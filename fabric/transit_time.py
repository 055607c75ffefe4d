"""How late a message is beyond its looks, measured without comparing clocks (design section 3), sans-IO.

`received - sent` mixes the foreign clock's offset, the way and the queueing. The offset and the bare way are the
same for every message of a link, so the smallest value seen is taken for them: what a message has above it was
queueing. The way itself is half the smallest round trip. Both minima slide over a window, because clocks drift.

They hold for one clock of the peer. Messages of a link come in the order in which they were sent, so one that seems
sent long before the last one was stamped by another clock (its host started anew), and the peer is measured from the
beginning. So is one that was lost and is heard again (`forget`): its host may have slept, which stops its clock. Who slept
for less is found out by a round trip: the answer to a ping cannot have queued for longer than all of it took. Who is watched is
pinged all the time; who is not is asked where what it says seems late (`ask`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from fabric.ids import PeerId

WINDOW_MS = 60_000.0
PEERS_MAX = 10_000
_STEP_LEAST_MS = 1.0  # clocks drift a little within a window
STEP_MS = 1_000.0  # more than any line could reorder, less than a host needs to start anew
DOUBTED_FROM_MS = 10.0  # less costs no budget much, and is what busy hosts make of any message
ASK_EVERY_MS = 1_000.0
_UNANSWERED_MS = 10_000.0  # by then the ping went down with its connection


@dataclass(slots=True)
class _SlidingMin:
    """The smallest value of the last half to whole window: two halves, the older one forgotten at once."""

    older: float = math.inf
    newer: float = math.inf
    turned_at_ms: float = -math.inf

    def add(self, value: float, now_ms: float, window_ms: float) -> float:
        passed_ms = now_ms - self.turned_at_ms
        if passed_ms >= window_ms / 2:
            self.older = self.newer if passed_ms < window_ms else math.inf
            self.newer = math.inf
            self.turned_at_ms = now_ms
        self.newer = min(self.newer, value)
        return min(self.older, self.newer)


@dataclass(slots=True)
class _Way:
    offset: _SlidingMin = field(default_factory=_SlidingMin)
    round_trip: _SlidingMin = field(default_factory=_SlidingMin)
    half_rtt_ms: float = 0.0
    sent_at_ms: float = -math.inf
    passed_ms: float = 0.0
    """Of the last message: received - sent."""
    queued_ms: float = 0.0
    """Of that, what is above the smallest."""
    asked_at_ms: float = -math.inf
    asked: int = 0
    """How many pings it was sent, each with its number."""
    answered: int = 0


class TransitMeter:
    """Per peer: queueing of each message plus half the minimum round trip. Remembers the newest peers only."""

    def __init__(self, window_ms: float = WINDOW_MS, peers_max: int = PEERS_MAX) -> None:
        self._window_ms = window_ms
        self._peers_max = peers_max
        self._ways: OrderedDict[PeerId, _Way] = OrderedDict()

    def late_ms(self, peer: PeerId, sent_at_ms: float, now_ms: float) -> float:
        """How late this message is, at least 0; it counts for the minimum as well."""
        way = self._way(peer)
        if sent_at_ms < way.sent_at_ms - STEP_MS:
            way = self._ways[peer] = _Way()
        way.sent_at_ms = sent_at_ms
        passed_ms = now_ms - sent_at_ms
        way.passed_ms = passed_ms
        way.queued_ms = passed_ms - way.offset.add(passed_ms, now_ms, self._window_ms)
        return way.queued_ms + way.half_rtt_ms

    def observe_rtt(self, peer: PeerId, rtt_ms: float, now_ms: float) -> None:
        """Take the round trip of a `Ping`, whose answer was the last message."""
        way = self._way(peer)
        self._check_offset(way, rtt_ms, now_ms)
        way.half_rtt_ms = way.round_trip.add(rtt_ms, now_ms, self._window_ms) / 2

    def ask(self, peer: PeerId, now_ms: float) -> int | None:
        """The number of a `Ping` to send to a peer whose last message seems late; its answer goes to `take_answer`.

        None: it does not, or the peer was asked within the last second, or has still to answer.
        """
        way = self._way(peer)
        again_ms = ASK_EVERY_MS if way.answered == way.asked else _UNANSWERED_MS
        if way.queued_ms <= DOUBTED_FROM_MS or now_ms < way.asked_at_ms + again_ms:
            return None
        way.asked_at_ms = now_ms
        way.asked += 1
        return way.asked

    def take_answer(self, peer: PeerId, number: int, now_ms: float) -> None:
        """The last message was a `Pong` of that number; of no interest if we did not ask for it.

        Only where there is doubt is a peer asked, so its round trips are those of bad moments: they bound what a message has queued for,
        and tell nothing of the bare way.
        """
        way = self._way(peer)
        if way.answered < number == way.asked:
            way.answered = number
            self._check_offset(way, now_ms - way.asked_at_ms, now_ms)

    def _check_offset(self, way: _Way, rtt_ms: float, now_ms: float) -> None:
        """What seems to have queued for longer than the round trip that it ended was stamped by a clock that stood still before."""
        if way.queued_ms > rtt_ms + _STEP_LEAST_MS:
            way.offset = _SlidingMin()
            way.offset.add(way.passed_ms, now_ms, self._window_ms)

    def forget(self, peer: PeerId) -> None:
        """The peer is gone; who comes back under its name is measured from the beginning."""
        self._ways.pop(peer, None)

    def _way(self, peer: PeerId) -> _Way:
        way = self._ways.get(peer)
        if way is None:
            way = self._ways[peer] = _Way()
            if len(self._ways) > self._peers_max:
                self._ways.popitem(last=False)
        else:
            self._ways.move_to_end(peer)
        return way
