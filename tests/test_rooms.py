"""The rooms and arrows: which package may import which, and the one door to every outsider."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fabric", "profiles", "policies", "roles", "deploy")
FILES_MAX = 15  # of a folder, and …
LINES_MAX = 400  # … of a file, unless docs/design.md says why not

# From a room to what of ours it may import (prefixes of module names).
ARROWS = {
    "fabric": ("fabric",),
    "profiles": ("profiles", "fabric.ids", "fabric.errors", "fabric.policy_options"),
    "policies": ("policies", "profiles", "fabric.ids", "fabric.errors", "fabric.policy_options"),
    "roles": ("roles", "policies", "profiles", "fabric"),
    "deploy": ("deploy", "roles", "policies", "profiles", "fabric"),
}

# The same between the rooms inside `roles`.
INNER_ARROWS: dict[str, tuple[str, ...]] = {
    "runtime": (),
    "applications": (),
    "config": ("applications",),
    "workload": ("applications", "config"),
    "frontend": ("runtime", "applications"),
    "scheduler": ("runtime", "config"),
    "gpu_worker": ("runtime",),
    "node_agent": ("runtime", "config"),
    "gateway": ("runtime", "config"),
    "profiling": ("runtime", "gpu_worker", "node_agent"),
    "simulator": (
        "runtime",
        "config",
        "workload",
        "applications",
        "frontend",
        "scheduler",
        "gpu_worker",
        "node_agent",
    ),
    "benchmark": ("runtime", "applications", "config", "workload", "scheduler", "gateway"),
    "observability": ("runtime", "config", "workload", "scheduler", "simulator"),
    "page": ("runtime", "observability"),
    "lab": ("runtime", "config", "workload", "scheduler", "simulator", "benchmark"),
}
INNER_ARROWS["cli"] = tuple(INNER_ARROWS)

# From an outsider to the files (or folders, with a slash) that may import it.
DOORS = {
    "zmq": ("fabric/sockets/", "fabric/curve.py", "fabric/curve_authenticator.py"),
    "msgpack": ("fabric/codec.py", "roles/runtime/journal.py"),
    "msgspec": (
        "fabric/codec.py",
        "fabric/json_files.py",
        "fabric/keys.py",
        "fabric/messages/",
        "profiles/documents.py",  # JSON
        "roles/config/read_config.py",
        "roles/config/sections.py",
        "roles/gateway/http/protocol_v2.py",  # JSON
    ),
    "httptools": ("roles/gateway/http/reader.py",),
    "uvloop": ("roles/gateway/shell.py",),
    "grpc": ("roles/gateway/rpc/",),
    "google": ("roles/gateway/rpc/",),
    "time": ("fabric/clock.py", "deploy/ssh/on_host/"),  # that runs alone on a host, without ours
    "torch": ("roles/gpu_worker/executors/", "profiles/profilers/", "deploy/local/demo/digits_model.py"),
    "torchvision": ("roles/gpu_worker/executors/", "profiles/profilers/"),
    "transformers": ("roles/gpu_worker/executors/", "profiles/profilers/"),
    "pulp": ("policies/",),
    "highspy": ("policies/",),
    "yaml": ("roles/config/documents.py",),
    "matplotlib": ("roles/lab/plots/",),
    "opentelemetry": ("roles/observability/spans.py",),
    "prometheus_client": ("roles/runtime/metrics/page.py",),
    "sklearn": ("profiles/estimator/",),
    "random": ("roles/", "fabric/loopback.py"),
}

# What every room may take from a package whose door is elsewhere: a struct is a dataclass that is cheap to make.
OPEN_TO_ALL = {"msgspec.Struct", "msgspec.field", "msgspec.structs.replace", "msgspec.structs.asdict"}

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
            if node.module.partition(".")[0] in ROOMS:
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
        if top in DOORS and module not in OPEN_TO_ALL:
            is_door = any(
                place == door or (door.endswith("/") and place.startswith(door)) for door in DOORS[top]
            )
            assert is_door, f"{place} imports {module}; its door is {DOORS[top]}"


def test_the_arrows_have_no_circle() -> None:
    order = {room: rank for rank, room in enumerate(ROOMS)}
    for room, allowed in ARROWS.items():
        for prefix in allowed:
            assert order[prefix.partition(".")[0]] <= order[room]


@pytest.mark.parametrize("room", INNER_ARROWS)
def test_a_role_imports_only_what_its_room_may(room: str) -> None:
    allowed = {room, *INNER_ARROWS[room]}
    for path in sorted((ROOT / "roles" / room).rglob("*.py")):
        for module in imports_of(path):
            if module.startswith("roles."):
                assert module.split(".")[1] in allowed, f"{path} may not import {module}"


def test_every_room_of_the_roles_has_its_arrows_and_they_have_no_circle() -> None:
    rooms = {path.parent.name for path in (ROOT / "roles").glob("*/__init__.py")}
    assert rooms == set(INNER_ARROWS)
    assert not list((ROOT / "roles").glob("[!_]*.py")), "no loose files"
    order = {room: rank for rank, room in enumerate(INNER_ARROWS)}
    assert all(order[to] < order[room] for room, allowed in INNER_ARROWS.items() for to in allowed)


def test_the_design_page_shows_these_arrows() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `roles/(\w+)/` \|[^|]*\| *([^|]*?) *\|$", page, re.MULTILINE))
    assert told.pop("cli") == "all above"
    shown = {room: tuple(filter(None, text.split(", "))) for room, text in told.items()}
    assert shown == {room: allowed for room, allowed in INNER_ARROWS.items() if room != "cli"}


def test_the_design_page_has_every_large_folder_and_file() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    page = page[page.index("| folder | why") : page.index("## 3.")]
    kept = (*ROOMS, "tests", "benchmarks", "docs")
    folders = Counter(
        f"{path.parent.relative_to(ROOT)}/"
        for room in kept
        for path in (ROOT / room).rglob("*.*")
        if path.suffix in {".py", ".md"} and path.name != "__init__.py"
    )
    files = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > LINES_MAX
    }
    large = files | {folder for folder, count in folders.items() if count > FILES_MAX}
    assert set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)) == large


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources()
    }
    arrows = {
        module: {found for found in imports_of(path) if found in modules and found != module}
        for module, path in modules.items()
    }
    for module, found in arrows.items():  # a package's own files may be imported by its first page
        arrows[module] = {one for one in found if not module.startswith(f"{one}.")}
    list(TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


def test_only_the_clock_says_what_time_it_is() -> None:
    for path in sources():
        if path.relative_to(ROOT).as_posix() == "fabric/clock.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                claim = f"{node.value.id}.{node.attr}"
                assert claim not in {"datetime.now", "datetime.utcnow", "loop.time"}, f"{path} reads {claim}"
