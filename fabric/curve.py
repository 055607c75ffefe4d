"""CURVE on ZeroMQ sockets: who connects by TCP proves who he is, and each message is taken from whom it may come.

A link that listens says which kinds of principals may connect (`LinkAccess.kinds`). ZeroMQ asks for each new connection, by ZAP; the
answer is pyzmq's own authenticator, on its thread, and this process's keyring. After that each message carries the key of its
connection, by which a revoked key, a wrong name and words about somebody else's slice are refused. Connections of a key that is
revoked are ended on both sides. Sockets by ipc need none of it: they are this user's.

Without keys nothing is bound to an address that others can reach (`check_listening`), whoever asks for it.

A server's address names its key (`tcp://HOST:PORT?key=HEX`), so that while a key is rotated everybody knows which of two to ask for;
one that names none is tried with the newest trusted key, and after a failure with the next.
"""

from __future__ import annotations

import ipaddress
import socket as plain
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq
from zmq.utils import z85

from fabric.clock import MonotonicClock
from fabric.errors import ConfigError, RemoteProtocolError, UntrustedKey
from fabric.ids import FRONTEND_PREFIX, NodeId, PeerId, is_worker_of, role_id_of, role_id_of_node
from fabric.keys import CLIENT, FRONTEND, NODE, OPERATOR, SCHEDULER, KeyPair, Keyring, kind_of
from fabric.tcp_connections import hang_up

if TYPE_CHECKING:
    from zmq.auth import Authenticator

_KEY: Final = "?key="
KEYLESS: Final = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Of who has no key at all; who has one that is not trusted is told of by the authenticator."""
_serial = count(1)


class Speaker(NamedTuple):
    """Whose key a message came by."""

    public: str
    principal: str


@dataclass(slots=True)
class LinkAccess:
    """What a link does with keys. `kinds`: who may connect to it; none for a link that only connects.

    `names`: whether the names that peers give themselves must be those of their keys; on sockets without names the messages say
    whose they are, and who is refused is told nothing, so that ZeroMQ tries again for it.
    """

    keyring: Keyring
    kinds: frozenset[str] = frozenset()
    names: bool = False
    refused_by_link: int = 0
    """Messages that a key did not cover, and connections of who has none."""
    refused_by_authenticator: int = 0
    """Connections of a key that may not connect; apart, as two threads that add to one number lose some."""
    _domain: str = field(init=False)
    _asked_by: Authenticator | None = field(init=False, default=None)
    _tries: dict[str, int] = field(init=False, default_factory=dict)
    _ports: set[int] = field(init=False, default_factory=set)
    _spoke_by: dict[int, str] = field(init=False, default_factory=dict)  # the key of each descriptor
    _changes: int = field(init=False)

    def __post_init__(self) -> None:
        self._domain = f"{next(_serial)}"
        self._changes = self.keyring.changes

    @property
    def refused(self) -> int:
        """Connections and messages that a key did not cover."""
        return self.refused_by_link + self.refused_by_authenticator

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound to a TCP address: what it is bound to from now on takes keys only."""
        # Here, where there are keys: pyzmq's thread takes asyncio with it, a tenth of a process's start.
        from fabric.curve_authenticator import authenticator_of  # noqa: PLC0415  see above

        self._asked_by = authenticator_of(socket.context)
        self._asked_by.configure_curve_callback(self._domain, self)
        own = self.keyring.own
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, self._domain.encode())

    def close(self) -> None:
        """Its link is closed: nobody asks any more."""
        if self._asked_by is not None:
            self._asked_by.credentials_providers.pop(self._domain, None)

    def announced(self, address: str) -> str:
        """An address of ours that was bound, as others should know it."""
        self._ports.add(int(address.rpartition(":")[2]))
        return f"{address}{_KEY}{z85.decode(self.keyring.own.public).hex()}"

    def connect_to(self, socket: zmq.Socket[bytes], address: str, principal: str) -> tuple[str, str]:
        """Before it is connected: the address without its key, and the key it must have.

        Raises UntrustedKey where that is not the principal's.
        """
        bare, _, named = address.partition(_KEY)
        trusted = self.keyring.public_keys(principal)
        if not trusted:
            raise UntrustedKey(f"{bare}: no key of {principal} is trusted")
        if named:
            key = _public(named, bare)
            if key not in trusted:
                raise UntrustedKey(f"{bare}: its key is not one of {principal}")
        else:
            tries = self._tries.get(bare, 0)
            self._tries[bare] = tries + 1
            key = trusted[tries % len(trusted)]
        own = self.keyring.own
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        return bare, key

    def trusts(self, key: str, principal: str) -> bool:
        """Whether whoever has that key may still be taken for that principal."""
        return self.keyring.principal_of(key) == principal

    def lets_in(self, key: str) -> bool:
        """Whether whoever has that key may speak to us."""
        principal = self.keyring.principal_of(key)
        return principal is not None and kind_of(principal) in self.kinds

    def has_changed(self) -> bool:
        """Whether somebody came or went since the last call; then the link looks at its connections."""
        self.keyring.look_again()
        is_changed, self._changes = self._changes != self.keyring.changes, self.keyring.changes
        return is_changed

    def check(self, frame: zmq.Frame, descriptor: int, peer: PeerId) -> Speaker | None:
        """Whose key a message's connection, that descriptor, has; None: it came by ipc.

        Raises RemoteProtocolError for one that is trusted no more.
        """
        try:
            public = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return None  # by TCP nobody gets here without a key
        principal = self.keyring.principal_of(public)
        if principal is None or kind_of(principal) not in self.kinds:
            self.refused_by_link += 1
            self._hang_up(descriptor)
            raise RemoteProtocolError("its key is not trusted here", "revoked")
        self._spoke_by[descriptor] = public
        if self.names and not may_be_called(principal, peer):
            self.refused_by_link += 1
            raise RemoteProtocolError(f"{principal} is not called {peer}", "not its name")
        return Speaker(public, principal)

    def hang_up_on_revoked(self) -> None:
        """End the connections by which revoked keys spoke; one that never said a word ends with its first."""
        for descriptor, public in list(self._spoke_by.items()):
            if not self.lets_in(public):
                self._hang_up(descriptor)

    def _hang_up(self, descriptor: int) -> None:
        self._spoke_by.pop(descriptor, None)
        hang_up(descriptor, self._ports)

    def check_owner(self, principal: str, message: object) -> None:
        """Raises RemoteProtocolError where a node speaks of another node's slice."""
        slice_id = getattr(message, "slice_id", None)
        if (
            kind_of(principal) == NODE
            and slice_id is not None
            and principal_of_receiver(slice_id) != principal
        ):
            self.refused_by_link += 1
            raise RemoteProtocolError(f"{slice_id} is not of {principal}", "not its own")

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator asks, on its thread, whether that key may connect."""
        del domain
        is_allowed = self.lets_in(key.decode("ascii", "replace"))
        self.refused_by_authenticator += not is_allowed
        return is_allowed


def keyless(address: str) -> str:
    """An address for who has no key. Raises ConfigError where it asks for one."""
    if _KEY in address:
        bare = address.partition(_KEY)[0]
        raise ConfigError(
            f"{bare} asks for a key: ClientOptions(key_file=...), --key FILE or $TENUTO_KEY_FILE, see `tenuto keys`"
        )
    return address


def check_listening(address: str, guard: LinkAccess | None) -> None:
    """Raise ConfigError for a TCP address at which all interfaces listen, or others than this host's without a key."""
    if is_wildcard(host_of(address)):
        raise ConfigError(f"{address}: name the interface's own address, or 127.0.0.1")
    if guard is None and not is_loopback(host_of(address)):
        raise ConfigError(
            f"{address}: others can reach it, and that needs keys (tenuto keys create DIRECTORY, and"
            " security: {keys: DIRECTORY})"
        )


def host_of(address: str) -> str:
    """The host, or the interface, in a `tcp://HOST:PORT` or `HOST:PORT`."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_wildcard(host: str) -> bool:
    """Whether that stands for all interfaces, or may: by a number in a spelling that only the system reads (`0.0`, `0x0`, `127.1`), or in other digits."""
    return _is_ip(
        host,
        "is_unspecified",
        host == "*" or not host or host.isdigit() or not host.isascii() or _is_number_to_the_system(host),
    )


def _is_number_to_the_system(host: str) -> bool:
    """inet_aton(3) takes fewer than four numbers, hexadecimal and octal ones; `getaddrinfo`, and so every socket, goes by it."""
    try:
        plain.inet_aton(host)
    except (OSError, ValueError):  # the latter of what is no ASCII, or has a zero in it
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach it."""
    return _is_ip(host, "is_loopback", host in {"localhost", "lo"})


def _is_ip(host: str, kind: str, otherwise: bool) -> bool:  # noqa: FBT001  of what is no number
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return otherwise
    return bool(getattr(getattr(ip, "ipv4_mapped", None) or ip, kind))


def guarded(keyring: Keyring | None, kinds: Collection[str] = (), *, names: bool = True) -> LinkAccess | None:
    """A guard for one link, where there are keys. `names`: see `LinkAccess`."""
    return None if keyring is None else LinkAccess(keyring, frozenset(kinds), names)


def may_be_called(principal: str, peer: PeerId) -> bool:
    """Whether a role of that name may bear that key."""
    role_id = role_id_of(peer)
    kind, _, name = principal.partition("/")
    match kind:
        case "node":
            return role_id == role_id_of_node(name) or is_worker_of(role_id, NodeId(name))
        case "frontend":
            return role_id.startswith(FRONTEND_PREFIX)
        case "scheduler":
            return role_id.startswith("scheduler-")
        case _:
            return role_id == principal


def principal_of_server(server: PeerId) -> str:
    """Whose key a server of that name must have."""
    return SCHEDULER if role_id_of(server).startswith("scheduler") else FRONTEND


def principal_of_receiver(peer: PeerId) -> str:
    """Whose key must have who takes payload under that name: a frontend, or a slice, whose name begins with its node's."""
    node, slash, _ = peer.partition("/")
    return f"{NODE}/{node}" if slash else FRONTEND


def new_pair(principal: str) -> KeyPair:
    """Draw a key."""
    public, secret = zmq.curve_keypair()
    return KeyPair(principal, public.decode(), secret.decode())


def _public(named: str, address: str) -> str:
    try:
        key = bytes.fromhex(named)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"{address}: the key in it is none")
    return z85.encode(key).decode()


CONTROL_KINDS: Final = frozenset({FRONTEND, NODE, OPERATOR, SCHEDULER})
"""Who speaks to a scheduler."""
CLIENT_KINDS: Final = frozenset({CLIENT, OPERATOR})
"""Who speaks to a frontend."""


def library_version() -> tuple[str, bool]:
    """Of libzmq, and whether it can speak CURVE."""
    return zmq.zmq_version(), zmq.has("curve")


def key_pair_ms() -> float:
    """How long it takes to make one: mostly one multiplication on the curve, of which a handshake needs several."""
    clock = MonotonicClock()
    began_ms = clock.now_ms()
    zmq.curve_keypair()
    return clock.now_ms() - began_ms
