"""One YAML (or JSON) file for simulate, goodput, plan, compare, bench and up (design section 10).

`roles/config/sections.py` is the file as written; `load_config` checks them and turns them into a `ClusterConfig`.
Everything that can be wrong is said before anything starts, as a ConfigError with the file, the path in it,
what is wrong, and what would be right. Unknown keys are refused with the closest known one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fabric.curve import host_of, is_loopback
from fabric.errors import ConfigError, ProfileError
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import ModelId
from fabric.messages import PRIORITY_MAX
from fabric.policy_options import shown
from policies.batching import discipline_options
from profiles.gpu import MIB
from profiles.interference import interference_options
from profiles.model import BATCH_SIZE_LIMIT, BATCH_SIZE_MAX_DEFAULT, LinearProfile, ModelProfile, table_of
from profiles.store import read_profile, shipped_profile
from roles.config.checks import (
    DURATION_MS_MAX,
    SEED_MAX,
    check_endpoint,
    finite,
    name_like,
    one_of,
    translated,
    unique,
    whole,
)
from roles.config.cluster import (
    ArrivalConfig,
    ClusterConfig,
    ListenConfig,
    ModelConfig,
    NetworkConfig,
    NodeConfig,
    PolicyChoice,
    SecurityConfig,
    placement_choice,
)
from roles.config.documents import read_document
from roles.config.gateway import checked_gateway
from roles.config.hosts import checked_deploy, checked_places
from roles.config.model_loaders import loader_spec
from roles.config.nodes import MEMORY_GB_MAX, checked_nodes
from roles.config.origins import policy_settings, section_settings
from roles.config.rates import Steps, model_rates
from roles.config.sections import (
    SECTIONS,
    ArrivalSection,
    Document,
    HeartbeatSection,
    ListenSection,
    ModelSection,
    ProfileSection,
)
from roles.config.shards import models_in_shards

__all__ = ["ClusterConfig", "ModelConfig", "NodeConfig", "config_origins", "load_config", "parse_config"]

TERM_MAX = 1 << 53  # what the wire takes
NETWORK_MS_MAX = 60_000.0
HEARTBEAT_MS_MIN, HEARTBEAT_MS_MAX = 1.0, 600_000.0
PHASE_MAX = 1e9  # gaps
SHAPE_MIN, SHAPE_MAX = 0.001, 1e6  # gaps of a smaller shape are 0 but for one in more than anybody draws
RUN_MS_MIN = 1e-6  # what results are rounded to


def load_config(path: Path) -> ClusterConfig:
    """Read and check a file; paths inside it are relative to it. ConfigError says what is wrong and where."""
    return parse_config(read_document(path), path.parent, source=str(path))


def parse_config(
    document: Mapping[str, Any], base_dir: Path, *, source: str = "configuration"
) -> ClusterConfig:
    """Check a configuration that is already in memory; `source` names it in errors and origins."""
    try:
        try:
            read = msgspec.convert(document, Document)
        except msgspec.ValidationError as error:
            raise ConfigError(translated(str(error), document, SECTIONS)) from error
        return _cluster_config(read, document, base_dir, source)
    except (ConfigError, ProfileError) as error:
        raise ConfigError(f"{source}: {error}") from error


def config_origins(config: ClusterConfig) -> list[tuple[str, Any, str]]:
    """(path, value, origin) of every setting, in file order; origin is the file or ``default``."""
    return [(setting.path, setting.value, setting.origin) for setting in config.settings]


def _cluster_config(
    read: Document, document: Mapping[str, Any], base_dir: Path, source: str
) -> ClusterConfig:
    if not read.models:
        raise ConfigError("models: is empty; it must list at least one model")
    for place, section in enumerate(read.models):
        name_like(section.name, f"models[{place}].name")
    unique([section.name for section in read.models], "models[{}].name")
    zipf = read.popularity.zipf if read.popularity else None
    rates = model_rates(read.rate_rps, zipf, [(section.rate_rps, section.weight) for section in read.models])
    models = tuple(
        _model(section, f"models[{place}]", rates[place], base_dir)
        for place, section in enumerate(read.models)
    )
    whole(read.seed, "seed", 0, SEED_MAX)
    network = read.cluster.network
    for field in network.__struct_fields__:
        finite(getattr(network, field), f"cluster.network.{field}", at_most=NETWORK_MS_MAX)
    heartbeats = _heartbeats(read.cluster.heartbeats)
    batching = _policy(read.batching, "batching")
    placement = _policy(read.placement, "placement")
    batching_choice, placed = _batching(*batching), placement_choice(*placement)
    if batching_choice.name == "shepherd":
        _all_idempotent(models)
    interference_given = _policy(read.cluster.interference, "cluster.interference")
    interference = _interference(*interference_given)
    listen = listen_config(read.listen, has_keys=read.security.keys is not None)
    is_client_written = "client" in (document.get("listen") or {})
    nodes = checked_nodes(read.cluster)
    models = models_in_shards(models, [section.shard for section in read.models], nodes, read.cluster.shards)
    places = checked_places(read.cluster, nodes[0].host, listen.client if is_client_written else None)
    return ClusterConfig(
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
        settings=(
            *section_settings(read, document, "", source),
            *policy_settings(
                "batching", batching_choice, batching[1], source, is_named="batching" in document
            ),
            *policy_settings("placement", placed, placement[1], source, is_named="placement" in document),
            *policy_settings(
                "cluster.interference",
                interference,
                interference_given[1],
                source,
                is_named="interference" in document["cluster"],
            ),
        ),
    )


def _model(
    section: ModelSection, where: str, rate: tuple[Steps, float | None], base_dir: Path
) -> ModelConfig:
    finite(section.slo_ms, f"{where}.slo_ms", over=0, at_most=DURATION_MS_MAX)
    if section.profile is None and section.loader is None:
        raise ConfigError(
            f"{where}: has neither profile nor loader; an emulated device needs a profile "
            "such as {alpha_ms: 1.05, beta_ms: 5.07}, a real one a loader"
        )
    profile, by_type = _profiles(section.profile, f"{where}.profile", base_dir)
    memory_bytes = None
    if section.memory_mb is not None:
        memory_bytes = int(
            finite(section.memory_mb, f"{where}.memory_mb", at_most=MEMORY_GB_MAX * 1024) * MIB
        )
    if section.run_limit_ms is not None:
        finite(section.run_limit_ms, f"{where}.run_limit_ms", over=0, at_most=DURATION_MS_MAX)
    steps, weight = rate
    return ModelConfig(
        model_id=ModelId(section.name),
        slo_ms=section.slo_ms,
        rate_steps=steps,
        weight=weight,
        arrival=_arrival(section.arrival, f"{where}.arrival", base_dir),
        profile=profile,
        profiles_by_type=by_type,
        loader=loader_spec(section.loader, f"{where}.loader", base_dir),
        memory_bytes=memory_bytes,
        priority=whole(section.priority, f"{where}.priority", 0, PRIORITY_MAX),
        run_limit_ms=section.run_limit_ms,
        is_idempotent=section.idempotent,
        term=whole(section.term, f"{where}.term", 0, TERM_MAX),
    )


def _all_idempotent(models: Sequence[ModelConfig]) -> None:
    for place, model in enumerate(models):
        if not model.is_idempotent:
            raise ConfigError(
                f"models[{place}].idempotent: is false, but batching: shepherd stops batches and runs them again"
            )


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


def _arrival(section: ArrivalSection, where: str, base_dir: Path) -> ArrivalConfig:
    one_of(section.process, ("poisson", "gamma", "uniform", "trace"), f"{where}.process")
    owners = {
        "shape": ("gamma", section.shape),
        "phase": ("uniform", section.phase),
        "path": ("trace", section.path),
    }
    for key, (process, value) in owners.items():
        if value is not None and section.process != process:
            raise ConfigError(f"{where}.{key}: belongs to process: {process}, not {section.process}")
    if section.process == "gamma" and section.shape is None:
        raise ConfigError(f"{where}.shape: is missing; a gamma process needs one (CV² = 1/shape)")
    if section.process == "trace" and section.path is None:
        raise ConfigError(f"{where}.path: is missing; a trace needs the CSV file to play")
    if section.phase is not None:
        finite(section.phase, f"{where}.phase", at_most=PHASE_MAX)
    trace_path = None
    if section.path is not None:
        trace_path = base_dir / section.path
        if not trace_path.is_file():
            raise ConfigError(f"{where}.path: there is no file {trace_path}")
    shape = 1.0
    if section.shape is not None:
        shape = finite(section.shape, f"{where}.shape", at_least=SHAPE_MIN, at_most=SHAPE_MAX)
    return ArrivalConfig(section.process, shape, section.phase, trace_path)


def _profiles(
    section: ProfileSection | None, where: str, base_dir: Path
) -> tuple[ModelProfile | None, dict[str, ModelProfile]]:
    if section is None:
        return None, {}
    if section.by_type is None:
        return _profile(section, where, base_dir), {}
    _one_kind(section, where)
    if not section.by_type:
        raise ConfigError(f"{where}.by_type: is empty; it must name at least one GPU type")
    by_type: dict[str, ModelProfile] = {}
    for gpu_type, inner in section.by_type.items():
        if inner.by_type is not None:
            raise ConfigError(f"{where}.by_type.{gpu_type}: by_type cannot be inside by_type")
        by_type[gpu_type.lower()] = _profile(inner, f"{where}.by_type.{gpu_type}", base_dir)
    return None, by_type


def _profile(section: ProfileSection, where: str, base_dir: Path) -> ModelProfile:
    profile = _written_profile(section, where, base_dir)
    ends_ms = profile.exec_ms(1), profile.exec_ms(profile.batch_size_max)
    if not RUN_MS_MIN <= ends_ms[0] <= ends_ms[1] <= DURATION_MS_MAX:
        raise ConfigError(
            f"{where}: batches take from {shown(ends_ms[0])} to {shown(ends_ms[1])} ms; "
            f"they must take from {RUN_MS_MIN:f} ms to {shown(DURATION_MS_MAX)} ms"
        )
    return profile


def _written_profile(section: ProfileSection, where: str, base_dir: Path) -> ModelProfile:
    _one_kind(section, where)
    try:
        if section.table is not None:
            return table_of(section.table, source=f"table at {where}")
        if section.ref is not None:
            is_file = section.ref.endswith(".json")  # what `tenuto profile` wrote
            return read_profile(base_dir / section.ref) if is_file else shipped_profile(section.ref)
        if section.alpha_ms is None or section.beta_ms is None:
            missing = "alpha_ms" if section.alpha_ms is None else "beta_ms"
            raise ConfigError(f"{where}.{missing}: is missing; a line needs alpha_ms and beta_ms")
        finite(section.alpha_ms, f"{where}.alpha_ms", at_most=DURATION_MS_MAX)
        finite(section.beta_ms, f"{where}.beta_ms", at_most=DURATION_MS_MAX)
        max_batch = BATCH_SIZE_MAX_DEFAULT
        if section.max_batch is not None:
            max_batch = whole(section.max_batch, f"{where}.max_batch", 1, BATCH_SIZE_LIMIT)
        return LinearProfile(section.alpha_ms, section.beta_ms, max_batch, source=f"line at {where}")
    except ProfileError as error:
        raise ConfigError(f"{where}: {error}") from error


def _one_kind(section: ProfileSection, where: str) -> None:
    line = (section.alpha_ms, section.beta_ms, section.max_batch)
    kinds = {
        "alpha_ms, beta_ms and max_batch": any(value is not None for value in line),
        "ref": section.ref is not None,
        "table": section.table is not None,
        "by_type": section.by_type is not None,
    }
    written = [kind for kind, is_written in kinds.items() if is_written]
    if len(written) != 1:
        got = f"has {' and '.join(written)}" if written else "is empty"
        raise ConfigError(
            f"{where}: {got}; it must be exactly one of {{alpha_ms, beta_ms, max_batch}}, {{ref}}, {{table}}, "
            "{by_type}"
        )


def listen_config(section: ListenSection, *, has_keys: bool) -> ListenConfig:
    """Where to listen, checked. Raises ConfigError."""
    for key, value in (("client", section.client), ("control", section.control or section.client)):
        check_endpoint(value, f"listen.{key}", schemes=("tcp", "ipc"))
        if not has_keys and value.startswith("tcp://") and not is_loopback(host_of(value)):
            raise ConfigError(
                f"listen.{key}: is {shown(value)}, which others can reach: that needs keys"
                " (tenuto keys create DIRECTORY, and security: {keys: DIRECTORY})"
            )
    if section.metrics is not None:
        check_endpoint(section.metrics, "listen.metrics", schemes=())
    return ListenConfig(section.client, section.control, section.metrics)


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
