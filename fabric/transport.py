"""How a role gets its links: over ZeroMQ, or over whatever else carries messages, such as a test's network.

A shell asks its transport for links by what they are for, and never for a kind of socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from fabric.curve import LinkAccess
from fabric.ids import Incarnation, PeerId
from fabric.inproc import PeersLink, ServerLink
from fabric.link import Link
from fabric.sockets import DealerLink, LinkOptions, PullLink, PushOptions, PushPool, RouterLink


class PushLink(Link, Protocol):
    """Payload to many receivers, each known by its name, incarnation and addresses; see `PushPool`."""

    def know(self, peer: PeerId, incarnation: Incarnation, addresses: Sequence[str]) -> None:
        """Take an entry of the directory."""
        ...

    def drop(self, peer: PeerId) -> None:
        """Forget a peer; what was sent to it has a moment to arrive."""
        ...


class Transport(Protocol):
    """Opens links. Addresses that cannot be are ConfigErrors; without a descriptor left it is PeerLost."""

    def bind_peers(
        self, addresses: Sequence[str], options: LinkOptions | None = None, guard: LinkAccess | None = None
    ) -> PeersLink:
        """Be reached by peers at all of `addresses`."""
        ...

    def bind_payload(
        self, addresses: Sequence[str], options: LinkOptions | None = None, guard: LinkAccess | None = None
    ) -> Link:
        """Take payload at all of `addresses`."""
        ...

    def connect(
        self, own: PeerId, server: PeerId, addresses: Sequence[str], guard: LinkAccess | None = None
    ) -> ServerLink:
        """Reach the one server of that name, as `own`."""
        ...

    def push(self, options: PushOptions | None = None, guard: LinkAccess | None = None) -> PushLink:
        """Send payload to whoever becomes known."""
        ...


class _ZmqTransport:
    """Sockets of this process's ZeroMQ context."""

    def bind_peers(
        self, addresses: Sequence[str], options: LinkOptions | None = None, guard: LinkAccess | None = None
    ) -> PeersLink:
        return RouterLink.bind(addresses, options, guard)

    def bind_payload(
        self, addresses: Sequence[str], options: LinkOptions | None = None, guard: LinkAccess | None = None
    ) -> Link:
        return PullLink.bind(addresses, options, guard)

    def connect(
        self, own: PeerId, server: PeerId, addresses: Sequence[str], guard: LinkAccess | None = None
    ) -> ServerLink:
        return DealerLink.connect(own, server, addresses, guard=guard)

    def push(self, options: PushOptions | None = None, guard: LinkAccess | None = None) -> PushLink:
        return PushPool(options, guard)


ZMQ: Final[Transport] = _ZmqTransport()
