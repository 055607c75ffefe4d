"""Message <-> header bytes: MessagePack arrays with the integer tag first. The one place that knows it.

A receiver believes nothing: version, tag, types and bounds are checked here, so that behind the codec every
message is what its struct says. A sender is held to the same bounds, so a bug shows where it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from fabric.errors import LocalProtocolError, PayloadTooLarge, RemoteProtocolError
from fabric.limits import OutOfBounds, check, clipped, is_fine
from fabric.messages import (
    TENSORS_MAX,
    WIRE_VERSION,
    Activations,
    Answer,
    AnyMessage,
    BatchesRemembered,
    BatchFailed,
    Changed,
    DesiredSlices,
    Directory,
    Envelope,
    FiguresListed,
    GlueAsked,
    GlueMade,
    Host,
    Infer,
    Inputs,
    InputsReturned,
    LoadStage,
    ModelsAdd,
    ModelsListed,
    ModelsRemove,
    NodeHello,
    Outputs,
    Parcel,
    PlanAsked,
    PlanCopy,
    PlanMade,
    RehearsalAsked,
    RehearsalMade,
    RequestsRemembered,
    SliceReady,
    StatusListed,
    Telemetry,
    WorkerHello,
)

HEADER_BYTES_MAX: Final = 128 << 10
"""Of one message. What a receiver's loop spends on a header grows with its bytes: 43,000 small numbers fit, some 7 ms."""
JOINED_HEADER_BYTES_MAX: Final = 32 << 10
"""Of several messages that travel as one: a list of 4,096 runs may take 12 KiB, and be read and checked in half a ms."""
LONG_HEADER_BYTES_MAX: Final = 1 << 20
LONG: Final = (
    RequestsRemembered,
    FiguresListed,
    Infer,
    Answer,
    Inputs,
    Outputs,
    BatchFailed,
    InputsReturned,
    Telemetry,
    ModelsRemove,
    Changed,
    GlueAsked,
    GlueMade,
    Activations,
)
"""Messages that describe thousands of tensors, or list what is placed; they travel alone when they are long."""
BULKY_HEADER_BYTES_MAX: Final = 16 << 20
"""For messages that list a whole cluster: 8 slices hosting 37 models of 512 batch sizes are 1.4 MB already."""
BULKY: Final = (
    BatchesRemembered,
    Directory,
    Host,
    LoadStage,
    ModelsAdd,
    ModelsListed,
    NodeHello,
    PlanAsked,
    PlanCopy,
    PlanMade,
    RehearsalAsked,
    RehearsalMade,
    SliceReady,
    StatusListed,
    DesiredSlices,
    WorkerHello,
)

_ENVELOPE_BYTES_MAX: Final = 64  # of a header, around its messages

_SHORT_HEADER_BYTES_MAX: Final = HEADER_BYTES_MAX - _ENVELOPE_BYTES_MAX

Buffer = bytes | memoryview

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Envelope)


def checked(parcel: Parcel) -> Parcel:
    """The parcel as it may be sent: over-long `reason`s are cut. Raises LocalProtocolError out of bounds."""
    if is_fine(parcel):
        return parcel
    try:
        parcel = clipped(parcel)
        check(parcel)
    except OutOfBounds as error:
        raise LocalProtocolError(f"cannot send {type(parcel.body).__name__}: {error}") from error
    return parcel


def encode_parcel(parcel: Parcel) -> bytes:
    """A message that is `checked`, ready to be `joined` with others. Raises LocalProtocolError where it cannot be sent."""
    try:
        try:
            encoded = _ENCODER.encode(parcel)
        except UnicodeEncodeError:  # mostly an exception's text, with a path's odd bytes in it
            encoded = _ENCODER.encode(clipped(parcel))
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"cannot send {type(parcel.body).__name__}: {error}") from error
    if len(encoded) > _SHORT_HEADER_BYTES_MAX:
        named, limit = type(parcel.body).__name__, header_bytes_max(type(parcel.body))
        if len(encoded) > limit - _ENVELOPE_BYTES_MAX:
            raise PayloadTooLarge(f"header of {named} has {len(encoded)} bytes, at most {limit} are allowed")
    return encoded


def are_too_long(sizes_sum: int) -> bool:
    """Whether messages of so many bytes, as `encode_parcel` gives them, cannot travel as one."""
    return sizes_sum > JOINED_HEADER_BYTES_MAX - _ENVELOPE_BYTES_MAX


def joined(encoded: Sequence[bytes], *, epoch: int, sent_at_ms: float) -> bytes:
    """The header of messages to one peer."""
    return _ENCODER.encode((WIRE_VERSION, epoch, sent_at_ms, [Raw(one) for one in encoded]))


def encode(envelope: Envelope) -> bytes:
    """The header of messages that are `checked`. Raises LocalProtocolError for what cannot be encoded."""
    encoded = [encode_parcel(parcel) for parcel in envelope.parcels]
    return joined(encoded, epoch=envelope.epoch, sent_at_ms=envelope.sent_at_ms)


def decode(header: Buffer, bytes_max: int = BULKY_HEADER_BYTES_MAX) -> Envelope:
    """Read a header. Raises RemoteProtocolError for anything but whole messages within bounds.

    `bytes_max`: what the link takes. A header over `JOINED_HEADER_BYTES_MAX` is looked at only if it is of one message,
    and one over `HEADER_BYTES_MAX` only if that message's type may be that long, so that nobody can make us read much
    of what we would refuse.
    """
    size = len(header)
    if size > bytes_max:
        raise RemoteProtocolError(f"header of {size} bytes, at most {bytes_max} come by this link")
    if size > JOINED_HEADER_BYTES_MAX and size > (allowed := _bytes_allowed(header)):
        raise RemoteProtocolError(f"header of {size} bytes, at most {allowed} are allowed for what is in it")
    try:
        envelope = _DECODER.decode(header)
        if envelope.version != WIRE_VERSION:
            raise RemoteProtocolError(f"wire version {envelope.version}, this side speaks {WIRE_VERSION}")
        described = sum([len(parcel.tensors) for parcel in envelope.parcels])
        if described > TENSORS_MAX:
            raise RemoteProtocolError(f"{described} tensors are described, at most {TENSORS_MAX} are allowed")
        if not is_fine(envelope):
            check(envelope)
    except (msgspec.MsgspecError, OutOfBounds, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed header: {error}") from error
    if not envelope.parcels:
        raise RemoteProtocolError("no message in a header")
    if size > HEADER_BYTES_MAX and size > header_bytes_max(type(envelope.parcels[0].body)):
        raise RemoteProtocolError(f"header of {type(envelope.parcels[0].body).__name__} has {size} bytes")
    return envelope


def header_bytes_max(kind: type[AnyMessage]) -> int:
    """How long the header of a lone message of that type may be."""
    if issubclass(kind, BULKY):
        return BULKY_HEADER_BYTES_MAX
    return LONG_HEADER_BYTES_MAX if issubclass(kind, LONG) else HEADER_BYTES_MAX


_LIMIT_OF_TAG: Final = {kind.__struct_config__.tag: header_bytes_max(kind) for kind in (*BULKY, *LONG)}


_NUMBER_BYTES: Final = {
    0xCA: 5,
    0xCB: 9,
    0xCC: 2,
    0xCD: 3,
    0xCE: 5,
    0xCF: 9,
    0xD0: 2,
    0xD1: 3,
    0xD2: 5,
    0xD3: 9,
}


def _bytes_allowed(header: Buffer) -> int:
    """How long a header may be that begins like this one, by its first bytes alone."""
    at = 1
    for _ in range(3):  # version, epoch, sent_at_ms
        at += _NUMBER_BYTES.get(header[at], 1)
    if bytes(header[at : at + 2]) != b"\x91\x92":  # one message, of tensors and a body
        return JOINED_HEADER_BYTES_MAX
    if header[at + 2] != 0x90:  # it has tensors, and its tag comes after them
        return LONG_HEADER_BYTES_MAX
    at += 6 if header[at + 3] == 0xDC else 4  # the body's own array, then its tag
    return _LIMIT_OF_TAG.get(header[at], HEADER_BYTES_MAX)
