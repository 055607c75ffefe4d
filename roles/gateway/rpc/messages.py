"""The messages of `open_inference.proto`, as classes that are made at import.

From the descriptors that protoc wrote (`open_inference.binpb`), in a pool of their own: nothing has to be generated where the gateway
is installed, any version of protobuf will do, and the classes of a client in the same process are not in the way.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE: Final = "inference.GRPCInferenceService"


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


ModelInferResponse: Final = message_class("ModelInferResponse")
ModelStreamInferResponse: Final = message_class("ModelStreamInferResponse")
