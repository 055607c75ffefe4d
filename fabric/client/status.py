"""The question that every role answers: how it is."""

from __future__ import annotations

import selectors
from collections.abc import Sequence

from fabric.clock import MonotonicClock
from fabric.errors import PeerLost
from fabric.ids import OPERATOR, PeerId, new_incarnation, peer_id
from fabric.messages import StatusAsked, StatusListed
from fabric.sockets import DealerLink


def ask_status(address: str | Sequence[str], timeout_ms: float = 2_000.0) -> StatusListed:
    """Ask any role how it is. Raises PeerLost if nobody answers in time, ConfigError for a bad address."""
    clock = MonotonicClock()
    addresses = (address,) if isinstance(address, str) else tuple(address)
    server = PeerId("role")
    link = DealerLink.connect(peer_id(OPERATOR, new_incarnation()), server, addresses)
    until_ms = clock.now_ms() + timeout_ms
    is_asked = False
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(link.fileno(), selectors.EVENT_READ)
            while clock.now_ms() < until_ms:
                is_asked = is_asked or link.send(server, StatusAsked())
                for received in link.receive(16):
                    if isinstance(received.message, StatusListed):
                        return received.message
                if link.take_lost():
                    break
                if not link.has_more:
                    selector.select(0.01)
    finally:
        link.close()
    raise PeerLost(f"nobody answers at {addresses[0]}")
