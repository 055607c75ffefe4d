"""Metadata, configuration, index and statistics as documents."""

from __future__ import annotations

from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import Ledger
from roles.gateway import descriptions
from roles.gateway.statistics import Statistics
from tests.unit.roles.gateway.test_inference import TWO


def test_a_model_is_described_without_a_batch_axis() -> None:
    described = descriptions.model(TWO)
    assert described["inputs"] == [
        {"name": "a", "datatype": "FP32", "shape": [3]},
        {"name": "b", "datatype": "INT64", "shape": [-1, 2]},
    ]
    assert descriptions.config(TWO)["input"][1] == {"name": "b", "data_type": "TYPE_INT64", "dims": [-1, 2]}


def test_the_index_has_what_is_served_and_what_could_be() -> None:
    idle = replace(TWO, model_id=ModelId("idle"), replicas=0)
    served = {one.model_id: one for one in (TWO, idle)}
    index = descriptions.index(served, ["two", "gone"], is_ready_only=False)
    assert {one["name"]: (one["state"], one["reason"]) for one in index} == {
        "two": ("READY", ""),
        "idle": ("UNAVAILABLE", "no slice that serves it is ready"),
        "gone": ("UNAVAILABLE", "unloaded"),
    }
    assert [one["name"] for one in descriptions.index(served, ["gone"], is_ready_only=True)] == ["two"]


def test_statistics_have_batches_and_stages() -> None:
    seen = Statistics()
    ledger = Ledger(
        preprocess_ms=1,
        held_ms=2,
        waited_ms=3,
        transfer_ms=4,
        queue_ms=5,
        gpu_ms=6,
        return_ms=7,
        batch_size=4,
    )
    seen.note_success("two", [ledger] * 6, 30.0, 1_000.0)  # six rows, and two of others: two batches of four
    for _ in range(2):
        seen.note_success("two", [ledger], 30.0, 1_000.0)
    seen.note_success("two", [replace(ledger, batch_size=1)], 30.0, 1_500.0)
    seen.note_failure("two", "Overloaded", 1.0, is_known=True)
    seen.note_failure("of a stranger", "ModelNotFound", 1.0, is_known=False)
    plain = seen.as_plain("two")
    stages = {stage: (one["count"], one["ns"] / 1e6) for stage, one in plain["inference_stats"].items()}
    assert stages == {
        "success": (4, 120.0),
        "fail": (1, 1.0),
        "queue": (9, 90.0),
        "compute_input": (9, 45.0),
        "compute_infer": (9, 54.0),
        "compute_output": (9, 63.0),
    }
    assert (plain["inference_count"], plain["execution_count"], plain["last_inference"]) == (9, 3, 1_500)
    assert plain["batch_stats"] == [
        {"batch_size": 1, "compute_infer": {"count": 1, "ns": 6_000_000}},
        {"batch_size": 4, "compute_infer": {"count": 2, "ns": 12_000_000}},
    ]
    assert seen.failures == {"Overloaded": 1, "ModelNotFound": 1}
    assert seen.as_plain("of a stranger")["inference_stats"]["fail"]["count"] == 0
