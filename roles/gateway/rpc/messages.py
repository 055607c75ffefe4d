"""The messages of `open_inference.proto`, as classes that are made at import.

From the descriptors that protoc wrote (`open_inference.binpb`), in a pool of their own: nothing has to be generated where the gateway
is installed, any version of protobuf will do, and the classes of a client in the same process are not in the way.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from fabric.messages import TENSORS_MAX

SERVICE: Final = "inference.GRPCInferenceService"
FIELDS_MAX: Final = 4 * TENSORS_MAX
"""Of a message: inputs and their bytes, outputs, and what else there is."""


def _loaded() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    raw = files("roles.gateway.rpc").joinpath("open_inference.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(raw).file:
        pool.Add(file)
    return pool


_POOL: Final = _loaded()


def message_class(name: str) -> Any:
    """The class of a message, such as `ModelInferRequest`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


def methods() -> list[Any]:
    """The descriptors of the service's methods."""
    return list(_POOL.FindServiceByName(SERVICE).methods)


def check_fields(raw: bytes) -> None:
    """Raises DecodeError for more fields than a request has, before they are made objects: of two bytes each becomes eighty.

    Source: protobuf, "Encoding".
    """
    at = seen = 0
    while at < len(raw):
        seen += 1
        if seen > FIELDS_MAX:
            raise DecodeError(f"it has over {FIELDS_MAX} fields; a request has fewer")
        key, at = _varint(raw, at)
        match key & 7:
            case 0:  # a varint
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(raw, at)
                at += size
            case 5:
                at += 4
            # 3 and 4 are around fields, which come next; of others the parser says what is wrong.


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits a byte, and where it ends; also where it should go on."""
    value = shift = 0
    for byte in raw[at : at + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if byte < 0x80:
            break
    return value, at


ModelInferResponse: Final = message_class("ModelInferResponse")
ModelStreamInferResponse: Final = message_class("ModelStreamInferResponse")
