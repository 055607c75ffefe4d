"""Who is greeted when: a hello makes a scheduler forget what it was told, so only the core says it to the active one."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fabric.heartbeats import HeartbeatTiming
from fabric.ids import FrontendId, Incarnation, PeerId
from fabric.messages import FrontendHello
from roles.frontend import scheduler_links
from roles.frontend.scheduler_links import GREET_EVERY_MS, SchedulerLinks
from roles.runtime.core import SCHEDULER, Lost

HELLO = FrontendHello(FrontendId("frontend-0"), Incarnation("0"), ())


class ManualClock:
    def __init__(self) -> None:
        self.at_ms = 0.0

    def now_ms(self) -> float:
        return self.at_ms


class Link:
    """Remembers what was sent, if it is there."""

    def __init__(self) -> None:
        self.is_there = True
        self.sent: list[object] = []

    def send(self, peer: PeerId, message: object) -> bool:
        del peer
        if self.is_there:
            self.sent.append(message)
        return self.is_there


def test_the_active_scheduler_is_not_greeted_behind_the_cores_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_links, "ServerSource", lambda *_: None)
    monkeypatch.setattr(scheduler_links, "TranslatedSource", lambda *_: None)
    clock = ManualClock()
    links = {number: Link() for number in range(2)}
    greeting = SchedulerLinks(0, cast(Any, links), clock, HeartbeatTiming(), lambda *_: None)
    greeting.greet(HELLO)
    for number in links:
        greeting._translated(number, Lost(SCHEDULER, "silent"))
    clock.at_ms += GREET_EVERY_MS
    greeting.greet_others(HELLO)
    assert [len(link.sent) for link in links.values()] == [1, 2]
    greeting.use(1)
    clock.at_ms += GREET_EVERY_MS
    greeting.greet_others(HELLO)
    assert [len(link.sent) for link in links.values()] == [2, 2], "now it is one of the others"
    links[0].is_there = False
    greeting.greet(HELLO)
    links[0].is_there = True
    clock.at_ms += GREET_EVERY_MS
    greeting.greet_others(HELLO)
    assert len(links[0].sent) == 3, "until it hears it"
