"""An estimator that trains in a second: every twentieth of the shipped records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from profiles.estimator.estimate import Estimator, samples_of
from profiles.estimator.gpus import GpuSpec, gpu_spec
from profiles.estimator.records import KernelRecord
from profiles.estimator.regressors import Sample

EVERY = 20
ROUNDS = 30


def few_samples(gpu_type: str = "v100") -> list[Sample]:
    return samples_of(gpu_spec(gpu_type))[::EVERY]


@cache
def quick_estimator(gpu_type: str = "v100") -> Estimator:
    return Estimator(gpu_spec(gpu_type), few_samples(gpu_type), rounds=ROUNDS)


def quickly_trained(gpu: GpuSpec, own: Sequence[KernelRecord]) -> Estimator:
    return Estimator(gpu, samples_of(gpu, own)[::EVERY], rounds=ROUNDS)
