"""`tenuto top` as its screen and its thread go."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

import pytest

from fabric.errors import PeerLost
from roles.cli.terminal import Screen
from roles.cli.top import _Top
from roles.cli.top_view import Facts, TopView


def test_who_quits_waits_for_the_look_that_is_under_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It asks by ZeroMQ, whose sockets must not be closed under it."""
    began, may_end = threading.Event(), threading.Event()
    looks = []

    def facts_of(*_: object) -> Facts:
        began.set()
        assert may_end.wait(60)
        looks.append(threading.current_thread())
        raise PeerLost("there is no cluster")

    class OneLook:
        height = 20

        def keys(self, _: float) -> str | None:
            if not began.is_set():
                return ""
            may_end.set()
            return None

        def show(self, _: object) -> None:
            pass

    monkeypatch.setattr("roles.cli.top.facts_of", facts_of)
    monkeypatch.setattr(TopView, "found", lambda *_: None)
    monkeypatch.setattr(TopView, "screen", lambda *_: "")
    facts = cast(Facts, type("NoFacts", (), {"at_ms": 0.0}))
    _Top(cast(Screen, OneLook()), tmp_path, None, 0.0, facts).run()
    (thread,) = looks
    assert not thread.is_alive()
