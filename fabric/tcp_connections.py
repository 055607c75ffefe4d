"""TCP connections that ZeroMQ has accepted, by their descriptors: it has no words for what is done to them here."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Container
from typing import Final

_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128  # `tcpi_bytes_received` of Linux's `struct tcp_info`, since 4.1
_INFO_BYTES: Final = _RECEIVED_AT + _RECEIVED.size


def hang_up(descriptor: int, ports: Container[int]) -> None:
    """End a connection to one of our `ports`. If its descriptor is another's there by now, that one connects again."""
    connection = _connection(descriptor, ports)
    if connection is not None:
        with connection, contextlib.suppress(OSError):  # it ends at this very moment
            connection.shutdown(socket.SHUT_RDWR)


def received_bytes(descriptor: int, ports: Container[int]) -> int | None:
    """What has come by a connection to one of our `ports`; None: it is none, or the kernel does not say."""
    connection = _connection(descriptor, ports)
    if connection is None:
        return None
    with connection, contextlib.suppress(OSError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) >= _INFO_BYTES:
            return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
    return None


def _connection(descriptor: int, ports: Container[int]) -> socket.socket | None:
    """A second descriptor of it; None: the kernel has given that number out again, to something else."""
    with contextlib.suppress(OSError):  # it is closed, or there is no descriptor left
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        connection = socket.socket(fileno=os.dup(descriptor))
        if connection.family != socket.AF_UNIX and connection.getsockname()[1] in ports:
            return connection
        connection.close()
    return None
