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
from profiles.estimator.records import KernelRecord
from profiles.estimator.regressors import ROUNDS, SEED, Floors, Sample, group_of
from profiles.estimator.work import ELEMENT_BYTES, OTHER, Work

ELEMENTS_A_BLOCK: Final = 512  # torch's vectorised kernels: 128 threads of four elements
THREADS: Final = 128
FEW_REGISTERS: Final = 32
TILE_REGISTERS: Final = 128
NARROW_REGISTERS: Final = 64
_TILED: Final = ("sgemm", "scudnn", "winograd", "convolve", "fft2d")
_NARROW: Final = ("128x32", "32x128", "32x32", "64x32")


_Kind = tuple[int, int, bool]
"""Threads a block, registers a thread, whether a tile-transforming convolution needs a work space."""
WINOGRAD_INPUTS: Final = 2.25  # F(4 x 4, 3 x 3): 36 numbers for every 16 of input and of output …
WINOGRAD_WEIGHTS: Final = 4.0  # … and for every 9 weights


@dataclass(frozen=True, slots=True)
class Launch:
    """Of an operator's longest kernel, and what its operator needs beside inputs and outputs."""

    blocks: int
    threads: int
    registers: int
    workspace_bytes: int = 0


def registers_of(record: KernelRecord) -> int:
    """Registers a thread, by the family of its kernels."""
    tiled = [name for name in record.kernels if any(word in name for word in _TILED)]
    if not tiled:
        return FEW_REGISTERS
    return NARROW_REGISTERS if any(word in tiled[-1] for word in _NARROW) else TILE_REGISTERS


def needs_workspace(record: KernelRecord) -> bool:
    """Winograd in several kernels writes the transformed tiles to memory; everything else keeps them on the SM."""
    return any("winograd_nonfused" in name for name in record.kernels)


class LaunchModel:
    """For every group of classes a regressor of blocks an element and a classifier of the kind of kernel."""

    def __init__(self, samples: Sequence[Sample], floors: Floors, rounds: int = ROUNDS) -> None:
        by_group: dict[str, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(group_of(sample.record.work.op), []).append(sample)
        self._floors = floors
        self._rounds = rounds
        self._models: dict[str, tuple[Any, Mapping[int, _Kind], Any]] = {
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
            blocks_of, kinds_of, kind_of = self._models[group]
            features = self._features([works[place] for place in of_group], gpu)
            numbers = [0] * len(of_group) if kind_of is None else kind_of.predict(features)
            for place, density, kind in zip(of_group, blocks_of.predict(features), numbers, strict=True):
                blocks = max(1, round(math.exp(min(float(density), 40.0)) * works[place].output_elements))
                threads, registers, has_workspace = kinds_of[int(kind)]
                workspace = _winograd_bytes(works[place]) if has_workspace else 0
                found[place] = Launch(blocks, threads, registers, workspace)
        return found

    def _fit(self, samples: Sequence[Sample]) -> tuple[Any, Mapping[int, _Kind], Any]:
        from sklearn.ensemble import (  # noqa: PLC0415  an extra, and slow to import
            HistGradientBoostingClassifier,
            HistGradientBoostingRegressor,
        )

        parts, target, said = [], [], []
        for gpu in dict.fromkeys(sample.gpu for sample in samples):
            records = [sample.record for sample in samples if sample.gpu == gpu]
            parts.append(self._features([record.work for record in records], gpu))
            target += [math.log(record.blocks / record.work.output_elements) for record in records]
            said += [(record.threads, registers_of(record), needs_workspace(record)) for record in records]
        features = np.concatenate(parts)
        blocks_of = HistGradientBoostingRegressor(
            loss="absolute_error", max_iter=self._rounds // 2, min_samples_leaf=8, random_state=SEED
        ).fit(features, target)
        kinds = {kind: number for number, kind in enumerate(sorted(set(said)))}
        kinds_of = {number: kind for kind, number in kinds.items()}
        kind_of = None
        if len(kinds) > 1:
            kind_of = HistGradientBoostingClassifier(
                max_iter=self._rounds // 10, min_samples_leaf=8, random_state=SEED, early_stopping=False
            ).fit(features, [kinds[kind] for kind in said])
        return blocks_of, kinds_of, kind_of

    def _features(self, works: Sequence[Work], gpu: GpuSpec) -> Array:
        return ratio_features(works, gpu, [self._floors.of(work.op, gpu) for work in works])


def _elementwise(work: Work) -> Launch:
    """Torch's rule; the records of elementwise operators follow it exactly."""
    return Launch(max(1, math.ceil(work.output_elements / ELEMENTS_A_BLOCK)), THREADS, FEW_REGISTERS)


def _winograd_bytes(work: Work) -> int:
    moved = WINOGRAD_INPUTS * (work.input_elements + work.output_elements)
    return round(ELEMENT_BYTES * (moved + WINOGRAD_WEIGHTS * work.weight_elements))
