"""What users import stays where it is (docs/design.md, section 10)."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from roles.cli.group import COMMANDS

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
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("module", "name"), [(module, one) for module, names in PROMISED.items() for one in names]
)
def test_what_users_import_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_command_is_where_the_installation_looks_for_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"tenuto": "roles.cli:main"}


@pytest.mark.parametrize("target", COMMANDS.values())
def test_every_command_is_there(target: str) -> None:
    module, _, name = target.partition(":")
    assert isinstance(getattr(importlib.import_module(module), name), click.Command)


def test_importing_the_command_changes_no_signal_handler() -> None:
    code = "import signal, roles.cli, roles.cli.group; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "True"


@pytest.mark.parametrize("role", ["frontend", "scheduler", "node_agent", "gpu_worker"])
def test_a_role_starts_without_what_only_keys_and_pages_need(role: str) -> None:
    code = f"import sys, roles.{role}.shell; print(*sorted({{'asyncio', 'ssl', 'email', 'torch'}} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


def test_what_the_client_promises_says_its_types_when_asked() -> None:
    """Frameworks ask, and users write such hints themselves."""
    code = (
        "import typing, fabric.client as c\n"
        "from fabric.link import NamedTensor\n"
        "print(c.Inputs | None)\n"
        "for one in (c.InferResult, c.RunResult, NamedTensor, *[\n"
        "    getattr(kind, name) for kind in (c.Client, c.BlockingClient) for name in dir(kind) if callable(getattr(kind, name)) and name[0] != '_'\n"
        "]):\n"
        "    typing.get_type_hints(one)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def imported_by(code: str) -> set[str]:
    """The names of all modules that a process has loaded when it has done that."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "roles.scheduler.shell",
        "roles.node_agent.shell",
        "roles.runtime.running_cluster",
        "roles.cli.role_commands",
        *(f"roles.cli.{name}" for name in ("status", "restart", "models", "health", "top", "doctor", "keys")),
        "fabric.client",
    ],
)
def test_what_never_has_tensors_starts_without_numpy(module: str) -> None:
    """It would be three tenths of a start, and 10 MB."""
    assert "numpy" not in imported_by(f"import {module}")


@pytest.mark.parametrize(
    "module",
    [
        *(
            "roles.scheduler.shell",
            "roles.node_agent.shell",
            "roles.frontend.shell",
            "roles.gpu_worker.shell",
        ),
        "deploy.local.commands",
        *(f"roles.cli.{name}" for name in ("role_commands", "status", "restart", "models", "health", "top")),
    ],
)
def test_what_asks_for_no_inference_starts_without_the_client(module: str) -> None:
    """It and asyncio would be a sixth of what `tenuto status` takes."""
    assert not imported_by(f"import {module}") & {"asyncio", "fabric.client"}


def test_reading_a_configuration_needs_no_numpy() -> None:
    """Every role and most commands read one, and with it the policies that it names, or that are taken where it names none."""
    load = (
        "from roles.config.read_config import load_config; load_config(pathlib.Path('examples/cluster.yaml'))"
    )
    assert "numpy" not in imported_by(f"import pathlib; {load}")
