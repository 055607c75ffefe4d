"""CURVE on ZeroMQ sockets: who connects by TCP proves who he is, and each message is taken from whom it may come.

A link that listens says which kinds of principals may connect (`Guard.kinds`). ZeroMQ asks for each new connection, by ZAP; the
answer is pyzmq's own authenticator, on its thread, and this process's keyring. After that each message carries the key of its
connection, by which a revoked key and a wrong name are refused. Sockets by ipc need none of it: their folder is this user's.

A server's address names its key (`tcp://HOST:PORT?key=HEX`), so that while a key is rotated everybody knows which of two to ask for;
one that names none is tried with the newest trusted key, and after a failure with the next.
"""

from __future__ import annotations

import atexit
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from fabric.errors import ConfigError, RemoteProtocolError
from fabric.ids import PeerId, role_id_of
from fabric.keys import CLIENT, FRONTEND, NODE, OPERATOR, SCHEDULER, KeyPair, Keyring, kind_of

_KEY: Final = "?key="
_serial = count(1)


@dataclass(slots=True)
class Guard:
    """What a link does with keys. `kinds`: who may connect to it; none for a link that only connects.

    `names`: whether the names that peers give themselves must be those of their keys; on sockets without names the messages say
    whose they are.
    """

    keyring: Keyring
    kinds: frozenset[str] = frozenset()
    names: bool = False
    refused: int = 0
    """Connections and messages that a key did not cover."""
    _domain: str = field(init=False)
    _tries: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._domain = f"{next(_serial)}"

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound to a TCP address: what it is bound to from now on takes keys only."""
        _authenticator(socket.context).configure_curve_callback(self._domain, self)
        own = self.keyring.own
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, self._domain.encode())

    def announced(self, address: str) -> str:
        """An address of ours as others should know it."""
        return f"{address}{_KEY}{z85.decode(self.keyring.own.public).hex()}"

    def connect_to(self, socket: zmq.Socket[bytes], address: str, principal: str) -> str:
        """Before it is connected: the address without its key. Raises ConfigError where its key is not that principal's."""
        bare, _, named = address.partition(_KEY)
        trusted = self.keyring.public_keys(principal)
        if not trusted:
            raise ConfigError(f"{bare}: no key of {principal} is trusted")
        if named:
            key = _public(named, bare)
            if key not in trusted:
                raise ConfigError(f"{bare}: its key is not one of {principal}")
        else:
            tries = self._tries.get(bare, 0)
            self._tries[bare] = tries + 1
            key = trusted[tries % len(trusted)]
        own = self.keyring.own
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        return bare

    def check(self, frame: zmq.Frame, peer: PeerId) -> None:
        """Raises RemoteProtocolError for a message that the key of its connection does not cover."""
        try:
            public = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return  # by ipc; by TCP nobody gets here without a key
        principal = self.keyring.principal_of(public)
        if principal is None or kind_of(principal) not in self.kinds:
            self.refused += 1
            raise RemoteProtocolError("its key is not trusted here", "revoked")
        if self.names and not may_be_called(principal, peer):
            self.refused += 1
            raise RemoteProtocolError(f"{principal} is not called {peer}", "not its name")

    def callback(self, domain: str, key: bytes) -> bool:
        """Pyzmq's authenticator asks, on its thread, whether that key may connect."""
        del domain
        principal = self.keyring.principal_of(key.decode("ascii", "replace"))
        is_allowed = principal is not None and kind_of(principal) in self.kinds
        self.refused += not is_allowed
        return is_allowed


def guarded(keyring: Keyring | None, kinds: Collection[str] = (), *, names: bool = True) -> Guard | None:
    """A guard for one link, where there are keys. `names`: see `Guard`."""
    return None if keyring is None else Guard(keyring, frozenset(kinds), names)


def may_be_called(principal: str, peer: PeerId) -> bool:
    """Whether a role of that name may bear that key."""
    role_id = role_id_of(peer)
    kind, _, name = principal.partition("/")
    match kind:
        case "node":
            return role_id == f"node-{name}" or (
                role_id.startswith(f"worker-{name}-") and role_id[len(f"worker-{name}-") :].isdigit()
            )
        case "frontend":
            return role_id.startswith("frontend-")
        case "scheduler":
            return role_id.startswith("scheduler-")
        case _:
            return role_id == kind


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


@cache
def _authenticator(context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
    """A context's one, for ZeroMQ asks in one place; it ends with the process."""
    made = ThreadAuthenticator(context)
    made.start()
    atexit.register(made.stop)
    return made


def _public(named: str, address: str) -> str:
    try:
        key = bytes.fromhex(named)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"{address}: the key in it is none")
    return z85.encode(key).decode()


CONTROL_KINDS: Final = frozenset({FRONTEND, NODE, OPERATOR})
"""Who speaks to a scheduler."""
CLIENT_KINDS: Final = frozenset({CLIENT, OPERATOR})
"""Who speaks to a frontend."""
