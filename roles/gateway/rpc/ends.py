"""How a gRPC call ends that has no outputs: by a status and metadata, or on a stream by a message."""

from __future__ import annotations

from typing import Any

import grpc

from fabric.errors import FabricError, error_text
from roles.gateway.failures import Failure, failure_of
from roles.gateway.rpc.held import Held
from roles.gateway.rpc.messages import ModelStreamInferResponse
from roles.runtime.process import log

Metadata = list[tuple[str, str]]


class Failed(Exception):
    """With what the client is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def failure_of_call(error: Exception) -> Failure:
    """What the client is told; a defect is logged."""
    if isinstance(error, Failed):
        return error.failure
    if not isinstance(error, FabricError):
        log.error("call_failed error=%r", error_text(error), exc_info=error)
    return failure_of(error)


async def abort(context: Any, failure: Failure, more: Metadata) -> Any:
    """End the call with it. Not to be called in an `except`: gRPC keeps what this raises, and with it the error that is handled and all that its frames hold."""
    trailing = [("tenuto-code", failure.code), *more]
    if failure.retry_after_ms is not None:
        # gRPC's own clients wait so long before they try again (gRFC A6).
        trailing.append(("grpc-retry-pushback-ms", str(round(failure.retry_after_ms))))
    await context.abort(getattr(grpc.StatusCode, failure.grpc_status), failure.reason, tuple(trailing))


def told(held: Held, failure: Failure) -> Any:
    """The message of a stream that says so."""
    answer = ModelStreamInferResponse(error_message=f"{failure.code}: {failure.reason}")
    answer.infer_response.id = held.request_id
    return answer
