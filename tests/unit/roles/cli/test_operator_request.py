"""What is said where an operator's request gets no answer."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest

import fabric.messages
from fabric.client import ask_status
from fabric.clock import VirtualClock
from fabric.errors import PeerLost
from fabric.ids import ModelId, NodeId, PeerId
from fabric.link import Received
from fabric.messages import (
    AnyMessage,
    Changed,
    DrainAsked,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    Ping,
    PlanChange,
    PlanRequest,
    Pong,
    RestartRoles,
    RoleDrain,
    RoleDrainDryRun,
    RoleRequest,
    SectionAsked,
)
from fabric.sockets import DealerLink
from roles.runtime.core import SCHEDULER
from roles.runtime.operator_request import SILENCE_MAX_MS, NotAnswered, ask_change
from tests.scarcity import no_descriptors

A = ModelId("a")
CHANGES: list[PlanRequest | RoleRequest] = [
    ModelsAdd(1, "[]"),
    ModelsRemove(1, (A,)),
    ModelSet(1, A),
    DrainAsked(1, NodeId("here")),
    RoleDrain(1, "frontend-0"),
    RestartRoles(1),
]
QUESTIONS: list[PlanRequest | RoleRequest] = [
    ModelsAdd(1, "[]", dry_run=True),
    ModelsRemove(1, (A,), dry_run=True),
    ModelSet(1, A, dry_run=True),
    DrainAsked(1, NodeId("here"), dry_run=True),
    RoleDrainDryRun(1, "frontend-0"),
    SectionAsked(1, A),
]


def test_every_message_that_can_be_a_dry_run_is_here() -> None:
    having = {
        kind for kind in vars(fabric.messages).values() if "dry_run" in getattr(kind, "__struct_fields__", ())
    }
    assert having == {type(one) for one in QUESTIONS if getattr(one, "dry_run", False)}
    assert having == set(get_args(PlanChange))


@pytest.mark.parametrize("request_", [*CHANGES, *QUESTIONS], ids=lambda one: type(one).__name__)
def test_whether_a_change_was_made_is_in_doubt_only_of_a_change(
    tmp_path: Path, request_: PlanRequest | RoleRequest
) -> None:
    with pytest.raises(NotAnswered) as raised:
        ask_change([f"ipc://{tmp_path}/nobody"], request_, limit_ms=0)
    assert ("whether the change was made is not known" in str(raised.value)) == (request_ in CHANGES)


class _AtWork:
    """A scheduler that answers each ping within a turn, and what it was asked after `work_ms`.

    `stopped_in`: where its host is stopped for 10 s, once.
    """

    refusal = ""

    def __init__(self, clock: VirtualClock, work_ms: float, stopped_in: str = "") -> None:
        self._clock, self._done_at_ms, self._stopped_in = clock, work_ms, stopped_in
        self._answers, self._under_way = list[Changed | Pong](), list[Changed | Pong]()

    def send(self, peer: PeerId, message: AnyMessage) -> bool:
        if isinstance(message, Ping):
            self._answers.append(Pong(message.number))
        return True

    def receive(self, limit: int) -> list[Received]:
        self._clock.advance(self._clock.now_ms() + 400.0)
        if self._clock.now_ms() >= self._done_at_ms:
            self._answers.append(Changed(1, "ok"))
        said, self._under_way, self._answers = self._under_way, self._answers, []
        return [Received(SCHEDULER, one) for one in said]

    def take_lost(self) -> bool:
        self._may_be_stopped("turn")
        return False

    @property
    def has_more(self) -> bool:
        self._may_be_stopped("wait")
        return True

    def _may_be_stopped(self, where: str) -> None:
        if where == self._stopped_in and self._clock.now_ms() > 2_000.0:
            self._stopped_in = ""
            self._clock.advance(self._clock.now_ms() + 10_000.0)

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_a_scheduler_that_is_at_work_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may take its `time_limit_s`, and a move 300 s for each model of a slice."""
    clock = VirtualClock(0.0)
    link = _AtWork(clock, 6 * 3_600_000.0)
    monkeypatch.setattr(DealerLink, "connect", lambda *_, **__: link)
    assert ask_change(["ipc://there"], ModelsAdd(1, "[]"), clock=clock).status == "ok"


@pytest.mark.parametrize("where", ["turn", "wait"])
@pytest.mark.parametrize(
    "request_", [ModelsAdd(1, "[]"), SectionAsked(1, A)], ids=lambda one: type(one).__name__
)
def test_a_command_that_was_stopped_itself_judges_nobody(
    monkeypatch: pytest.MonkeyPatch, where: str, request_: PlanRequest
) -> None:
    """Suspended, or frozen with its container: what was said meanwhile is read a moment later, and nobody may have been asked."""
    clock = VirtualClock(0.0)
    link = _AtWork(clock, 14_000.0, where)
    monkeypatch.setattr(DealerLink, "connect", lambda *_, **__: link)
    assert ask_change(["ipc://there"], request_, clock=clock).status == "ok"


@pytest.mark.parametrize(
    "question", [SectionAsked(1, A), RoleDrainDryRun(1, "frontend-0")], ids=lambda one: type(one).__name__
)
def test_a_question_that_needs_no_plan_and_that_nobody_there_knows_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch, question: PlanRequest | RoleRequest
) -> None:
    clock = VirtualClock(0.0)
    link = _AtWork(clock, math.inf)
    monkeypatch.setattr(DealerLink, "connect", lambda *_, **__: link)
    with pytest.raises(NotAnswered):
        ask_change(["ipc://there"], question, clock=clock)
    assert SILENCE_MAX_MS < clock.now_ms() < 10_000.0, "later than who is gone is told as that"


def test_a_change_that_nobody_waits_for_any_more_is_given_up_and_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = VirtualClock(0.0)
    link = _AtWork(clock, math.inf)
    monkeypatch.setattr(DealerLink, "connect", lambda *_, **__: link)
    with pytest.raises(PeerLost, match=r"nobody waits.*whether the change was made is not known"):
        ask_change(["ipc://there"], ModelsAdd(1, "[]"), clock=clock, is_given_up=lambda: clock.now_ms() > 900)
    assert clock.now_ms() == 1_200.0, "the next turn"


def test_where_no_descriptor_is_left_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks in a role that serves, as the page does, goes on."""
    connect = DealerLink.connect
    with ExitStack() as scarcity:

        def connected(*arguments: Any, **named: Any) -> DealerLink:
            link = connect(*arguments, **named)
            scarcity.enter_context(no_descriptors())
            return link

        monkeypatch.setattr(DealerLink, "connect", connected)
        with pytest.raises(PeerLost):
            ask_change([f"ipc://{tmp_path}/nobody"], SectionAsked(1, A), limit_ms=50.0)
        scarcity.pop_all().close()
        with pytest.raises(PeerLost):
            ask_status(f"ipc://{tmp_path}/nobody", 50.0)
