"""What is said where an operator's request gets no answer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest

import fabric.messages
from fabric.client import ask_status
from fabric.errors import PeerLost
from fabric.ids import ModelId, NodeId
from fabric.messages import (
    DrainAsked,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    PlanChange,
    PlanRequest,
    RestartRoles,
    RoleDrain,
    RoleDrainDryRun,
    RoleRequest,
    SectionAsked,
)
from fabric.sockets import DealerLink
from roles.runtime.operator_request import NotAnswered, ask_change
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
