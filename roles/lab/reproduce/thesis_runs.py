"""One bar of the thesis' figures, planned and played: expected goodput, and emulated under two disciplines.

`fixed` is the thesis' router with the thesis' own rule here: replicas get requests in proportion to their batch sizes
(section 4.3.3), whatever rates a plan names for them. Emulated: table A.1's run times, interference `sm`, no network delay, Poisson arrivals at the target rate. The
thesis' clients reach less than their target (433 of 500 requests per second, section 6.2.1), which gives its
placements some room that ours do not get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from fabric.ids import ModelId
from policies.placement.common.base import Placement
from roles.lab.reproduce.thesis_settings import (
    AO_GROUPS,
    PROFILE_FAMILY,
    VISION_MODELS,
    WAO_GROUPS,
    FigureSetting,
)
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Outcome, Window

# The thesis warms up first, then sends for eight seconds (4000 requests at 500 per second).
WINDOW = Window(2_000.0, 10_000.0)


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy of the thesis' evaluation (section 6.1.3). `family`: the profiles it plans with."""

    label: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    family: str = PROFILE_FAMILY


@dataclass(frozen=True, slots=True)
class Played:
    """A contender in a setting: its plan, and what came of it under each discipline."""

    setting: FigureSetting
    contender: Contender
    plan: Placement
    outcomes: Mapping[str, Outcome]

    def goodput_rps(self, batching: str) -> float:
        """Requests within their SLO per second."""
        outcome = self.outcomes[batching]
        return outcome.good / outcome.duration_s

    def model_goodput_rps(self, batching: str, model: str) -> float:
        """That of one model."""
        outcome = self.outcomes[batching]
        return outcome.models[ModelId(model)].good / outcome.duration_s


# The thesis names no limit. Ten seconds are plenty on an idle machine; a figure must not depend on a busy one.
_UNHURRIED = {"time_limit_s": 120.0}

IGNITER = Contender("iGniter", "igniter", family="thesis-v100-estimate")


def contenders(setting: FigureSetting) -> tuple[Contender, ...]:
    """The thesis' five; Usher's two with the groups of its figures where they are known."""
    is_vision = {model for model, _ in setting.loads} == set(VISION_MODELS)
    usher = {"groups": [list(group) for group in AO_GROUPS]} if is_vision else {}
    wao = {"groups": [list(group) for group in WAO_GROUPS]} if is_vision else {}
    return (
        IGNITER,
        Contender("Usher", "usher", usher),
        Contender("WAO-Usher", "wao-usher", wao),
        Contender("AO-MILP", "ao-milp", _UNHURRIED),
        Contender("WSM-MILP", "wsm-milp", _UNHURRIED),
    )


def play(
    setting: FigureSetting,
    contender: Contender,
    batchings: Sequence[str] = ("fixed", "deferred"),
    strength: float = 1.0,
) -> Played:
    """Plan once, then play the same arrivals under each discipline; `strength` is the interference's."""
    plan = setting.config(contender.policy, contender.options, family=contender.family).place()
    outcomes = {}
    for batching in batchings:
        config = setting.config(batching=batching, strength=strength)
        played = without_rates(plan) if batching == "fixed" else plan
        outcomes[batching] = simulate(
            config, workload_of(config), WINDOW, settings_from(config, played)
        ).outcome
    return Played(setting, contender, plan, outcomes)


def without_rates(plan: Placement) -> Placement:
    """The same slices; `fixed` shares by batch size where a plan names no rates (ADR 0012)."""
    slices = tuple(
        replace(planned, models=tuple(replace(model, rate_rps=None) for model in planned.models))
        for planned in plan.slices
    )
    return replace(plan, slices=slices)


def play_slices(
    setting: FigureSetting, slices: Sequence[Mapping[str, Any]], batching: str = "fixed"
) -> Played:
    """Play a placement that is written down."""
    return play(setting, Contender("given", "given", {"slices": list(slices)}), (batching,))


def describe(plan: Placement) -> str:
    """GPU by GPU what it hosts, as the thesis draws it: 'GPU 0: t5 8; GPU 1: resnet50 32'."""
    hosted: dict[int, list[str]] = {}
    for planned in plan.slices:
        hosted.setdefault(planned.gpu, []).extend(
            f"{model.model_id} {model.batch}" for model in planned.models
        )
    return "; ".join(f"GPU {gpu}: {' + '.join(models)}" for gpu, models in sorted(hosted.items()))


def expected(setting: FigureSetting, policy: str, **options: Any) -> Placement:
    """The plan alone."""
    unhurried = _UNHURRIED if policy.endswith("-milp") else {}
    return setting.config(policy, {**unhurried, **options}).place()
