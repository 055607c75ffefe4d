"""Requests of a load by gRPC, as the protocol's own clients send them: submitted like the SDK's, one call each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import grpc

from fabric.client import InferResult
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost, RequestError
from fabric.ids import ModelId
from fabric.link import Tensor
from fabric.messages import Ledger, ModelInfo, TensorInfo
from fabric.tensors import dtype_name
from roles.gateway.inference import as_tritons
from roles.gateway.rpc.messages import SERVICE, message_class
from roles.gateway.tensors import datatype_of, declared_dtype, to_raw

ASK_S: Final = 10.0
CALL_SPARE_MS: Final = 2_000.0
"""Beyond a request's budget: the gateway answers by then, the call ends only where it does not."""
MESSAGE_BYTES_MAX: Final = 1 << 30
_CLOCK: Final = MonotonicClock()
_LOST: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)

Failed = Callable[[str, str], RequestError]
Ledgers = Callable[[str, float], Ledger]


class RpcClient:
    """Of one gateway. `failed` makes the error of a code and a reason, `ledger` reads `server-timing`."""

    def __init__(self, address: str, *, is_tls: bool, token: str, failed: Failed, ledger: Ledgers) -> None:
        self._address = address
        self._is_tls = is_tls
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._failed = failed
        self._ledger = ledger
        self._tasks: set[asyncio.Task[InferResult]] = set()

    async def __aenter__(self) -> Self:
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ]
        if self._is_tls:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.aio.secure_channel(self._address, credentials, options=options)
        else:
            self._channel = grpc.aio.insecure_channel(self._address, options=options)
        # Of an answer the ledger is read, and its tensors are not.
        self._infer = self._call("ModelInfer", "ModelInferRequest", bytes)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        await self._channel.close()

    def _call(self, method: str, asked: str, reads: Callable[[bytes], Any]) -> Any:
        writes = message_class(asked).SerializeToString
        return self._channel.unary_unary(f"/{SERVICE}/{method}", writes, reads)

    async def models(self, names: Iterable[ModelId]) -> dict[ModelId, ModelInfo]:
        """What is known of these; one that is not served is left out. Raises PeerLost, and RequestError for a wrong token."""
        asked = message_class("ModelMetadataRequest")
        call = self._call(
            "ModelMetadata", "ModelMetadataRequest", message_class("ModelMetadataResponse").FromString
        )
        found = {}
        for name in names:
            try:
                told = await call(
                    asked(name=name), timeout=ASK_S, metadata=self._metadata, wait_for_ready=True
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    continue
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise PeerLost(f"nobody answers at grpc://{self._address} as a gateway does") from error
                raise self._error_of(error) from error
            inputs = tuple(
                TensorInfo(one.name, dtype_name(declared_dtype(one.datatype)), tuple(one.shape))
                for one in told.inputs
            )
            found[name] = ModelInfo(name, 0.0, inputs)
        return found

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        budget_ms: float | None = None,
        priority: int | None = None,
    ) -> asyncio.Future[InferResult]:
        """Send one request. The future fails with a FabricError only."""
        request = message_class("ModelInferRequest")(model_name=model)
        for name, array in inputs.items():
            request.inputs.add(name=name, datatype=datatype_of(dtype_name(array.dtype)), shape=array.shape)
            request.raw_input_contents.append(bytes(to_raw(array)))
        limit_s = ASK_S
        if budget_ms is not None:
            request.parameters["deadline_ms"].double_param = budget_ms
            limit_s = (budget_ms + CALL_SPARE_MS) / 1e3
        if priority is not None:
            request.parameters["priority"].int64_param = as_tritons(priority)
        task = asyncio.ensure_future(self._asked(request, limit_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _asked(self, request: Any, limit_s: float) -> InferResult:
        began_ms = _CLOCK.now_ms()
        call = self._infer(request, timeout=limit_s, metadata=self._metadata)
        try:
            await call
            trailing = await call.trailing_metadata()
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from error
        took_ms = _CLOCK.now_ms() - began_ms
        timing = next((value for key, value in trailing or () if key == "server-timing"), "")
        return InferResult({}, self._ledger(str(timing), took_ms))

    def _error_of(self, error: Any) -> FabricError:
        trailing = error.trailing_metadata() or ()
        code = next((str(value) for key, value in trailing if key == "tenuto-code"), "")
        if code:
            return self._failed(code, error.details() or "")
        if error.code() in _LOST:
            return PeerLost(f"{self._address}: {error.details()}")
        return self._failed(error.code().name, error.details() or "")
