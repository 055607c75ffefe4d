"""`tenuto top` as its screen and its thread go."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fabric.errors import PeerLost
from fabric.messages import StatusListed
from roles.cli.terminal import Screen
from roles.cli.top import _Top, facts_of
from roles.cli.top_view import Facts, TopView
from roles.runtime.live_figures import LiveFigures
from roles.runtime.running_cluster import ClusterReport


def test_a_look_is_of_the_moment_when_schedulers_are_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Counts of slices are of then: rates would be too low where roles that are silent were waited for after it."""
    clock: Any = SimpleNamespace(at_ms=1_000.0, now_ms=lambda: clock.at_ms)

    def waits(found: Any) -> Any:
        clock.at_ms += 1_000.0
        return found

    nobody = ClusterReport({}, (), StatusListed("scheduler-0", 1, (), (), {}), {})
    monkeypatch.setattr("roles.cli.top.MonotonicClock", lambda: clock)
    monkeypatch.setattr("roles.cli.top.look", lambda *_: waits(nobody))
    monkeypatch.setattr("roles.cli.top.live_figures", lambda *_: waits(LiveFigures({})))
    monkeypatch.setattr("roles.cli.top.newest_bad_of_all", lambda *_: waits(([], [])))
    assert facts_of(tmp_path, None).at_ms == 1_000.0


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
