"""Message <-> header bytes: MessagePack arrays with the integer tag first. The one place that knows it.

A receiver believes nothing: version, tag, types and bounds are checked here, so that behind the codec every
message is what its struct says. A sender is held to the same bounds, so a bug shows where it is made.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fabric.errors import LocalProtocolError, RemoteProtocolError
from fabric.limits import OutOfBounds, check, clipped
from fabric.messages import (
    WIRE_VERSION,
    Directory,
    Envelope,
    Host,
    ModelsAdd,
    ModelsListed,
    NodeHello,
    Parcel,
    PlanAsked,
    PlanMade,
    SliceReady,
    StatusListed,
    Want,
    WorkerHello,
)

HEADER_BYTES_MAX: Final = 1 << 20
BULKY_HEADER_BYTES_MAX: Final = 16 << 20
"""For messages that list a whole cluster: 8 slices hosting 37 models of 512 batch sizes are 1.4 MB already."""
BULKY: Final = (
    Directory,
    Host,
    ModelsAdd,
    ModelsListed,
    NodeHello,
    PlanAsked,
    PlanMade,
    SliceReady,
    StatusListed,
    Want,
    WorkerHello,
)

PARCELS_MAX: Final = 64
"""Messages that may travel as one."""

Buffer = bytes | memoryview

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Envelope)


def checked(parcel: Parcel) -> Parcel:
    """The parcel as it may be sent: over-long `reason`s are cut. Raises LocalProtocolError out of bounds."""
    try:
        try:
            check(parcel)
        except OutOfBounds:
            parcel = clipped(parcel)
            check(parcel)
    except OutOfBounds as error:
        raise LocalProtocolError(f"cannot send {type(parcel.body).__name__}: {error}") from error
    return parcel


def encode(envelope: Envelope) -> bytes:
    """The header of messages that are `checked`. Raises LocalProtocolError for what cannot be encoded."""
    try:
        header = _ENCODER.encode(envelope)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"cannot send {_named(envelope)}: {error}") from error
    if len(header) > HEADER_BYTES_MAX and len(header) > _header_bytes_max(envelope):
        raise LocalProtocolError(f"header of {_named(envelope)} has {len(header)} bytes")
    return header


def decode(header: Buffer) -> Envelope:
    """Read a header. Raises RemoteProtocolError for anything but whole messages within bounds."""
    if len(header) > BULKY_HEADER_BYTES_MAX:
        raise RemoteProtocolError(f"header of {len(header)} bytes")
    try:
        envelope = _DECODER.decode(header)
        if envelope.version != WIRE_VERSION:
            raise RemoteProtocolError(f"wire version {envelope.version}, this side speaks {WIRE_VERSION}")
        check(envelope)
    except (msgspec.MsgspecError, OutOfBounds, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed header: {error}") from error
    if not 1 <= len(envelope.parcels) <= PARCELS_MAX:
        raise RemoteProtocolError(f"{len(envelope.parcels)} messages in one")
    if len(header) > HEADER_BYTES_MAX and len(header) > _header_bytes_max(envelope):
        raise RemoteProtocolError(f"header of {_named(envelope)} has {len(header)} bytes")
    return envelope


def _header_bytes_max(envelope: Envelope) -> int:
    is_bulky = any(isinstance(parcel.body, BULKY) for parcel in envelope.parcels)
    return BULKY_HEADER_BYTES_MAX if is_bulky else HEADER_BYTES_MAX


def _named(envelope: Envelope) -> str:
    return ", ".join(sorted({type(parcel.body).__name__ for parcel in envelope.parcels}))
