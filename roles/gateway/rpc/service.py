"""The gRPC service: each call asks the same `Service` and `Repository` as HTTP does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from fabric.errors import FabricError, InvalidInput, Overloaded, RequestError
from fabric.ids import ModelId
from fabric.messages import ModelInfo
from roles.gateway import descriptions
from roles.gateway.failures import GONE, Failure, TooSlow, failure_of
from roles.gateway.http.limits import NO_ROOM_FOR_ANSWER, NO_ROOM_FOR_BODY, BodyBudget, HttpLimits
from roles.gateway.inference import Inference, Rows, check_version, checked_rows, outputs_of
from roles.gateway.repository import Repository, load, unload
from roles.gateway.rpc.ends import Failed, Metadata, abort, failure_of_call
from roles.gateway.rpc.held import Held
from roles.gateway.rpc.messages import (
    SERVICE,
    ModelStreamInferResponse,
    message_class,
    methods,
)
from roles.gateway.rpc.size_check import check_size
from roles.gateway.rpc.stream import InferStream
from roles.gateway.rpc.translation import plain_parameters, read_infer, write_infer
from roles.gateway.service import Answered, Outcome, Service
from roles.gateway.timing import server_timing
from roles.gateway.tokens import Tokens
from roles.gateway.trace_context import traceparent_of

IDLE_MS: Final = 300_000.0
"""A connection without calls ends after that."""
_OPEN: Final = ("ServerLive", "ServerReady")
"""Without a token, as by HTTP; their messages have nothing in them, and are not waited for."""

Reading = Callable[[], Awaitable[Held]]
"""The message of a call, or of a stream that goes on; raises for one that is refused unread."""
Answering = Callable[[Reading | None, Any], Awaitable[tuple[Any, Metadata]]]
"""With a message (of those of `_OPEN` None) and gRPC's context: the response, and what goes into the trailing metadata."""


class RpcService:
    """What `grpc.aio` calls."""

    def __init__(
        self,
        service: Service,
        repository: Repository,
        tokens: Tokens,
        budget: BodyBudget,
        calls_max: int,
        request_bytes_max: int,
    ) -> None:
        self._silent_ms_max = max(IDLE_MS, HttpLimits().body_limit_ms(request_bytes_max))
        """A call ends whose message is not here by then, or on whose stream nothing is asked or answered.

        Of a message gRPC tells nothing before it is whole: who sends a large one slowly looks the same as who sends none.
        """
        self._budget = budget
        self._unread = budget.half()
        """Of answers. gRPC ends no call while one is on its way, so clients that stop reading keep theirs for as long as they like."""
        self._calls_max = calls_max
        self._service = service
        self._repository = repository
        self._tokens = tokens
        self.calls = 0
        """Since the start."""
        self.under_way = 0
        """Calls that have room now, at most `calls_max`; a stream is one."""
        self._streams: set[InferStream] = set()
        self._is_draining = False
        self._documents: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server,
            "ModelMetadata": self._model,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }

    def handler(self) -> Any:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        handlers = {}
        for method in methods():
            reads = partial(self._read, message_class(method.input_type.name).FromString)
            writes = message_class(method.output_type.name).SerializeToString
            if method.name == "ModelStreamInfer":
                handlers[method.name] = grpc.stream_stream_rpc_method_handler(self._stream, reads, writes)
                continue
            answering = (
                self._infer
                if method.name == "ModelInfer"
                else self._document(method.name, method.output_type.name)
            )
            call = partial(self._health if method.name in _OPEN else self._unary, answering)
            # Of a unary one grpc.aio reads the whole message, for however long it takes, before we hear of the call.
            handlers[method.name] = grpc.stream_unary_rpc_method_handler(call, reads, writes)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def drain(self) -> None:
        """Let streams end on which nothing is under way, and the others when their answers are sent."""
        self._is_draining = True
        for stream in list(self._streams):
            stream.drain()

    def _read(self, parse: Callable[[bytes], Any], raw: bytes) -> Held:
        """Of a message that there is no room for, or that is none, nothing is kept."""
        if not self._budget.take(len(raw)):
            return Held(Overloaded(NO_ROOM_FOR_BODY), 0, self._budget)
        try:
            check_size(raw)
            message = parse(raw)
        except RequestError as error:
            refusal = error
        except DecodeError as error:
            refusal = InvalidInput(f"the message cannot be read: {error!s:.200}")
        else:
            return Held(message, len(raw), self._budget)
        self._budget.give_back(len(raw))
        return Held(refusal, 0, self._budget)

    # ------------------------------------------------------------ calls

    def _admit(self, context: Any, metadata: dict[str, str]) -> None:
        """Make room for a call until its answer is sent. Raises Unauthorised, Overloaded."""
        self._check_token(metadata)
        if self.under_way >= self._calls_max:
            raise Overloaded(f"there are {self._calls_max} calls")
        self.under_way += 1
        context.add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        self.under_way -= 1

    async def _unary(self, answering: Answering, _: Any, context: Any) -> Any:
        """One message, and one answer."""
        metadata = self._metadata(context)
        try:
            response, trailing = await answering(partial(self._admitted, context, metadata), context)
        except Exception as error:  # noqa: BLE001  whatever it is, the client is told by a code
            failure = failure_of_call(error)
        else:
            context.set_trailing_metadata([*trailing, *_trace(metadata)])
            return response
        return await abort(context, failure, _trace(metadata))

    async def _health(self, answering: Answering, _: Any, context: Any) -> Any:
        """Of a gateway that has no more room too."""
        return (await answering(None, context))[0]

    async def _admitted(self, context: Any, metadata: dict[str, str]) -> Held:
        """The message of a call that there is room for. Raises Unauthorised, Overloaded, TooSlow, InvalidInput."""
        self._admit(context, metadata)
        limit_s = self._silent_ms_max / 1e3
        try:
            async with asyncio.timeout(limit_s):
                held = await context.read()
        except TimeoutError:
            raise TooSlow(f"the message of this call took over {limit_s:g} s") from None
        if held is grpc.aio.EOF:
            raise InvalidInput("the call has no message")
        assert isinstance(held, Held), "`_read` made it"
        return held

    # ------------------------------------------------------------ inferences

    async def _infer(self, reading: Reading | None, context: Any) -> tuple[Any, Metadata]:
        assert reading is not None, "it has a message"
        response, size, timing = await self._inferred(reading, None, context)
        context.add_done_callback(lambda _: self._unread.give_back(size))
        return response, [("server-timing", timing)]

    async def _stream(self, requests: AsyncIterator[Held], context: Any) -> AsyncIterator[Any]:
        """Every request is answered when it is done, in whatever order that is; its `id` says which it was."""
        metadata = self._metadata(context)
        refused: Failure | None = None
        try:
            self._admit(context, metadata)
        except FabricError as error:
            refused = failure_of(error)
        if refused is not None:
            await abort(context, refused, [])

        async def answered(held: Held, read_at_ms: float, refusal: Failure | None) -> tuple[Any, int]:
            async def reading() -> Held:
                self._check_token(metadata)  # which may have been revoked since the last one
                if refusal is not None:
                    raise Failed(refusal)
                return held

            response, size, _ = await self._inferred(reading, read_at_ms, context)
            return ModelStreamInferResponse(infer_response=response), size

        clock = self._service.clock
        stream = InferStream(requests, answered, clock, self._silent_ms_max, self._unread)
        self._streams.add(stream)
        if self._is_draining:
            stream.drain()
        try:
            async with aclosing(stream.answers()) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._streams.discard(stream)
        if stream.failure is not None:
            await abort(context, stream.failure, [])

    async def _inferred(
        self, reading: Reading, began_at_ms: float | None, context: Any
    ) -> tuple[Any, int, str]:
        """The response, its bytes of `_unread`, to be given back, and where the time went; counted, from its message on, or as refused. Raises Failed.

        `began_at_ms`: from when on its deadline counts; None: from when its message is there.
        """
        service, model, asked_at_ms = self._service, "", self._service.clock.now_ms()
        held: Held | None = None
        try:
            held = await reading()
            self.calls += 1
            asked_at_ms = service.clock.now_ms()
            request = held.message
            model = request.model_name
            began_at_ms = asked_at_ms if began_at_ms is None else began_at_ms
            inference, rows, answered = await self._answered(request, began_at_ms, context)
            answers = [one.outputs for one in answered.results]
            outputs = outputs_of(inference, answers, is_stacked=rows.is_stacked)
            response = write_infer(inference, outputs)
            size = self._taken(response)
        except asyncio.CancelledError:
            if held is not None:
                service.count(model, asked_at_ms, GONE)
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, it is counted and told
            failure = failure_of_call(error)
        else:
            ledgers = [one.ledger for one in answered.results]
            service.count(model, asked_at_ms, ledgers)
            return response, size, server_timing(ledgers)
        service.count(model, asked_at_ms, failure)
        raise Failed(failure)

    def _taken(self, response: Any) -> int:
        """Its bytes, which it has of `_unread` until they are given back. Raises Overloaded."""
        size: int = response.ByteSize()
        if not self._unread.take(size):
            raise Overloaded(NO_ROOM_FOR_ANSWER)
        return size

    async def _answered(
        self, request: Any, began_at_ms: float, context: Any
    ) -> tuple[Inference, Rows, Answered]:
        """Asked once more where the model has become another one since the gateway heard of it. Raises FabricError, Failed."""
        info = self._service.model(request.model_name)
        try:
            return await self._answered_by(info, request, began_at_ms, context)
        except Failed as error:
            failure = error.failure
        except FabricError as error:
            failure = failure_of(error)
        if not self._service.may_be_outdated(info, failure):
            raise Failed(failure)
        found = await self._service.changed(request.model_name, info, failure)
        if found is None:
            raise Failed(failure)
        return await self._answered_by(found, request, began_at_ms, context)

    async def _answered_by(
        self, info: ModelInfo | None, request: Any, began_at_ms: float, context: Any
    ) -> tuple[Inference, Rows, Answered]:
        inference = read_infer(request)
        rows = checked_rows(info, inference)
        budget_ms = self._budget_ms(inference, began_at_ms, context)
        return inference, rows, await self._asked(inference, rows, budget_ms)

    def _budget_ms(self, inference: Inference, began_at_ms: float, context: Any) -> float | None:
        """A call's own deadline says when nobody waits any more: it may be tighter than the SLO, never looser."""
        budget_ms = self._service.budget_left_ms(inference, began_at_ms)
        left_s: float | None = context.time_remaining()
        if left_s is None:
            return budget_ms
        left_ms = max(0.0, left_s * 1e3)
        return left_ms if budget_ms is None else min(budget_ms, left_ms)

    async def _asked(self, inference: Inference, rows: Rows, budget_ms: float | None) -> Answered:
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def on_end(outcome: Outcome) -> None:
            if not ended.done():
                ended.set_result(outcome)

        asking = self._service.submit(inference, rows, budget_ms, on_end)
        try:
            outcome = await ended
        except asyncio.CancelledError:  # by the client, or with its connection
            asking.cancel()
            raise
        if isinstance(outcome, Failure):
            raise Failed(outcome)
        return outcome

    # ------------------------------------------------------------ documents

    def _document(self, name: str, answer: str) -> Answering:
        """A call that answers with a document, made a message of that name."""
        made = message_class(answer)

        async def answering(reading: Reading | None, context: Any) -> tuple[Any, Metadata]:
            del context
            held = None if reading is None else await reading()
            self.calls += 1
            document = await self._documents[name](None if held is None else held.message)
            return json_format.ParseDict(document or {}, made()), []

        return answering

    async def _live(self, request: Any) -> Any:
        del request
        return {"live": True}

    async def _ready(self, request: Any) -> Any:
        del request
        return {"ready": self._service.is_ready}

    async def _model_ready(self, request: Any) -> Any:
        check_version(request.name, request.version)
        info = (await self._service.served()).get(ModelId(request.name))
        return {"ready": info is not None and self._service.is_model_ready(info)}

    async def _server(self, request: Any) -> Any:
        del request
        return descriptions.server()

    async def _model(self, request: Any) -> Any:
        check_version(request.name, request.version)
        return descriptions.model(await self._service.model_now(request.name))

    async def _config(self, request: Any) -> Any:
        check_version(request.name, request.version)
        return {"config": descriptions.config(await self._service.model_now(request.name))}

    async def _statistics(self, request: Any) -> Any:
        check_version(request.name, request.version)
        if request.name:
            await self._service.model_now(request.name)
        names = [request.name] if request.name else sorted(await self._service.models())
        return {"model_stats": [self._service.statistics.as_plain(name) for name in names]}

    async def _index(self, request: Any) -> Any:
        served = await self._service.served()
        return {"models": descriptions.index(served, self._repository.names, is_ready_only=request.ready)}

    async def _load(self, request: Any) -> Any:
        parameters = plain_parameters(request.parameters)
        await load(self._service, self._repository, request.model_name, parameters)

    async def _unload(self, request: Any) -> Any:
        await unload(self._service, self._repository, request.model_name)

    # ------------------------------------------------------------ metadata

    def _metadata(self, context: Any) -> dict[str, str]:
        return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}

    def _check_token(self, metadata: dict[str, str]) -> None:
        self._tokens.check(metadata.get("authorization"))


def _trace(metadata: dict[str, str]) -> Metadata:
    traceparent = traceparent_of(metadata.get("traceparent"))
    return [] if traceparent is None else [("traceparent", traceparent)]
