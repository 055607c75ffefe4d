"""What an open-loop run at a living cluster was worth, judged by the lines of a simulated one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fabric.errors import ConfigError, ProfileError
from fabric.ids import ModelId, SliceId
from policies.slo import BAD_RATE_ALLOWED
from roles.applications.tally import StageTally
from roles.benchmark.share import COLUMNS, STAGES, LoadRecord, asked_of
from roles.config.cluster import ClusterConfig
from roles.scheduler.settings import SchedulerSettings, settings_from
from roles.workload.outcomes import (
    ApplicationOutcome,
    GpuUse,
    ModelOutcome,
    Outcome,
    Window,
    model_outcome,
    nearest_rank,
    stage_outcome,
    use_of,
)

LATE_MS_MAX = 1.0
LATE_SLO_FRACTION = 0.05
"""A sender may be late at its p99 by the larger of these: a millisecond, or that part of the tightest SLO."""

Parts = Mapping[int, float]
"""How much of which GPUs of the cluster a slice has."""

_COLUMN = {name: place for place, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True)
class PlannedSlices:
    """The slices of the file's own plan, and what of the cluster each has; a slice that it does not have counts as one whole GPU.

    `remark`: why nothing is known of them, where no plan can be made.
    """

    parts: Mapping[SliceId, Parts]
    remark: str = ""


def planned_slices(config: ClusterConfig, settings: SchedulerSettings | None = None) -> PlannedSlices:
    """Plan as the cluster did. It may have been planned by what is not there any more, or not here: then that is a remark.

    `settings`: of the file's plan, where that is made already.
    """
    try:
        slices = (settings or settings_from(config)).slices
    except (ConfigError, ProfileError) as error:
        return PlannedSlices({}, f"slices count as whole GPUs, as the file's plan cannot be made: {error}")
    places = _places(config)
    parts: dict[SliceId, Parts] = {}
    for node_id, spec in slices:
        share = (spec.share_percent or 100.0) / 100
        # Ranks run each batch together, a pipeline's stages one after the other.
        share /= 1 if spec.is_gang else len(spec.gpus)
        parts[spec.slice_id] = {places[f"{node_id}/gpu{gpu}"]: share for gpu in spec.gpus}
    return PlannedSlices(parts)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A finished run: the verdict and the rows behind it (`COLUMNS`), all models, the whole run."""

    config: ClusterConfig
    window: Window
    outcome: Outcome
    record: LoadRecord

    def column(self, name: str, model_id: ModelId | None = None) -> NDArray[np.float64]:
        """One column of the requests that count: those whose intended arrival lies in the window; of one model, or of all."""
        rows = _inside(self.record.rows, self.window)
        if model_id is not None:
            rows = rows[rows[:, _COLUMN["model"]] == self._place(model_id)]
        return rows[:, _COLUMN[name]]

    def remarks(self) -> list[str]:
        """Where the cluster has another SLO than the file, as after `tenuto models set`: each request brings the file's as its budget."""
        told = self.record.slos_ms
        return [
            f"{name}: the cluster has an SLO of {told[name]:g} ms, the file {slo_ms:g} ms, with which requests were sent and judged"
            for name, slo_ms in asked_of(self.config)
            if told.get(name, 0.0) not in (0.0, slo_ms)  # 0: a gateway does not tell it
        ]

    def errors(self, model_id: ModelId | None = None) -> Counter[str]:
        """By code, of one model or application, or of all; those of the whole run."""
        return self.record.errors_of(None if model_id is None else self._place(model_id))

    def _place(self, model_id: ModelId) -> int:
        return [name for name, _ in asked_of(self.config)].index(model_id)

    @property
    def sender_late_p99_ms(self) -> float:
        """How late requests were sent, at the 99th percentile."""
        return nearest_rank(np.sort(self.column("late_ms")), 0.99) or 0.0

    @property
    def late_allowed_ms(self) -> float:
        """Beyond it the run says more of its senders than of the cluster."""
        return max(LATE_MS_MAX, LATE_SLO_FRACTION * min(slo_ms for _, slo_ms in asked_of(self.config)))

    @property
    def is_valid(self) -> bool:
        """Whether the senders kept to the plan."""
        return self.sender_late_p99_ms <= self.late_allowed_ms

    @property
    def is_spoiled(self) -> bool:
        """Whether the senders were late and a model fared badly: it may be their doing.

        Late senders make latency look worse, never better, so what was good all the same is good.
        """
        return not self.is_valid and self.outcome.worst_bad_rate >= BAD_RATE_ALLOWED

    def as_json(self) -> dict[str, object]:
        """The contract of `bench --json`: as `simulate`, plus the stages, of all models and of each, and the senders' own lateness."""
        latency_ms = np.sort(_known(self.column("latency_ms")))
        late_ms = np.sort(self.column("late_ms"))
        return {
            **self.outcome.as_json(),
            "latency_ms": _percentiles(latency_ms),
            "breakdown_ms": self.breakdown_ms(),
            "sender": {
                "late_ms": _percentiles(late_ms),
                "late_allowed_ms": self.late_allowed_ms,
                "is_valid": self.is_valid,
            },
            "errors": dict(self.errors()),
            "by_model": {model.model_id: self._of_model(model.model_id) for model in self.config.models},
        }

    def _of_model(self, model_id: ModelId) -> dict[str, object]:
        return {
            "latency_ms": _percentiles(np.sort(_known(self.column("latency_ms", model_id)))),
            "breakdown_ms": self.breakdown_ms(model_id),
            "errors": dict(self.errors(model_id)),
        }

    def breakdown_ms(self, model_id: ModelId | None = None) -> dict[str, dict[str, float | None]]:
        """By stage of the ledger: mean, p50 and p99 over the answered requests that count, of one model or of all."""
        breakdown: dict[str, dict[str, float | None]] = {}
        for stage in STAGES:
            spent_ms = np.sort(_known(self.column(stage, model_id)))
            breakdown[stage] = {
                "mean": round(float(spent_ms.mean()), 6) if spent_ms.size else None,
                "p50": nearest_rank(spent_ms, 0.5),
                "p99": nearest_rank(spent_ms, 0.99),
            }
        return breakdown


def judge(
    config: ClusterConfig,
    records: Sequence[LoadRecord],
    window: Window,
    planned: PlannedSlices | None = None,
) -> LoadRun:
    """Put the senders' records together and judge what was meant to arrive in the window. `planned` spares planning again."""
    record = _merged(records)
    outcome = _outcome(config, planned or planned_slices(config), record, window)
    return LoadRun(config, window, outcome, record)


def _merged(records: Sequence[LoadRecord]) -> LoadRecord:
    """One record; each sender has numbered the slices it heard of by itself."""
    names = sorted({name for record in records for name in record.slices})
    numbers = {name: float(number) for number, name in enumerate(names)}
    errors: Counter[tuple[int, str]] = Counter()
    stages: dict[str, dict[str, StageTally]] = {}
    blocks = []
    for record in records:
        rows = record.rows.copy()
        renumbered = np.array([numbers[name] for name in record.slices])
        ran = ~np.isnan(rows[:, _COLUMN["slice"]])
        rows[ran, _COLUMN["slice"]] = renumbered[rows[ran, _COLUMN["slice"]].astype(int)]
        blocks.append(rows)
        errors += record.errors
        for application, tallies in record.stages.items():
            known = stages.setdefault(application, {})
            for stage, tally in tallies.items():
                known.setdefault(stage, StageTally()).add(tally)
    rows = np.concatenate(blocks)
    order = np.argsort(rows[:, _COLUMN["intended_at_ms"]], kind="stable")
    return LoadRecord(rows[order], tuple(names), errors, stages, records[0].slos_ms)


def _outcome(config: ClusterConfig, planned: PlannedSlices, record: LoadRecord, window: Window) -> Outcome:
    rows = record.rows
    fates: dict[ModelId, ModelOutcome] = {}
    for place, (name, slo_ms) in enumerate(asked_of(config)):
        own = rows[rows[:, _COLUMN["model"]] == place]
        arrived_at_ms = own[:, _COLUMN["intended_at_ms"]]
        fates[name] = model_outcome(
            arrived_at_ms,
            arrived_at_ms + own[:, _COLUMN["latency_ms"]],
            slo_ms,
            window,
            _batch_sizes(_known(_inside(own, window)[:, _COLUMN["batch_size"]])),
        )
    models = {model.model_id: fates[model.model_id] for model in config.models}
    applications = {
        one.name: ApplicationOutcome(
            fates[ModelId(one.name)],
            {stage: stage_outcome(tally) for stage, tally in record.stages.get(one.name, {}).items()},
        )
        for one in config.applications
    }
    return Outcome(
        window.duration_s,
        models,
        _gpu_use(config, planned, record, window),
        applications,
        is_work_known=_is_work_known(_inside(rows, window), len(config.models)),
        gpus_min=max(map(len, planned.parts.values()), default=1),
    )


def _is_work_known(rows: NDArray[np.float64], models: int) -> bool:
    """Whether answers tell of all batches: those of applications do not, nor those of a gateway that tells of none."""
    has_stages = rows[:, _COLUMN["model"]] >= models
    is_untold = ~np.isnan(rows[:, _COLUMN["latency_ms"]]) & np.isnan(rows[:, _COLUMN["batch_size"]])
    return not np.any(has_stages | is_untold)


def _batch_sizes(of_requests: NDArray[np.float64]) -> list[int]:
    """Sizes of the batches behind the requests: a batch of b is told of b times."""
    sizes, told = np.unique(of_requests, return_counts=True)
    return [int(size) for size, times in zip(sizes, told, strict=True) for _ in range(round(times / size))]


def _gpu_use(config: ClusterConfig, planned: PlannedSlices, record: LoadRecord, window: Window) -> GpuUse:
    """Each GPU's busy part of the window by the answers' ledgers, weighted by the slices' shares, and with which models.

    What other clients had computed is not in it, nor what was computed for nobody or for stages of applications. A slice that the file's plan does
    not have came with a move; its share is not known here, so it counts as a whole GPU: the one in its name. The GPUs of a
    pipeline count alike: the ledger does not say how long each of them had the batch.
    """
    rows = _inside(record.rows, window)
    rows = rows[~np.isnan(rows[:, _COLUMN["batch_size"]])]
    places = _places(config)
    spent_ms: list[defaultdict[ModelId, float]] = [defaultdict(float) for _ in config.gpus]
    for place, model in enumerate(config.models):
        own = rows[rows[:, _COLUMN["model"]] == place]
        busy_ms = np.bincount(
            own[:, _COLUMN["slice"]].astype(int),
            own[:, _COLUMN["gpu_ms"]] / own[:, _COLUMN["batch_size"]],
            len(record.slices),
        )
        for name, ms in zip(record.slices, busy_ms, strict=True):
            parts = planned.parts.get(SliceId(name))
            if parts is None:
                gpu = places.get(name.rpartition("/")[0])
                parts = {} if gpu is None else {gpu: 1.0}
            for gpu, share in parts.items():
                spent_ms[gpu][model.model_id] += share * float(ms)
    return use_of(spent_ms, window)


def _places(config: ClusterConfig) -> dict[str, int]:
    """The number of each GPU in the cluster, by its node and its number there."""
    return {f"{gpu.node_id}/gpu{gpu.local_index}": gpu.index for gpu in config.gpus}


def _inside(rows: NDArray[np.float64], window: Window) -> NDArray[np.float64]:
    at_ms = rows[:, _COLUMN["intended_at_ms"]]
    return rows[(at_ms >= window.from_ms) & (at_ms < window.until_ms)]


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


def _percentiles(ascending: NDArray[np.float64]) -> dict[str, float | None]:
    return {
        name: nearest_rank(ascending, fraction)
        for name, fraction in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999))
    }
