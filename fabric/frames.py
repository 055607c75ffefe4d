"""Multipart layout: `[route] [header] [small tensors] [large tensor …]`; pack, join and split, sans-IO.

The route is the peer's identity and exists only where a socket routes (ROUTER). What is sent to one peer in one
moment travels together: the header holds all of it, and describes the tensors in order. Those below 64 kB lie in
one frame, each padded to 8 bytes, because a frame costs more than copying so little; each larger one has a frame
of its own that nobody copies, or lies in shared memory and has none.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final, Protocol

from fabric import codec
from fabric.codec import Buffer
from fabric.errors import LocalProtocolError, PayloadTooLarge, RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.link import NamedTensor, Packed
from fabric.messages import TENSORS_MAX, AnyMessage, Envelope, Parcel, SharedAt, TensorSpec
from fabric.shared_memory import Region

FRAMES_MAX: Final = TENSORS_MAX + 2
SMALL_BELOW_BYTES: Final = 65_536
ALIGNMENT: Final = 8  # numpy reads unaligned arrays, but slowly
PAYLOAD_BYTES_MAX: Final = 1 << 30  # a batch of 512 images of 0.6 MB is 0.3 GB
ANSWER_BYTES_MAX: Final = 256 << 20
"""What passes between a client and a frontend: of one request's outputs, and of inputs before the frontend's own limit."""
REQUEST_BYTES_MAX: Final = 64 << 20
"""What a frontend takes of one request's inputs."""
NAME_CHARS_MAX: Final = 200  # a ZeroMQ identity holds 255, of which a connection's mark takes some
_MARK: Final = "#"

_PADDING: Final = bytes(ALIGNMENT)


class Lender(Protocol):
    """Where a message may say that bytes lie instead of travelling; see `fabric.shared_memory.Borrowed`."""

    def place(self, at: SharedAt, size: int) -> Region:
        """Raises RemoteProtocolError if they do not."""
        ...


def pack(
    message: AnyMessage,
    named: Sequence[NamedTensor] = (),
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    is_sharing: bool = False,
) -> Packed:
    """Make a message ready to `join`; `is_sharing`: its receiver can read shared memory of ours.

    Raises LocalProtocolError for what the wire does not allow.
    """
    if not named:
        return _packed(Parcel((), message))
    if len(named) > TENSORS_MAX:
        raise LocalProtocolError(f"{len(named)} tensors in one message, at most {TENSORS_MAX} are allowed")
    from fabric import tensors  # noqa: PLC0415  NumPy: who never has tensors does without

    specs: list[TensorSpec] = []
    travelling: list[memoryview] = []
    size = shared_size = 0
    for tensor in named:
        if is_sharing and tensor.place is not None:
            specs.append(tensors.to_place(tensor))
            shared_size += len(tensor.place.data)
        else:
            spec, frame = tensors.to_frame(tensor.name, tensor.array)
            specs.append(spec)
            travelling.append(frame)
            size += len(frame)
    if size + shared_size > payload_bytes_max:
        raise PayloadTooLarge(
            f"payload of {size + shared_size} bytes, at most {payload_bytes_max} are allowed"
        )
    return _packed(Parcel(tuple(specs), message), travelling, size, shared_size)


def join(packed: Sequence[Packed], *, epoch: Epoch, sent_at_ms: float) -> list[Buffer]:
    """The frames of messages to one peer: the header, the small tensors, then each large one."""
    header = codec.joined([one.header for one in packed], epoch=epoch, sent_at_ms=sent_at_ms)
    if not any(one.frames for one in packed):
        return [header]
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


def kept_apart(parts: Sequence[Buffer]) -> list[Buffer]:
    """The same to be kept for long: what is part of something much larger is copied, so that it does not keep all of that.

    Shared memory stays: it takes none of ours.
    """
    return [bytes(part) if _bytes_behind(part) > 2 * len(part) else part for part in parts]


def _bytes_behind(part: Buffer) -> int:
    """Of all that lives on with it; nothing where that is shared memory."""
    size, owner = len(part), part.obj if isinstance(part, memoryview) else None
    while owner is not None:
        if isinstance(owner, mmap.mmap):
            return 0
        size = max(size, len(owner) if isinstance(owner, bytes) else getattr(owner, "nbytes", 0))
        # A view's of memory, or an array's of an array's.
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return size


def split(
    parts: Sequence[Buffer],
    *,
    header_bytes_max: int = codec.BULKY_HEADER_BYTES_MAX,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    borrowed: Lender | None = None,
) -> tuple[Envelope, list[Sequence[NamedTensor]]]:
    """The messages in `parts` (without route), and the tensors of each: views of the frames or of shared memory.

    Without `borrowed` no tensor may lie in shared memory. Raises RemoteProtocolError.
    """
    if not parts or len(parts) > FRAMES_MAX:
        raise RemoteProtocolError(f"a message of {len(parts)} frames")
    envelope = codec.decode(parts[0], header_bytes_max)
    if len(parts) == 1 and not any(parcel.tensors for parcel in envelope.parcels):
        return envelope, [()] * len(envelope.parcels)
    if not payload_bytes_max:
        raise RemoteProtocolError("tensors by a link that takes none")
    from fabric.tensors import size_of  # noqa: PLC0415  NumPy: who never has tensors does without

    described = [[(spec, size_of(spec)) for spec in parcel.tensors] for parcel in envelope.parcels]
    size = sum([size for specs in described for _, size in specs])
    if size > payload_bytes_max:
        raise RemoteProtocolError(f"payload of {size} bytes")
    taken = _Frames(parts[1:], [sized for specs in described for sized in specs], borrowed)
    named = [[taken.tensor(spec, size) for spec, size in specs] for specs in described]
    taken.end()
    return envelope, list(named)


class _Frames:
    """The bytes of a message's tensors, taken in order."""

    def __init__(
        self, payload: Sequence[Buffer], specs: Sequence[tuple[TensorSpec, int]], borrowed: Lender | None
    ) -> None:
        travelling = [size for spec, size in specs if spec.at is None]
        large_count = sum([size >= SMALL_BELOW_BYTES for size in travelling])
        has_small = large_count < len(travelling)
        if len(payload) != large_count + has_small:
            raise RemoteProtocolError(
                f"{len(payload)} frames came, {large_count} large tensors and"
                f" {len(travelling) - large_count} small are described"
            )
        self._small = memoryview(payload[0] if has_small else b"")
        self._large = iter(payload[1:] if has_small else payload)
        self._offset = 0
        self._borrowed = borrowed

    def tensor(self, spec: TensorSpec, size: int) -> NamedTensor:
        """The next one."""
        from fabric.tensors import from_frame  # noqa: PLC0415  `split` has it

        place: Region | None = None
        if spec.at is not None:
            if self._borrowed is None:
                raise RemoteProtocolError("a tensor in shared memory, which this side does not take")
            place = self._borrowed.place(spec.at, size)
            frame: Buffer = place.data
        elif size >= SMALL_BELOW_BYTES:
            frame = next(self._large)
        else:
            frame = self._small[self._offset : self._offset + size]
            self._offset += size + -size % ALIGNMENT
        return NamedTensor(spec.name, from_frame(spec, frame), place)

    def end(self) -> None:
        """Nothing may be left over."""
        if self._offset != len(self._small):
            raise RemoteProtocolError(
                f"{len(self._small)} bytes of small tensors came, {self._offset} are described"
            )


def route_of(peer: PeerId, mark: str) -> bytes:
    """The identity of a connection of that peer. `mark` tells it from others, see `fabric.sockets.routes`.

    Raises LocalProtocolError unless the name is 1 to 200 printable ASCII characters without `#`.
    """
    if not _is_name(peer):
        raise LocalProtocolError(f"{peer!r:.300} cannot be a peer's name")
    return f"{peer}{_MARK}{mark}".encode("ascii")


def peer_from(route: Buffer) -> tuple[PeerId, str]:
    """The peer behind an identity, and the mark of its connection; a foreign client may leave that out.

    Raises RemoteProtocolError for an identity that nobody of ours would take.
    That is also one without a boot nonce: such names are given inside a process ("scheduler", "planner"), and who is
    called so there is trusted.
    """
    try:
        name, _, mark = bytes(route).decode("ascii").partition(_MARK)
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("an identity that is not ASCII") from error
    if not _is_name(name):  # also peers without one: ZeroMQ gives them binary ones that start with a zero
        raise RemoteProtocolError(f"identity {name!r:.300}")
    role_id, _, nonce = name.rpartition("/")
    if not role_id or not nonce:
        raise RemoteProtocolError(f"identity {name!r:.300} is not <role id>/<boot nonce>")
    return PeerId(name), mark


def size_of(parts: Sequence[Buffer]) -> int:
    """Bytes in all frames; a memoryview here is always one of bytes."""
    return sum(map(len, parts))


def _packed(
    parcel: Parcel, travelling: Sequence[memoryview] = (), size: int = 0, shared_size: int = 0
) -> Packed:
    parcel = codec.checked(parcel)
    return Packed(parcel, codec.encode_parcel(parcel), travelling, size, shared_size)


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= NAME_CHARS_MAX and text.isascii() and text.isprintable() and _MARK not in text
