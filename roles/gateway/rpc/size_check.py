"""What a gRPC message would take, found from the lengths of its fields before the parser makes objects of them.

A field of two bytes becomes an object of eighty, and an element of one byte a number of eight. The budget counts the bytes of a
message, so what would take many times that is refused here. Source of the format: protobuf, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fabric.errors import InvalidInput, TooLarge
from fabric.messages import RANK_MAX, TENSORS_MAX
from roles.gateway.rpc.messages import message_class
from roles.gateway.tensors import FILES_MAX, VALUES_MAX

FIELDS_MAX: Final = 4 * TENSORS_MAX
"""Of a message: inputs and their bytes, outputs, and what else there is."""
TENSOR_FIELDS_MAX: Final = 8 * TENSORS_MAX
"""Of all inputs and outputs of a message that are not small, with their parameters, and elements that are fields of their own."""
_SMALL_BYTES: Final = 128
"""Of an input or output that is not looked into: of so few bytes all that there may be take 30 MB, and those of a usual request cost nothing."""
_SHAPE_BYTES_MAX: Final = 10 * RANK_MAX  # a number has ten bytes at most
_PACKED: Final = 2  # the kind of a field that has a length: bytes, a message, numbers one after the other
_PIECE_BYTES: Final = 1 << 20
_GOES_ON: Final = bytes(range(128, 256))  # of a number, every byte but its last

_REQUEST: Final = message_class("ModelInferRequest").DESCRIPTOR
_INPUT: Final = _REQUEST.fields_by_name["inputs"].message_type
_CONTENTS: Final = _INPUT.fields_by_name["contents"].message_type


def _number(descriptor: Any, name: str) -> int:
    number: int = descriptor.fields_by_name[name].number
    return number


_INPUTS: Final = _number(_REQUEST, "inputs")
_OUTPUTS: Final = _number(_REQUEST, "outputs")
_SHAPE: Final = _number(_INPUT, "shape")
_CONTENTS_OF_INPUT: Final = _number(_INPUT, "contents")
_FILES: Final = _number(_CONTENTS, "bytes_contents")
_SIZES: Final = {_number(_CONTENTS, "fp32_contents"): 4, _number(_CONTENTS, "fp64_contents"): 8}
_VARINTS: Final = {
    _number(_CONTENTS, f"{name}_contents") for name in ("bool", "int", "int64", "uint", "uint64")
}


def check_size(raw: bytes) -> None:
    """Raises InvalidInput or TooLarge for what no inference has so much of, whatever request it is: others have no tensors.

    What is no message at all is left to the parser.
    """
    tensors = _Tensors(raw)
    for count, (number, kind, begin, end) in enumerate(_fields(raw, 0, len(raw)), 1):
        if count > FIELDS_MAX:
            raise InvalidInput(f"the message has over {FIELDS_MAX} fields; a request has fewer")
        if kind != _PACKED or end - begin <= _SMALL_BYTES:
            continue
        if number == _INPUTS:
            tensors.check_input(begin, end)
        elif number == _OUTPUTS:
            for _ in tensors.fields(begin, end):
                pass


class _Tensors:
    """What the inputs and outputs of one message have together."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._fields = 0
        self._elements = 0

    def fields(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Those of a message within that one, counted."""
        for field in _fields(self._raw, begin, end):
            self._fields += 1
            if self._fields > TENSOR_FIELDS_MAX:
                raise InvalidInput(
                    f"the tensors of the message have over {TENSOR_FIELDS_MAX} fields; those of a request have fewer"
                )
            yield field

    def check_input(self, begin: int, end: int) -> None:
        """Its shape, its elements, and how many fields it has."""
        shape_bytes = files = 0
        for number, kind, at, until in self.fields(begin, end):
            if number == _SHAPE:
                shape_bytes += until - at
                if shape_bytes > _SHAPE_BYTES_MAX:
                    raise InvalidInput(
                        f"an input has a shape of over {_SHAPE_BYTES_MAX} bytes; it must be at most {RANK_MAX} lengths"
                    )
            elif number == _CONTENTS_OF_INPUT and kind == _PACKED:
                for inner, inner_kind, first, last in self.fields(at, until):
                    if inner == _FILES:
                        files += 1
                        if files > FILES_MAX:
                            raise InvalidInput(
                                f"an input has over {FILES_MAX} elements of BYTES; one inference may have {FILES_MAX} rows of one each"
                            )
                    else:
                        self._count(inner, inner_kind, first, last)

    def _count(self, number: int, kind: int, begin: int, end: int) -> None:
        if kind != _PACKED:
            self._elements += 1
        elif number in _SIZES:
            self._elements += (end - begin) // _SIZES[number]
        elif number in _VARINTS:
            for at in range(begin, end, _PIECE_BYTES):
                piece = self._raw[at : min(at + _PIECE_BYTES, end)]
                self._elements += len(piece.translate(None, _GOES_ON))
                if self._elements > VALUES_MAX:
                    break
        if self._elements > VALUES_MAX:
            raise TooLarge(
                f"over {VALUES_MAX} elements in contents; there may be as many: send tensors as raw_input_contents"
            )


def _fields(raw: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number and kind of each field that lies there, and where its value begins and ends."""
    end = min(end, len(raw))
    while at < end:
        key, at = _varint(raw, at)
        begin = at
        kind = key & 7
        if kind == _PACKED:
            size, begin = _varint(raw, at)
            at = begin + size
        elif kind == 0:  # a varint
            _, at = _varint(raw, at)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        # 3 and 4 are around fields, which come next; of others the parser says what is wrong.
        yield key >> 3, kind, begin, min(at, end)


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits a byte, and where it ends; also where it should go on."""
    if at < len(raw) and raw[at] < 0x80:
        return raw[at], at + 1
    value = shift = 0
    for byte in raw[at : at + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if byte < 0x80:
            break
    return value, at
