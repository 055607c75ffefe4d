"""What a live run was worth, from rows written by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.ids import ModelId
from fabric.messages import ModelInfo, TensorInfo
from roles.benchmark.share import COLUMNS, STAGES, LoadRecord, inputs_for
from roles.benchmark.verdict import judge, planned_slices
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.scheduler.settings import settings_from
from roles.workload.outcomes import Window

WINDOW = Window(1000.0, 2000.0)


def config() -> ClusterConfig:
    profile = {"alpha_ms": 1, "beta_ms": 5}
    models = [
        {"name": name, "slo_ms": slo_ms, "rate_rps": 10, "profile": profile}
        for name, slo_ms in (("a", 25), ("b", 50))
    ]
    return parse_config({"models": models, "cluster": {"gpus": 2}}, Path())


def row(
    model: int,
    intended_at_ms: float,
    latency_ms: float = math.nan,
    *,
    late_ms: float = 0.0,
    batch_size: float = math.nan,
    slice_no: float = math.nan,
    gpu_ms: float = math.nan,
) -> list[float]:
    stages = [gpu_ms if stage == "gpu_ms" else (math.nan if math.isnan(gpu_ms) else 1.0) for stage in STAGES]
    return [float(model), intended_at_ms, late_ms, latency_ms, batch_size, slice_no, *stages]


def record(
    rows: list[list[float]], slices: tuple[str, ...] = (), errors: dict[tuple[int, str], int] | None = None
) -> LoadRecord:
    assert all(len(one) == len(COLUMNS) for one in rows)
    return LoadRecord(np.array(rows), slices, Counter(errors or {}))


def slice_names() -> list[str]:
    return [spec.slice_id for _, spec in settings_from(config()).slices]


def test_senders_records_become_one_whatever_each_called_its_slices() -> None:
    first, second = slice_names()
    one = record([row(0, 1000.0, 20.0, batch_size=2, slice_no=0, gpu_ms=8.0)], (second,))
    other = record(
        [
            row(0, 1001.0, 19.0, batch_size=2, slice_no=1, gpu_ms=8.0),
            row(1, 1002.0, 30.0, batch_size=1, slice_no=0, gpu_ms=6.0),
        ],
        (first, second),
    )
    run = judge(config(), [one, other], WINDOW)
    # Two requests of a batch of two ran 8 ms on the second GPU, a lone one 6 ms on the first, of 1000 ms.
    assert run.outcome.gpus.busy_fraction == pytest.approx((0.006, 0.008))
    assert [run.outcome.gpus_of(name) for name in ("a", "b")] == pytest.approx([0.008, 0.006])
    assert run.outcome.models[ModelId("a")].batch_mean == 2.0
    assert run.outcome.models[ModelId("b")].good == 1


def test_an_unanswered_request_is_dropped_and_a_late_one_late() -> None:
    rows = [row(0, 1000.0), row(0, 1100.0, 26.0, batch_size=1, slice_no=0, gpu_ms=6.0), row(0, 2500.0)]
    run = judge(
        config(), [record(rows, (slice_names()[0],), {(0, "Overloaded"): 1, (1, "NoReplica"): 2})], WINDOW
    )
    found = run.outcome.models[ModelId("a")]
    assert (found.offered, found.good, found.late, found.dropped) == (2, 0, 1, 1)
    assert run.as_json()["errors"] == {"Overloaded": 1, "NoReplica": 2}


def test_stages_latency_and_errors_are_told_of_each_model() -> None:
    rows = [
        row(0, 1000.0, 20.0, batch_size=1, slice_no=0, gpu_ms=6.0),
        row(0, 1001.0, 22.0, batch_size=1, slice_no=0, gpu_ms=8.0),
        row(1, 1002.0, 40.0, batch_size=1, slice_no=0, gpu_ms=30.0),
    ]
    run = judge(config(), [record(rows, (slice_names()[0],), {(1, "Overloaded"): 3})], WINDOW)
    assert run.breakdown_ms(ModelId("a"))["gpu_ms"] == {"mean": 7.0, "p50": 6.0, "p99": 8.0}
    assert run.breakdown_ms(ModelId("b"))["gpu_ms"]["mean"] == 30.0
    assert run.breakdown_ms()["gpu_ms"]["p99"] == 30.0
    by_model: Any = run.as_json()["by_model"]
    assert by_model["a"]["latency_ms"]["p99"] == 22.0
    assert (by_model["a"]["errors"], by_model["b"]["errors"]) == ({}, {"Overloaded": 3})


def test_errors_of_an_application_are_told_by_its_name() -> None:
    profile = {"alpha_ms": 1, "beta_ms": 5}
    app = {"name": "app", "slo_ms": 90, "rate_rps": 5, "stages": {"only": {"model": "a"}}}
    document = {
        "models": [{"name": "a", "slo_ms": 25, "rate_rps": 10, "profile": profile}],
        "applications": [app],
    }
    run = judge(
        parse_config({**document, "cluster": {"gpus": 1}}, Path()),
        [record([row(1, 1000.0), row(0, 1001.0)], errors={(1, "Overloaded"): 2, (0, "NoReplica"): 1})],
        WINDOW,
    )
    assert run.errors(ModelId("app")) == {"Overloaded": 2}
    assert run.errors(ModelId("a")) == {"NoReplica": 1}


def test_a_run_is_not_valid_when_its_own_senders_were_late() -> None:
    # Allowed: 5 % of the tightest SLO, 25 ms.
    punctual = [row(0, 1000.0 + place, late_ms=1.2) for place in range(100)]
    assert judge(config(), [record(punctual)], WINDOW).is_valid
    tardy = [row(0, 1000.0 + place, late_ms=1.3) for place in range(100)]
    assert not judge(config(), [record(tardy)], WINDOW).is_valid


def test_a_run_is_spoiled_by_late_senders_only_where_something_was_bad() -> None:
    def played(late_ms: float, latency_ms: float) -> bool:
        rows = [row(0, 1000.0 + n, latency_ms, late_ms=late_ms, batch_size=1, slice_no=0) for n in range(99)]
        return judge(config(), [record(rows, (slice_names()[0],))], WINDOW).is_spoiled

    assert played(late_ms=5.0, latency_ms=30.0)
    assert not played(late_ms=5.0, latency_ms=20.0), "latency counts from the intended moment: good is good"
    assert not played(late_ms=0.5, latency_ms=30.0)


def test_a_slice_that_came_with_a_move_counts_for_the_gpu_in_its_name() -> None:
    rows = [row(0, 1000.0, 20.0, batch_size=1, slice_no=0, gpu_ms=8.0)]
    outcome = judge(config(), [record(rows, ("local/gpu1/7",))], WINDOW).outcome
    assert outcome.gpus.busy_fraction == pytest.approx((0.0, 0.008))
    assert outcome.gpus.used == 1


def test_slices_of_a_host_that_the_file_does_not_have_count_for_no_gpu() -> None:
    rows = [row(0, 1000.0, 20.0, batch_size=1, slice_no=0, gpu_ms=8.0)]
    assert judge(config(), [record(rows, ("elsewhere/gpu0/0",))], WINDOW).outcome.gpus.busy_fraction == (
        0.0,
        0.0,
    )


def test_a_run_without_requests_in_the_window_has_no_percentiles() -> None:
    run = judge(config(), [record([row(0, 0.0)])], WINDOW)
    assert run.outcome.offered == 0
    assert run.is_valid
    assert run.breakdown_ms()["gpu_ms"] == {"mean": None, "p50": None, "p99": None}


def test_inputs_are_made_up_as_the_model_declares_them() -> None:
    declared = (TensorInfo("image", "float32", (3, 8, 8)), TensorInfo("tokens", "int64", (-1,)))
    made = inputs_for(ModelInfo(ModelId("a"), 25.0, declared), 4096)
    assert (made["image"].dtype, made["image"].shape) == (np.dtype(np.float32), (3, 8, 8))
    assert (made["tokens"].dtype, made["tokens"].ndim) == (np.dtype(np.int64), 1)
    assert inputs_for(None, 4096)["input"].nbytes == 4096


def cut(name: str, loader: dict[str, Any]) -> ClusterConfig:
    """A model over two GPUs, of three."""
    profile = {"alpha_ms": 1, "beta_ms": 5, "stages": {2: [3, 3]}}
    model = {"name": name, "slo_ms": 50, "rate_rps": 10, "profile": profile, "loader": loader}
    return parse_config({"models": [model], "cluster": {"gpus": 3}}, Path())


@pytest.mark.parametrize(
    ("loader", "busy"),
    [
        ({"zoo": "torchvision", "arch": "resnet50", "stages": 2}, (0.3, 0.3, 0.0)),
        ({"python": "a:B", "ranks": 2}, (0.6, 0.6, 0.0)),
    ],
)
def test_all_gpus_of_a_model_over_several_are_busy_with_it(
    loader: dict[str, Any], busy: tuple[float, ...]
) -> None:
    """A pipeline's one after the other, ranks together; and no fewer are advised."""
    config = cut("m", loader)
    ((_, spec),) = settings_from(config).slices
    rows = [row(0, 1000.0 + 10 * n, 20.0, batch_size=1, slice_no=0, gpu_ms=6.0) for n in range(100)]
    outcome = judge(config, [record(rows, (spec.slice_id,))], WINDOW).outcome
    assert outcome.gpus.busy_fraction == pytest.approx(busy)
    assert outcome.gpus.used == 2
    assert outcome.advice_gpus == 2


def test_a_load_whose_plan_cannot_be_made_is_judged_all_the_same() -> None:
    """Its slices count as the whole GPUs in their names."""
    document = {
        "models": [{"name": "a", "slo_ms": 25, "rate_rps": 10, "profile": {"alpha_ms": 1, "beta_ms": 5}}],
        "cluster": {"gpus": 2},
        "batching": "fixed",
    }
    config = parse_config(document, Path())
    planned = planned_slices(config)
    assert "as the file's plan cannot be made: batching.fixed: there is no batch size for a" in planned.remark
    rows = [row(0, 1000.0, 20.0, batch_size=1, slice_no=0, gpu_ms=8.0)]
    run = judge(config, [record(rows, ("local/gpu1/0",))], WINDOW, planned)
    assert run.outcome.gpus.busy_fraction == pytest.approx((0.0, 0.008))
    assert run.outcome.models[ModelId("a")].good == 1


def test_where_not_all_batches_are_told_of_no_number_of_gpus_is_advised() -> None:
    """Answers of applications tell of none, nor do those of somebody else's gateway."""
    told = row(0, 1000.0, 20.0, batch_size=1, slice_no=0, gpu_ms=6.0)
    names = (slice_names()[0],)
    assert judge(config(), [record([told, told], names)], WINDOW).as_json()["advice_gpus"] == 1
    untold = row(0, 1001.0, 20.0, slice_no=0, gpu_ms=6.0)
    assert judge(config(), [record([told, untold], names)], WINDOW).as_json()["advice_gpus"] is None
    of_an_application = row(2, 1001.0)
    assert judge(config(), [record([told, of_an_application], names)], WINDOW).outcome.advice_gpus is None


def test_an_slo_that_is_another_one_in_the_cluster_is_told() -> None:
    told = replace(record([row(0, 1000.0, 20.0)]), slos_ms={ModelId("a"): 5.0, ModelId("b"): 50.0})
    assert judge(config(), [told, told], WINDOW).remarks() == [
        "a: the cluster has an SLO of 5 ms, the file 25 ms, with which requests were sent and judged"
    ]
    untold = replace(told, slos_ms={ModelId("a"): 0.0})  # a gateway by gRPC
    assert judge(config(), [untold], WINDOW).remarks() == []
