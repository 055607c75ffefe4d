"""A profile as it was measured: what `tenuto profile` writes, and what it is good for afterwards.

A file holds everything that was seen, with what it was seen on: another model, GPU, driver or torch is another
profile. Readers take run times (the medians), memory, Usher's requirements and iGniter's coefficients from it, each
where it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from fabric.errors import ProfileError
from profiles.documents import BatchSize, Count, NotNegative, Positive, SharePercent, converted
from profiles.igniter.performance_model import (
    Coefficients,
    EstimatedIgniterProfile,
    Hardware,
    read_coefficients,
    read_hardware,
)
from profiles.model import TableProfile, rising
from profiles.requirements import Requirements, Usage


class Subject(Struct, frozen=True, forbid_unknown_fields=True):
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


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    """One batch size at one share, alone; times in ms with the copies to and from the device.

    `low_ms` and `high_ms` are the error bars of an estimate, which has no runs and knows no percentiles: they are
    its run time. None: it was measured.
    """

    share_percent: SharePercent
    batch_size: BatchSize
    p50_ms: Positive
    p95_ms: Positive
    p99_ms: Positive
    runs: Count
    memory_bytes: Count
    power_w: NotNegative | None = None
    frequency_mhz: NotNegative | None = None
    low_ms: NotNegative | None = None
    high_ms: NotNegative | None = None


class KernelRow(Struct, frozen=True, forbid_unknown_fields=True):
    """Launches of one kernel with one configuration in one batch, together."""

    name: str
    launches: Count
    duration_ms: NotNegative
    grid: tuple[Count, Count, Count]
    block: tuple[Count, Count, Count]
    registers_per_thread: Count
    shared_bytes: Count
    occupancy_percent: NotNegative
    sm_percent: NotNegative


class MeasuredProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one run of the profiler saw."""

    subject: Subject
    points: Sequence[Point]
    load_bytes: Count
    feedback_bytes: Count
    requirements: Mapping[BatchSize, Requirements] = field(default_factory=dict)
    kernels: Mapping[BatchSize, Sequence[KernelRow]] = field(default_factory=dict)
    """By batch size, on the whole device."""
    igniter: Mapping[str, Mapping[str, Any]] | None = None
    """`hardware` and `coefficients` under the names of the shipped files."""
    stages_ms: Mapping[Count, tuple[Positive, ...]] = field(default_factory=dict)
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

        A larger batch that was measured faster is taken as slow as the smaller one: run times never fall, nor does memory. What
        batches need is left out where a share had no memory for them: they have no run time.
        """
        columns: dict[float, dict[int, float]] = {}
        memory: dict[int, float] = {}
        for point in self.points:
            columns.setdefault(point.share_percent, {})[point.batch_size] = point.p50_ms
            memory[point.batch_size] = max(memory.get(point.batch_size, 0.0), float(point.memory_bytes))
        table = TableProfile(
            {share: rising(column) for share, column in columns.items()},
            source=self.source,
            memory_by_batch=memory or None,
            usage=Usage({size: needs for size, needs in self.requirements.items() if size <= max(memory)}),
            error=self.error,
        ).with_cuts(self.stages_ms)
        if self.igniter is None:
            return table
        return EstimatedIgniterProfile(*_igniter(self.igniter), self.source, table).with_cuts(self.stages_ms)

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
    """What `document` gave. Raises ProfileError for anything else."""
    found = converted({name: value for name, value in document.items() if name != "version"}, MeasuredProfile)
    if not found.points:
        raise ProfileError("points is empty; a measured profile has at least one")
    if found.igniter is not None:
        _igniter(found.igniter)
    return found


def _igniter(sections: Mapping[str, Mapping[str, Any]]) -> tuple[Hardware, Coefficients]:
    try:
        return read_hardware(sections["hardware"]), read_coefficients(sections["coefficients"])
    except KeyError as error:
        raise ProfileError(f"igniter has no {error}; it must have hardware and coefficients") from error
