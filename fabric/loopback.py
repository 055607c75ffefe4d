"""Link in memory, with delay, loss and reordering on demand, on whatever clock it is given.

Messages pass through the same codec and frames as on a socket, so what is unencodable fails here too, and a
receiver's tensors are read-only views here too. One seed, one history.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fabric import frames
from fabric.clock import Clock
from fabric.codec import Buffer
from fabric.errors import RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.link import NO_EPOCH, NamedTensor, Packed, Received
from fabric.messages import AnyMessage
from fabric.transit_time import TransitMeter

_Arrival = tuple[float, int, PeerId, list[Buffer]]  # when, tie-break, from whom, what


@dataclass(slots=True, frozen=True)
class LinkConditions:
    """What happens on the way. Delay is one way, jitter the most that is added to it; the others are shares.

    Messages of one sender keep their order unless reordered; a reordered one is `reorder_ms` later than it
    would be and may be overtaken.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    lost_share: float = 0.0
    reordered_share: float = 0.0
    reorder_ms: float = 5.0


class LoopbackNetwork:
    """Where loopback links find each other by name. `conditions` may be changed at any time."""

    def __init__(
        self,
        clock: Clock,
        draws: random.Random,
        conditions: LinkConditions | None = None,
        queue_messages_max: int = 1_000,
    ) -> None:
        self.clock = clock
        self.conditions = conditions or LinkConditions()
        self._draws = draws
        self._queue_messages_max = queue_messages_max
        self._links: dict[PeerId, LoopbackLink] = {}
        self._in_order_at_ms: dict[tuple[PeerId, PeerId], float] = {}
        self._arrivals: list[tuple[float, int, LoopbackLink]] = []
        self._sent = 0

    def link(self, own: PeerId, *, is_anonymous: bool = False) -> LoopbackLink:
        """A link that others reach as `own`; anonymous: receivers are not told who sent (as with PUSH)."""
        assert own not in self._links, f"{own} is there already"
        made = LoopbackLink(self, own, is_anonymous=is_anonymous)
        self._links[own] = made
        return made

    @property
    def next_arrival_at_ms(self) -> float | None:
        """When the next message arrives anywhere (a moment that may have passed); None: nothing is on its way."""
        link = self.next_link
        return None if link is None else link.next_arrival_at_ms

    @property
    def next_link(self) -> LoopbackLink | None:
        """Where the next message arrives; of those that arrive at one moment, the one that was sent first."""
        self._forget_received()
        return self._arrivals[0][2] if self._arrivals else None

    def note_arrival(self, arrives_at_ms: float, sent: int, link: LoopbackLink) -> None:
        """That message will arrive by that link."""
        heapq.heappush(self._arrivals, (arrives_at_ms, sent, link))
        self._forget_received()

    def _forget_received(self) -> None:
        """Of what was received, or whose link is closed, nothing stands first."""
        arrivals = self._arrivals
        while arrivals:
            _, sent, link = arrivals[0]
            if link.queued and link.next_arrival()[1] == sent:
                return
            heapq.heappop(arrivals)

    def is_there(self, peer: PeerId) -> bool:
        """Whether a link of that name is open."""
        return peer in self._links

    def remove(self, peer: PeerId) -> None:
        """A link was closed: its name is unroutable from now on."""
        self._links.pop(peer, None)

    def carry(self, sender: PeerId, shown_as: PeerId, peer: PeerId, parts: list[Buffer]) -> bool:
        """Take a message on its way; False: the receiver's queue is full. A lost one is accepted."""
        receiver = self._links[peer]
        if receiver.queued >= self._queue_messages_max:
            return False
        arrives_at_ms = self.arrives_at_ms(sender, peer, self.clock.now_ms())
        if arrives_at_ms is not None:
            self._sent += 1
            receiver.arrive((arrives_at_ms, self._sent, shown_as, parts))
        return True

    def arrives_at_ms(self, sender: PeerId, peer: PeerId, sent_at_ms: float) -> float | None:
        """When a message sent now is there; None: it is lost. A subclass may know better than `conditions`."""
        conditions = self.conditions
        if self._draws.random() < conditions.lost_share:
            return None
        arrives_at_ms = sent_at_ms + conditions.delay_ms + self._draws.random() * conditions.jitter_ms
        if self._draws.random() < conditions.reordered_share:
            return arrives_at_ms + conditions.reorder_ms
        arrives_at_ms = max(arrives_at_ms, self._in_order_at_ms.get((sender, peer), arrives_at_ms))
        self._in_order_at_ms[sender, peer] = arrives_at_ms
        return arrives_at_ms

    def late_ms(self, meter: TransitMeter, peer: PeerId, sent_at_ms: float) -> float:
        """How late a message of that peer is, which has arrived now; a subclass may know instead of measuring."""
        return meter.late_ms(peer, sent_at_ms, self.clock.now_ms())


class LoopbackLink:
    """One end. Behaves as any `Link`; `fileno` is -1."""

    def __init__(self, network: LoopbackNetwork, own: PeerId, *, is_anonymous: bool) -> None:
        self.epoch: Epoch = NO_EPOCH
        self.transit = TransitMeter()
        self._network = network
        self._own = own
        self._shown_as = PeerId("") if is_anonymous else own
        self._inbox: list[_Arrival] = []
        self._came: list[Received] = []  # of what travelled together, and was more than was asked for
        self._lost: list[PeerId] = []
        self._counters = dict.fromkeys(
            (
                "messages_in",
                "messages_out",
                "bytes_in",
                "bytes_out",
                "garbage_in",
                "full_out",
                "unroutable_out",
            ),
            0.0,
        )

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """False as `send_packed`. Raises LocalProtocolError for what cannot be sent."""
        return self.send_packed(peer, (frames.pack(message, tensors),))

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """False: the peer's queue is full, or nobody of that name is there (see `take_lost`)."""
        if not self._network.is_there(self._own):
            return False
        sent_at_ms = self._network.clock.now_ms()
        parts = frames.join(packed, epoch=self.epoch, sent_at_ms=sent_at_ms)
        if not self._network.is_there(peer):
            self._lost.append(peer)
            self._counters["unroutable_out"] += 1
            return False
        if not self._network.carry(self._own, self._shown_as, peer, [bytes(part) for part in parts]):
            self._counters["full_out"] += 1
            return False
        self._counters["messages_out"] += len(packed)
        self._counters["bytes_out"] += frames.size_of(parts)
        return True

    def receive(self, limit: int) -> Sequence[Received]:
        """What has arrived by the network's clock."""
        came, self._came = self._came, []
        taken = len(came)
        while taken < limit and self._has_arrived:
            _, _, peer, parts = heapq.heappop(self._inbox)
            self._counters["bytes_in"] += frames.size_of(parts)
            taken += 1
            try:
                came.extend(self._open_up(peer, parts))
            except RemoteProtocolError:
                self._counters["garbage_in"] += 1
            taken = max(taken, len(came))
        received, self._came = came[:limit], came[limit:]
        self._counters["messages_in"] += len(received)
        return received

    def arrive(self, arrival: _Arrival) -> None:
        """Take a message that will be here at its moment; a test may bring garbage this way."""
        heapq.heappush(self._inbox, arrival)
        self._network.note_arrival(*arrival[:2], self)

    def take_lost(self) -> Sequence[PeerId]:
        """Names that a send found nobody under since the last call."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def queued(self) -> int:
        """Messages here and on their way."""
        return len(self._inbox)

    @property
    def next_arrival_at_ms(self) -> float | None:
        """When the next message arrives, or did."""
        return self._inbox[0][0] if self._inbox else None

    def next_arrival(self) -> tuple[float, int]:
        """The same, and its place among all that were sent; only while something is `queued`."""
        return self._inbox[0][:2]

    @property
    def has_more(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._came) or self._has_arrived

    @property
    def _has_arrived(self) -> bool:
        return bool(self._inbox) and self._inbox[0][0] <= self._network.clock.now_ms()

    @property
    def addresses(self) -> Sequence[str]:
        """Reached by name."""
        return ()

    @property
    def counters(self) -> Mapping[str, float]:
        """As on a socket."""
        return self._counters

    def fileno(self) -> int:
        """Nothing to wait for."""
        return -1

    def close(self) -> None:
        """What is queued for this link is gone with it."""
        self._network.remove(self._own)
        self._inbox.clear()

    def _open_up(self, peer: PeerId, parts: Sequence[Buffer]) -> list[Received]:
        envelope, named = frames.split(parts)
        late_ms = 0.0
        if peer:
            late_ms = self._network.late_ms(self.transit, peer, envelope.sent_at_ms)
        epoch = Epoch(envelope.epoch)
        return [
            Received(peer, parcel.body, tensors, late_ms, epoch)
            for parcel, tensors in zip(envelope.parcels, named, strict=True)
        ]
