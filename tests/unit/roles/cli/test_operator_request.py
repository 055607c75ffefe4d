"""What is said where an operator's request gets no answer."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

import fabric.messages
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
from roles.runtime.operator_request import NotAnswered, ask_change

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
