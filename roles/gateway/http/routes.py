"""Which path asks for what: the Open Inference Protocol v2 under `/v2`, the plain route for people under `/v1`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote

from fabric.errors import (
    FabricError,
    InvalidInput,
    NoReplica,
    error_text,
    nothing_ready,
)
from fabric.ids import ModelId
from roles.gateway import descriptions
from roles.gateway.failures import (
    Failure,
    MethodNotAllowed,
    NotFound,
    NoToken,
    Refused,
    Unsupported,
    failure_of,
)
from roles.gateway.http.cross_site import check_not_cross_site
from roles.gateway.http.inference import HttpInference
from roles.gateway.http.messages import Answer, Cancellable, Head, Reply, Request
from roles.gateway.http.protocol_v2 import failed, read_json, write_json
from roles.gateway.inference import check_version
from roles.gateway.repository import Repository, load, unload
from roles.gateway.service import Service, not_served
from roles.gateway.tokens import Tokens
from roles.gateway.trace_context import traceparent_of
from roles.runtime.process import log

Page = Callable[[str], Awaitable[tuple[bytes, str]]]
"""The page of metrics in a format that the reader accepts, and its content type."""
_OPEN: Final = ("/v2/health/live", "/v2/health/ready")
"""Without a token: who looks after processes has none."""
_NOT_DONE: Final = ("systemsharedmemory", "cudasharedmemory", "trace", "logging")
"""Extensions of Triton's."""

_INFERENCES: Final = ("infer", "predict")
_STRANGERS: Final = (NoToken.code, Refused.code)
"""What an inference is refused with for who asks."""
_HEALTHY: Final = {
    "live": Reply(200, (write_json({"live": True}),)),
    "ready": Reply(200, (write_json({"live": True, "ready": True}),)),
}
"""The protocol's text has `live` in both, KServe's server and client `ready` in the second."""
_UNREADY: Final = Failure("NoReplica", "no frontend wants requests now", retryable=True, retry_after_ms=1e3)


@dataclass(slots=True, frozen=True)
class Route:
    """A path taken apart: what it asks for, of which model."""

    name: str
    model: str = ""
    version: str = ""


_METHODS: Final[Mapping[str, Sequence[str]]] = {
    name: methods
    for names, methods in (
        (
            ("server", "live", "ready", "model", "model_ready", "config", "stats", "models", "metrics"),
            ("GET", "HEAD"),
        ),
        (("infer", "predict", "index", "load", "unload"), ("POST",)),
    )
    for name in names
}


def route_of(head: Head) -> Route:
    """Raises NotFound, MethodNotAllowed, Unsupported, ModelNotFound for a version that there is not."""
    route = _asked_by(head)
    check_version(route.model, route.version)
    return route


def _asked_by(head: Head) -> Route:
    try:
        parts = [unquote(part, errors="strict") for part in head.path.split("/")[1:]]
    except UnicodeDecodeError as error:
        raise NotFound("the path is not UTF-8") from error
    if parts == ["metrics"]:
        route: Route | None = Route("metrics")
    else:
        route = _v1(parts) if parts[:1] == ["v1"] else _v2(parts)
    if route is None:
        raise NotFound(f"there is no {head.path[:200]!r} here")
    allowed = _METHODS[route.name]
    if head.method not in allowed:
        raise MethodNotAllowed(f"{head.path[:200]!r} takes {' and '.join(allowed)}", allowed)
    return route


def _v1(parts: Sequence[str]) -> Route | None:
    match parts:
        case ["v1", "models"]:
            return Route("models")
        case ["v1", "models", last] if last.endswith(":predict"):
            return Route("predict", last.removesuffix(":predict"))
    return None


def _v2(parts: Sequence[str]) -> Route | None:
    match parts:
        case ["v2"] | ["v2", ""]:
            return Route("server")
        case ["v2", "health", ("live" | "ready") as what]:
            return Route(what)
        case ["v2", "models", "stats"]:
            return Route("stats")
        case ["v2", "models", model]:
            return Route("model", model)
        case ["v2", "models", model, "versions", version]:
            return Route("model", model, version)
        case ["v2", "models", model, ("infer" | "config" | "stats") as what]:
            return Route(what, model)
        case ["v2", "models", model, "versions", version, ("infer" | "config" | "stats") as what]:
            return Route(what, model, version)
        case ["v2", "models", model, "ready"]:
            return Route("model_ready", model)
        case ["v2", "models", model, "versions", version, "ready"]:
            return Route("model_ready", model, version)
        case ["v2", "repository", "index"]:
            return Route("index")
        case ["v2", "repository", "models", model, ("load" | "unload") as what]:
            return Route(what, model)
        case ["v2", extension, *_] if extension in _NOT_DONE:
            raise Unsupported(f"the extension {extension!r} of the protocol is not served here")
    return None


class Routes:
    """Answers requests: health at once, inferences by callbacks, all else in a task each."""

    def __init__(
        self,
        service: Service,
        repository: Repository,
        tokens: Tokens,
        page: Page,
        own_hosts: Collection[str],
    ) -> None:
        """`own_hosts`: under which it may be asked where no token is needed."""
        self._page = page
        self._own_hosts = own_hosts
        self._service = service
        self._repository = repository
        self._tokens = tokens
        self._documents: Mapping[str, Callable[[Route, Request], Awaitable[Any]]] = {
            "server": self._server,
            "model": self._model,
            "model_ready": self._model_ready,
            "config": self._config,
            "stats": self._stats,
            "models": self._models,
            "index": self._index,
            "load": self._load,
            "unload": self._unload,
            "metrics": self._metrics,
        }

    def screen(self, head: Head) -> None:
        """Whether the body is worth reading. Raises RequestError."""
        if head.path not in _OPEN:
            self._tokens.check(head.headers.get("authorization"))
            if not self._tokens.is_asked_for:
                check_not_cross_site(head, self._own_hosts)
        route_of(head)

    def refused(self, head: Head, failure: Failure) -> None:
        """Count it where it asked for an inference; of no model where a stranger named one."""
        with contextlib.suppress(FabricError):
            route = _asked_by(head)
            if route.name in _INFERENCES:
                model = "" if failure.code in _STRANGERS else route.model
                self._service.count(model, self._service.clock.now_ms(), failure)

    def start(self, request: Request, answer: Answer) -> Cancellable | None:
        """Answer one request."""
        head = request.head
        route = route_of(head)
        if route.name in _INFERENCES:
            inference = HttpInference(
                self._service,
                route.model,
                request,
                lambda reply: answer(_traced(head, reply)),
                is_plain=route.name == "predict",
            )
            inference.start()
            return inference
        if route.name in _HEALTHY:
            is_healthy = route.name == "live" or self._service.is_ready
            answer(_HEALTHY[route.name] if is_healthy else failed(_UNREADY))
            return None
        task = asyncio.ensure_future(self._documents[route.name](route, request))
        task.add_done_callback(lambda done: _tell(done, answer))
        return task

    # ------------------------------------------------------------ documents

    async def _server(self, route: Route, request: Request) -> Any:
        del route, request
        return descriptions.server()

    async def _model(self, route: Route, request: Request) -> Any:
        del request
        return descriptions.model(await self._service.model_now(route.model))

    async def _model_ready(self, route: Route, request: Request) -> Any:
        del request
        info = (await self._service.served()).get(ModelId(route.model))
        if info is None:
            raise not_served(route.model)
        if not self._service.is_model_ready(info):
            return failure_of(NoReplica(nothing_ready(route.model), info.coming_in_ms))
        return {"name": route.model, "ready": True}

    async def _config(self, route: Route, request: Request) -> Any:
        del request
        return descriptions.config(await self._service.model_now(route.model))

    async def _stats(self, route: Route, request: Request) -> Any:
        del request
        if route.model:
            await self._service.model_now(route.model)
            names: Sequence[str] = (route.model,)
        else:
            names = sorted(await self._service.models())
        return {"model_stats": [self._service.statistics.as_plain(name) for name in names]}

    async def _models(self, route: Route, request: Request) -> Any:
        del route, request
        return descriptions.listed(list((await self._service.models()).values()))

    async def _index(self, route: Route, request: Request) -> Any:
        del route
        asked = _asked(request)
        served = await self._service.served()
        return descriptions.index(served, self._repository.names, is_ready_only=asked.get("ready") is True)

    async def _load(self, route: Route, request: Request) -> Any:
        parameters = _asked(request).get("parameters")
        if not isinstance(parameters, dict | None):
            raise InvalidInput("parameters must be an object")
        await load(self._service, self._repository, route.model, parameters or {})

    async def _metrics(self, route: Route, request: Request) -> Any:
        del route
        body, content_type = await self._page(request.head.headers.get("accept", ""))
        return Reply(200, (body,), content_type)

    async def _unload(self, route: Route, request: Request) -> Any:
        _asked(request)
        await unload(self._service, self._repository, route.model)


def _asked(request: Request) -> dict[str, Any]:
    document = read_json(request.body) if request.body else {}
    if not isinstance(document, dict):
        raise InvalidInput("the body must be an object")
    return document


def _tell(done: asyncio.Future[Any], answer: Answer) -> None:
    if done.cancelled():
        return
    error = done.exception()
    if error is not None:
        if not isinstance(error, FabricError):
            log.error("request_failed error=%r", error_text(error), exc_info=error)
        answer(failed(failure_of(error)))
        return
    match done.result():
        case None:
            answer(Reply(200))
        case Failure() as failure:
            answer(failed(failure))
        case Reply() as reply:
            answer(reply)
        case document:
            answer(Reply(200, (write_json(document),)))


def _traced(head: Head, reply: Reply) -> Reply:
    traceparent = traceparent_of(head.headers.get("traceparent"))
    if traceparent is None:
        return reply
    return replace(reply, headers=(*reply.headers, ("traceparent", traceparent)))
