"""`tenuto profile --estimate`: a profile out of a model's operator graph, in the form of a measured one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from fabric.errors import ProfileError
from fabric.messages import LoaderSpec
from profiles.estimator.check import checked
from profiles.estimator.estimate import BatchEstimate, Estimator, samples_of
from profiles.estimator.gpus import RECORDED, GpuSpec, gpu_spec
from profiles.estimator.operators import Basis
from profiles.estimator.records import KernelRecord, gpu_of_records, read_records
from profiles.measured import KernelRow, MeasuredProfile, Point, Subject
from profiles.model import WHOLE_GPU_PERCENT
from profiles.profilers.torch import versions
from profiles.requirements import Requirements
from roles.gpu_worker.executors.profiled import ProfiledModel, device_named
from roles.profiling.kernels import kernel_rows

BASES: Final[tuple[Basis, ...]] = ("recorded", "alike", "roofline")
UNKNOWN_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class EstimateAsk:
    """What to estimate for which type of GPU; `records` is a file with kernel records of the user's own."""

    model: str
    loader: LoaderSpec
    gpu_type: str
    batch_sizes: Sequence[int]
    records: Path | None = None


def trained(gpu: GpuSpec, own: Sequence[KernelRecord]) -> Estimator:
    """On the user's own records and on what is shipped; takes seconds."""
    return Estimator(gpu, samples_of(gpu, own))


def estimated(
    ask: EstimateAsk,
    progress: Callable[[float], None],
    warn: Callable[[str], None],
    train: Callable[[GpuSpec, Sequence[KernelRecord]], Estimator] = trained,
) -> MeasuredProfile:
    """Loads the model on the CPU, follows a batch of every size by its shapes, and runs none of them.

    Raises ConfigError for a model that cannot be had, ProfileError for one that cannot be followed, a GPU that
    nothing is known of, records that are none, and half precision.
    """
    gpu = gpu_of_records(ask.gpu_type, ask.records)
    own = () if ask.records is None else read_records(ask.records)
    device = device_named("cpu")
    model = ProfiledModel(ask.loader, device)
    sizes = sorted({1, *ask.batch_sizes})
    graphs = [model.graph(size) for size in sizes]  # what cannot be followed is said before the training
    estimator = train(gpu, own)
    found: list[BatchEstimate] = []
    notes = _notes_of_records(gpu, len(own))
    for size, graph in zip(sizes, graphs, strict=True):
        one = estimator.estimate(graph)
        if one.memory_bytes > gpu.memory_bytes:
            notes.append(f"batches from {size} on: they need over {gpu.memory_bytes >> 30} GiB")
            break
        found.append(one)
        progress(len(found) / len(sizes))
    if not found:
        raise ProfileError(f"not even a batch of 1 fits a {gpu.gpu_type} of {gpu.memory_bytes >> 30} GiB")
    notes += _notes_of_operators(found[-1])
    for note in notes:
        warn(note)
    return MeasuredProfile(
        Subject(
            ask.model,
            model.digest,
            "estimate",
            ask.gpu_type.lower(),
            gpu.name,
            "",
            versions(device)["torch"],
            _today(),
            tuple(notes),
        ),
        [_point(one) for one in found],
        model.load_bytes,
        graphs[0].output_bytes,
        _requirements(found),
        {one.batch_size: _rows(one, gpu) for one in found},
    )


def estimate_checked(records: Path, gpu_type: str) -> dict[str, dict[str, float]]:
    """`{op: {n, median_error, p90_error, roofline_median_error}}` against a file of kernel records."""
    found = checked(read_records(records), gpu_of_records(gpu_type, records))
    return {op: asdict(errors) for op, errors in found.items()}


def _point(one: BatchEstimate) -> Point:
    return Point(
        WHOLE_GPU_PERCENT,
        one.batch_size,
        one.exec_ms,
        one.exec_ms,
        one.exec_ms,
        0,
        one.memory_bytes,
        low_ms=one.low_ms,
        high_ms=one.high_ms,
    )


def _requirements(found: Sequence[BatchEstimate]) -> dict[int, Requirements]:
    return {one.batch_size: one.requirements for one in found}


def _rows(one: BatchEstimate, gpu: GpuSpec) -> list[KernelRow]:
    return kernel_rows(one.kernels, gpu.limits)


def _notes_of_records(gpu: GpuSpec, own: int) -> list[str]:
    if own:
        return [f"learned from {own} kernel records of your own"]
    if gpu.records is None:
        others = ", ".join(RECORDED)
        return [
            f"no kernel records of {gpu.name}: learned from {others}, carried over by peak rates; expect far larger errors"
        ]
    recorded = gpu_spec(gpu.records)
    if recorded.gpu_type != gpu.gpu_type:
        return [f"learned from records of {recorded.name}, carried over to {gpu.name} by peak rates"]
    return []


def _notes_of_operators(one: BatchEstimate) -> list[str]:
    launched = sum(one.by_basis.values())
    recorded, alike, bare = (one.by_basis.get(basis, 0) for basis in BASES)
    notes = [
        f"{launched} operators a batch: {recorded} with records, {alike} like one with records, {bare} by the roofline"
    ]
    if one.unknown:
        named = Counter(one.unknown).most_common()
        shown = ", ".join(f"{name} ({count})" for name, count in named[:UNKNOWN_SHOWN])
        rest = f" and {len(named) - UNKNOWN_SHOWN} more" if len(named) > UNKNOWN_SHOWN else ""
        notes.append(f"operators without records, taken from the roofline: {shown}{rest}")
    return notes


def _today() -> str:
    started = datetime.fromtimestamp(Path("/proc/self").stat().st_mtime, UTC)  # the start of this process
    return started.date().isoformat()
