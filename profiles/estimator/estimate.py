"""A model's run time, memory and requirements on a GPU from its operator graph, with how wrong they may be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from profiles.estimator.regressors import SEED, Floors, Roofline, Sample, TimeRegressor, one_thread
from profiles.estimator.timeline import Streams, Timed, starts_ms
from profiles.estimator.work import ELEMENTWISE_OPS, OTHER, ROW_OPS, Work
from profiles.occupancy import Kernel, requirements_of
from profiles.requirements import Requirements

HELD_OUT: Final = 0.2  # of the records: what error bars are read from
HIDDEN: Final = 1.3
"""Up to so many floors a launch hides the kernel, and a record says little about it."""
KERNEL_MIN_MS: Final = 0.002
ALIKE_ERROR: Final = 0.3
ROOFLINE_ERROR: Final = 0.5
EVENTS_MS: Final = 0.005
"""What the two events around a measured operator cost the host; a model has none between its operators."""


@dataclass(frozen=True, slots=True)
class BatchEstimate:
    """One batch size. `low_ms` and `high_ms` bound the run time by the held-out errors of its operators."""

    batch_size: int
    exec_ms: float
    low_ms: float
    high_ms: float
    memory_bytes: int
    requirements: Requirements
    by_basis: Mapping[Basis, int]
    """Launched operators by how well they are known."""
    unknown: Mapping[str, int]
    """Names of those that no record is like."""


class Estimator:
    """Of one type of GPU, trained on records of it; of all GPUs with records where there is none of its own."""

    def __init__(
        self,
        gpu: GpuSpec,
        samples: Sequence[Sample],
        *,
        streams: Streams = "one",
    ) -> None:
        self.gpu = gpu
        self._streams = streams
        drawn = np.random.default_rng(SEED).random(len(samples)) < HELD_OUT
        known = [sample for sample, is_out in zip(samples, drawn, strict=True) if not is_out]
        self._samples = len(samples)
        with one_thread():
            self._times = TimeRegressor(known)
            self._launches = LaunchModel(known, self._times.floors)
            unseen = [sample for sample, is_out in zip(samples, drawn, strict=True) if is_out]
            self._errors = _errors(self._times, unseen)
        self._roofline = Roofline()
        self._roofline.fit(known, self._times.floors)
        self._gaps_ms = measuring_gaps_ms(known, self._times.floors)
        self._gap_ms = float(np.median([self._gaps_ms[op] for op in ELEMENTWISE_OPS if op in self._gaps_ms]))

    def estimate(self, graph: OperatorGraph) -> BatchEstimate:
        """Raises ProfileError for a graph with arithmetic in half precision, or none at all."""
        works = [work for work in work_of(graph.calls) if work.pieces]
        if not works:
            raise ProfileError("the model launches nothing: there is nothing to estimate")
        with one_thread():
            kernels_ms = self.kernels_ms(works)
            launches = self._launches.predict([work.pieces[0] for work in works], self.gpu)
        kernels = self.kernels(works, kernels_ms, launches, graph)
        copies_ms = (sum(graph.inputs_bytes) + graph.output_bytes) / (self.gpu.copy_gbps * 1e6)
        exec_ms = copies_ms + max(kernel.start_ms + kernel.duration_ms for kernel in kernels)
        spread_ms = self._spread_ms(works, kernels_ms)
        memory = reserved_bytes(
            graph,
            {work.call: launch.workspace_bytes for work, launch in zip(works, launches, strict=True)},
        )
        return BatchEstimate(
            graph.batch_size,
            exec_ms,
            max(exec_ms - spread_ms, copies_ms),
            exec_ms + spread_ms,
            memory,
            requirements_of(kernels, self.gpu.limits, 100 * memory / self.gpu.memory_bytes),
            Counter(work.basis for work in works),
            Counter(graph.calls[work.call].name for work in works if work.basis == "roofline"),
        )

    def kernels_ms(self, works: Sequence[OperatorWork]) -> list[float]:
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

    def kernels(
        self,
        works: Sequence[OperatorWork],
        kernels_ms: Sequence[float],
        launches: Sequence[Launch],
        graph: OperatorGraph,
    ) -> list[Kernel]:
        """In order, as a trace would have them."""
        place = {work.call: index for index, work in enumerate(works)}
        timed = [
            Timed(
                duration_ms,
                self.host_ms(work),
                tuple(place[read] for read in graph.calls[work.call].reads if read in place),
            )
            for work, duration_ms in zip(works, kernels_ms, strict=True)
        ]
        return [
            Kernel(
                graph.calls[work.call].name,
                start_ms,
                one.duration_ms,
                (launch.blocks, 1, 1),
                (launch.threads, 1, 1),
                launch.registers,
            )
            for work, one, launch, start_ms in zip(
                works, timed, launches, starts_ms(timed, self._streams), strict=True
            )
        ]

    def host_ms(self, work: OperatorWork) -> float:
        """What launching it keeps the host."""
        return max(0.0, self._times.floors.of(work.pieces[0].op, self.gpu) - EVENTS_MS)

    def _busy_ms(self, work: Work, latency_ms: float) -> float:
        floor_ms = self._times.floors.of(work.op, self.gpu)
        busy_ms = max(KERNEL_MIN_MS, latency_ms - self._gaps_ms.get(work.op, self._gap_ms))
        if latency_ms > HIDDEN * floor_ms:
            return busy_ms
        return min(busy_ms, KERNEL_MIN_MS + self._roofline.factor(work.op) * self.gpu.roofline_ms(work))

    def _fallback_ms(self, work: Work) -> float:
        factor = sum(self._roofline.factor(op) for op in ELEMENTWISE_OPS) / len(ELEMENTWISE_OPS)
        return KERNEL_MIN_MS + factor * self.gpu.roofline_ms(work)

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
    """The user's own records of this GPU, then the shipped ones of it; of all GPUs where neither is there."""
    samples = [Sample(record, gpu) for record in own]
    types = [gpu.records] if gpu.records else ([] if own else list(RECORDED))
    for gpu_type in types:
        recorded = gpu_spec(gpu_type)
        samples += [Sample(record, recorded) for record in shipped_records(gpu_type)]
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
