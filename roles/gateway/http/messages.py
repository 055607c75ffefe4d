"""What a connection hands on, and what it is to answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from roles.gateway.failures import Failure

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"

Body = bytes | memoryview


@dataclass(slots=True, frozen=True)
class Head:
    """A request without its body. `path` is not decoded; header names are in small letters."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


@dataclass(slots=True, frozen=True)
class Request:
    """A whole one. `body` is decompressed; `began_at_ms`: when its first byte came, from where its deadline counts."""

    head: Head
    body: bytes
    began_at_ms: float
    keep_alive: bool = True


def _unheard(failure: Failure | None) -> None:
    """Nobody wants to know."""


@dataclass(slots=True, frozen=True)
class Reply:
    """An answer. `body` goes out part by part, as it is. `on_written` hears whether it does, or why another one goes."""

    status: int
    body: Sequence[Body] = ()
    content_type: str = JSON
    headers: Sequence[tuple[str, str]] = field(default=())
    on_written: Callable[[Failure | None], None] = _unheard

    @property
    def size_bytes(self) -> int:
        """Of the body."""
        return sum(len(part) for part in self.body)


Answer = Callable[[Reply], None]


class Cancellable(Protocol):
    """A request that is being answered."""

    def cancel(self) -> object:
        """Its client has gone."""
        ...


class Handler(Protocol):
    """Who answers requests."""

    def screen(self, head: Head) -> None:
        """Raises RequestError for a request that need not even be read."""
        ...

    def refused(self, head: Head, failure: Failure) -> None:
        """A request with that head is, and was or will not be started."""
        ...

    def start(self, request: Request, answer: Answer) -> Cancellable | None:
        """Answer it, now (then None may be returned) or later."""
        ...


REASONS: Final[Mapping[int, str]] = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    499: "Client Closed Request",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


def head_of(reply: Reply, *, is_last: bool) -> bytes:
    """Status line and header fields, as they go out. `is_last`: the connection ends after it."""
    lines = [
        f"HTTP/1.1 {reply.status} {REASONS[reply.status]}",
        f"Content-Length: {reply.size_bytes}",
    ]
    if reply.body:
        lines.append(f"Content-Type: {reply.content_type}")
    lines += [f"{name}: {value}" for name, value in reply.headers]
    if is_last:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def retry_headers(failure: Failure) -> list[tuple[str, str]]:
    """When to ask again, and what is asked for, in HTTP's own words."""
    found = []
    if failure.retry_after_s is not None:
        found.append(("Retry-After", str(failure.retry_after_s)))
    if failure.allowed:
        found.append(("Allow", ", ".join(failure.allowed)))
    if failure.status == 401:
        found.append(("WWW-Authenticate", 'Bearer realm="tenuto"'))
    return found
