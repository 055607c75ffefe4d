"""The configuration as it is carried to hosts: one folder, the same on all of them, with every file it names.

Roles read it with paths relative to itself. What only the operator's machine can say is filled in: where roles are, and each
host's address. The name of its folder is a hash of its content.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.ssh.inventory import CONFIG_FILE
from fabric.errors import ConfigError
from roles.config.cluster import ClusterConfig
from roles.config.documents import read_document
from roles.config.read_config import parse_config

KEYS: Final = "../../keys"
"""The keys folder, from a configuration's."""
_FILES: Final = "files"
BYTES_MAX: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration file as it was when it was read: what is done follows this, whatever becomes of the file."""

    path: Path
    document: Mapping[str, Any]
    config: ClusterConfig

    @classmethod
    def of(cls, path: Path) -> Source:
        """Raises ConfigError as `load_config` does."""
        document = read_document(path)
        return cls(path, document, parse_config(document, path.parent, source=str(path)))


@dataclass(frozen=True, slots=True)
class CarriedConfig:
    """`files`: by path in the folder, a file here or its content. `name`: of the folder."""

    name: str
    files: Mapping[str, Path | bytes]


def carried_config(source: Source, addresses: Mapping[str, str]) -> CarriedConfig:
    """The folder. `addresses`: of every host. Raises ConfigError for a file that is named and is not there."""
    files: dict[str, Path | bytes] = {}
    base_dir = source.path.parent
    document = json.loads(json.dumps(source.document, default=str))
    document.pop("deploy", None)
    places = source.config.places
    document["cluster"] |= {
        "schedulers": [
            {"host": one.host, "standby": one.is_standby, "port": one.port, "shard": one.shard}
            for one in places.schedulers
        ],
        "frontends": [
            {
                "host": one.host,
                "listen": {
                    key: value
                    for key, value in (("client", one.client), ("http", one.http), ("metrics", one.metrics))
                    if value is not None
                },
            }
            for one in places.frontends
        ],
        "addresses": {host: addresses[host] for host in source.config.hosts},
    }
    if source.config.security.keys is not None:
        document["security"] = {"keys": KEYS}
    for model in document["models"]:
        _take_along(model, base_dir, files)
    files[CONFIG_FILE] = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{_sha256(content)}\0".encode())
    return CarriedConfig(digest.hexdigest()[:12], files)


def _take_along(model: dict[str, Any], base_dir: Path, files: dict[str, Path | bytes]) -> None:
    """Every file that a model's section names, under a new name; the section says that one."""

    def carried(path: str, where: str) -> str:
        found = base_dir / path
        if not found.exists():
            raise ConfigError(f"models: {where} of {model.get('name')}: there is no {found}")
        digest = hashlib.sha256(str(found.resolve()).encode()).hexdigest()[:8]
        name = f"{_FILES}/{digest}-{found.name}"
        for inner, file in _files_of(found):
            files[f"{name}{inner}"] = file
        return name

    def profile(value: Any) -> None:
        if isinstance(value, dict):
            if str(value.get("ref", "")).endswith(".json"):
                value["ref"] = carried(value["ref"], "profile.ref")
            for inner in (value.get("by_type") or {}).values():
                profile(inner)

    profile(model.get("profile"))
    loader, arrival = model.get("loader") or {}, model.get("arrival") or {}
    if loader.get("weights"):
        loader["weights"] = carried(loader["weights"], "loader.weights")
    if arrival.get("path"):
        arrival["path"] = carried(arrival["path"], "arrival.path")
    if loader.get("python"):
        files.update(_module(loader["python"].partition(":")[0], base_dir))


def _module(module: str, base_dir: Path) -> Iterator[tuple[str, Path]]:
    """The file or the package of a user's module beside the file or where Python here finds it; nothing of what is installed."""
    top = module.partition(".")[0]
    for found in (base_dir / f"{top}.py", base_dir / top, Path.cwd() / f"{top}.py", Path.cwd() / top):
        if found.is_file() or (found / "__init__.py").is_file():
            for inner, file in _files_of(found):
                if "__pycache__" not in inner:
                    yield f"{found.name}{inner}", file
            return
    if importlib.util.find_spec(top) is None:
        raise ConfigError(
            f"loader.python: there is no module {top} beside the file, in this folder or installed"
        )


def _files_of(found: Path) -> Iterator[tuple[str, Path]]:
    if found.is_file():
        yield "", found
        return
    for path in sorted(found.rglob("*")):
        if path.is_file():
            yield f"/{path.relative_to(found).as_posix()}", path


def _sha256(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    if content.stat().st_size > BYTES_MAX:
        raise ConfigError(f"{content}: is larger than {BYTES_MAX >> 30} GiB; put it on the hosts yourself")
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
