"""A node agent's status as metrics: its GPUs' sensors, its own loop, and what its workers say of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from fabric.ids import PeerId
from fabric.messages import GpuReport, StatusListed
from roles.runtime.loop.driver import DriverStats
from roles.runtime.metrics import catalog
from roles.runtime.metrics.catalog import Metric
from roles.runtime.metrics.common import about_process, about_role, other_events
from roles.runtime.metrics.snapshot import MS, Measured

METRICS: Final = PeerId("metrics")
"""Who asks the core how it is when the page of metrics is wanted; no peer's name is without an incarnation."""
WORKERS_MAX: Final = 256
"""Workers with series of their own on a page."""
_LATENESS: Final = (("0.5", "timer_late_p50_ms"), ("0.99", "timer_late_p99_ms"), ("1", "timer_late_ms_max"))
_SHOWN: Final = frozenset({"cpu_ms", "memory_bytes", "pid", "turns", *(name for _, name in _LATENESS)})
_EVENTS_MAX: Final = 64


def measured_agent(status: StatusListed, stats: DriverStats) -> list[Measured]:
    """All of it."""
    own: dict[str, float] = {}
    workers: dict[str, dict[str, float]] = {}
    for name, value in status.counters.items():
        worker_id, _, counter = name.rpartition("/")
        (workers.setdefault(worker_id, {}) if worker_id else own)[counter] = value
    return [
        about_role("node-agent"),
        *about_process(stats),
        *(one for gpu in status.gpus for one in _gpu(gpu)),
        Measured(catalog.WORKERS, (), len(workers)),
        *(
            one
            for worker_id in sorted(workers)[:WORKERS_MAX]
            for one in _worker(worker_id, workers[worker_id])
        ),
        *other_events(own, {"is_ready": catalog.AGENT_READY}),
    ]


def _gpu(report: GpuReport) -> Iterator[Measured]:
    gpu = (str(report.info.gpu),)
    yield Measured(catalog.GPU_MEMORY_TOTAL, gpu, report.info.memory_bytes)
    sample = report.sample
    if sample is None:
        return
    known: tuple[tuple[Metric, float | None, float], ...] = (
        (catalog.GPU_SENSOR_BUSY, sample.busy_percent, 0.01),
        (catalog.GPU_MEMORY, sample.memory_used_bytes, 1.0),
        (catalog.GPU_POWER, sample.power_w, 1.0),
        (catalog.GPU_CLOCK, sample.sm_mhz, 1e6),
        (catalog.GPU_TEMPERATURE, sample.temperature_c, 1.0),
    )
    for metric, value, unit in known:
        if value is not None:
            yield Measured(metric, gpu, value * unit)
    yield Measured(catalog.GPU_THROTTLED, gpu, float(bool(sample.throttle)))


def _worker(worker_id: str, counters: Mapping[str, float]) -> Iterator[Measured]:
    worker = (worker_id,)
    yield Measured(catalog.WORKER_CPU, worker, counters.get("cpu_ms", 0.0) * MS)
    yield Measured(catalog.WORKER_MEMORY, worker, counters.get("memory_bytes", 0.0))
    yield Measured(catalog.WORKER_TURNS, worker, counters.get("turns", 0.0))
    for quantile, name in _LATENESS:
        yield Measured(catalog.WORKER_LATENESS, (worker_id, quantile), counters.get(name, 0.0) * MS)
    names = sorted(name for name in counters if name not in _SHOWN and not name.endswith(("_max", "_ms")))
    for name in names[:_EVENTS_MAX]:
        yield Measured(catalog.WORKER_EVENTS, (worker_id, name), counters[name])
