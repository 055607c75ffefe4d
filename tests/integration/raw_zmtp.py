"""A ZeroMQ peer made of a plain socket, which can stop where no real one would: in the middle of a frame."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from fabric.codec import encode
from fabric.messages import WIRE_VERSION, AnyMessage, Envelope, Parcel, TensorSpec

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


def shake_hands(address: str, identity: str, kind: str = "DEALER") -> socket.socket:
    """Connected as a socket of that kind and identity (ZMTP 3.0, https://rfc.zeromq.org/spec/23)."""
    return _shaken_hands(address, identity, kind)[0]


def socket_type(address: str, identity: str) -> str:
    """What listens there, such as ROUTER or PULL."""
    connection, ready = _shaken_hands(address, identity, "DEALER")
    connection.close()
    own_type = ready.partition(b"\x0bSocket-Type")[2]
    return own_type[4 : 4 + int.from_bytes(own_type[:4], "big")].decode()


def _shaken_hands(address: str, identity: str, kind: str) -> tuple[socket.socket, bytes]:
    connection = connect(address)
    connection.settimeout(5.0)
    connection.sendall(_GREETING)
    _take(connection, len(_GREETING))
    ready = b"\x05READY"
    for name, value in (("Socket-Type", kind), ("Identity", identity)):
        ready += bytes([len(name)]) + name.encode() + len(value).to_bytes(4, "big") + value.encode()
    connection.sendall(bytes([_COMMAND, len(ready)]) + ready)
    flags, size = _take(connection, 2)
    assert flags == _COMMAND
    answer = _take(connection, size)
    assert b"READY" in answer
    return connection, answer


def header(message: AnyMessage, tensors: Sequence[TensorSpec] = ()) -> bytes:
    """A whole first frame, of a message with those tensors in frames to come."""
    encoded = encode(Envelope(WIRE_VERSION, 0, 0.0, (Parcel(tuple(tensors), message),)))
    return frame_start(len(encoded), more=bool(tensors)) + encoded


def frame_start(size: int, *, more: bool = False) -> bytes:
    """What announces a frame of `size` bytes."""
    return bytes([_LONG | (_MORE if more else 0)]) + size.to_bytes(8, "big")


def connect(address: str) -> socket.socket:
    """A plain connection to where a ZeroMQ socket listens."""
    if address.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address.removeprefix("ipc://"))
        return connection
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def _take(connection: socket.socket, size: int) -> bytes:
    taken = b""
    while len(taken) < size:
        chunk = connection.recv(size - len(taken))
        assert chunk, "the other side closed the connection"
        taken += chunk
    return taken
