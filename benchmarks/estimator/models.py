"""Whole models: run time, memory and requirements against the 71 rows of Table A.1, each model judged without itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from profiles.estimator.estimate import (
    CALIBRATION,
    BatchEstimate,
    Calibration,
    Prediction,
    shipped_estimator,
)
from profiles.estimator.graph import OperatorGraph
from profiles.store import shipped_data

GPU_TYPE = "v100-sxm2"  # what the thesis measured on
EVENTS_MS = (0.0, 0.002, 0.004, 0.005, 0.006, 0.008, 0.010)
Key = tuple[str, int]


def table_a1() -> dict[Key, Mapping[str, Any]]:
    """Its rows by model and batch size."""
    return {(row["model"], row["batch"]): row for row in shipped_data("thesis_table_a1_v100")["rows"]}


def predictions(graphs: Mapping[Key, OperatorGraph]) -> dict[Key, Prediction]:
    """The same for every calibration."""
    estimator = shipped_estimator(GPU_TYPE)
    return {key: estimator.predict(graph) for key, graph in graphs.items()}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one row says of each constant."""

    errors: Mapping[float, float]
    """By what events cost: |run time estimated / measured - 1|."""
    achieved: float | None
    scratch: float | None
    over_roofline: float


def evidence(one: Prediction, row: Mapping[str, Any]) -> Evidence:
    """Of a row and what is predicted for it."""
    estimator = shipped_estimator(GPU_TYPE)
    measured_ms = 1e3 * row["latency_s"]
    bare = [
        estimator.put_together(one, replace(CALIBRATION, events_ms=events_ms, achieved=1.0))
        for events_ms in EVENTS_MS
    ]
    occupancy = bare[0].requirements.achieved_occupancy_percent
    assert occupancy is not None, "estimates say it"
    scratch = None
    if row["mem_pct"] is not None:
        measured = row["mem_pct"] / 100 * estimator.gpu.memory_bytes - one.weights_bytes
        scratch = measured / (one.reserved_bytes - one.weights_bytes)
    return Evidence(
        {at: abs(found.exec_ms / measured_ms - 1) for at, found in zip(EVENTS_MS, bare, strict=True)},
        None if row["ach_occ_pct"] is None else row["ach_occ_pct"] / occupancy,
        scratch,
        measured_ms / estimator.roofline_ms(one.graph),
    )


def calibrated(others: Sequence[Evidence]) -> tuple[Calibration, float]:
    """What those rows say together, and their constant on the roofline for whole models."""
    events_ms = min(EVENTS_MS, key=lambda at: float(np.median([one.errors[at] for one in others])))
    achieved = [one.achieved for one in others if one.achieved is not None]
    scratch = [one.scratch for one in others if one.scratch is not None]
    return (
        Calibration(events_ms, float(np.median(achieved)), float(np.median(scratch))),
        float(np.median([one.over_roofline for one in others])),
    )


def on_table_a1(graphs: Mapping[Key, OperatorGraph]) -> dict[str, Any]:
    """A row for each of Table A.1's: measured and estimated; calibrations by model."""
    rows, found = table_a1(), predictions(graphs)
    estimator = shipped_estimator(GPU_TYPE)
    answer: dict[str, Any] = {"rows": [], "calibrations": {}}
    said = {key: evidence(found[key], row) for key, row in rows.items()}
    for model in dict.fromkeys(key[0] for key in rows):
        calibration, constant = calibrated([one for key, one in said.items() if key[0] != model])
        answer["calibrations"][model] = [
            calibration.events_ms,
            calibration.achieved,
            calibration.scratch,
            constant,
        ]
        for key in (one for one in rows if one[0] == model):
            estimate = estimator.put_together(found[key], calibration)
            answer["rows"].append(_row(rows[key], estimate, constant * estimator.roofline_ms(graphs[key])))
        print(model, answer["calibrations"][model], flush=True)
    return answer


def _row(row: Mapping[str, Any], one: BatchEstimate, roofline_ms: float) -> dict[str, Any]:
    needs = one.requirements
    return {
        "model": row["model"],
        "batch": row["batch"],
        "measured_ms": 1e3 * row["latency_s"],
        "ms": one.exec_ms,
        "low_ms": one.low_ms,
        "high_ms": one.high_ms,
        "roofline_ms": roofline_ms,
        "measured_memory_percent": row["mem_pct"],
        "memory_percent": needs.memory_percent,
        "measured_ao": row["ach_occ_pct"],
        "ao": needs.achieved_occupancy_percent,
        "measured_wao": row["wavg_ach_occ_pct"],
        "wao": needs.weighted_occupancy_percent,
        "measured_wsm": row["wavg_sm_util_pct"],
        "wsm": needs.weighted_sm_percent,
    }
