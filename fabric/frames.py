"""Multipart layout: `[route] [header] [tensor frame …]`; split and join, sans-IO.

The route is the peer's identity and exists only where a socket routes (ROUTER). The header's envelope describes
the tensor frames one by one, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fabric import codec, tensors
from fabric.codec import Buffer
from fabric.errors import LocalProtocolError, RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.link import NamedTensor
from fabric.messages import WIRE_VERSION, AnyMessage, Envelope, TensorSpec

TENSORS_MAX: Final = 4096
PAYLOAD_BYTES_MAX: Final = 1 << 30  # a batch of 512 images of 0.6 MB is 0.3 GB
ROUTE_BYTES_MAX: Final = 255  # what a ZeroMQ identity can hold


def join(
    message: AnyMessage,
    named: Sequence[NamedTensor],
    *,
    epoch: Epoch,
    sent_at_ms: float,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
) -> list[Buffer]:
    """Header and tensor frames of a message. Raises LocalProtocolError for what the wire does not allow."""
    if len(named) > TENSORS_MAX:
        raise LocalProtocolError(f"{len(named)} tensors in one message, at most {TENSORS_MAX} are allowed")
    specs: list[TensorSpec] = []
    frames: list[Buffer] = []
    for tensor in named:
        spec, frame = tensors.to_frame(tensor.name, tensor.array)
        specs.append(spec)
        frames.append(frame)
    if size_of(frames) > payload_bytes_max:
        raise LocalProtocolError(
            f"payload of {size_of(frames)} bytes, at most {payload_bytes_max} are allowed"
        )
    header = codec.encode(Envelope(WIRE_VERSION, epoch, sent_at_ms, tuple(specs), message))
    return [header, *frames]


def split(
    parts: Sequence[Buffer], *, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> tuple[Envelope, list[NamedTensor]]:
    """The message in `parts` (without route). Raises RemoteProtocolError; tensors are views of the frames."""
    if not parts or len(parts) > TENSORS_MAX + 1:
        raise RemoteProtocolError(f"a message of {len(parts)} frames")
    header, *frames = parts
    if size_of(frames) > payload_bytes_max:
        raise RemoteProtocolError(f"payload of {size_of(frames)} bytes")
    envelope = codec.decode(header)
    if len(envelope.tensors) != len(frames):
        raise RemoteProtocolError(f"{len(envelope.tensors)} tensors described, {len(frames)} frames came")
    return envelope, [
        NamedTensor(spec.name, tensors.from_frame(spec, frame))
        for spec, frame in zip(envelope.tensors, frames, strict=True)
    ]


def route_to(peer: PeerId) -> bytes:
    """A peer's identity on the wire. Raises LocalProtocolError unless 1 to 255 printable ASCII characters."""
    if not _is_name(peer):
        raise LocalProtocolError(f"{peer!r:.300} cannot be a peer's name")
    return peer.encode("ascii")


def peer_from(route: Buffer) -> PeerId:
    """The peer behind an identity. Raises RemoteProtocolError for one that nobody of ours would take."""
    try:
        name = bytes(route).decode("ascii")
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("an identity that is not ASCII") from error
    if not _is_name(name):  # also peers without one: ZeroMQ gives them binary ones that start with a zero
        raise RemoteProtocolError(f"identity {name!r:.300}")
    return PeerId(name)


def size_of(parts: Sequence[Buffer]) -> int:
    """Bytes in all frames; a memoryview here is always one of bytes."""
    return sum(map(len, parts))


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= ROUTE_BYTES_MAX and text.isascii() and text.isprintable()
