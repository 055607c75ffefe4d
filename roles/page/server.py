"""Serves the page, its feed and answers to questions. Nothing here changes anything.

Browsers are told to load nothing from anywhere else. A request must name this host as itself or as loopback: a site of somebody
else's whose name leads here (DNS rebinding) gets nothing. A question costs processor time, so it takes a header that no
other site's page can send.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib import resources
from typing import Final
from urllib.parse import parse_qs

from fabric.clock import Clock
from fabric.errors import InvalidInput, Overloaded
from roles.page.feed import Feed
from roles.page.questions import KINDS, Questions, question_of
from roles.runtime.host_header import host_named, own_hosts
from roles.runtime.small_http import Answered, Asked, SmallHttpServer

CONNECTIONS_MAX: Final = 64
"""A tab has one for a moment each second."""
QUERY_CHARS_MAX: Final = 200
ASKED_BY: Final = "x-tenuto-page"
JSON: Final = "application/json"
_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFE: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


def files() -> Mapping[str, tuple[bytes, str]]:
    """By path: what a browser loads, and its type. All of it is in memory from the start."""
    found = {}
    for file in resources.files("roles.page").joinpath("static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            found[f"/{file.name}"] = file.read_bytes(), _TYPES[suffix]
    found["/"] = found.pop("/index.html")
    return found


class PageServer:
    """`on_read` is called whenever somebody reads the feed, on the server's thread. Raises ConfigError for a bad address."""

    def __init__(
        self,
        address: str,
        feed: Feed,
        questions: Questions,
        models: Callable[[], frozenset[str]],
        on_read: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._feed = feed
        self._questions = questions
        self._models = models
        self._on_read = on_read
        self._clock = clock
        self._files = files()
        self._own = own_hosts(address)
        self._server = SmallHttpServer(
            address, self._answer, "page", "the page cannot be served", CONNECTIONS_MAX
        )
        # `url` may say it in another way than the file.
        self._own |= own_hosts(self._server.address)

    @property
    def url(self) -> str:
        """What a browser opens."""
        return f"http://{self._server.address}/"

    def close(self) -> None:
        """End it."""
        self._server.close()

    async def _answer(self, asked: Asked) -> Answered:
        if host_named(asked.headers.get("host", "")) not in self._own:
            return _plain(HTTPStatus.MISDIRECTED_REQUEST, "this page is not of that host")
        if asked.path in self._files:
            body, content_type = self._files[asked.path]
            return Answered(HTTPStatus.OK, body, content_type, _SAFE)
        if asked.path == "/feed":
            self._on_read()
            after, served = _number_of(asked.query, "after"), _text_of(asked.query, "served")
            answer = self._feed.answer(after, served, self._clock.now_ms())
            return Answered(HTTPStatus.OK, answer, JSON, _SAFE)
        if asked.path in KINDS or asked.path == "/answer":
            if ASKED_BY not in asked.headers:
                return _plain(HTTPStatus.FORBIDDEN, f"a question needs the header {ASKED_BY}")
            return self._told(asked) if asked.path == "/answer" else self._asked(asked)
        return _plain(HTTPStatus.NOT_FOUND, "there is no such page")

    def _asked(self, asked: Asked) -> Answered:
        if asked.method != "GET":
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "GET")
        try:
            question = question_of(KINDS[asked.path], asked.query, self._models())
            number = self._questions.ask(question)
        except InvalidInput as error:
            return _plain(HTTPStatus.BAD_REQUEST, str(error))
        except Overloaded as error:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        self._on_read()
        told = {"number": number, "command": ["tenuto", *question.arguments]}
        return Answered(HTTPStatus.ACCEPTED, json.dumps(told).encode(), JSON, _SAFE)

    def _told(self, asked: Asked) -> Answered:
        number = _number_of(asked.query, "number")
        answer = self._questions.answer(number)
        if answer is None:
            return _plain(HTTPStatus.NOT_FOUND, "that question is not known any more")
        self._on_read()
        return Answered(HTTPStatus.OK, answer or b'{"is_waiting": true}', JSON, _SAFE)


def _text_of(query: str, key: str) -> str:
    return parse_qs(query).get(key, [""])[-1] if len(query) < QUERY_CHARS_MAX else ""


def _number_of(query: str, key: str) -> int:
    """A whole number in a query; 0 where it has none."""
    text = _text_of(query, key)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def _plain(status: HTTPStatus, text: str) -> Answered:
    return Answered(status, f"{text}\n".encode(), headers=_SAFE)
