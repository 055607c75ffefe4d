"""A model's run time, memory and requirements on a GPU from its operator graph, with how wrong they may be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from fabric.errors import ProfileError
from profiles.estimator.gpus import RECORDED, GpuSpec, gpu_spec
from profiles.estimator.graph import OperatorGraph
from profiles.estimator.launches import Launch, LaunchModel
from profiles.estimator.memory import reserved_bytes
from profiles.estimator.operators import Basis, OperatorWork, work_of
from profiles.estimator.records import KernelRecord, shipped_records
from profiles.estimator.regressors import ROUNDS, SEED, Floors, Roofline, Sample, TimeRegressor, one_thread
from profiles.estimator.timeline import Streams, Timed, starts_ms
from profiles.estimator.work import ELEMENTWISE_OPS, OTHER, ROW_OPS, Work
from profiles.occupancy import Kernel, occupancy_percent, requirements_of
from profiles.requirements import Requirements

HELD_OUT: Final = 0.2  # of the records: what error bars are read from
HIDDEN: Final = 1.3
"""Up to so many floors a launch hides the kernel, and a record says little about it."""
KERNEL_MIN_MS: Final = 0.002
ENOUGH: Final = 100
ALIKE_ERROR: Final = 0.3
ROOFLINE_ERROR: Final = 0.5


@dataclass(frozen=True, slots=True)
class Calibration:
    """What records of single operators cannot say. Fitted on the thesis' Table A.1 (V100, eager torch).

    `events_ms`: of a record's launch, what the events around it cost the host, which a model's operators do
    not have. `achieved`: warps active over warps that fit, as counters see them. `scratch`: what is
    reserved beside the weights, over what live tensors and known work spaces account for. The benchmark
    refits all three without the model it judges.
    """

    events_ms: float = 0.005
    achieved: float = 0.93
    scratch: float = 1.45


CALIBRATION: Final = Calibration()


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is known of a graph before it is put on a timeline."""

    graph: OperatorGraph
    works: Sequence[OperatorWork]
    kernels_ms: Sequence[float]
    launches: Sequence[Launch]
    reserved_bytes: int
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class BatchEstimate:
    """One batch size. `low_ms` and `high_ms` bound the run time by the held-out errors of its operators."""

    batch_size: int
    exec_ms: float
    low_ms: float
    high_ms: float
    memory_bytes: int
    requirements: Requirements
    kernels: Sequence[Kernel]
    by_basis: Mapping[Basis, int]
    """Launched operators by how well they are known."""
    unknown: Mapping[str, int]
    """Names of those that no record is like."""


class Estimator:
    """Of one type of GPU, trained on records of it; of all GPUs with records where there is none of its own."""

    def __init__(
        self, gpu: GpuSpec, samples: Sequence[Sample], streams: Streams = "one", rounds: int = ROUNDS
    ) -> None:
        self.gpu = gpu
        self._streams = streams
        drawn = np.random.default_rng(SEED).random(len(samples)) < HELD_OUT
        known = [sample for sample, is_out in zip(samples, drawn, strict=True) if not is_out]
        unseen = [sample for sample, is_out in zip(samples, drawn, strict=True) if is_out]
        with one_thread():
            self._times = TimeRegressor(known, rounds=rounds)
            self._launches = LaunchModel(known, self._times.floors, rounds)
            self._errors = _errors(self._times, unseen)
        self._roofline = Roofline()
        self._roofline.fit(known, self._times.floors)
        self._gaps_ms = measuring_gaps_ms(known, self._times.floors)

    def estimate(self, graph: OperatorGraph, calibration: Calibration = CALIBRATION) -> BatchEstimate:
        """Raises ProfileError for a graph with arithmetic in half precision, or none at all."""
        return self.put_together(self.predict(graph), calibration)

    def predict(self, graph: OperatorGraph) -> Prediction:
        """The part that takes time; the same for every calibration."""
        works = [work for work in work_of(graph.calls) if work.pieces]
        if not works:
            raise ProfileError("the model launches nothing: there is nothing to estimate")
        with one_thread():
            kernels_ms = self._kernels_ms(works)
            launches = self._launches.predict([work.pieces[0] for work in works], self.gpu)
        workspaces = {work.call: one.workspace_bytes for work, one in zip(works, launches, strict=True)}
        reserved, weights = reserved_bytes(graph, workspaces)
        return Prediction(graph, works, kernels_ms, launches, reserved, weights)

    def put_together(self, found: Prediction, calibration: Calibration = CALIBRATION) -> BatchEstimate:
        """On the timeline."""
        graph, works = found.graph, found.works
        kernels = self._kernels(found, calibration)
        copies_ms = (sum(graph.inputs_bytes) + graph.output_bytes) / (self.gpu.copy_gbps * 1e6)
        exec_ms = copies_ms + max(kernel.start_ms + kernel.duration_ms for kernel in kernels)
        spread_ms = self._spread_ms(works, found.kernels_ms)
        memory = found.weights_bytes + round(
            calibration.scratch * (found.reserved_bytes - found.weights_bytes)
        )
        return BatchEstimate(
            graph.batch_size,
            exec_ms,
            max(exec_ms - spread_ms, copies_ms),
            exec_ms + spread_ms,
            memory,
            requirements_of(kernels, self.gpu.limits, 100 * memory / self.gpu.memory_bytes),
            kernels,
            Counter(work.basis for work in works),
            Counter(graph.calls[work.call].name for work in works if work.basis == "roofline"),
        )

    def roofline_ms(self, graph: OperatorGraph) -> float:
        """The baseline for a whole model: each operator by its class's constant on the roofline, or its floor."""
        pieces = [piece for work in work_of(graph.calls) for piece in work.pieces]
        factor = self._elementwise_factor
        return math.fsum(
            factor * self.gpu.roofline_ms(piece)
            if piece.op == OTHER
            else self._roofline.factor(piece.op) * self.gpu.roofline_ms(piece)
            for piece in pieces
        )

    def _kernels_ms(self, works: Sequence[OperatorWork]) -> list[float]:
        """What each operator keeps the GPU busy: a record's time without what measuring it added."""
        pieces = [piece for work in works for piece in work.pieces if piece.op != OTHER]
        said = iter(self._times.predict_ms(pieces, self.gpu))
        found = []
        for work in works:
            total_ms = 0.0
            for piece in work.pieces:
                total_ms += (
                    self._fallback_ms(piece) if piece.op == OTHER else self._busy_ms(piece, next(said))
                )
            found.append(total_ms)
        return found

    def _kernels(self, found: Prediction, calibration: Calibration) -> list[Kernel]:
        """In order, as a trace would have them."""
        place = {work.call: index for index, work in enumerate(found.works)}
        calls = [found.graph.calls[work.call] for work in found.works]
        timed = [
            Timed(
                duration_ms,
                max(0.0, self._times.floors.of(work.pieces[0].op, self.gpu) - calibration.events_ms),
                tuple(place[read] for read in call.reads if read in place),
            )
            for work, call, duration_ms in zip(found.works, calls, found.kernels_ms, strict=True)
        ]
        limits = self.gpu.limits
        kernels = []
        for call, one, launch, start_ms in zip(
            calls, timed, found.launches, starts_ms(timed, self._streams), strict=True
        ):
            kernel = Kernel(
                call.name,
                start_ms,
                one.duration_ms,
                (launch.blocks, 1, 1),
                (launch.threads, 1, 1),
                launch.registers,
            )
            achieved = calibration.achieved * occupancy_percent(kernel, limits)
            kernels.append(replace(kernel, occupancy_percent=achieved))
        return kernels

    @property
    def _elementwise_factor(self) -> float:
        known = [self._roofline.factor(op) for op in ELEMENTWISE_OPS if op in self._roofline.known]
        if not known:
            raise ProfileError(
                "there are no records of elementwise operators: nothing says what memory reaches"
            )
        return sum(known) / len(known)

    def _busy_ms(self, work: Work, latency_ms: float) -> float:
        floor_ms = self._times.floors.of(work.op, self.gpu)
        busy_ms = max(KERNEL_MIN_MS, latency_ms - self._gaps_ms.get(work.op, 0.0))
        if latency_ms > HIDDEN * floor_ms:
            return busy_ms
        return min(busy_ms, KERNEL_MIN_MS + self._roofline.factor(work.op) * self.gpu.roofline_ms(work))

    def _fallback_ms(self, work: Work) -> float:
        return KERNEL_MIN_MS + self._elementwise_factor * self.gpu.roofline_ms(work)

    def _spread_ms(self, works: Sequence[OperatorWork], kernels_ms: Sequence[float]) -> float:
        """Errors of one class go together, those of different ones do not."""
        by_class: dict[str, float] = {}
        for work, duration_ms in zip(works, kernels_ms, strict=True):
            op = work.pieces[0].op
            error = self._errors.get(op, ROOFLINE_ERROR)
            if work.basis == "alike":
                error = max(error, ALIKE_ERROR)
            key = f"{op} {work.basis}"
            by_class[key] = by_class.get(key, 0.0) + error * duration_ms
        return math.sqrt(sum(value * value for value in by_class.values()))


def measuring_gaps_ms(samples: Sequence[Sample], floors: Floors) -> dict[str, float]:
    """By class, what a record has before its kernel starts: the host's way to the launch.

    Where memory bounds a class, it is where the line of time over bytes of its largest operators meets zero. After
    the launch the host takes some more time, which floors have and large operators hide; it is taken as
    equal for all classes, so a class that arithmetic bounds has its floor without that.
    """
    gaps: dict[str, float] = {}
    after: list[float] = []
    by_class: dict[tuple[str, GpuSpec], list[tuple[float, float]]] = {}
    for one in samples:
        key = (one.record.work.op, one.gpu)
        by_class.setdefault(key, []).append((one.record.work.size_bytes, one.record.latency_ms))
    for (op, gpu), points in by_class.items():
        largest = np.array(sorted(points)[-max(2, len(points) // 5) :])
        if op in (*ELEMENTWISE_OPS, *ROW_OPS) and len(points) > 1 and largest[0, 0] < largest[-1, 0]:
            start_ms = float(np.polyfit(largest[:, 0], largest[:, 1], 1)[1])
            gap_ms = min(max(0.0, start_ms - KERNEL_MIN_MS), floors.of(op, gpu))
            gaps[op] = min(gaps.get(op, gap_ms), gap_ms)
            if op in ELEMENTWISE_OPS:
                after.append(floors.of(op, gpu) - gap_ms)
    tail_ms = float(np.median(after)) if after else 0.0
    for op, gpu in by_class:
        if op not in gaps:
            gaps[op] = max(0.0, floors.of(op, gpu) - tail_ms)
    return gaps


def samples_of(gpu: GpuSpec, own: Sequence[KernelRecord] = ()) -> list[Sample]:
    """The user's own records of this GPU, and the shipped ones of it; of all GPUs where neither is there.

    A class with `ENOUGH` records of the user's is learned from these alone: a hundred of this very host and torch say more
    than thousands of another, which would outvote them.
    """
    samples = [Sample(record, gpu) for record in own]
    counts = Counter(record.work.op for record in own)
    types = [gpu.records] if gpu.records else ([] if own else list(RECORDED))
    for gpu_type in types:
        recorded = gpu_spec(gpu_type)
        shipped = (record for record in shipped_records(gpu_type) if counts[record.work.op] < ENOUGH)
        samples += [Sample(record, recorded) for record in shipped]
    return samples


@cache
def shipped_estimator(gpu_type: str) -> Estimator:
    """Trained on what is shipped, once in a process; takes seconds. Raises ProfileError for an unknown GPU."""
    gpu = gpu_spec(gpu_type)
    return Estimator(gpu, samples_of(gpu))


def _errors(times: TimeRegressor, samples: Sequence[Sample]) -> dict[str, float]:
    """The 90th percentile of the error of each class on records that were held out."""
    found: dict[str, list[float]] = {}
    for gpu in dict.fromkeys(sample.gpu for sample in samples):
        records = [sample.record for sample in samples if sample.gpu == gpu]
        said = times.predict_ms([record.work for record in records], gpu)
        for record, predicted_ms in zip(records, said, strict=True):
            found.setdefault(record.work.op, []).append(abs(predicted_ms / record.latency_ms - 1))
    return {op: float(np.quantile(values, 0.9)) for op, values in found.items()}
