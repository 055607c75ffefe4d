"""What users import stays where it is (docs/design.md, section 10)."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

import pytest

PROMISED = {
    "fabric.client": ("Client", "BlockingClient", "ClientOptions", "InferResult", "ask_status"),
    "fabric.errors": (
        "FabricError",
        "RequestError",
        "PeerLost",
        "DeadlineExceeded",
        "Overloaded",
        "InvalidInput",
    ),
    "roles.cli": ("main",),
}
COMMANDS = {"demo", "down", "up"}


@pytest.mark.parametrize(
    ("module", "name"), [(module, one) for module, names in PROMISED.items() for one in names]
)
def test_what_users_import_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_installation_has_the_command_and_those_that_others_add() -> None:
    (tenuto,) = entry_points(group="console_scripts", name="tenuto")
    assert tenuto.value == "roles.cli:main"
    assert {point.name for point in entry_points(group="tenuto.commands")} >= COMMANDS
