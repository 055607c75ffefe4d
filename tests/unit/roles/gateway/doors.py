"""A gateway's HTTP and gRPC in one process, on loopback, before a client of frontends that is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
from msgspec.structs import replace

from fabric.client import Client, InferResult
from fabric.clock import MonotonicClock
from fabric.errors import InvalidInput, ModelNotFound, Overloaded
from fabric.ids import ModelId
from fabric.link import Tensor
from fabric.messages import Ledger, ModelInfo, TensorInfo, TensorSpec
from fabric.tensors import dtype_name
from roles.config.gateway import GatewayConfig
from roles.frontend.admission import wrong_inputs
from roles.gateway.http.connection import HttpServer
from roles.gateway.http.limits import HttpLimits
from roles.gateway.http.routes import Routes
from roles.gateway.repository import Repository
from roles.gateway.rpc.messages import SERVICE, message_class
from roles.gateway.rpc.server import RpcServer
from roles.gateway.service import Service
from roles.gateway.tokens import Tokens
from roles.runtime.host_header import own_hosts

WAIT_S = 30
Asked = message_class("ModelInferRequest")
Response = message_class("ModelInferResponse")
Streamed = message_class("ModelStreamInferResponse")


def model(
    name: str = "m", shape: tuple[int, ...] | None = (3,), dtype: str = "float32", replicas: int = 1
) -> ModelInfo:
    """With one input `x`, which is its output; `shape` None: it does not say what it takes."""
    tensors = () if shape is None else (TensorInfo("x", dtype, shape),)
    return ModelInfo(ModelId(name), 30_000.0, tensors, tensors, replicas=replicas)


def heads_of(name: str, *heads: str, replicas: int = 1) -> list[ModelInfo]:
    """As a frontend lists a model with heads: by them alone."""
    return [replace(model(head, replicas=replicas), head_of=ModelId(name)) for head in heads]


class StandIn:
    """What a service asks: answers with the inputs what is served and fits. `busy` is Overloaded, `never` without an end."""

    is_ready = True

    def __init__(self, *served: ModelInfo) -> None:
        self.served = {one.model_id: one for one in served}
        self.asked: list[tuple[str, tuple[int, ...], float | None]] = []
        """Model, shape and budget of each."""
        self.listings = 0

    async def models(self) -> tuple[ModelInfo, ...]:
        self.listings += 1
        found = tuple(self.served.values())
        await asyncio.sleep(0)
        return found

    def submit(
        self, name: str, inputs: Mapping[str, Tensor], budget_ms: float | None, priority: int | None
    ) -> asyncio.Future[InferResult]:
        del priority
        self.asked.append((name, next(iter(inputs.values())).shape, budget_ms))
        future: asyncio.Future[InferResult] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(self._end, future, name, inputs)
        return future

    def _end(self, future: asyncio.Future[InferResult], name: str, inputs: Mapping[str, Tensor]) -> None:
        if future.done() or name == "never":
            return
        info = self.served.get(ModelId(name))
        specs = [TensorSpec(key, dtype_name(one.dtype), one.shape) for key, one in inputs.items()]
        if name == "busy":
            future.set_exception(Overloaded("too much is asked"))
        elif heads := [one.model_id for one in self.served.values() if one.head_of == name]:
            future.set_exception(InvalidInput(f"model {name!r} is asked by its heads: {', '.join(heads)}"))
        elif info is None:
            future.set_exception(ModelNotFound("there is none"))
        elif (wrong := wrong_inputs(info, specs)) is not None:
            future.set_exception(InvalidInput(wrong))
        else:
            future.set_result(InferResult(inputs, Ledger(batch_size=1)))


class Doors:
    """Both of them."""

    def __init__(self, home: Path, client: StandIn, tokens: Tokens) -> None:
        self.client = client
        self.service = Service(cast(Client, client), MonotonicClock())
        self.repository = Repository({}, home, home, is_open=False)
        self.http = HttpServer(
            Routes(self.service, self.repository, tokens, self._page, own_hosts("x")),
            HttpLimits(),
            MonotonicClock(),
        )
        config = GatewayConfig(http=None, grpc="127.0.0.1:0")
        self.rpc = RpcServer(self.service, self.repository, tokens, config, self.http.budget)
        self.port = 0
        self.channel: Any = None

    async def _page(self, accept: str) -> tuple[bytes, str]:
        raise NotImplementedError(accept)

    async def http_raw(self, raw: bytes) -> tuple[int, Any]:
        """One request on a connection of its own: status and document."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
            body = await reader.readexactly(int(fields[b"content-length"]))
        finally:
            writer.close()
        return int(head.split()[1]), json.loads(body) if body else None

    async def http_get(self, path: str) -> tuple[int, Any]:
        return await self.http_raw(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    async def http_post(self, path: str, body: bytes, more: str = "") -> tuple[int, Any]:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        return await self.http_raw(head.encode() + body)

    async def http_infer(
        self, name: str, array: Tensor, outputs: Sequence[str] = ()
    ) -> tuple[str, tuple[int, ...]]:
        """Code of the failure or nothing, and the shape of the output."""
        header: dict[str, Any] = {
            "inputs": [
                {
                    "name": "x",
                    "datatype": "FP32",
                    "shape": array.shape,
                    "parameters": {"binary_data_size": array.nbytes},
                }
            ]
        }
        if outputs:
            header["outputs"] = [{"name": one} for one in outputs]
        text = json.dumps(header).encode()
        more = f"Inference-Header-Content-Length: {len(text)}\r\n"
        told = (await self.http_post(f"/v2/models/{name}/infer", text + array.tobytes(), more))[1]
        return ("", tuple(told["outputs"][0]["shape"])) if "outputs" in told else (told["code"], ())

    async def grpc_infer(
        self, name: str, array: Tensor, outputs: Sequence[str] = (), limit_s: float = WAIT_S
    ) -> tuple[str, tuple[int, ...]]:
        call = self.channel.unary_unary(
            f"/{SERVICE}/ModelInfer", Asked.SerializeToString, Response.FromString
        )
        try:
            told = await call(asked(name, array, outputs), timeout=limit_s)
        except grpc.aio.AioRpcError as error:
            found = dict(error.trailing_metadata() or ())
            return str(found.get("tenuto-code", error.code().name)), ()
        return "", tuple(told.outputs[0].shape)

    async def stream_infer(
        self, name: str, array: Tensor, outputs: Sequence[str] = (), limit_s: float = WAIT_S
    ) -> tuple[str, tuple[int, ...]]:
        async def one() -> AsyncIterator[Any]:
            yield asked(name, array, outputs)

        told = [answer async for answer in self.stream(one(), timeout=limit_s)]
        assert len(told) == 1
        if told[0].error_message:
            return told[0].error_message.partition(":")[0], ()
        return "", tuple(told[0].infer_response.outputs[0].shape)

    def stream(self, requests: AsyncIterator[Any], **options: Any) -> Any:
        """A stream's call."""
        method = f"/{SERVICE}/ModelStreamInfer"
        call = self.channel.stream_stream(method, Asked.SerializeToString, Streamed.FromString)
        return call(requests, **options)

    def infer(self, door: str) -> Callable[..., Awaitable[tuple[str, tuple[int, ...]]]]:
        """By `http`, `grpc` or `stream`."""
        found: Any = getattr(self, f"{door}_infer")
        return cast(Callable[..., Awaitable[tuple[str, tuple[int, ...]]]], found)

    def counted(self, name: str) -> tuple[int, int]:
        """Successes and failures."""
        stages = self.service.statistics.as_plain(name)["inference_stats"]
        return stages["success"]["count"], stages["fail"]["count"]


def asked(name: str, array: Tensor | None = None, outputs: Sequence[str] = (), **fields: Any) -> Any:
    """A request by gRPC."""
    array = np.zeros(3, np.float32) if array is None else array
    request = Asked(model_name=name, **fields)
    request.inputs.add(name="x", datatype="FP32", shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    for one in outputs:
        request.outputs.add(name=one)
    return request


def at_doors(
    home: Path, client: StandIn, test: Callable[[Doors], Awaitable[None]], tokens: Tokens | None = None
) -> None:
    """Run a test at them."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Doors]:
        doors = Doors(home, client, tokens or Tokens(None))
        listener = await asyncio.get_running_loop().create_server(doors.http.connection, "127.0.0.1", 0)
        doors.port = listener.sockets[0].getsockname()[1]
        address = await doors.rpc.open()
        options = [
            ("grpc.max_send_message_length", 1 << 30),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        try:
            async with grpc.aio.insecure_channel(address, options) as doors.channel:
                yield doors
        finally:
            await doors.rpc.close()
            doors.http.close()
            listener.close()

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), opened() as doors:
            await test(doors)

    asyncio.run(run())
