"""The estimator against kernel records that it was not trained on, operator class by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiles.estimator.estimate import samples_of
from profiles.estimator.gpus import RECORDED, GpuSpec, gpu_spec
from profiles.estimator.records import KernelRecord, shipped_records
from profiles.estimator.regressors import Sample, TimeRegressor, group_of, one_thread


@dataclass(frozen=True, slots=True)
class ErrorsOfClass:
    """Relative errors of run times over `n` records: |predicted / measured - 1|."""

    n: int
    median_error: float
    p90_error: float
    roofline_median_error: float


def checked(
    records: Sequence[KernelRecord], gpu: GpuSpec, own: Sequence[KernelRecord] = ()
) -> dict[str, ErrorsOfClass]:
    """By class; `own` are records of this GPU to learn from too. What has the same operator and sizes is not learned from.

    Where none of this GPU remains, or it has none, all others' are learned from.
    """
    asked = {(record.work.op, record.work.dims) for record in records}
    groups = {group_of(op) for op, _ in asked}  # nothing else needs to be learned
    samples = [
        one
        for one in samples_of(gpu, own)
        if group_of(one.record.work.op) in groups and (one.record.work.op, one.record.work.dims) not in asked
    ]
    missing = {op for op, _ in asked} - {one.record.work.op for one in samples}
    for gpu_type in RECORDED if missing else ():
        samples += [
            Sample(record, gpu_spec(gpu_type))
            for record in shipped_records(gpu_type)
            if record.work.op in missing and gpu_type != gpu.records
        ]
    with one_thread():
        times = TimeRegressor(samples)
        roofline = TimeRegressor(samples, "roofline")
    return errors_of(records, gpu, times, roofline)


def errors_of(
    records: Sequence[KernelRecord], gpu: GpuSpec, times: TimeRegressor, roofline: TimeRegressor
) -> dict[str, ErrorsOfClass]:
    """Of two that are trained already."""
    works = [record.work for record in records]
    measured = np.array([record.latency_ms for record in records])
    with one_thread():
        wrong = np.abs(np.array(times.predict_ms(works, gpu)) / measured - 1)
        bare = np.abs(np.array(roofline.predict_ms(works, gpu)) / measured - 1)
    ops = np.array([work.op for work in works])
    return {
        op: ErrorsOfClass(
            int(np.sum(ops == op)),
            float(np.median(wrong[ops == op])),
            float(np.quantile(wrong[ops == op], 0.9)),
            float(np.median(bare[ops == op])),
        )
        for op in sorted(set(ops.tolist()))
    }
