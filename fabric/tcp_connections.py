"""TCP connections that ZeroMQ has accepted, by their descriptors: it has no words for what is done to them here."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Container
from typing import Final, NamedTuple

_COUNTS: Final = struct.Struct("=QQ")
_COUNTS_AT: Final = 120  # `tcpi_bytes_acked`, `tcpi_bytes_received` of Linux's `struct tcp_info`, since 4.1
_INFO_BYTES: Final = _COUNTS_AT + _COUNTS.size
_WAITING: Final = struct.Struct("=i")
_NO_BYTES: Final = bytes(_WAITING.size)


def hang_up(descriptor: int, ports: Container[int]) -> None:
    """End a connection to one of our `ports`. If its descriptor is another's there by now, that one connects again."""
    with contextlib.suppress(OSError):  # it may be closed, or end now
        connection = _socket_at(descriptor)
        try:
            if _is_to(connection, ports):
                connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()


class Carried(NamedTuple):
    """Bytes: that ZeroMQ has taken of a connection, and of ours those that the other end has."""

    taken: int
    acknowledged: int


def carried_by(descriptor: int, ports: Container[int]) -> Carried | None:
    """By a connection to one of our `ports`; None: it is none, or the kernel does not say."""
    with contextlib.suppress(OSError):  # it may be closed
        connection = _socket_at(descriptor)
        try:
            if _is_to(connection, ports):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                (waiting,) = _WAITING.unpack(fcntl.ioctl(descriptor, termios.FIONREAD, _NO_BYTES))
                if len(info) >= _INFO_BYTES:
                    acknowledged, received = _COUNTS.unpack_from(info, _COUNTS_AT)
                    return Carried(received - waiting, acknowledged)
        finally:
            connection.detach()
    return None


def host_at(descriptor: int) -> str:
    """The address at the other end of a TCP connection, without its port; empty: there is none any more."""
    with contextlib.suppress(OSError):
        connection = _socket_at(descriptor)
        try:
            place = connection.getpeername()
        finally:
            connection.detach()
        return str(place[0]) if isinstance(place, tuple) else ""
    return ""


def _socket_at(descriptor: int) -> socket.socket:
    """Whatever is there: to find out what costs most of all this. ZeroMQ's it stays, so it must be detached again.

    No descriptor more is needed: there may be none left.
    """
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)


def _is_to(connection: socket.socket, ports: Container[int]) -> bool:
    """False: the kernel has given the descriptor out again, to something else (OSError: to no socket)."""
    place = connection.getsockname()
    return isinstance(place, tuple) and place[1] in ports
