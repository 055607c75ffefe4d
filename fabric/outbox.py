"""What a role has to say in one turn of its loop, gathered by peer so that it travels as one message.

A message of ZeroMQ's costs its sender and its receiver more than what is in it, and under load a turn has much to
say to the same peer. A lone message waits for nothing: the turn that made it ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from fabric import frames
from fabric.codec import are_too_long
from fabric.ids import PeerId
from fabric.link import NamedTensor, Packed
from fabric.messages import PARCELS_MAX, AnyMessage

GATHERED_BYTES_MAX: Final = 1 << 20
"""Of tensors that travel together, those in shared memory too: a receiver's limit is for all of a message's."""


class Sending(Protocol):
    """The part of a link that an outbox needs."""

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """Queue messages that travel as one; False: none of them is queued."""
        ...


class _Gathered:
    """What goes to one peer as one."""

    __slots__ = ("_header_size", "_size", "packed")

    def __init__(self) -> None:
        self.packed: list[Packed] = []
        self._size = self._header_size = 0

    def has_room(self, more: Packed) -> bool:
        return (
            len(self.packed) < PARCELS_MAX
            and self._size + more.size + more.shared_size <= GATHERED_BYTES_MAX
            # So short a header does not describe as many tensors as a message may have.
            and not are_too_long(self._header_size + len(more.header))
        )

    def add(self, more: Packed) -> None:
        self.packed.append(more)
        self._size += more.size + more.shared_size
        self._header_size += len(more.header)


class Outbox:
    """Messages in order for each peer. `on_refused` hears of each one that the link did not take."""

    def __init__(
        self,
        link: Sending,
        on_refused: Callable[[PeerId, AnyMessage], None],
        payload_bytes_max: int = frames.PAYLOAD_BYTES_MAX,
    ) -> None:
        self._link = link
        self._on_refused = on_refused
        self._payload_bytes_max = payload_bytes_max
        self.is_sharing = False
        """Whether who is on the other side can read our shared memory."""
        self._gathered: dict[PeerId, _Gathered] = {}
        self._last: Packed | None = None  # of this turn, without tensors: many peers are often told the same

    def put(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> None:
        """Say it when the turn ends. Raises LocalProtocolError for what cannot be sent.

        Arrays must not change until then; large ones not until ZeroMQ is done with them.
        """
        packed = self._last
        if tensors or packed is None or packed.parcel.body is not message:
            packed = frames.pack(
                message, tensors, payload_bytes_max=self._payload_bytes_max, is_sharing=self.is_sharing
            )
            self._last = None if tensors else packed
        gathered = self._gathered.get(peer)
        if gathered is None:
            gathered = self._gathered[peer] = _Gathered()
        elif not gathered.has_room(packed):
            full, gathered = gathered, _Gathered()
            self._gathered[peer] = gathered  # before the send, whose refusal may have something to say
            self._send(peer, full.packed)
        gathered.add(packed)

    def flush(self) -> None:
        """The turn ends: send everything."""
        if not self._gathered:
            return
        self._last = None
        gathered, self._gathered = self._gathered, {}
        for peer, together in gathered.items():
            self._send(peer, together.packed)

    def refuse(self) -> None:
        """Whoever it is for is gone: all that waits counts as not taken."""
        gathered, self._gathered = self._gathered, {}
        for peer, together in gathered.items():
            self._refuse(peer, together.packed)

    def _send(self, peer: PeerId, packed: Sequence[Packed]) -> None:
        if not self._link.send_packed(peer, packed):
            self._refuse(peer, packed)

    def _refuse(self, peer: PeerId, packed: Sequence[Packed]) -> None:
        for one in packed:
            self._on_refused(peer, one.parcel.body)
