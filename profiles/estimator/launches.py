"""Launch configurations, learned from kernel records: how many blocks of how many threads an operator's longest kernel has.

Records carry grid and block but no registers; those of a kernel's family are public and hardly vary: matrix kernels keep their
tile in registers, all others use few. What was predicted goes the same way as a traced kernel afterwards
(`profiles/occupancy.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from profiles.estimator.features import Array, ratio_features
from profiles.estimator.gpus import GpuSpec
from profiles.estimator.regressors import SEED, Floors, Sample, group_of
from profiles.estimator.records import KernelRecord
from profiles.estimator.work import OTHER, Work

ELEMENTS_A_BLOCK: Final = 512  # torch's vectorised kernels: 128 threads of four elements
THREADS: Final = 128
FEW_REGISTERS: Final = 32
TILE_REGISTERS: Final = 128
NARROW_REGISTERS: Final = 64
_TILED: Final = ("sgemm", "scudnn", "winograd", "convolve", "fft2d")
_NARROW: Final = ("128x32", "32x128", "32x32", "64x32")
ROUNDS: Final = 150


@dataclass(frozen=True, slots=True)
class Launch:
    """Of an operator's longest kernel."""

    blocks: int
    threads: int
    registers: int


def registers_of(record: KernelRecord) -> int:
    """Registers a thread, by the family of its kernels."""
    tiled = [name for name in record.kernels if any(word in name for word in _TILED)]
    if not tiled:
        return FEW_REGISTERS
    return NARROW_REGISTERS if any(word in tiled[-1] for word in _NARROW) else TILE_REGISTERS


class LaunchModel:
    """For every group of classes a regressor of elements a block and a classifier of (threads, registers)."""

    def __init__(self, samples: Sequence[Sample], floors: Floors) -> None:
        by_group: dict[str, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(group_of(sample.record.work.op), []).append(sample)
        self._floors = floors
        self._models: dict[str, tuple[Any, Mapping[int, tuple[int, int]], Any]] = {
            group: self._fit(members) for group, members in sorted(by_group.items()) if group != "elementwise"
        }

    def predict(self, works: Sequence[Work], gpu: GpuSpec) -> list[Launch]:
        """In the order of the works."""
        found = [_elementwise(work) for work in works]
        places: dict[str, list[int]] = {}
        for place, work in enumerate(works):
            if work.op != OTHER and group_of(work.op) in self._models:
                places.setdefault(group_of(work.op), []).append(place)
        for group, of_group in places.items():
            blocks_of, pairs, pair_of = self._models[group]
            features = self._features([works[place] for place in of_group], gpu)
            kinds = [0] * len(of_group) if pair_of is None else pair_of.predict(features)
            for place, density, kind in zip(of_group, blocks_of.predict(features), kinds, strict=True):
                blocks = max(1, round(math.exp(min(float(density), 40.0)) * works[place].output_elements))
                found[place] = Launch(blocks, *pairs[int(kind)])
        return found

    def _fit(self, samples: Sequence[Sample]) -> tuple[Any, Mapping[int, tuple[int, int]], Any]:
        from sklearn.ensemble import (  # noqa: PLC0415  an extra, and slow to import
            HistGradientBoostingClassifier,
            HistGradientBoostingRegressor,
        )

        parts, target, said = [], [], []
        for gpu in dict.fromkeys(sample.gpu for sample in samples):
            records = [sample.record for sample in samples if sample.gpu == gpu]
            parts.append(self._features([record.work for record in records], gpu))
            target += [math.log(record.blocks / record.work.output_elements) for record in records]
            said += [(record.threads, registers_of(record)) for record in records]
        features = np.concatenate(parts)
        blocks_of = HistGradientBoostingRegressor(
            loss="absolute_error", max_iter=ROUNDS, min_samples_leaf=8, random_state=SEED
        ).fit(features, target)
        kinds = {pair: number for number, pair in enumerate(sorted(set(said)))}
        pairs = {number: pair for pair, number in kinds.items()}
        pair_of = None
        if len(kinds) > 1:
            pair_of = HistGradientBoostingClassifier(
                max_iter=30, min_samples_leaf=8, random_state=SEED, early_stopping=False
            ).fit(features, [kinds[pair] for pair in said])
        return blocks_of, pairs, pair_of

    def _features(self, works: Sequence[Work], gpu: GpuSpec) -> Array:
        return ratio_features(works, gpu, [self._floors.of(work.op, gpu) for work in works])


def _elementwise(work: Work) -> Launch:
    """torch's rule; the records of elementwise operators follow it exactly."""
    return Launch(max(1, math.ceil(work.output_elements / ELEMENTS_A_BLOCK)), THREADS, FEW_REGISTERS)
