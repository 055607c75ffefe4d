"""The models of a file, checked, and how their requests arrive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.messages import LEAVING_TERM, MERGES, PREFIX, PRIORITY_MAX, HeadSpec
from profiles.gpu import MIB
from profiles.model import ModelProfile
from roles.config.applications import ReadApplications
from roles.config.checks import DURATION_MS_MAX, finite, name_like, one_of, whole
from roles.config.cluster import ArrivalConfig, ModelConfig
from roles.config.model_loaders import loader_spec
from roles.config.nodes import MEMORY_GB_MAX
from roles.config.rates import Steps
from roles.config.sections import ApplicationSection, ArrivalSection, ModelSection

HEADS_MAX = 64  # a directory lists them all, and a batch is warmed with its requests spread over them
TERM_MAX = 1 << 53  # what the wire takes
PHASE_MAX = 1e9  # gaps
SHAPE_MIN, SHAPE_MAX = 0.001, 1e6  # gaps of a smaller shape are 0 but for one in more than anybody draws


def checked_model(
    section: ModelSection,
    where: str,
    rate: tuple[Steps, float | None],
    profiles: tuple[ModelProfile | None, dict[str, ModelProfile]],
    applied: ReadApplications,
    base_dir: Path,
) -> ModelConfig:
    """One entry of `models`. Raises ConfigError."""
    slo_ms = section.slo_ms
    if slo_ms is None:
        is_asked = section.rate_rps is not None or section.weight is not None
        slo_ms = None if is_asked else applied.slo_ms.get(ModelId(section.name))
        if slo_ms is None:
            raise ConfigError(
                f"{where}.slo_ms: is missing; only a model that stages of applications alone ask has none"
            )
    finite(slo_ms, f"{where}.slo_ms", over=0, at_most=DURATION_MS_MAX)
    heads = checked_heads(section, slo_ms, where, base_dir)
    if section.profile is None and section.loader is None and not any(head.loader for head in heads):
        raise ConfigError(
            f"{where}: has neither profile nor loader; an emulated device needs a profile "
            "such as {alpha_ms: 1.05, beta_ms: 5.07}, a real one a loader"
        )
    profile, by_type = profiles
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
        slo_ms=slo_ms,
        rate_steps=steps,
        weight=weight,
        arrival=checked_arrival(section.arrival, f"{where}.arrival", base_dir),
        profile=profile,
        profiles_by_type=by_type,
        loader=loader_spec(section.loader, f"{where}.loader", base_dir),
        memory_bytes=memory_bytes,
        priority=whole(section.priority, f"{where}.priority", 0, PRIORITY_MAX),
        run_limit_ms=section.run_limit_ms,
        is_idempotent=section.idempotent,
        term=whole(section.term, f"{where}.term", LEAVING_TERM, TERM_MAX),
        stage_rps=applied.stage_rps.get(ModelId(section.name), 0.0),
        heads=heads,
        merge=checked_merge(section, where),
    )


def check_head_names(models: Sequence[ModelSection], applications: Sequence[ApplicationSection]) -> None:
    """Clients ask by one name whatever it is of; stages ask models without heads. Raises ConfigError."""
    taken = {section.name: f"models[{place}]" for place, section in enumerate(models)}
    taken |= {section.name: f"applications[{place}]" for place, section in enumerate(applications)}
    for place, section in enumerate(models):
        for number, head in enumerate(section.heads):
            where = f"models[{place}].heads[{number}]"
            name_like(head.name, f"{where}.name")
            if head.name in taken:
                raise ConfigError(f"{where}.name: {head.name!r} is already the name at {taken[head.name]}")
            taken[head.name] = where
    with_heads = {section.name for section in models if section.heads}
    for place, application in enumerate(applications):
        for name, stage in application.stages.items():
            if stage.model in with_heads:
                raise ConfigError(
                    f"applications[{place}].stages.{name}.model: {stage.model} has heads, which stages cannot ask"
                )


def checked_heads(section: ModelSection, slo_ms: float, where: str, base_dir: Path) -> tuple[HeadSpec, ...]:
    """The heads of one entry of `models`; `slo_ms` is the model's. Raises ConfigError."""
    if not section.heads:
        return ()
    if section.loader is not None:
        raise ConfigError(f"{where}.loader: goes without heads; each of these has a loader of its own")
    whole(len(section.heads), f"{where}.heads: their number", 2, HEADS_MAX)
    heads = []
    for place, head in enumerate(section.heads):
        at = f"{where}.heads[{place}]"
        if head.slo_ms is not None:
            finite(head.slo_ms, f"{at}.slo_ms", at_least=slo_ms, at_most=DURATION_MS_MAX)
        loader = loader_spec(head.loader, f"{at}.loader", base_dir)
        if loader is not None and (loader.stages or loader.ranks):
            raise ConfigError(f"{at}.loader: a head runs whole on one GPU, without stages and ranks")
        if (loader is None) != (section.heads[0].loader is None):
            raise ConfigError(f"{at}.loader: all heads of a model have a loader, or none has")
        heads.append(HeadSpec(ModelId(head.name), head.slo_ms, loader))
    return tuple(heads)


def checked_merge(section: ModelSection, where: str) -> str:
    """How the heads of one entry of `models` run together. Raises ConfigError."""
    if section.merge is None:
        return PREFIX
    if not section.heads:
        raise ConfigError(f"{where}.merge: goes with heads: it says how these run together")
    return one_of(section.merge, MERGES, f"{where}.merge")


def require_idempotent(models: Sequence[ModelConfig], batching: str) -> None:
    """`shepherd` stops batches and runs them again. Raises ConfigError where a model may not run twice."""
    for place, model in enumerate(models):
        if batching == "shepherd" and not model.is_idempotent:
            raise ConfigError(
                f"models[{place}].idempotent: is false, but batching: shepherd stops batches and runs them again"
            )


def checked_arrival(section: ArrivalSection, where: str, base_dir: Path) -> ArrivalConfig:
    """How requests arrive, of a model or of an application. Raises ConfigError."""
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
