"""Placements and batching disciplines on one workload: `tenuto compare`.

Every combination plays the same arrivals (one seed) on the same cluster, with the interference that the file names,
and with the plan that the file would get if it named these two. A policy that does not look at the batching plans once. A plan that leaves models out is played with what it placed: the requests of the
others are dropped. A combination that cannot be built is a row with the reason, so that one missing solver or
batch size does not hide the others' results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed

from msgspec import Struct
from msgspec.structs import replace

from fabric.errors import ConfigError, ProfileError
from policies.placement.common.base import Placement
from roles.config.choices import NamedChoice
from roles.config.cluster import ClusterConfig
from roles.config.models import require_idempotent
from roles.lab.plan import cost_per_hour, rounded, unplaced_json
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import Workload
from roles.workload.outcomes import ModelOutcome, Outcome, Window


class Compared(Struct, frozen=True):
    """One combination: its plan and what came of it, or the `error` that kept it from being played."""

    placement: str
    batching: str
    plan: Placement | None = None
    cost_per_hour: float | None = None
    outcome: Outcome | None = None
    error: str | None = None

    @property
    def goodput_by_model_rps(self) -> dict[str, float]:
        """Requests per second of each model that finished within their SLO."""
        return self._by_model_rps(lambda one: one.good)

    @property
    def offered_by_model_rps(self) -> dict[str, float]:
        """Requests per second of each model that came."""
        return self._by_model_rps(lambda one: one.offered)

    @property
    def worst_served_fraction(self) -> float | None:
        """Good / offered of the model that fares worst; None where nothing was played or nothing came."""
        models = () if self.outcome is None else self.outcome.fates.values()
        return min((one.good / one.offered for one in models if one.offered), default=None)

    def _by_model_rps(self, count: Callable[[ModelOutcome], int]) -> dict[str, float]:
        if self.outcome is None:
            return {}
        duration_s = self.outcome.duration_s
        return {name: count(one) / duration_s for name, one in self.outcome.fates.items()}

    def as_json(self) -> dict[str, object]:
        """A row of `compare --json`; what was not reached is null."""
        outcome, plan = self.outcome, self.plan
        return {
            "placement": self.placement,
            "batching": self.batching,
            "offered_rps": None if outcome is None else rounded(outcome.offered / outcome.duration_s),
            "goodput_rps": None if outcome is None else rounded(outcome.good / outcome.duration_s),
            "goodput_by_model_rps": {
                name: rounded(rate_rps) for name, rate_rps in self.goodput_by_model_rps.items()
            },
            "gpus_by_model": {}
            if outcome is None
            else {name: rounded(outcome.gpus_of(name)) for name in outcome.models},
            "worst_served_fraction": rounded(self.worst_served_fraction),
            "gpus_used": None if plan is None else len(plan.gpus_used),
            "cost_per_hour": self.cost_per_hour,
            "expected_goodput_rps": None if plan is None else rounded(plan.expected_goodput_rps),
            "unplaced": [] if plan is None else unplaced_json(plan.unplaced),
            "violations": [] if plan is None else list(plan.violations),
            "error": self.error,
        }


def compare(
    config: ClusterConfig,
    workload: Workload,
    window: Window,
    choices: tuple[Sequence[NamedChoice], Sequence[NamedChoice]],
    executor: Executor,
    on_step: Callable[[float], None],
) -> list[Compared]:
    """Every placement of `choices[0]` with every discipline of `choices[1]`, in that order.

    `on_step` hears which part is done, from 0 to 1. Raises ConfigError where no combination could be played,
    whatever the policy: the interference model is not there, or the run is too long.
    """
    placements, batchings = choices
    for gpu_type in config.gpu_types:
        config.device_model(gpu_type)
    asked = {
        (placement.label, batching.label): replace(
            config, placement=placement.policy, batching=batching.policy
        )
        for placement in placements
        for batching in batchings
    }
    planning = {
        plan_key: executor.submit(plan_one, own)
        for plan_key, own in {_plan_key(key, own): own for key, own in asked.items()}.items()
    }
    steps = len(planning) + len(asked)
    for done, _ in enumerate(as_completed(planning.values()), start=1):
        on_step(done / steps)
    rows: dict[tuple[str, str], Compared] = {}
    playing = {}
    for key, own in asked.items():
        found = planning[_plan_key(key, own)].result()
        if isinstance(found, str):
            rows[key] = Compared(*key, error=found)
            continue
        rows[key] = Compared(*key, plan=found, cost_per_hour=cost_per_hour(config, found))
        playing[executor.submit(play_one, own, workload, window, found)] = key
    for done, played in enumerate(as_completed(playing), start=steps - len(playing) + 1):
        key, came = playing[played], played.result()
        if isinstance(came, str):
            rows[key] = replace(rows[key], error=came)
        else:
            rows[key] = replace(rows[key], outcome=came)
        on_step(done / steps)
    return list(rows.values())


def _plan_key(key: tuple[str, str], config: ClusterConfig) -> tuple[str, str]:
    """Combinations with the same key have the same plan."""
    placement, batching = key
    return placement, batching if config.is_planned_for_its_batching else ""


def plan_one(config: ClusterConfig) -> Placement | str:
    """The plan, or the reason why there is none. Runs in a process of the pool."""
    try:
        return config.place()
    except (ConfigError, ProfileError) as error:
        return str(error)


def play_one(
    config: ClusterConfig, workload: Workload, window: Window, placement: Placement
) -> Outcome | str:
    """What came of a combination, or the reason why it cannot be played. Runs in a process of the pool."""
    try:
        require_idempotent(config.models, config.batching.name)
        return simulate(config, workload, window, settings_from(config, placement)).outcome
    except (ConfigError, ProfileError) as error:
        return str(error)
