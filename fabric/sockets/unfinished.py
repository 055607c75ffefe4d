"""What TCP connections have sent of messages that have not ended.

ZeroMQ bounds a frame, and how many whole messages wait. The frames of a message that has not ended it keeps, however many there
are, and shows them to nobody. But the kernel knows how much it has taken of each connection, and from whom whole messages come is
seen here: what it took since is of a message that has not ended.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from fabric.clock import Clock
from fabric.sockets.monitor import ConnectionMonitor
from fabric.sockets.options import LinkOptions
from fabric.tcp_connections import hang_up, taken_bytes

TOGETHER_TIMES: Final = (
    4  # so many of the largest messages may be under way at once, of all connections together
)
LOOK_EVERY_MS: Final = 250.0
LOOK_AT: Final = 64  # connections at once: they take under a millisecond
FRAMING_BYTES: Final = 64  # of ZeroMQ's and CURVE's, for each frame
HANDSHAKE_BYTES: Final = 4_096  # and what is told beside messages


class UnfinishedMessages:
    """Ends connections that have sent more than a message may have without an end of it."""

    def __init__(self, monitor: ConnectionMonitor, options: LinkOptions, ports: Container[int]) -> None:
        """`ports`: of ours, at which they were accepted."""
        self._standing = monitor.standing
        self._ports = ports
        self._clock: Clock = options.clock
        message_bytes = options.header_bytes_max + options.payload_bytes_max
        self._bytes_max = message_bytes + FRAMING_BYTES * (options.frames_max + 1) + HANDSHAKE_BYTES
        self._whole: set[int] = set()  # by which a message has ended since they were looked at
        self._next: list[int] = []  # to be looked at in this round
        self._look_at_ms = self._clock.now_ms() + LOOK_EVERY_MS

    @property
    def is_due(self) -> bool:
        """Whether `look` should be called, when all whole messages have been taken."""
        return bool(self._standing) and self._clock.now_ms() >= self._look_at_ms

    def ends(self, descriptor: int) -> None:
        """A whole message has come by that connection."""
        self._whole.add(descriptor)

    def look(self) -> int:
        """At some of them. How many connections were ended."""
        self._look_at_ms = self._clock.now_ms() + LOOK_EVERY_MS
        if not self._next:
            self._next = list(self._standing)
            self._whole.intersection_update(self._next)
        for descriptor in self._next[:LOOK_AT]:
            self._look_at(descriptor)
        del self._next[:LOOK_AT]
        return self._end_largest()

    def _look_at(self, descriptor: int) -> None:
        connection = self._standing.get(descriptor)
        taken = taken_bytes(descriptor, self._ports)
        if connection is None or taken is None:  # it has ended, or is not by TCP
            self._standing.pop(descriptor, None)
        elif descriptor in self._whole:
            connection.taken, connection.unfinished = taken, 0
        else:
            connection.unfinished = taken - connection.taken
        self._whole.discard(descriptor)

    def _end_largest(self) -> int:
        """Until each one and all together are within their bounds."""
        standing, ended = self._standing, 0
        together = sum(one.unfinished for one in standing.values())
        while standing:
            descriptor = max(standing, key=lambda one: standing[one].unfinished)
            size = standing[descriptor].unfinished
            if size <= self._bytes_max and together <= TOGETHER_TIMES * self._bytes_max:
                break
            together -= size
            del standing[descriptor]
            hang_up(descriptor, self._ports)
            ended += 1
        return ended
