"""One HTTP/1.1 connection as it comes in, sans-IO: bytes and the time in, requests and refusals out.

    IDLE --first byte--> HEAD --screened--> BODY --last byte--> IDLE, with a request
                          |                  |
                          +------ wrong, too large, too slow ------> CLOSED, with a refusal

The parser is llhttp, Node.js' own. Everything that one connection can hold is bounded here (`limits.py`): llhttp itself takes
heads and bodies of any size, and any time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

import httptools

from fabric.errors import InvalidInput, Overloaded, RequestError, TooLarge
from fabric.policy_options import shown
from roles.gateway.failures import HeaderTooLarge, TooSlow, Unsupported
from roles.gateway.http.compression import Decoder
from roles.gateway.http.limits import NO_ROOM_FOR_BODY, BodyBudget, HttpLimits
from roles.gateway.http.messages import Head, Request

_SMALL_BYTES: Final = 4 << 10
_GATHERED_BYTES: Final = 1 << 20
_LENGTH_DIGITS_MAX: Final = 19
"""Of a length without leading zeros: more are over 2^63, and Python's `int` raises from 4,300 on."""
_ABSOLUTE: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_FRAMING: Final = ("host", "content-length", "transfer-encoding", "connection")
Screen = Callable[[Head], None]
"""Raises RequestError for a head whose body need not even be read."""


@dataclass(slots=True, frozen=True)
class ContinueWanted:
    """The client waits for a sign before it sends its body (`Expect: 100-continue`)."""


@dataclass(slots=True, frozen=True)
class Refused:
    """An answer without asking anybody. `is_last`: nothing more is read. `head`: where it was read.

    `defect`: what of ours failed on these bytes, which no client is told.
    """

    error: RequestError
    is_last: bool = True
    head: Head | None = None
    defect: BaseException | None = None


ReaderEvent = Request | ContinueWanted | Refused


class _State(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    CLOSED = auto()


class HttpReader:
    """Reads the requests of one connection. Give their bytes back to `budget` when they are answered."""

    def __init__(self, limits: HttpLimits, budget: BodyBudget, screen: Screen, now_ms: float) -> None:
        self._limits = limits
        self._budget = budget
        self._screen = screen
        self._parser = httptools.HttpRequestParser(self)
        self._events: list[ReaderEvent] = []
        self._state = _State.IDLE
        self._now_ms = self._began_at_ms = self._body_at_ms = now_ms
        self._head_at_ms = now_ms
        """From when on its time counts: later than its first byte where an answer before it was not out by then."""
        self._has_asked = False  # anything, since the connection began
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._headers_seen = 0
        self._head_bytes = 0
        self._pieces: list[bytes | bytearray] = []
        self._taken = 0  # from the budget, for this body
        self._received = 0  # of it, as it came
        self._size = 0
        self._decoder: Decoder | None = None
        self._head: Head | None = None
        self._screened: RequestError | None = None
        self._is_upgrade_offered = False  # in a head that is read, and whose body needs another parser

    # ------------------------------------------------------------ from the shell

    def feed(self, data: bytes, now_ms: float) -> Sequence[ReaderEvent]:
        """Take what came."""
        if self._state is _State.CLOSED:
            return ()
        self._now_ms = now_ms
        if self._state is _State.IDLE:
            data = data.lstrip(b"\r\n")  # empty lines before a request are none of it (RFC 9112, 2.2)
            if not data:
                return ()
            self._enter_head()
        if self._state is _State.HEAD:
            # The parser tells of a header field only when it is over, so what it holds is counted too.
            self._head_bytes += len(data)
        head, body_bytes = self._head, self._received  # of what is in its body now, if anything is
        try:
            self._parse(data)
        except httptools.HttpParserCallbackError as error:
            found = error.__context__
            if isinstance(found, RequestError):
                self._refuse(found)
            else:  # our own defect, but a stranger's bytes: they end nobody's connection but theirs
                self._refuse(InvalidInput("this request cannot be read"), defect=found or error)
        except httptools.HttpParserError as error:
            self._refuse(InvalidInput(f"this is not HTTP/1.1: {error!s:.200}"))
        if self._state is _State.BODY and self._head is head:
            # The frames of chunks, and fields after the last one, are bounded as a head is between two pieces of the body.
            self._head_bytes = self._head_bytes + len(data) if self._received == body_bytes else 0
        if self._state in (_State.HEAD, _State.BODY) and self._head_bytes > self._limits.head_bytes_max:
            self._refuse(HeaderTooLarge(f"the head is over {self._limits.head_bytes_max} bytes"))
        events, self._events = self._events, []
        return events

    def tick(self, now_ms: float) -> Sequence[ReaderEvent]:
        """Time goes by: what should have come by now is refused."""
        limit_at_ms = self.limit_at_ms
        if limit_at_ms is None or now_ms < limit_at_ms:
            return ()
        what = "body" if self._state is _State.BODY else "head"
        self._refuse(TooSlow(f"the {what} of the request took too long"))
        events, self._events = self._events, []
        return events

    def held_up(self, since_ms: float, now_ms: float) -> None:
        """An answer before it was awaited meanwhile, or nothing was read: what is on its way has that much longer, or from its own beginning on."""
        self._head_at_ms += now_ms - max(since_ms, self._head_at_ms)
        self._body_at_ms += now_ms - max(since_ms, self._body_at_ms)

    def close(self) -> None:
        """The connection is over: nothing is held for it any more."""
        self._budget.give_back(self._taken)
        self._taken = 0
        self._pieces = []
        self._state = _State.CLOSED

    @property
    def limit_at_ms(self) -> float | None:
        """When what is coming in must be here; None: nothing is."""
        match self._state:
            case _State.HEAD:
                return self._head_at_ms + self._limits.head_ms
            case _State.BODY:
                return self._body_at_ms + self._limits.body_limit_ms(self._received)
            case _State.IDLE if not self._has_asked:
                return self._head_at_ms + self._limits.head_ms
        return None

    @property
    def is_idle(self) -> bool:
        """Nothing of a request is here."""
        return self._state is _State.IDLE

    @property
    def is_closed(self) -> bool:
        """Nothing more is read: what was read last ends the connection, or it has ended."""
        return self._state is _State.CLOSED

    # ------------------------------------------------------------ from the parser

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._state is _State.IDLE:
            self._enter_head()

    def on_url(self, url: bytes) -> None:
        """Called by the parser, with a piece of it."""
        if self._head is not None:
            return  # read before
        self._url += url
        if len(self._url) > self._limits.head_bytes_max:
            raise HeaderTooLarge(f"the path is over {self._limits.head_bytes_max} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if self._is_upgrade_offered:
            return  # read before
        self._headers_seen += 1
        if self._headers_seen > self._limits.headers_max:
            raise HeaderTooLarge(f"over {self._limits.headers_max} header fields")
        if self._head is not None:
            return  # a trailer, after chunks: nobody asks for one
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        if key == "host" and key in self._headers:
            raise InvalidInput("this is not HTTP/1.1: it has more than one Host")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        if self._is_upgrade_offered:
            self._is_upgrade_offered = False  # the second one goes on with the body
            return
        limits = self._limits
        method = self._parser.get_method().decode("latin-1")
        if self._parser.get_http_version() == "1.1" and "host" not in self._headers:
            raise InvalidInput("this is not HTTP/1.1: it has no Host")  # RFC 9112, 3.2
        coding = self._headers.get("transfer-encoding", "chunked")
        if coding.strip().lower() != "chunked":
            raise Unsupported(f"Transfer-Encoding {shown(coding)} cannot be read; there is chunked")
        path, _, query = _in_origin_form(self._url.decode("latin-1")).partition("?")
        self._head = Head(method, path, query, self._headers)
        length = self._headers.get("content-length", "").strip().lstrip("0")
        has_body = length != "" or "transfer-encoding" in self._headers
        try:
            self._screen(self._head)
        except RequestError as error:
            if has_body:  # which is not worth reading
                raise
            self._screened = error
        if len(length) > _LENGTH_DIGITS_MAX or int(length or "0") > limits.body_bytes_max:
            raise TooLarge(f"a body of {length:.20} bytes; there may be {limits.body_bytes_max}")
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            self._decoder = Decoder(encoding, limits.body_bytes_max)
        expected = self._headers.get("expect")
        if expected is not None:
            if expected.lower() != "100-continue":
                raise Unsupported(f"Expect: {expected:.60} is not known; there is 100-continue")
            if (
                self._parser.get_http_version() != "1.0"
            ):  # who speaks that knows of no such sign (RFC 9110, 10.1.1)
                self._events.append(ContinueWanted())
        self._is_upgrade_offered = self._parser.should_upgrade() and method != "CONNECT"
        self._state = _State.BODY
        self._head_bytes = 0
        self._body_at_ms = self._now_ms

    def on_body(self, data: bytes) -> None:
        """Called by the parser, with a piece of it, without the frames of chunks."""
        self._received += len(data)
        if self._decoder is not None:
            data = self._decoder.feed(data)
        self._size += len(data)
        if self._size > self._limits.body_bytes_max:
            raise TooLarge(f"the body is over {self._limits.body_bytes_max} bytes")
        if not self._budget.take(len(data)):
            raise Overloaded(NO_ROOM_FOR_BODY)
        self._taken += len(data)
        last = self._pieces[-1] if self._pieces else b""
        if self._pieces and len(data) < _SMALL_BYTES and len(last) < _GATHERED_BYTES:
            # An object for each would hold twenty times what the budget knows of, where chunks are of two bytes.
            if not isinstance(last, bytearray):
                last = self._pieces[-1] = bytearray(last)
            last += data
        else:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Called by the parser, by the first of two without having read the body."""
        if self._is_upgrade_offered:
            return
        if self._decoder is not None:
            self._decoder.end()
        assert self._head is not None, "its head came first"
        first = self._pieces[0] if len(self._pieces) == 1 else None
        body = first if isinstance(first, bytes) else b"".join(self._pieces)
        # Who speaks 1.0 would wait for an answer that says that it goes on, and else for the end (RFC 9112, 9.3).
        keep_alive = self._parser.should_keep_alive() and self._parser.get_http_version() == "1.1"
        if self._screened is not None:
            self._events.append(Refused(self._screened, is_last=not keep_alive, head=self._head))
        else:
            self._events.append(Request(self._head, body, self._began_at_ms, keep_alive))
        self._state = _State.IDLE
        self._has_asked = True
        self._begin()  # the bytes are the request's now

    # ------------------------------------------------------------ inside

    def _enter_head(self) -> None:
        self._state = _State.HEAD
        self._began_at_ms = self._head_at_ms = self._now_ms

    def _parse(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                (read_bytes,) = upgrade.args
            else:
                return
            if not self._is_upgrade_offered:  # CONNECT: what follows cannot be read
                self._note_last()
                return
            data = memoryview(data)[read_bytes:]
            # Not while the offer is handled: it would become the reason for which the next parser refuses something.
            self._pass_over_offer()

    def _pass_over_offer(self) -> None:
        """Read on as if nothing had been said of another protocol (RFC 9110, 7.8): llhttp takes what follows for that one.

        So another parser gets those parts of the head by which it knows where the request ends.
        """
        assert self._head is not None, "it is read"
        lines = [f"{self._head.method} / HTTP/{self._parser.get_http_version()}"]
        lines += (f"{name}: {self._headers[name]}" for name in _FRAMING if name in self._headers)
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data("".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1"))

    def _note_last(self) -> None:
        for at, event in enumerate(self._events):
            if isinstance(event, Request):
                self._events[at] = replace(event, keep_alive=False)
            elif isinstance(event, Refused):
                self._events[at] = replace(event, is_last=True)
        self.close()

    def _refuse(self, error: RequestError, defect: BaseException | None = None) -> None:
        self._events.append(Refused(error, head=self._head, defect=defect))
        self._has_asked = True
        self.close()


def _in_origin_form(target: str) -> str:
    """A path, also where it came with scheme and host, as to a proxy (RFC 9112, 3.2.2)."""
    found = _ABSOLUTE.match(target)
    if found is None:
        return target
    rest = target[found.end() :]
    return rest if rest.startswith("/") else f"/{rest}"
