"""What TCP connections have sent of messages that have not ended.

ZeroMQ bounds a frame, and how many whole messages wait. The frames of a message that has not ended it keeps, however many there
are, and shows them to nobody. But the kernel knows how much has come by each connection, and from whom whole messages come is
seen here: what came since is of a message that has not ended.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from fabric.clock import Clock
from fabric.sockets.monitor import ConnectionMonitor
from fabric.sockets.options import LinkOptions
from fabric.tcp_connections import hang_up, received_bytes

TOGETHER_TIMES: Final = (
    4  # so many of the largest messages may be under way at once, of all connections together
)
LOOK_EVERY_MS: Final = 250.0
LOOK_MORE_MS: Final = 1.0  # for each connection: each costs some 6 us
FRAMING_BYTES: Final = 64  # of ZeroMQ's and CURVE's, for each frame
HANDSHAKE_BYTES: Final = 4_096  # and what is told beside messages


class UnfinishedMessages:
    """Ends connections that have sent more than a message may have without an end of it."""

    def __init__(self, monitor: ConnectionMonitor, options: LinkOptions, ports: Container[int]) -> None:
        """`ports`: of ours, at which they were accepted."""
        self._monitor = monitor
        self._ports = ports
        self._clock: Clock = options.clock
        message_bytes = options.header_bytes_max + options.payload_bytes_max
        self.bytes_max = message_bytes + FRAMING_BYTES * (options.frames_max + 1) + HANDSHAKE_BYTES
        self._whole: set[int] = set()  # descriptors by which a message has ended since the last look
        self._look_at_ms = self._clock.now_ms() + LOOK_EVERY_MS

    @property
    def is_due(self) -> bool:
        """Whether `look` should be called, when all whole messages have been taken."""
        return bool(self._monitor.received) and self._clock.now_ms() >= self._look_at_ms

    def ends(self, descriptor: int) -> None:
        """A whole message has come by that connection."""
        self._whole.add(descriptor)

    def look(self) -> int:
        """How many connections were ended."""
        received, whole = self._monitor.received, self._whole
        unfinished: list[tuple[int, int]] = []
        for descriptor, before in list(received.items()):
            now = received_bytes(descriptor, self._ports)
            if now is None:  # not by TCP, or it has ended
                del received[descriptor]
            elif descriptor in whole:
                received[descriptor] = now
            elif now > before:
                unfinished.append((now - before, descriptor))
        whole.clear()
        self._look_at_ms = self._clock.now_ms() + LOOK_EVERY_MS + LOOK_MORE_MS * len(received)
        unfinished.sort()
        together, ended = sum(size for size, _ in unfinished), 0
        while unfinished:
            size, descriptor = unfinished.pop()
            if size <= self.bytes_max and together <= TOGETHER_TIMES * self.bytes_max:
                break
            together -= size
            del received[descriptor]
            hang_up(descriptor, self._ports)
            ended += 1
        return ended
