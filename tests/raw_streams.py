"""Bytes of local streams, written by hand from docs/wire.md."""

from __future__ import annotations

import sys
from typing import Final

from fabric.ids import PeerId
from fabric.sockets.routes import new_route

HELLO: Final = b"TENUTO-STREAM/1 "


def framed(*parts: bytes) -> bytes:
    """A message."""
    padded = b"".join(
        part + bytes(-len(part) % 8) for part in (numbers(len(parts), *map(len, parts)), *parts[:-1])
    )
    return padded + parts[-1]


def numbers(*values: int) -> bytes:
    """As they stand before the frames."""
    return b"".join(value.to_bytes(4, sys.byteorder) for value in values)


def greeting(name: str) -> bytes:
    """Of one more connection of that peer."""
    return framed(HELLO + new_route(PeerId(name)))
