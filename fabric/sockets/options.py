"""The bounds of a link."""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from fabric import frames
from fabric.clock import Clock, MonotonicClock
from fabric.codec import BULKY_HEADER_BYTES_MAX, LONG_HEADER_BYTES_MAX


class LinkOptions(Struct, frozen=True):
    """Bounds of one link. A queue of messages is per peer and direction; the others are per message.

    `header_bytes_max`: of those that come in, as the link's purpose needs. `payload_bytes_max` 0: no tensors.
    `is_sharing`: tensors may come through memory that processes of this host share, from peers connected by ipc.
    `queue_bytes_max`: waiting for one peer, of a router and of local streams (by ZeroMQ in messages of 64 kB and more);
    one message is always allowed into an empty queue, however large.
    """

    clock: Clock = field(default_factory=MonotonicClock)
    queue_messages_max: int = 1_000
    header_bytes_max: int = LONG_HEADER_BYTES_MAX
    payload_bytes_max: int = frames.PAYLOAD_BYTES_MAX
    is_sharing: bool = False
    queue_bytes_max: int = 256 << 20

    @property
    def frame_bytes_max(self) -> int:
        """Of a single frame; who sends a larger one loses the connection."""
        return max(self.payload_bytes_max, self.header_bytes_max)

    @property
    def frames_max(self) -> int:
        """Of a message without its route: more are not kept."""
        return frames.FRAMES_MAX if self.payload_bytes_max else 1


CONTROL: Final = LinkOptions(header_bytes_max=BULKY_HEADER_BYTES_MAX, payload_bytes_max=0)
"""What roles say to one another: no tensors, but lists of a whole cluster."""
