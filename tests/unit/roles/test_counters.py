"""Every counter a role keeps is in its status from its start: one that appears at its first event hides that event's step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import roles
from fabric.ids import Incarnation, NodeId
from roles.frontend import shell as frontend_shell
from roles.frontend.core import FrontendCore
from roles.gpu_worker.core import COUNTED
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from tests.builders import frontend_settings
from tests.worker_builders import serving_core

ROOMS = Path(roles.__file__).parent
FRONTEND = {*FrontendCore(frontend_settings()).counters, *frontend_shell._COUNTED}
AGENT = set(NodeAgentCore(AgentSelf(NodeId("node-0"), Incarnation("0")), FoundDevices(())).counters)
OFFENCES = {
    "late_results",
    "messages_unlisted",
    "peers_cut_off",
    "messages_ignored",
}  # told once there are any


def counted_in(room: Path) -> Iterator[str]:
    """Each name that the code of a room counts up under, spelled out there."""
    for file in room.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.AugAssign)
                and isinstance(node.target, ast.Subscript)
                and isinstance(node.target.value, ast.Attribute)
                and node.target.value.attr in ("counters", "_counters", "_counts")
                and isinstance(node.target.slice, ast.Constant)
                and isinstance(node.target.slice.value, str)
            ):
                yield node.target.slice.value


@pytest.mark.parametrize(
    ("room", "told"), [("frontend", FRONTEND), ("gpu_worker", set(COUNTED)), ("node_agent", AGENT)]
)
def test_what_a_role_counts_is_told_from_its_start(room: str, told: set[str]) -> None:
    counted = set(counted_in(ROOMS / room)) - OFFENCES
    assert len(counted) >= 9, "the roles count otherwise than this test looks for"
    assert counted <= told


def test_a_worker_that_did_nothing_says_so() -> None:
    assert set(COUNTED) <= set(serving_core().counters)
