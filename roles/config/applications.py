"""`applications` and `graph_deadlines` of the file, checked: graphs of models with one SLO."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.policy_options import shown, suggestion
from policies.graphs import ApplicationPlan, FanOut
from policies.graphs.fan_outs import means, moments_ms
from policies.graphs.graph import FAN_OUT_MAX, SEGMENTS, Graph, Stage, graph_of
from profiles.model import ModelProfile
from roles.applications.served import GlueSpec
from roles.config.checks import DURATION_MS_MAX, finite, name_like, whole
from roles.config.cluster import ApplicationConfig, ArrivalConfig, PolicyChoice
from roles.config.model_loaders import class_named
from roles.config.rates import Steps, rate_steps
from roles.config.sections import (
    ApplicationSection,
    ArrivalSection,
    GlueSection,
    ModelSection,
    StageSection,
)

GLUE_MS_MAX = 10_000.0
_SOURCE = "outputs."


class ReadApplications(Struct, frozen=True):
    """The applications, and what follows for models: the SLO of those that have none of their own, and what stages ask of each."""

    applications: tuple[ApplicationConfig, ...]
    slo_ms: Mapping[ModelId, float]
    stage_rps: Mapping[ModelId, float]


def read_applications(
    sections: Sequence[ApplicationSection],
    rates: Sequence[Steps],
    rule: PolicyChoice,
    models: Sequence[ModelSection],
    profiles: Mapping[str, Sequence[ModelProfile]],
    gpus: int,
    read_arrival: Callable[[ArrivalSection, str], ArrivalConfig],
) -> ReadApplications:
    """Check them against the models of the file. `rates`: of each application. `profiles`: of each model, on the types of GPU there are."""
    names = [model.name for model in models]
    applications: list[ApplicationConfig] = []
    slo_ms: dict[ModelId, float] = {}
    stage_rps: dict[ModelId, float] = {}
    for place, (section, steps) in enumerate(zip(sections, rates, strict=True)):
        where = f"applications[{place}]"
        name_like(section.name, f"{where}.name")
        if section.name in names:
            raise ConfigError(
                f"{where}.name: {section.name!r} is already the name of a model or an application"
            )
        names.append(section.name)
        finite(section.slo_ms, f"{where}.slo_ms", over=0, at_most=DURATION_MS_MAX)
        fan_outs = {
            name: _fan_out(stage, f"{where}.stages.{name}.fan_out") for name, stage in section.stages.items()
        }
        glue = {
            name: _glue(stage.glue, f"{where}.stages.{name}.glue")
            for name, stage in section.stages.items()
            if stage.glue is not None
        }
        graph = _graph(section.stages, fan_outs, where, [model.name for model in models])
        plan = _plan(section, graph, profiles, gpus, where)
        plan = replace(plan, segments=rule.options.get("segments", SEGMENTS))
        try:
            budgets_ms = plan.budgets(rule.name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        arrival = read_arrival(section.arrival, f"{where}.arrival")
        applications.append(ApplicationConfig(plan, fan_outs, steps, arrival, glue))
        demands = applications[-1].demands
        for stage in graph.stages:
            model_id = stage.model_id
            slo_ms[model_id] = min(slo_ms.get(model_id, DURATION_MS_MAX), budgets_ms[stage.name])
            highest_rps = max((rate_rps for _, rate_rps in steps), default=0.0)
            stage_rps[model_id] = stage_rps.get(model_id, 0.0) + highest_rps * max(
                demand[stage.name] for demand in demands
            )
    return ReadApplications(tuple(applications), slo_ms, stage_rps)


def _fan_out(stage: StageSection, where: str) -> FanOut:
    section = stage.fan_out
    if isinstance(section, int):
        return FanOut("fixed", ((0.0, float(whole(section, where, 1, FAN_OUT_MAX))),))
    source = None if section.source is None else _source(section.source, stage, where)
    written = {
        process: value
        for process, value in (("poisson", section.poisson), ("share", section.share))
        if value is not None
    }
    if source is not None and not written:
        return FanOut("fixed", ((0.0, 1.0),), source)
    if len(written) != 1:
        raise ConfigError(
            f"{where}: must be a whole number, or exactly one of {{poisson: MEAN}} and {{share: PART}}"
        )
    ((process, value),) = written.items()
    steps = rate_steps(value, f"{where}.{process}")
    for _, mean in steps:
        finite(mean, f"{where}.{process}", at_most=1.0 if process == "share" else FAN_OUT_MAX)
    return FanOut(process, steps, source)


def _source(written: str, stage: StageSection, where: str) -> str:
    name = written.removeprefix(_SOURCE)
    if not written.startswith(_SOURCE) or not name:
        raise ConfigError(
            f"{where}.from: is {shown(written)}; it must be {_SOURCE}NAME, an output of the stage before"
        )
    if not isinstance(stage.after, str) and len(stage.after) != 1:
        raise ConfigError(f"{where}.from: the stage must come after one stage, whose output decides")
    if stage.glue is not None:
        raise ConfigError(f"{where}.from: the stage has a glue, which decides how many requests follow")
    return name


def _glue(written: str | GlueSection, where: str) -> GlueSpec:
    if isinstance(written, str):
        return GlueSpec(class_named(written, where), GlueSection(written).limit_ms)
    finite(written.limit_ms, f"{where}.limit_ms", over=0, at_most=GLUE_MS_MAX)
    return GlueSpec(class_named(written.python, f"{where}.python"), written.limit_ms)


def _graph(
    sections: Mapping[str, StageSection],
    fan_outs: Mapping[str, FanOut],
    where: str,
    models: Sequence[str],
) -> Graph:
    stages = []
    for name, section in sections.items():
        name_like(name, f"{where}.stages")
        _check_outputs_differ(name, sections, where)
        if section.model not in models:
            raise ConfigError(
                f"{where}.stages.{name}.model: there is no model {shown(section.model)}"
                f"{suggestion(section.model, models)}"
            )
        after = (section.after,) if isinstance(section.after, str) else section.after
        mean = fan_outs[name].mean(0.0)
        may_be_none = fan_outs[name].may_be_none or section.glue is not None
        model_id = ModelId(section.model)
        stages.append(Stage(name, model_id, after, mean, section.optional, section.answer, may_be_none))
    try:
        return graph_of(stages, [means(fan_outs, at_ms) for at_ms in moments_ms(fan_outs.values())])
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error


def _check_outputs_differ(name: str, stages: Collection[str], where: str) -> None:
    """An answer's tensor is named STAGE.PLACE.OUTPUT, and a place is a number or several."""
    parts = name.split(".")
    for place in range(1, len(parts)):
        other = ".".join(parts[:place])
        if parts[place].isdecimal() and other in stages:
            raise ConfigError(
                f"{where}.stages: {name} begins as the outputs of {other} do in an answer"
                " (STAGE.NUMBER.OUTPUT); it must be named otherwise, such as with a '-' before the number"
            )


def _plan(
    section: ApplicationSection,
    graph: Graph,
    profiles: Mapping[str, Sequence[ModelProfile]],
    gpus: int,
    where: str,
) -> ApplicationPlan:
    """What is known before anything runs. A stage is planned for its slowest GPU; what is provably too late goes by its fastest."""
    tables: dict[str, list[float]] = {}
    fastest_ms: dict[str, float] = {}
    for stage in graph.stages:
        found = profiles[str(stage.model_id)]
        if not found:
            return ApplicationPlan(section.name, graph, section.slo_ms, {}, gpus)
        size_max = min(profile.batch_size_max for profile in found)
        tables[stage.name] = [
            max(profile.exec_ms(size) for profile in found) for size in range(1, size_max + 1)
        ]
        fastest_ms[stage.name] = min(profile.exec_ms(1) for profile in found)
    plan = ApplicationPlan(section.name, graph, section.slo_ms, tables, gpus, fastest_ms)
    if plan.longest_ms > section.slo_ms:
        raise ConfigError(
            f"{where}.slo_ms: is {shown(section.slo_ms)}; the models on the longest way take {plan.longest_ms:.4g} ms without any wait"
        )
    return plan
