"""What a batch takes on a shared GPU, read from the papers: run times, and four laws of how neighbours slow it down.

A batch keeps the factor that it started with. Everything is a plain number here; `law` gets a batch and its neighbours.

- none: nobody disturbs anybody.
- sm: 1 + 2.4 (W/s - 1) where the share s is less than the SM utilisation W, times max(1, sum of what all occupy, 1 + own x
  others) where there are neighbours, each occupying min(W, s) (ADR 0040).
- gpulet: the worst of c1 l2 + c2 l2' + c3 dram + c4 dram' + c5 over the neighbours, utilisations times own share (section 4.2).
- igniter: equations 1 to 11 of section 3.1, among the neighbours over alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.references.start_rule import RunHeard, Started, StartRule


@dataclass(frozen=True)
class OnSlice:
    """A batch that runs."""

    model: str
    size: int
    share_percent: float


Law = Callable[[OnSlice, Sequence[OnSlice]], float]
"""What a batch takes, in ms."""


@dataclass
class SharedGpus(StartRule):
    """Slices with `share_percent` on GPUs (`gpu_of`). `model_of` says which model a batch is of."""

    tolerance_ms: float = 1e-7  # at the very moment it may still go
    abort_ms: float = 0.0
    gpu_of: Mapping[str, int] = field(default_factory=dict)
    share_percent: Mapping[str, float] = field(default_factory=dict)
    model_of: Mapping[int, str] = field(default_factory=dict)
    law: Law = lambda own, others: 0.0

    def _exec_ms(self, started: Started, run: RunHeard) -> float:
        others = [
            self._on_slice(device.started, slice_id)
            for slice_id, device in self._device.items()
            if slice_id != run.slice_id and self.gpu_of[slice_id] == self.gpu_of[run.slice_id]
        ]
        return self.law(self._on_slice(started, run.slice_id), others)

    def _on_slice(self, started: Started, slice_id: str) -> OnSlice:
        size = sum(len(seqs) for _, seqs in started.rows)
        return OnSlice(self.model_of[started.number], size, self.share_percent[slice_id])


Table = Mapping[int, float]
"""Values at batch sizes, linear between them; the nearest one outside."""


def value(table: Table, size: int) -> float:
    """The value at a batch size."""
    return float(np.interp(size, list(table), list(table.values())))


def none(run_ms: Mapping[str, Table]) -> Law:
    return lambda own, _: value(run_ms[own.model], own.size)


def by_sm(run_ms: Mapping[str, Table], sm_percent: Mapping[str, Table]) -> Law:
    def occupied(one: OnSlice) -> float:
        return min(wanted(one), one.share_percent / 100)

    def wanted(one: OnSlice) -> float:
        table = sm_percent[one.model]
        never_falls = np.maximum.accumulate(list(table.values()))
        return float(np.interp(one.size, list(table), never_falls)) / 100

    def law(own: OnSlice, others: Sequence[OnSlice]) -> float:
        factor = max(1.0, 1 + 2.4 * (wanted(own) * 100 / own.share_percent - 1))
        if others:
            beside = sum(occupied(one) for one in others)
            factor *= max(1.0, occupied(own) + beside, 1 + occupied(own) * beside)
        return value(run_ms[own.model], own.size) * factor

    return law


def by_bandwidth(
    run_ms: Mapping[str, Table], l2: Mapping[str, Table], dram: Mapping[str, Table], c: Sequence[float]
) -> Law:
    def used(table: Table, one: OnSlice) -> float:
        return value(table, one.size) / 100 * one.share_percent / 100

    def law(own: OnSlice, others: Sequence[OnSlice]) -> float:
        factors = [
            c[0] * used(l2[own.model], own)
            + c[1] * used(l2[one.model], one)
            + c[2] * used(dram[own.model], own)
            + c[3] * used(dram[one.model], one)
            + c[4]
            for one in others
        ]
        return value(run_ms[own.model], own.size) * max([1.0, *factors])

    return law


def igniter(gpu: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> Law:
    """`gpu` and `models`: `hardware` and `workload_coefficients` of the shipped file."""

    def active_ms(one: OnSlice) -> float:
        m, b = models[one.model], one.size
        work = m["k1_ms_pct"] * b * b + m["k2_ms_pct"] * b + m["k3_ms_pct"]
        return float(work / (one.share_percent + m["k4_pct"]) + m["k5_ms"])

    def linear(one: OnSlice, slope: str, constant: str) -> float:
        ability_rps = 1000 * one.size / active_ms(one)
        return float(models[one.model][slope] * ability_rps + models[one.model][constant])

    def latency_ms(own: OnSlice, others: Sequence[OnSlice]) -> float:
        m, crowd = models[own.model], [own, *others]
        watts = gpu["p_idle_w"] + sum(linear(one, "alpha_power_w_per_rps", "beta_power_w") for one in crowd)
        top = gpu["F_max_frequency_mhz"]
        clock = top + gpu["alpha_f_mhz_per_w"] * max(0.0, watts - gpu["P_max_power_w"])
        launch_ms = m["k_sch_ms_per_kernel"]
        if others:
            launch_ms += gpu["alpha_sch_ms"] * len(crowd) + gpu["beta_sch_ms"]
        cache = sum(linear(one, "alpha_cacheutil_pct_per_rps", "beta_cacheutil_pct") for one in others)
        on_gpu_ms = m["n_k"] * launch_ms + active_ms(own) * (1 + m["alpha_cache_per_pct"] * cache)
        pcie_ms = own.size * (m["d_load_bytes"] + m["d_feedback_bytes"]) / gpu["B_pcie_bytes_per_ms"]
        return float(on_gpu_ms * top / max(clock, top / 10) + pcie_ms)

    return lambda own, others: max(latency_ms(own, others), latency_ms(own, []))
