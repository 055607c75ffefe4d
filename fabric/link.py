"""Link: what sockets and in-memory fakes share. Messages and tensors in, messages and tensors out.

A link never blocks and never grows without bound. `send` answers False when the peer's queue is full or the
peer is gone: the caller knows what that means for its message (refuse, shed, count), the link does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from fabric.ids import Epoch, PeerId
from fabric.messages import AnyMessage, Parcel
from fabric.shared_memory import Region

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tensor = NDArray[np.generic]
else:  # NumPy takes three tenths of a start: who never has tensors does without
    Tensor = Any

NO_EPOCH = Epoch(0)


class NamedTensor(Struct, gc=False):
    """A tensor and the name of the model input or output it is for. `place`: where else its bytes lie."""

    name: str
    array: Tensor
    place: Region | None = None


class Received(Struct, frozen=True, gc=False):
    """One message that came in.

    `late_ms` is how much older it is than it looks: time spent queueing on the way plus half the link's
    minimum round trip (design section 3). The receiver subtracts it from any budget in the message.
    Tensors are views of received frames or of shared memory: read-only, valid as long as they are referenced.
    """

    peer: PeerId
    message: AnyMessage
    tensors: Sequence[NamedTensor] = ()
    late_ms: float = 0.0
    epoch: Epoch = NO_EPOCH


class Packed(Struct, frozen=True, gc=False):
    """A message that may travel: held against the limits, its tensors as bytes, except those in shared memory.

    `header`: what there is to say in the header. `size` is that of the tensors that travel, `shared_size` that of those
    which need not.
    """

    parcel: Parcel
    header: bytes
    frames: Sequence[memoryview] = ()
    size: int = 0
    shared_size: int = 0


class Link(Protocol):
    """One socket, or its stand-in."""

    epoch: Epoch
    """Stamped on everything sent."""

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """Queue a message for `peer` without blocking; False: its queue is full, or it is not connected."""
        ...

    def receive(self, limit: int) -> Sequence[Received]:
        """Take at most `limit` messages that have come; empty when none has. Garbage is counted, not raised."""
        ...

    def take_lost(self) -> Sequence[PeerId]:
        """Peers whose connection was closed, or that a send found unroutable, since the last call."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether `receive` (or `take_lost` of sockets) would return something of which `fileno` may not tell (it is edge-triggered): do not sleep."""
        ...

    @property
    def addresses(self) -> Sequence[str]:
        """Where others reach this link: real ports, ipc first. Empty for a link that connects."""
        ...

    @property
    def counters(self) -> Mapping[str, float]:
        """Since the start: messages_in, messages_out, bytes_in, bytes_out, garbage_in, full_out (sends refused)."""
        ...

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have come; -1 for a link in memory."""
        ...

    def close(self) -> None:
        """Flush for at most 100 ms, then close. Safe to call twice."""
        ...
