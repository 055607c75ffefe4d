"""By which connection a router reaches a peer, sans-IO.

ZeroMQ's ROUTER keeps an identity for whoever connected with it first, before any message was checked. If identities were
peers' names, anybody with some key could connect under another's name before its owner does: the owner would be ignored, and
what is said to that name would go to the squatter. So a connection's identity is the peer's name and a mark that nobody can
guess, `NAME#NUMBER.SECRET`, drawn anew for each connection and told to nobody but this server. There is nothing to squat then: a name belongs to the connections that *spoke* under it and
whose key may bear it (`LinkAccess.check`), the newest of which is answered.

`NUMBER` grows with each connection of a process. ZeroMQ reads connections in turns, so once a newer one has spoken, what still
waits on an older one is older news that comes later, and is not heard: its sender gave that connection up, and
begins anew on the newer one. A peer that comes back need not wait until the router has noticed that its old connection is gone.

Of a connection that has ended ZeroMQ may still have messages. They are heard, but nobody is reached by it any more.

ZeroMQ tells of ends by descriptors, which the kernel gives out again. Who spoke first by a connection that had ended before anybody
read it may seem to be at the descriptor of the next one: which of two is there cannot be told, as ZeroMQ may read the newer one first.
So all who spoke by a descriptor are kept, and end with it: whoever is lost is told of then, or when something is sent to him.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import count
from typing import Final

from msgspec import Struct

from fabric import frames
from fabric.ids import PeerId

NAMES_MAX: Final = 10_000
"""Of one key; who has more loses its oldest, and nobody else's."""
ENDED_MAX: Final = 1_024  # connections that are remembered after their end
_NUMBER_CHARS_MAX: Final = 12
_numbers = count(1)


def new_route(peer: PeerId) -> bytes:
    """The identity of one more connection of this process. Raises LocalProtocolError for what cannot be a name."""
    return frames.route_of(peer, f"{next(_numbers):x}.{secrets.token_hex(16)}")


class _Route(Struct, frozen=True):
    identity: bytes
    number: int
    key: str | None
    descriptor: int | None


class Routes:
    """The routes of a router's peers."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._routes: dict[PeerId, _Route] = {}
        self._peers: dict[bytes, PeerId] = {}  # by the identity of the connection that is answered
        self._names: dict[str | None, dict[PeerId, None]] = {}  # of each key, the oldest first
        self._at: dict[int, dict[PeerId, None]] = {}  # who spoke by the connections with that descriptor
        self._ended: dict[bytes, None] = {}  # identities, the oldest first

    def __len__(self) -> int:
        """How many peers are known."""
        return len(self._routes)

    def note(
        self, identity: bytes, peer: PeerId, mark: str, key: str | None, descriptor: int | None = None
    ) -> bool:
        """A message came by that connection, from a peer that may be called so; False: a newer one of its has spoken.

        From then on the peer is answered there, unless the connection has ended.
        `key`: its public one; None: none is needed. `descriptor`: with which it ends, see `end_at`.
        """
        known = self._routes.get(peer)
        if known is not None and known.identity != identity and _number(mark) <= known.number:
            return _number(mark) == known.number
        if identity in self._ended:
            return True  # it had been waiting
        self.forget(peer)
        names = self._names.setdefault(key, {})
        if len(names) >= self._names_max:
            self.forget(next(iter(names)))
            names = self._names.setdefault(key, {})
        names[peer] = None
        self._routes[peer] = _Route(identity, _number(mark), key, descriptor)
        self._peers[identity] = peer
        if descriptor is not None:
            self._at.setdefault(descriptor, {})[peer] = None
        return True

    def to(self, peer: PeerId) -> bytes | None:
        """The identity to send to; None: nobody of that name has spoken."""
        route = self._routes.get(peer)
        return None if route is None else route.identity

    def peer_at(self, identity: bytes, descriptor: int | None = None) -> PeerId | None:
        """Whom that connection belongs to; None: it has not spoken, not with that descriptor, or its peer has a newer one."""
        peer = self._peers.get(identity)
        return peer if peer is None or self._routes[peer].descriptor == descriptor else None

    def end_at(self, descriptor: int) -> list[PeerId]:
        """The connection with that descriptor has ended; whose those were that did."""
        lost = list(self._at.get(descriptor, ()))
        for peer in lost:
            self.end(peer)
        return lost

    def end(self, peer: PeerId) -> None:
        """The connection by which it was answered has ended."""
        route = self._routes.get(peer)
        if route is not None:
            self._ended[route.identity] = None
            if len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]
            self.forget(peer)

    def forget(self, peer: PeerId) -> None:
        """It is gone, or its key is."""
        route = self._routes.pop(peer, None)
        if route is not None:
            del self._peers[route.identity]
            names = self._names[route.key]
            del names[peer]
            if not names:
                del self._names[route.key]
            if route.descriptor is not None:
                there = self._at[route.descriptor]
                del there[peer]
                if not there:
                    del self._at[route.descriptor]

    def forget_keys(self, is_trusted: Callable[[str], bool]) -> list[PeerId]:
        """Forget the peers whose keys are trusted no more; who they were."""
        gone = [key for key in self._names if key is not None and not is_trusted(key)]
        lost = [peer for key in gone for peer in self._names[key]]
        for peer in lost:
            self.forget(peer)
        return lost


def _number(mark: str) -> int:
    """0 where there is none: then the first connection of that name stays the one."""
    number = mark.partition(".")[0]
    if not number or len(number) > _NUMBER_CHARS_MAX:
        return 0
    try:
        return int(number, 16)
    except ValueError:
        return 0
