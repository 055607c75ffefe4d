from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device_copies import Copies, hidden_part, read_events
from benchmarks.figures import Table

DIGITS = "deploy.local.demo.digits_model:Digits"


def copied(start_us: float, end_us: float, name: str = "Memcpy HtoD (Pinned -> Device)") -> dict[str, Any]:
    return {"cat": "gpu_memcpy", "name": name, "ts": start_us, "dur": end_us - start_us}


def kernel(start_us: float, end_us: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": "gemm", "ts": start_us, "dur": end_us - start_us}


@pytest.mark.parametrize(
    ("events", "part"),
    [
        ([], None),
        ([kernel(0, 10)], None),
        ([copied(0, 10)], 0.0),
        ([copied(0, 10), kernel(20, 30)], 0.0),
        ([copied(0, 10), kernel(5, 30)], 0.5),
        # Two kernels side by side hide no more than one, and answers on their way back are no inputs.
        ([copied(0, 10), kernel(2, 6), kernel(4, 8), copied(0, 10, "Memcpy DtoH (Device -> Pinned)")], 0.6),
        ([copied(0, 10), copied(20, 30), kernel(20, 40), {"ph": "M", "name": "process_name"}], 0.5),
    ],
)
def test_a_copy_is_hidden_for_as_long_as_kernels_run(
    events: list[dict[str, Any]], part: float | None
) -> None:
    assert hidden_part(events) == (part if part is None else pytest.approx(part))


def test_a_timeline_shows_both_threads_and_says_what_it_was_measured_on(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json.gz"
    copies = Copies(DIGITS, "float32", torch.device("cpu"), 2, 1.0)
    copies.timeline(path, "cpu, torch 2, 2026-01-31")
    with gzip.open(path) as packed:
        assert json.load(packed)["measured_on"] == "cpu, torch 2, 2026-01-31"
    by_thread: dict[str, set[int]] = {"stage": set(), "run": set()}
    for event in read_events(path):
        if event.get("cat") == "user_annotation":
            by_thread[event["name"]].add(event["tid"])
    assert len(by_thread["run"]) == len(by_thread["stage"]) == 1
    assert by_thread["run"] != by_thread["stage"]


def test_without_pinned_memory_its_cells_are_empty() -> None:
    copies = Copies(DIGITS, "float32", torch.device("cpu"), 2, 1.0)
    transfers, results, staging = (Table("", ()) for _ in range(3))
    copies.add_transfers(transfers)
    copies.add_results(results)
    copies.add_staging(staging)
    assert [(row[2], row[4] is None) for row in transfers.rows] == [
        *[("pinned", True), ("pageable", False)] * 2
    ]
    assert results.rows[0][2] is None
    assert staging.rows[0][:2] == (DIGITS, 2)
