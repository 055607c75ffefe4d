"""One YAML (or JSON) file for simulate, goodput, plan, compare, bench and up (design section 10).

`roles/config/sections.py` is the file as written; `load_config` checks them and turns them into a `ClusterConfig`.
Everything that can be wrong is said before anything starts, as a ConfigError with the file, the path in it,
what is wrong, and what would be right. Unknown keys are refused with the closest known one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fabric.curve import host_of, is_loopback
from fabric.errors import ConfigError, ProfileError
from fabric.heartbeats import HeartbeatTiming
from fabric.policy_options import shown
from policies.batching.registry import discipline_options
from policies.graphs import rule_options
from profiles.interference import interference_options
from roles.config.applications import read_applications
from roles.config.checks import (
    SEED_MAX,
    check_endpoint,
    finite,
    name_like,
    translated,
    unique,
    whole,
)
from roles.config.cluster import (
    ClusterConfig,
    ListenConfig,
    ModelConfig,
    NetworkConfig,
    NodeConfig,
    PolicyChoice,
    SecurityConfig,
    Setting,
    placement_choice,
)
from roles.config.documents import read_document
from roles.config.gateway import checked_gateway
from roles.config.hosts import checked_deploy, checked_places
from roles.config.listeners import check_listeners
from roles.config.model_profiles import on_types, read_profiles
from roles.config.models import check_head_names, checked_arrival, checked_model, require_idempotent
from roles.config.nodes import checked_nodes
from roles.config.origins import policy_settings, section_settings
from roles.config.overrides import Override, of_environment, overridden
from roles.config.rates import shared_rates
from roles.config.sections import (
    SECTIONS,
    Document,
    HeartbeatSection,
    ListenSection,
)
from roles.config.shards import models_in_shards

__all__ = [
    "ClusterConfig",
    "ModelConfig",
    "NodeConfig",
    "config_origins",
    "load_config",
    "load_document",
    "parse_config",
]

NETWORK_MS_MAX = 60_000.0
HEARTBEAT_MS_MIN, HEARTBEAT_MS_MAX = 1.0, 600_000.0


Overrides = Callable[[Mapping[str, Any]], Sequence[Override]]
"""What the command line says instead of a document."""


def load_config(path: Path, overrides: Overrides | None = None, *, text: str | None = None) -> ClusterConfig:
    """Read and check a file; paths inside it are relative to it. ConfigError says what is wrong and where.

    `text`: what it said when that was read, whatever has become of it.
    """
    return load_document(path, overrides, text=text)[1]


def load_document(
    path: Path, overrides: Overrides | None = None, *, text: str | None = None
) -> tuple[dict[str, Any], ClusterConfig]:
    """The same with the document itself, in which the environment's values and then `overrides` stand instead of the file's."""
    written = read_document(path, text)
    given = [*of_environment(), *(() if overrides is None else overrides(written))]
    document, origins = overridden(written, given)
    try:
        config = parse_config(document, path.parent, source=str(path))
    except ConfigError as error:
        others = [
            f"{name} is from {origin}" for name, origin in origins.items() if f" {name}: " in str(error)
        ]
        if others:
            raise ConfigError(f"{error} ({', '.join(others)})") from error
        raise
    if not origins:
        return document, config
    settings = tuple(replace(one, origin=_origin(one, origins)) for one in config.settings)
    return document, replace(config, settings=settings)


def _origin(setting: Setting, origins: Mapping[str, str]) -> str:
    """Of what it is, or is a part of."""
    above = [path for path in origins if re.match(rf"{re.escape(path)}(?![\w-])", setting.path)]
    return origins[max(above, key=len)] if above and setting.origin != "default" else setting.origin


def parse_config(
    document: Mapping[str, Any], base_dir: Path, *, source: str = "configuration", is_whole: bool = True
) -> ClusterConfig:
    """Check a configuration that is already in memory; `source` names it in errors and origins.

    Where it is not whole, its placement may name models that are not there.
    """
    try:
        try:
            read = msgspec.convert(document, Document)
        except msgspec.ValidationError as error:
            raise ConfigError(translated(str(error), document, SECTIONS, _complaint)) from error
        except UnicodeEncodeError as error:  # from the wire; what files hold was looked at as they were read
            raise ConfigError(f"{shown(error.object)} holds half of a character") from error
        return _cluster_config(read, document, base_dir, source, is_whole=is_whole)
    except (ConfigError, ProfileError) as error:
        raise ConfigError(f"{source}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: something in it is nested too deeply, perhaps within itself") from error


def _complaint(document: Any) -> str:
    try:
        msgspec.convert(document, Document)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def config_origins(config: ClusterConfig) -> list[tuple[str, Any, str]]:
    """(path, value, origin) of every setting, in file order; origin is a flag, $TENUTO_SET, the file or ``default``."""
    return [(setting.path, setting.value, setting.origin) for setting in config.settings]


def _cluster_config(
    read: Document, document: Mapping[str, Any], base_dir: Path, source: str, *, is_whole: bool
) -> ClusterConfig:
    if not read.models:
        raise ConfigError("models: is empty; it must list at least one model")
    for place, section in enumerate(read.models):
        name_like(section.name, f"models[{place}].name")
    unique([section.name for section in read.models], "models[{}].name")
    check_head_names(read.models, read.applications)
    zipf = read.popularity.zipf if read.popularity else None
    if read.applications and read.cluster.shards > 1:
        raise ConfigError("cluster.shards: applications are played with one scheduler so far, without shards")
    asked = {stage.model for section in read.applications for stage in section.stages.values()}
    rates = shared_rates(
        read.rate_rps,
        zipf,
        [(section.rate_rps, section.weight) for section in read.models],
        [(section.rate_rps, section.weight) for section in read.applications],
        [place for place, section in enumerate(read.models) if section.name in asked],
    )
    nodes = checked_nodes(read.cluster)
    profiles = [
        read_profiles(section.profile, f"models[{place}].profile", base_dir)
        for place, section in enumerate(read.models)
    ]
    rule, rule_given = _policy(read.graph_deadlines, "graph_deadlines")
    deadlines = PolicyChoice(rule, rule_options(rule, rule_given))
    applied = read_applications(
        read.applications,
        [steps for steps, _ in rates[len(read.models) :]],
        deadlines,
        read.models,
        {
            section.name: on_types(profile, by_type, [node.gpu_type for node in nodes if node.gpus])
            for section, (profile, by_type) in zip(read.models, profiles, strict=True)
        },
        sum(node.gpus for node in nodes),
        partial(checked_arrival, base_dir=base_dir),
    )
    models = tuple(
        checked_model(section, f"models[{place}]", rates[place], profiles[place], applied, base_dir)
        for place, section in enumerate(read.models)
    )
    whole(read.seed, "seed", 0, SEED_MAX)
    network = read.cluster.network
    for field in network.__struct_fields__:
        finite(getattr(network, field), f"cluster.network.{field}", at_most=NETWORK_MS_MAX)
    heartbeats = _heartbeats(read.cluster.heartbeats)
    batching = _policy(read.batching, "batching")
    placement = _policy(read.placement, "placement")
    gpu_count = sum(node.gpus for node in nodes)
    placed = placement_choice(*placement, models if is_whole else None, gpu_count, read.cluster.shards)
    batching_choice = _batching(*batching)
    require_idempotent(models, batching_choice.name)
    interference_given = _policy(read.cluster.interference, "cluster.interference")
    interference = _interference(*interference_given)
    listen = listen_config(read.listen, has_keys=read.security.keys is not None)
    is_client_written = "client" in (document.get("listen") or {})
    models = models_in_shards(models, [section.shard for section in read.models], nodes, read.cluster.shards)
    places = checked_places(read.cluster, nodes[0].host, listen.client if is_client_written else None)
    config = ClusterConfig(
        models=models,
        nodes=nodes,
        batching=batching_choice,
        placement=placed,
        seed=read.seed,
        frontends=len(places.frontends),
        schedulers=len(places.schedulers),
        shards=read.cluster.shards,
        network=NetworkConfig(
            network.control_ms, network.data_ms_per_item, network.result_ms, network.jitter_ms
        ),
        interference=interference,
        heartbeats=heartbeats,
        listen=listen,
        security=SecurityConfig(None if read.security.keys is None else base_dir / read.security.keys),
        places=places,
        gateway=checked_gateway(read.cluster.gateway, read.listen, base_dir),
        deploy=checked_deploy(read.deploy, base_dir),
        applications=applied.applications,
        graph_deadlines=rule,
        settings=(
            *section_settings(read, document, "", source),
            *policy_settings(
                "batching", batching_choice, batching[1], source, is_named="batching" in document
            ),
            *policy_settings("placement", placed, placement[1], source, is_named="placement" in document),
            *policy_settings(
                "graph_deadlines", deadlines, rule_given, source, is_named="graph_deadlines" in document
            ),
            *policy_settings(
                "cluster.interference",
                interference,
                interference_given[1],
                source,
                is_named="interference" in document["cluster"],
            ),
        ),
    )
    check_listeners(config)
    return config


def _heartbeats(section: HeartbeatSection) -> HeartbeatTiming:
    where = "cluster.heartbeats"
    interval_ms = finite(
        section.interval_ms, f"{where}.interval_ms", at_least=HEARTBEAT_MS_MIN, at_most=HEARTBEAT_MS_MAX
    )
    # One heartbeat that is lost or late must not make a peer lost.
    patience_ms = finite(
        section.patience_ms, f"{where}.patience_ms", at_least=2 * interval_ms, at_most=HEARTBEAT_MS_MAX
    )
    return HeartbeatTiming(interval_ms, patience_ms)


def listen_config(section: ListenSection, *, has_keys: bool, prefix: str = "listen.") -> ListenConfig:
    """Where to listen, checked. `prefix`: of the keys, as an error names them. Raises ConfigError."""
    for key, value in (("client", section.client), ("control", section.control or section.client)):
        check_endpoint(value, f"{prefix}{key}", schemes=("tcp", "ipc"))
        if not has_keys and value.startswith("tcp://") and not is_loopback(host_of(value)):
            raise ConfigError(
                f"{prefix}{key}: is {shown(value)}, which others can reach: that needs keys"
                " (tenuto keys create DIRECTORY, and security: {keys: DIRECTORY})"
            )
    for key, address in (("metrics", section.metrics), ("page", section.page)):
        if address is not None:
            check_endpoint(address, f"{prefix}{key}", schemes=())
    return ListenConfig(section.client, section.control, section.metrics, section.page)


def _policy(value: str | dict[str, dict[str, Any] | None], where: str) -> tuple[str, dict[str, Any]]:
    """A name, or {name: {options}}."""
    if isinstance(value, str):
        return value, {}
    if len(value) != 1:
        raise ConfigError(f"{where}: must be one name, or one name with its options: {{name: {{…}}}}")
    ((name, options),) = value.items()
    return name, options or {}


def _batching(name: str, given: Mapping[str, Any]) -> PolicyChoice:
    return PolicyChoice(name, discipline_options(name, given))


def _interference(name: str, given: Mapping[str, Any]) -> PolicyChoice:
    return PolicyChoice(name, interference_options(name, given, "cluster.interference"))
