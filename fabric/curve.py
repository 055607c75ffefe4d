"""CURVE on ZeroMQ sockets: who connects by TCP proves who he is, and each message is taken from whom it may come.

A link that listens says which kinds of principals may connect (`Guard.kinds`). ZeroMQ asks for each new connection, by ZAP; the
answer is pyzmq's own authenticator, on its thread, and this process's keyring. After that each message carries the key of its
connection, by which a revoked key, a wrong name and words about somebody else's slice are refused. Sockets by ipc need none of
it: their folder is this user's.

A server's address names its key (`tcp://HOST:PORT?key=HEX`), so that while a key is rotated everybody knows which of two to ask for;
one that names none is tried with the newest trusted key, and after a failure with the next.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from fabric.errors import ConfigError, RemoteProtocolError
from fabric.ids import FRONTEND_PREFIX, NodeId, PeerId, is_worker_of, role_id_of, role_id_of_node
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
    _asked_by: _Authenticator | None = field(init=False, default=None)
    _tries: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._domain = f"{next(_serial)}"

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound to a TCP address: what it is bound to from now on takes keys only."""
        self._asked_by = _authenticator(socket.context)
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

    def check(self, frame: zmq.Frame, peer: PeerId) -> str | None:
        """Whose key a message's connection has; None: it came by ipc. Raises RemoteProtocolError for one that is trusted no more."""
        try:
            public = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return None  # by TCP nobody gets here without a key
        principal = self.keyring.principal_of(public)
        if principal is None or kind_of(principal) not in self.kinds:
            self.refused += 1
            raise RemoteProtocolError("its key is not trusted here", "revoked")
        if self.names and not may_be_called(principal, peer):
            self.refused += 1
            raise RemoteProtocolError(f"{principal} is not called {peer}", "not its name")
        return principal

    def check_owner(self, principal: str, message: object) -> None:
        """Raises RemoteProtocolError where a node speaks of another node's slice."""
        slice_id = getattr(message, "slice_id", None)
        if (
            kind_of(principal) == NODE
            and slice_id is not None
            and principal_of_receiver(slice_id) != principal
        ):
            self.refused += 1
            raise RemoteProtocolError(f"{slice_id} is not of {principal}", "not its own")

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator asks, on its thread, whether that key may connect."""
        del domain
        principal = self.keyring.principal_of(key.decode("ascii", "replace"))
        is_allowed = principal is not None and kind_of(principal) in self.kinds
        self.refused += not is_allowed
        return is_allowed


class _Authenticator(ThreadAuthenticator):
    """Pyzmq's, but whoever is refused may ask again, when it may be known.

    ZeroMQ gives a connection up for good that is refused with 400, not so with 300. (It does not say under which name a
    connection comes, so names are checked with each message.)
    """

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = "anonymous"
    ) -> None:
        status_code = b"300" if status_code == b"400" else status_code
        super()._send_zap_reply(request_id, status_code, status_text, user_id)


def keyless(address: str) -> str:
    """An address for who has no key. Raises ConfigError where it asks for one."""
    if _KEY in address:
        bare = address.partition(_KEY)[0]
        raise ConfigError(
            f"{bare} asks for a key: give a client its file, ClientOptions(key_file=...), see `tenuto keys`"
        )
    return address


def guarded(keyring: Keyring | None, kinds: Collection[str] = (), *, names: bool = True) -> Guard | None:
    """A guard for one link, where there are keys. `names`: see `Guard`."""
    return None if keyring is None else Guard(keyring, frozenset(kinds), names)


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
def _authenticator(context: zmq.Context[zmq.Socket[bytes]]) -> _Authenticator:
    """A context's one, for ZeroMQ asks in one place; it ends with the process."""
    made = _Authenticator(context)
    made.start()
    atexit.register(_stop, made, os.getpid())
    return made


def _stop(made: _Authenticator, pid: int) -> None:
    if os.getpid() == pid:  # a fork has no such thread, and would wait for it
        made.stop()


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
