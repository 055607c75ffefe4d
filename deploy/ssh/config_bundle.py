"""The configuration as it is carried to hosts: one folder, the same on all of them, with every file it names.

Roles read it with paths relative to itself. What only the operator's machine can say is filled in: where roles are, and each
host's address. The name of its folder is a hash of its content.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.ssh.inventory import CONFIG_FILE, Rank, RoleOnHost, gateway_file, inventory_of
from fabric.errors import ConfigError
from fabric.keys import naming_path
from roles.config.cluster import ClusterConfig
from roles.config.documents import through_json
from roles.config.named_files import loaders_of, name_files
from roles.config.read_config import load_document

KEYS: Final = "../../keys"
"""The keys folder, from a configuration's."""
_FILES: Final = "files"
_HERE: Final = "/proc/self/cwd"
VIEWS: Final = "views.json"
_SCHEDULERS_ALONE: Final = frozenset(
    {"models", "seed", "rate_rps", "popularity", "batching", "placement", "applications", "graph_deadlines"}
    | {"network", "interference"}
)
"""Sections of the file, and of its `cluster`, that no other role reads; but for applications, which frontends serve."""
_OF_GATEWAYS: Final = ("http", "grpc")
"""Of `listen`; no other role reads them, nor `cluster.gateway`."""
_OF_APPLICATIONS: Final = ("applications", "graph_deadlines", "seed")
BYTES_MAX: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration file as it was when it was read, with what the environment says instead: what is done follows this, whatever becomes of the file."""

    path: Path
    document: Mapping[str, Any]
    config: ClusterConfig

    @classmethod
    def of(cls, path: Path) -> Source:
        """Read it. Raises ConfigError as `load_document` does."""
        return cls(path, *load_document(path))

    @property
    def is_changed(self) -> bool:
        """Whether the file says something else by now, or nothing that can be read."""
        try:
            return load_document(self.path)[0] != self.document
        except ConfigError:
            return True


@dataclass(frozen=True, slots=True)
class CarriedConfig:
    """`files`: by path in the folder, a file here or its content. `name`: of the folder.

    `views`: by role id, a hash of what the role reads of it, which is in the folder too (`views.json`). A gateway's names what it reads beside that.
    """

    name: str
    files: Mapping[str, Path | bytes]
    views: Mapping[str, str]


def carried_config(source: Source, addresses: Mapping[str, str]) -> CarriedConfig:
    """The folder. `addresses`: of every host that one is known of. Raises ConfigError for a file that is named and is not there."""
    files: dict[str, Path | bytes] = {}
    hashes: dict[str, str] = {}
    base_dir = source.path.parent
    document = through_json(source.document)
    document.pop("deploy", None)
    places = source.config.places
    document["cluster"] |= {
        "schedulers": [
            {"host": one.host, "standby": one.is_standby, "port": one.port}
            | ({"shard": one.shard} if source.config.shards > 1 else {})
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
        "addresses": {host: addresses[host] for host in source.config.hosts if host in addresses},
    }
    if source.config.shards > 1:  # dealt here: an agent's own line is to say where it belongs
        for written, node in zip(document["cluster"]["nodes"], source.config.nodes, strict=True):
            written["shard"] = node.shard
    if source.config.security.keys is not None:
        document["security"] = {"keys": KEYS}
    gateway = source.config.gateway
    if gateway.may_be_reached:  # what it reads is secret, and lies beside the keys
        document["cluster"]["gateway"] |= {key: f"{KEYS}/{gateway_file(key)}" for key in gateway.files}
    for model in document["models"]:
        take_along(model, base_dir, files, hashes)
    glue: dict[str, str] = {}
    take_glue_along(document, base_dir, files, glue)
    files[CONFIG_FILE] = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
    views = {
        role.role_id: " ".join(
            [
                _hash_of(_view(role, wanted.host, document, hashes, glue)),
                *(wanted.secrets if role.rank is Rank.GATEWAY else ()),
            ]
        )
        for wanted in inventory_of(source.config).hosts
        for role in wanted.roles
    }
    files[VIEWS] = json.dumps(views, indent=1, sort_keys=True).encode() + b"\n"
    return CarriedConfig(_hash_of([document, {**hashes, **glue}]), files, views)


def _view(
    role: RoleOnHost,
    host: str,
    document: Mapping[str, Any],
    hashes: Mapping[str, str],
    glue: Mapping[str, str],
) -> Any:
    """All that a role's process reads of a configuration, and what it does not know how to do without.

    Only the scheduler reads of models and policies, for frontends and agents hear of them from it; workers are started in their
    agent's folder. So a model, a rate or a host more is no reason for these to start again. Applications are the frontends', with their glue.
    The address of its page of metrics is said, as it follows from how many roles come before it.
    """
    if role.rank is Rank.GATEWAY:
        return _view_of_gateway(host, document)
    document = _without_gateway(document)
    cluster = document["cluster"]
    if role.rank is Rank.SCHEDULER:
        return ["all", document, hashes]  # not the folder's name, which no script has in its stamp
    near = {host, *(one["host"] for one in cluster["schedulers"])}
    own = {
        **{key: value for key, value in cluster.items() if key not in _SCHEDULERS_ALONE},
        "addresses": {name: address for name, address in cluster["addresses"].items() if name in near},
        "nodes": [one for one in cluster["nodes"] if one["host"] == host] if role.rank is Rank.AGENT else [],
        "frontends": [one for one in cluster["frontends"] if one["host"] == host]
        if role.rank is Rank.FRONTEND
        else [],
    }
    rest = {key: value for key, value in document.items() if key not in _SCHEDULERS_ALONE}
    if role.rank is Rank.FRONTEND and document.get("applications"):
        rest |= {key: document[key] for key in _OF_APPLICATIONS if key in document}
    files = {Rank.AGENT: hashes, Rank.FRONTEND: glue}
    return [{**rest, "cluster": own}, files.get(role.rank, {}), role.page]


def _view_of_gateway(host: str, document: Mapping[str, Any]) -> Any:
    """What its own keys say, where its frontends and itself are, and the models that may be loaded through it."""
    cluster, listen = document["cluster"], document.get("listen") or {}
    gateway = cluster["gateway"]
    frontends = [at for at, one in enumerate(cluster["frontends"]) if one["host"] == host]
    models = document["models"] if gateway.get("model_control") else []
    own = {key: listen.get(key) for key in _OF_GATEWAYS}
    return [gateway, own, cluster["addresses"].get(host), frontends, models]


def _without_gateway(document: Mapping[str, Any]) -> Mapping[str, Any]:
    cluster, listen = ({**(document.get(key) or {})} for key in ("cluster", "listen"))
    cluster.pop("gateway", None)
    for key in _OF_GATEWAYS:
        listen.pop(key, None)
    return {**document, "cluster": cluster, "listen": listen}


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def take_along(
    model: dict[str, Any],
    base_dir: Path,
    files: dict[str, Path | bytes],
    hashes: dict[str, str],
    *,
    is_absolute_there: bool = False,
) -> None:
    """Every file that a model's section names, under a new name; the section says that one.

    `hashes` gets what each of them contains. `is_absolute_there`: what has an absolute path lies at that place already, where it
    is to be read.
    """

    def carried(path: str, where: str) -> str:
        if is_absolute_there and Path(path).is_absolute():
            return path
        found = base_dir / path
        with naming_path(found):
            if not found.exists():
                raise ConfigError(f"models: {where} of {model.get('name')}: there is no {found}")
        inside = {inner: (file, _sha256(file)) for inner, file in _files_of(found)}
        digest = _hash_of(sorted((inner, sha256) for inner, (_, sha256) in inside.items()))[:8]
        name = f"{_FILES}/{digest}-{found.name}"
        for inner, (file, sha256) in inside.items():
            files[f"{name}{inner}"], hashes[f"{name}{inner}"] = file, sha256
        # Workers on all hosts are told of weights, each of which runs in its own host's folder; the scheduler's path would be another.
        # Where files have one place on every host, that is said.
        return f"{_HERE}/{name}" if where == "loader.weights" and not is_absolute_there else name

    name_files(model, carried)
    for loader in loaders_of(model):
        if loader.get("python"):
            _take_module(loader["python"], "loader.python", base_dir, files, hashes)


def take_glue_along(
    document: Mapping[str, Any], base_dir: Path, files: dict[str, Path | bytes], hashes: dict[str, str]
) -> None:
    """The modules of all applications' glue, which runs beside frontends. `hashes` gets what each file contains."""
    for application in document.get("applications") or ():
        for name, stage in application["stages"].items():
            glue = stage.get("glue")
            if glue:
                written = glue if isinstance(glue, str) else glue["python"]
                where = f"applications: glue of {application['name']}.{name}"
                _take_module(written, where, base_dir, files, hashes)


def _take_module(
    written: str, where: str, base_dir: Path, files: dict[str, Path | bytes], hashes: dict[str, str]
) -> None:
    for name, file in _module(written.partition(":")[0], where, base_dir):
        files[name], hashes[name] = file, _sha256(file)


def _module(module: str, where: str, base_dir: Path) -> Iterator[tuple[str, Path]]:
    """The file or the package of a user's module beside the file or where Python here finds it; nothing of what is installed."""
    top = module.partition(".")[0]
    for found in (base_dir / f"{top}.py", base_dir / top, Path.cwd() / f"{top}.py", Path.cwd() / top):
        if found.is_file() or (found / "__init__.py").is_file():
            for inner, file in _files_of(found):
                if "__pycache__" not in inner:
                    yield f"{found.name}{inner}", file
            return
    if importlib.util.find_spec(top) is None:
        raise ConfigError(f"{where}: there is no module {top} beside the file, in this folder or installed")


def _files_of(found: Path) -> Iterator[tuple[str, Path]]:
    if found.is_file():
        yield "", found
        return
    for path in sorted(found.rglob("*")):
        if path.is_file():
            yield f"/{path.relative_to(found).as_posix()}", path


def _sha256(file: Path) -> str:
    with naming_path(file), file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size > BYTES_MAX:
            raise ConfigError(f"{file}: is larger than {BYTES_MAX >> 30} GiB; put it on the hosts yourself")
        return hashlib.file_digest(opened, "sha256").hexdigest()
