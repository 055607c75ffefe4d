"""Multipart layout: `[route] [header] [small tensors] [large tensor …]`; pack, join and split, sans-IO.

The route is the peer's identity and exists only where a socket routes (ROUTER). What is sent to one peer in one
moment travels together: the header holds all of it, and describes the tensors in order. Those below 64 kB lie in
one frame, each padded to 8 bytes, because a frame costs more than copying so little; each larger one has a frame
of its own that nobody copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fabric import codec, tensors
from fabric.codec import Buffer
from fabric.errors import LocalProtocolError, RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.link import NamedTensor, Packed
from fabric.messages import WIRE_VERSION, AnyMessage, Envelope, Parcel

TENSORS_MAX: Final = 4096  # of one message
FRAMES_MAX: Final = TENSORS_MAX + 2
SMALL_BELOW_BYTES: Final = 65_536
ALIGNMENT: Final = 8  # numpy reads unaligned arrays, but slowly
PAYLOAD_BYTES_MAX: Final = 1 << 30  # a batch of 512 images of 0.6 MB is 0.3 GB
ROUTE_BYTES_MAX: Final = 255  # what a ZeroMQ identity can hold

_PADDING: Final = bytes(ALIGNMENT)


def pack(
    message: AnyMessage, named: Sequence[NamedTensor] = (), *, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> Packed:
    """Make a message ready to `join`. Raises LocalProtocolError for what the wire does not allow."""
    if not named:
        return Packed(codec.checked(Parcel((), message)), (), 0)
    if len(named) > TENSORS_MAX:
        raise LocalProtocolError(f"{len(named)} tensors in one message, at most {TENSORS_MAX} are allowed")
    described = [tensors.to_frame(tensor.name, tensor.array) for tensor in named]
    size = sum(len(frame) for _, frame in described)
    if size > payload_bytes_max:
        raise LocalProtocolError(f"payload of {size} bytes, at most {payload_bytes_max} are allowed")
    parcel = Parcel(tuple(spec for spec, _ in described), message)
    return Packed(codec.checked(parcel), [frame for _, frame in described], size)


def join(packed: Sequence[Packed], *, epoch: Epoch, sent_at_ms: float) -> list[Buffer]:
    """The frames of messages to one peer: the header, the small tensors, then each large one."""
    header = codec.encode(Envelope(WIRE_VERSION, epoch, sent_at_ms, tuple(one.parcel for one in packed)))
    small: list[Buffer] = []
    large: list[Buffer] = []
    for one in packed:
        for frame in one.frames:
            if len(frame) >= SMALL_BELOW_BYTES:
                large.append(frame)
            else:
                small.append(frame)
                if len(frame) % ALIGNMENT:
                    small.append(_PADDING[: -len(frame) % ALIGNMENT])
    if not small:
        return [header, *large]
    return [header, b"".join(small), *large]


def split(
    parts: Sequence[Buffer], *, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> tuple[Envelope, list[list[NamedTensor]]]:
    """The messages in `parts` (without route), and the tensors of each: views of the frames.

    Raises RemoteProtocolError.
    """
    if not parts or len(parts) > FRAMES_MAX:
        raise RemoteProtocolError(f"a message of {len(parts)} frames")
    header, *payload = parts
    if size_of(payload) > payload_bytes_max:
        raise RemoteProtocolError(f"payload of {size_of(payload)} bytes")
    envelope = codec.decode(header)
    sizes = [tensors.size_of(spec) for parcel in envelope.parcels for spec in parcel.tensors]
    large_count = sum(size >= SMALL_BELOW_BYTES for size in sizes)
    has_small = large_count < len(sizes)
    if len(payload) != large_count + has_small:
        raise RemoteProtocolError(
            f"{len(payload)} frames came, {large_count} large tensors and {len(sizes) - large_count} small are described"
        )
    small = memoryview(payload[0] if has_small else b"")
    large = iter(payload[1:] if has_small else payload)
    named: list[list[NamedTensor]] = []
    size_next, offset = iter(sizes), 0
    for parcel in envelope.parcels:
        own: list[NamedTensor] = []
        for spec in parcel.tensors:
            size = next(size_next)
            if size >= SMALL_BELOW_BYTES:
                frame = next(large)
            else:
                frame = small[offset : offset + size]
                offset += size + -size % ALIGNMENT
            own.append(NamedTensor(spec.name, tensors.from_frame(spec, frame)))
        named.append(own)
    if offset != len(small):
        raise RemoteProtocolError(f"{len(small)} bytes of small tensors came, {offset} are described")
    return envelope, named


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
