"""A profile as it was measured: what `tenuto profile` writes, and what it is good for afterwards.

A file holds everything that was seen, with what it was seen on: another model, GPU, driver or torch is another
profile. Readers take run times (the medians), memory, Usher's requirements and iGniter's coefficients from it, each
where it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from fabric.errors import ProfileError
from profiles.igniter.performance_model import EstimatedIgniterProfile, read_coefficients, read_hardware
from profiles.model import TableProfile
from profiles.requirements import Requirements, Usage


class Subject(Struct, frozen=True):
    """What was measured, on what. `model_hash` is over its weights, or its source where it shows none."""

    model: str
    model_hash: str
    device: str
    gpu_type: str
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    date: str = ""
    notes: tuple[str, ...] = ()
    """What is missing, and why; which way batches ran."""


class Point(Struct, frozen=True):
    """One batch size at one share, alone; times in ms with the copies to and from the device.

    `low_ms` and `high_ms` are the error bars of an estimate, which has no runs and knows no percentiles: they are
    its run time. None: it was measured.
    """

    share_percent: float
    batch_size: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    runs: int
    memory_bytes: int
    power_w: float | None = None
    frequency_mhz: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None


class KernelRow(Struct, frozen=True):
    """Launches of one kernel with one configuration in one batch, together."""

    name: str
    launches: int
    duration_ms: float
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers_per_thread: int
    shared_bytes: int
    occupancy_percent: float
    sm_percent: float


class MeasuredProfile(Struct, frozen=True):
    """Everything that one run of the profiler saw."""

    subject: Subject
    points: Sequence[Point]
    load_bytes: int
    feedback_bytes: int
    requirements: Mapping[int, Requirements] = field(default_factory=dict)
    kernels: Mapping[int, Sequence[KernelRow]] = field(default_factory=dict)
    """By batch size, on the whole device."""
    igniter: Mapping[str, Mapping[str, float]] | None = None
    """`hardware` and `coefficients` under the names of the shipped files."""
    stages_ms: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """By the number of stages into which the model was cut: what each takes for one request, without what goes between them."""

    @property
    def error(self) -> float | None:
        """The widest error bar over its run time, for an estimate; None: it was measured."""
        bars = [
            max(point.high_ms - point.p50_ms, point.p50_ms - point.low_ms) / point.p50_ms
            for point in self.points
            if point.low_ms is not None and point.high_ms is not None
        ]
        return max(bars) if bars else None

    @property
    def source(self) -> str:
        """Where the numbers come from, in a line."""
        subject = self.subject
        if self.error is not None:
            return (
                f"ESTIMATE, not measured: {subject.model} on {subject.gpu} from its operator graph and kernel "
                f"records, {subject.date}, run times within {100 * self.error:.0f} %"
            )
        where = subject.gpu or subject.device
        return f"measured {subject.date} on {where}: {subject.model} {subject.model_hash[:12]}, torch {subject.torch}"

    def profile(self) -> TableProfile | EstimatedIgniterProfile:
        """The profile for planning and emulation.

        A larger batch that was measured faster is taken as slow as the smaller one: run times never fall.
        """
        columns: dict[float, dict[int, float]] = {}
        memory: dict[int, float] = {}
        for point in self.points:
            columns.setdefault(point.share_percent, {})[point.batch_size] = point.p50_ms
            memory[point.batch_size] = max(memory.get(point.batch_size, 0.0), float(point.memory_bytes))
        rising = {share: _rising(column) for share, column in columns.items()}
        table = TableProfile(
            rising,
            source=self.source,
            memory_by_batch=memory or None,
            usage=Usage(dict(self.requirements)),
            error=self.error,
        ).with_cuts(self.stages_ms)
        if self.igniter is None:
            return table
        return EstimatedIgniterProfile(
            read_hardware(self.igniter["hardware"]),
            read_coefficients(self.igniter["coefficients"]),
            self.source,
            table,
        ).with_cuts(self.stages_ms)

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "subject": asdict(self.subject),
            "points": [asdict(point) for point in self.points],
            "load_bytes": self.load_bytes,
            "feedback_bytes": self.feedback_bytes,
            "requirements": {str(size): asdict(needs) for size, needs in self.requirements.items()},
            "kernels": {str(size): [asdict(row) for row in rows] for size, rows in self.kernels.items()},
            "igniter": self.igniter,
            "stages_ms": {str(count): list(stages_ms) for count, stages_ms in self.stages_ms.items()},
        }


def measured_from(document: Mapping[str, Any]) -> MeasuredProfile:
    """What `document` gave. Raises ProfileError, KeyError, TypeError or ValueError for anything else."""
    subject = dict(document["subject"])
    subject["notes"] = tuple(subject.get("notes", ()))
    points = [Point(**point) for point in document["points"]]
    if not points:
        raise ProfileError("a measured profile has at least one point")
    return MeasuredProfile(
        Subject(**subject),
        points,
        int(document["load_bytes"]),
        int(document["feedback_bytes"]),
        {int(size): Requirements(**needs) for size, needs in document["requirements"].items()},
        {int(size): [_kernel_row(row) for row in rows] for size, rows in document["kernels"].items()},
        document["igniter"],
        {
            int(count): tuple(float(ms) for ms in stages_ms)
            for count, stages_ms in document.get("stages_ms", {}).items()
        },
    )


def _kernel_row(row: Mapping[str, Any]) -> KernelRow:
    return KernelRow(**{**row, "grid": tuple(row["grid"]), "block": tuple(row["block"])})


def _rising(column: Mapping[int, float]) -> dict[int, float]:
    sizes = sorted(column)
    return dict(zip(sizes, accumulate((column[size] for size in sizes), max), strict=True))
