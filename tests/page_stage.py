"""Looks at clusters that a test makes up: it names only what matters to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fabric.ids import BatchId, ModelId, NodeId, SliceId
from fabric.messages import (
    BatchEntry,
    GpuInfo,
    GpuReport,
    Ledger,
    ModelInfo,
    PlanReport,
    RequestRecord,
    SliceReport,
    StatusListed,
)
from roles.observability.remembered import BatchSeen, RequestSeen
from roles.page.snapshot import Look
from roles.runtime.live_figures import LiveFigures, LiveModel
from roles.runtime.running_cluster import ClusterReport, ProcessReport


def live(model: str, **told: Any) -> LiveModel:
    known: dict[str, Any] = {
        "slo_ms": 50.0,
        "window_s": 10.0,
        "rate_rps": 100.0,
        "goodput_rps": 100.0,
        "late": 0,
        "dropped": {},
        "bad_rate": 0.0,
        "p50_ms": 20.0,
        "p99_ms": 40.0,
    }
    return LiveModel(ModelId(model), **{**known, **told})


def batch(
    model: str, slice_id: str, started_at_ms: float, exec_ms: float, size: int = 4, status: str = "ok"
) -> BatchSeen:
    entry = BatchEntry(
        1,
        BatchId(1),
        ModelId(model),
        SliceId(slice_id),
        size,
        status,
        "slice_free",
        0.0,
        0.0,
        exec_ms,
        exec_ms,
        exec_ms,
        0.1,
        0.0,
        0.0,
    )
    return BatchSeen(entry, started_at_ms - 1.0, started_at_ms, started_at_ms + exec_ms)


def request(model: str, outcome: str, ended_at_ms: float, number: int = 1, **ledger: Any) -> RequestSeen:
    told = Ledger(total_ms=sum(ledger.values()), slice_id=SliceId("here/gpu0/0"), **ledger)
    record = RequestRecord(number, f"f-{number:x}", ModelId(model), outcome, "", 0.0, 50.0, told, BatchId(0))
    return RequestSeen(record, ended_at_ms - told.total_ms, ended_at_ms)


def slice_of(name: str, *models: str, state: str = "ready", share: float | None = None) -> SliceReport:
    return SliceReport(SliceId(name), state, "", tuple(map(ModelId, models)), 1, 1, (), share)


def gpu(number: int, **info: Any) -> GpuReport:
    return GpuReport(NodeId("here"), GpuInfo(number, "generic", "emulated", **info))


@dataclass
class Stage:
    """What the next look sees."""

    models: Sequence[str] = ("a", "b")
    slices: Sequence[SliceReport] = field(default_factory=lambda: [slice_of("here/gpu0/0", "a", "b")])
    gpus: Sequence[GpuReport] = field(default_factory=lambda: [gpu(0)])
    figures: Mapping[str, LiveModel] = field(default_factory=dict)
    plan: PlanReport | None = None
    counters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    processes: Sequence[ProcessReport] = ()
    silent: Sequence[str] = ()
    replicas: int = 1
    queued: Mapping[str, float] = field(default_factory=dict)

    def look(
        self,
        at_ms: float,
        batches: Sequence[BatchSeen] = (),
        requests: Sequence[RequestSeen] = (),
        from_ms: float = float("-inf"),
    ) -> Look:
        models = tuple(ModelInfo(ModelId(name), 50.0, replicas=self.replicas) for name in self.models)
        status = StatusListed(
            "scheduler-0",
            1,
            tuple(self.slices),
            models,
            {},
            tuple(self.gpus),
            self.plan,
            queued=dict(self.queued),
        )
        report = ClusterReport({}, self.processes, status, self.counters)
        figures = {ModelId(name): one for name, one in self.figures.items()}
        return Look(at_ms, report, LiveFigures(figures, list(self.silent)), batches, requests, from_ms)
