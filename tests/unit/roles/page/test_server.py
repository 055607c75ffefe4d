"""Under which names the page answers."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fabric.clock import MonotonicClock
from roles.page.feed import Feed
from roles.page.questions import Questions
from roles.page.server import PageServer


def status_under(name: str, netloc: str) -> int:
    with closing(http.client.HTTPConnection(netloc, timeout=30)) as connection:
        connection.putrequest("GET", "/", skip_host=True)
        connection.putheader("Host", name)
        connection.endheaders()
        return connection.getresponse().status


@pytest.mark.parametrize("host", ["127.0.0.1", "LocalHost", "127.2", "0X7F000002"])
def test_the_page_answers_under_the_name_it_was_given_and_the_address_it_prints(
    host: str, tmp_path: Path
) -> None:
    """The last two are 127.0.0.2, as the system's resolver reads them: names that are not what is bound."""
    clock = MonotonicClock()
    questions = Questions(tmp_path, None, clock)
    server = PageServer(f"{host}:0", Feed(), questions, frozenset, lambda: None, clock)
    with closing(server):
        netloc = urlsplit(server.url).netloc
        _, _, port = netloc.rpartition(":")
        for name in (
            host,
            host.lower(),
            host.upper(),
            f"{host}:{port}",
            netloc,
            "localhost",
            f"[::1]:{port}",
        ):
            assert status_under(name, netloc) == 200, name
        for name in ("evil.example", f"evil.example:{port}", "127.0.0.3", ""):
            assert status_under(name, netloc) == 421, name
