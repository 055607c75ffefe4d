"""AO-MILP and WSM-MILP: the placement with the highest expected goodput (thesis section 5.4.3).

All models at once, no groups, no order, no multiples of c_min; replicas get no MPS share (section 6.1.3). The
metric of compute is the achieved occupancy (`ao-milp`) or the time-weighted SM utilisation (`wsm-milp`).
Fairness, queueing and the time to form a batch are not modelled. Only a proven optimum is the same in every
run, and only between proven optima does another GPU never lower the goodput.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.policy_options import Flag, Number, Schema
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Rejected,
    Unplaced,
)
from policies.placement.common.demands import (
    Metric,
    ResourceDemand,
    profiled_demands,
    rate_of,
    why_unservable,
    within_slo,
)
from policies.placement.common.gpu_kinds import GpuClass, gpu_classes
from policies.placement.common.request_checks import in_order, joined, rated, require_gpus
from policies.placement.milp.model import MilpProblem, MilpSolution, solve_task
from policies.registry import Registered
from policies.solver import TIME_LIMIT_S

OPTIONS: Schema = {
    "time_limit_s": Number(TIME_LIMIT_S, maximum=86_400),
    "second_stage": Flag(default=True),
    "max_replicas": Number(None, minimum=1, maximum=65_536, is_minimum_allowed=True, is_whole=True),
    "build_filter": Flag(default=False),
    "max_wait_ms": Number(100.0),
}
_REJECTED_MAX = 5


class Milp:
    """The thesis' MILP with the given metric. Options: see `OPTIONS`.

    `time_limit_s` is the solver's, for all its stages: a plan that it cut short may depend on how fast the machine is, and
    its first decision says that it is not proven. `second_stage` chooses among equal goodputs (`model.py`).
    `max_replicas` bounds a model's replicas. `build_filter` refuses more replicas with a batch size than get it
    filled within `max_wait_ms` (batch ≤ rate · max_wait / replicas); those with batches of one, which one request fills, are never refused.
    """

    def __init__(
        self, name: str, metric: Metric, options: Mapping[str, Any], nodes_max: int | None = None
    ) -> None:
        self._name = name
        self._options = options
        self._nodes_max = nodes_max
        self._metric = metric
        self._time_limit_s: float = options["time_limit_s"]
        self._has_second_stage: bool = options["second_stage"]
        self._max_replicas: int | None = options.get("max_replicas")
        self._max_wait_ms: float = options["max_wait_ms"] if options["build_filter"] else math.inf

    def within_nodes(self, nodes_max: int) -> Milp:
        """The same without a time limit: it places nothing that so many nodes a stage do not prove the best."""
        return Milp(self._name, self._metric, self._options, nodes_max)

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  nothing is kept: the program alone decides
    ) -> Placement:
        """Place; what the replicas of a model cannot carry is unplaced as a part of its rate.

        Raises ConfigError for no GPU, or no solver.
        """
        require_gpus(gpus)
        planned, unrated = rated(models)
        found = self._placed(planned, gpus, profiles)
        return replace(found, unplaced=in_order([*found.unplaced, *unrated], models))

    def _placed(
        self, models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
    ) -> Placement:
        classes = gpu_classes(gpus)
        offers, reasons = self._offers(models, classes, profiles)
        rates_rps = [rate_of(model) for model in models]
        replicas_max = [
            self._replicas_max(model, offered, len(gpus)) for model, offered in _by_model(models, offers)
        ]
        task = MilpProblem(
            rates_rps,
            classes,
            offers,
            replicas_max,
            self._time_limit_s,
            self._has_second_stage,
            self._nodes_max,
        )
        answer = solve_task(task) if any(offers) else None
        if answer is None:
            late = f"the solver found no placement within {self._time_limit_s:g} s"
            nowhere = (Unplaced(m.model_id, m.rate_rps, reasons.get(m.model_id, late)) for m in models)
            return Placement((), tuple(nowhere), (), 0.0)
        return _placement(models, task, answer, reasons)

    def _offers(
        self, models: Sequence[PlacedModelInput], classes: Sequence[GpuClass], profiles: Profiles
    ) -> tuple[list[dict[int, tuple[ResourceDemand, ...]]], dict[ModelId, str]]:
        """By class of GPUs and model what may run there; why not, for models that may run nowhere."""
        offers: list[dict[int, tuple[ResourceDemand, ...]]] = [{} for _ in classes]
        reasons: dict[ModelId, str] = {}
        for m, model in enumerate(models):
            why_not: list[str] = []
            for k, gpus in enumerate(classes):
                reason = why_unservable(model, gpus.slot, profiles, self._metric)
                if reason is None:
                    demands = within_slo(model, profiled_demands(model, gpus.slot, profiles, self._metric))
                    kept = tuple(d for d in demands if self._built_in_time(model, d.batch))
                    if kept:
                        offers[k][m] = kept
                        continue
                    reason = f"no batch within its SLO is full within {self._max_wait_ms:g} ms at its rate"
                why_not.append(reason)
            if len(why_not) == len(classes):
                reasons[model.model_id] = joined(why_not)
        return offers, reasons

    def _built_in_time(self, model: PlacedModelInput, batch: int) -> int:
        """How many replicas with that batch size get it filled within the wait."""
        if math.isinf(self._max_wait_ms) or batch == 1:
            return self._max_replicas or 10**9
        return math.floor(rate_of(model) * self._max_wait_ms / 1000 / batch * (1 + 1e-9))

    def _replicas_max(
        self, model: PlacedModelInput, batches: Sequence[int], gpu_count: int
    ) -> dict[int, int]:
        most = min(gpu_count, self._max_replicas or gpu_count)
        return {batch: min(most, self._built_in_time(model, batch)) for batch in batches}


def _by_model(
    models: Sequence[PlacedModelInput], offers: Sequence[Mapping[int, Sequence[ResourceDemand]]]
) -> list[tuple[PlacedModelInput, list[int]]]:
    """Each model with the batch sizes it is offered anywhere."""
    return [
        (model, sorted({demand.batch for offered in offers for demand in offered.get(m, ())}))
        for m, model in enumerate(models)
    ]


def _placement(
    models: Sequence[PlacedModelInput],
    task: MilpProblem,
    answer: MilpSolution,
    reasons: Mapping[ModelId, str],
) -> Placement:
    """The answer as slices: each replica alone on its slice, fullest GPUs first."""
    replicas: dict[int, list[tuple[GpuSlot, ResourceDemand]]] = {m: [] for m in range(len(models))}
    for gpus, offers, patterns in zip(task.classes, task.offers, answer.patterns, strict=True):
        for gpu, pattern in zip(gpus.gpus, patterns, strict=False):  # the GPUs left over stay empty
            for m, option in pattern:
                replicas[m].append((gpu, offers[m][option]))
    slices: list[PlannedSlice] = []
    unplaced: list[Unplaced] = []
    decisions = [_overall(task, answer)]
    for m, model in enumerate(models):
        rate_rps, placed = rate_of(model), replicas[m]
        carried_rps = sum(demand.throughput_rps for _, demand in placed)
        served_rps = min(rate_rps, carried_rps)
        for gpu, demand in placed:
            # One batch size a model: on GPUs of one type the router's shares of the load are equal. Of
            # several types the faster gets more, or the slower one would not carry what the goodput counts.
            part_rps = served_rps * demand.throughput_rps / carried_rps
            entry = PlannedModel(model.model_id, demand.batch, part_rps, predicted_ms=demand.exec_ms)
            slices.append(PlannedSlice(gpu.index, None, (entry,)))
        if rate_rps - served_rps > 1e-9 * rate_rps:
            shortfall = _shortfall([demand for _, demand in placed], task, m)
            reason = reasons.get(model.model_id) or shortfall
            unplaced.append(Unplaced(model.model_id, rate_rps - served_rps, reason))
        if model.model_id not in reasons:
            decisions.append(_choice(model, [demand for _, demand in placed], _offered(task, m)))
    slices.sort(key=lambda planned: planned.gpu)
    return Placement(tuple(slices), tuple(unplaced), (), answer.goodput_rps, tuple(decisions))


def _offered(task: MilpProblem, m: int) -> list[ResourceDemand]:
    by_batch = {demand.batch: demand for offers in reversed(task.offers) for demand in offers.get(m, ())}
    return [by_batch[batch] for batch in sorted(by_batch)]


def _shortfall(placed: Sequence[ResourceDemand], task: MilpProblem, m: int) -> str:
    if not placed:
        return "other models bring more goodput on these GPUs"
    batch, carried_rps = placed[0].batch, sum(demand.throughput_rps for demand in placed)
    gpus = sum(
        len(of_class.gpus)
        for of_class, offers in zip(task.classes, task.offers, strict=True)
        if any(demand.batch == batch for demand in offers.get(m, ()))
    )
    is_bound = len(placed) >= min(gpus, task.replicas_max[m][batch])
    return f"its {len(placed)} replicas of batch {batch} carry {carried_rps:.1f} requests per second; " + (
        "it may have no more: one on each GPU that may have that batch, and what `max_replicas` and `build_filter` allow"
        if is_bound
        else "other models bring more goodput than another one"
    )


def _overall(task: MilpProblem, answer: MilpSolution) -> Decision:
    """What the solver came to; the gap is 0 where the optimum is proven."""
    if not answer.is_proven:
        chosen = f"the best that {answer.solver} found in {task.time_limit_s:g} s"
    elif answer.is_tidied:
        chosen = f"the proven optimum ({answer.solver}), of equal ones the one with the least run time"
    else:
        chosen = f"a proven optimum ({answer.solver})"
    metrics = {"expected_goodput_rps": answer.goodput_rps, "gap_rps": answer.gap_rps}
    return Decision("placement", chosen, metrics)


def _choice(
    model: PlacedModelInput, placed: Sequence[ResourceDemand], offered: Sequence[ResourceDemand]
) -> Decision:
    """The model's batch size beside the others within its SLO, those nearest in goodput per Creq first."""
    chosen = placed[0] if placed else None
    rejected = [
        Rejected(
            f"batch {demand.batch}",
            "the whole placement serves no more with it, or takes longer",
            _metrics(demand),
        )
        for demand in offered
        if chosen is None or demand.batch != chosen.batch
    ]
    rejected.sort(key=lambda other: -other.metrics["goodput_per_creq"])
    what = f"{len(placed)} of batch {chosen.batch}" if chosen else "not served"
    return Decision(
        str(model.model_id), what, _metrics(chosen) if chosen else {}, tuple(rejected[:_REJECTED_MAX])
    )


def _metrics(demand: ResourceDemand) -> dict[str, float]:
    return {
        "throughput_rps": demand.throughput_rps,
        "exec_ms": demand.exec_ms,
        "creq_percent": demand.compute_percent,
        "mreq_percent": demand.memory_percent,
        "goodput_per_creq": demand.throughput_rps / max(demand.compute_percent, 1e-9),
    }


AO_MILP: Final = Registered(OPTIONS, partial(Milp, "ao-milp", "achieved_occupancy_percent"))
WSM_MILP: Final = Registered(OPTIONS, partial(Milp, "wsm-milp", "weighted_sm_percent"))
