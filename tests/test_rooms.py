"""The rooms and arrows: which package may import which, and the one door to every outsider."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fabric", "profiles", "policies", "roles", "deploy")

# From a room to what of ours it may import (prefixes of module names).
ARROWS = {
    "fabric": ("fabric",),
    "profiles": ("profiles", "fabric.ids", "fabric.errors"),
    "policies": ("policies", "profiles", "fabric.ids", "fabric.errors"),
    "roles": ("roles", "policies", "profiles", "fabric"),
    "deploy": ("deploy", "roles.config", "fabric"),
}

# From an outsider to the files (or folders, with a slash) that may import it.
DOORS = {
    "zmq": ("fabric/sockets.py",),
    "msgpack": ("fabric/codec.py", "roles/journal.py"),
    "msgspec": ("fabric/codec.py", "fabric/messages.py", "roles/config.py", "roles/config_sections.py"),
    "time": ("fabric/clock.py",),
    "torch": ("roles/gpu_worker/executors/", "profiles/profilers/", "roles/demo/digits_model.py"),
    "torchvision": ("roles/gpu_worker/executors/", "profiles/profilers/"),
    "transformers": ("roles/gpu_worker/executors/", "profiles/profilers/"),
    "pulp": ("policies/",),
    "highspy": ("policies/",),
    "yaml": ("roles/documents.py",),
    "matplotlib": ("roles/plots/",),
    "random": ("roles/", "fabric/loopback.py"),
}

FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "cPickle"}


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room they lead to"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in allowed)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    place = path.relative_to(ROOT).as_posix()
    for module in imports_of(path):
        top = module.partition(".")[0]
        assert top not in FORBIDDEN, f"{place} imports {module}: nothing here runs what it reads"
        if top in ROOMS:
            package_of_allowed = any(prefix.startswith(f"{module}.") for prefix in ARROWS[room])
            assert is_within(module, ARROWS[room]) or package_of_allowed, f"{place} may not import {module}"
        if top in DOORS:
            is_door = any(
                place == door or (door.endswith("/") and place.startswith(door)) for door in DOORS[top]
            )
            assert is_door, f"{place} imports {module}; its door is {DOORS[top]}"


def test_the_arrows_have_no_circle() -> None:
    order = {room: rank for rank, room in enumerate(ROOMS)}
    for room, allowed in ARROWS.items():
        for prefix in allowed:
            assert order[prefix.partition(".")[0]] <= order[room]


def test_only_the_clock_says_what_time_it_is() -> None:
    for path in sources():
        if path.relative_to(ROOT).as_posix() == "fabric/clock.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                claim = f"{node.value.id}.{node.attr}"
                assert claim not in {"datetime.now", "datetime.utcnow", "loop.time"}, f"{path} reads {claim}"
