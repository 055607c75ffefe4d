"""What `status`, `models list` and `top` show fits 80 columns, whatever things are called and however large figures are."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.table import Table

from fabric.ids import ModelId, NodeId, SliceId
from fabric.messages import (
    GpuInfo,
    GpuRef,
    GpuReport,
    GpuSample,
    GpuSharing,
    ModelInfo,
    PlanReport,
    SliceReport,
    StatusListed,
)
from roles.cli.cluster_tables import (
    LOOP_COLUMNS,
    advice_line,
    application_table,
    drained_line,
    gpu_tables,
    loop_table,
    model_table,
    process_table,
    shard_table,
    slice_table,
)
from roles.cli.status import late_host_of
from roles.runtime.live_figures import LiveModel
from roles.runtime.running_cluster import ClusterReport, ProcessReport
from roles.runtime.shard_reports import ShardReport

LONG = "efficientnet-b7-imagenet21k-finetuned-production-eu-west-2026-canary"
MODEL = ModelId(LONG)
HOST = NodeId("ip-10-123-45-167.eu-central-1.compute.internal")
SLICE = SliceId(f"{HOST}/gpu15/1234")
LISTED = StatusListed(
    "scheduler-0",
    4_194_304,
    (SliceReport(SLICE, "failed", f"no memory for {LONG}", (MODEL,) * 9, 123_456_789, 987_654_321),),
    (ModelInfo(MODEL, 86_400_000.0, replicas=1_024),),
    {},
)
LOOPS = dict.fromkeys(LOOP_COLUMNS, 12_345.678) | {"pid": 4_194_304.0}
REPORT = ClusterReport(
    {},
    (ProcessReport(f"node-{HOST}", 4_194_304, True, {"control": (f"ipc:///run/user/1000/tenuto/node-{HOST}.control",)}),),
    LISTED,
    {f"worker-{HOST}-1": LOOPS},
    (ShardReport(63, f"scheduler-{HOST}", 1_048_576, (MODEL,) * 4, 4_096, 4_096, (f"scheduler-{HOST}",) * 3),),
)  # fmt: skip
LIVE = {
    MODEL: LiveModel(
        MODEL, 86_400_000.0, 10.0, 98_765.4, 12_345.6, 123_456, {"Overloaded": 654_321}, 1.0, 99_999.9, 99_999.9
    )
}  # fmt: skip
GPU = GpuReport(
    HOST,
    GpuInfo(15, "h100", "cuda", 80_000_000_000, name="NVIDIA H100 80GB HBM3"),
    GpuSharing(15, "mps", "the shares of its slices add up to 130 %"),
    GpuSample(15, 100.0, 80_000_000_000, 699.9, 1_980, 2_619, 89, ("sw_power_cap", "hw_thermal_slowdown")),
    99_999.0,
)
TABLES: dict[str, tuple[Callable[[], Table], tuple[str, ...]]] = {
    "processes": (lambda: process_table(REPORT), ("4194304", "alive")),
    "models": (lambda: model_table(LISTED, LIVE), ("98765", "12346", "100.0", "123456", "654321", "86400000")),
    "applications": (
        lambda: application_table([ModelInfo(MODEL, 86_400_000.0, replicas=1_024, asks=(MODEL,) * 3)], LIVE),
        ("98765", "12346", "100.0", "123456", "654321", "86400000"),
    ),
    "slices": (lambda: slice_table(LISTED.slices), ("123456789", "987654321")),
    "shards": (lambda: shard_table(REPORT), ("1048576", "4096")),
    "loops": (lambda: loop_table(REPORT), ("12345.678",)),
    "GPUs": (lambda: gpu_tables([GPU])[0], ("100 %", "80/80", "700", "1980", "89")),
}  # fmt: skip


def test_what_is_drained_is_named_by_node_or_by_gpu_and_said_to_be_taken_back() -> None:
    def drained(*where: tuple[str, int]) -> str:
        refs = tuple(GpuRef(NodeId(node), gpu) for node, gpu in where)
        plan = PlanReport("steady", "", 4, 4, (), 0, 0, drained=refs)
        gpus = tuple(
            GpuReport(NodeId(node), GpuInfo(gpu, "v100", "emulated")) for node in "ab" for gpu in (0, 1)
        )
        return drained_line(StatusListed("scheduler-0", 1, (), (), {}, gpus, plan))

    back = " (tenuto drain --back uses it again)"
    assert drained() == ""
    assert drained_line(LISTED) == ""
    assert drained(("a", 1)) == f"Drained: a/gpu1{back}"
    assert drained(("a", 0), ("a", 1), ("b", 0)) == f"Drained: a, b/gpu0{back}"
    assert drained_line(LISTED, ["frontend-1"]) == f"Drained: frontend-1{back}"
    assert drained(("gone", 0)) == f"Drained: gone/gpu0{back}", "its node does not answer"


def test_that_all_gpus_are_asked_for_is_said_to_change_only_when_some_were_idle_for_long() -> None:
    def advice(advised: int, gpus: int) -> str:
        return advice_line(PlanReport("steady", "", gpus, advised, (), 0, 0))

    assert advice(3, 3) == "the load asks for 3 of 3 GPUs (for fewer only when some were idle for 2 min)"
    assert advice(2, 3) == "the load asks for 2 of 3 GPUs"
    assert advice(4, 3) == "the load asks for 4 of 3 GPUs"
    assert advice(1, 1) == "the load asks for 1 of 1 GPUs"


def test_advice_for_more_gpus_says_where_a_slow_host_loses_requests() -> None:
    """GPUs are advised for all that is lost, and more of them do not make a host faster."""

    def advice(advised: int, late_ms: float) -> str:
        processes = {"worker-a-1": {"timer_late_p99_ms": late_ms}, "scheduler-0": {"timer_late_p99_ms": 0.1}}
        models = (ModelInfo(ModelId("m"), 100.0), ModelInfo(ModelId("tight"), 25.0))
        report = ClusterReport({}, (), StatusListed("scheduler-0", 1, (), models, {}), processes)
        return advice_line(PlanReport("steady", "", 6, advised, (), 0, 0), late_host_of(report))

    late = "but timers of worker-a-1 are 34 ms late (p99), and what that loses counts too: see tenuto why"
    assert advice(7, 34.0) == f"the load asks for 7 of 6 GPUs ({late})"
    assert advice(7, 1.9) == "the load asks for 7 of 6 GPUs", "under 8 % of the tightest SLO"
    assert advice(5, 34.0) == "the load asks for 5 of 6 GPUs"


@pytest.mark.parametrize("name", TABLES)
def test_it_fits_80_columns_and_no_figure_is_cut(name: str) -> None:
    made, figures = TABLES[name]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(made())
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text.replace("… 5 more", ""), "which is how a long list of models ends"
    for figure in figures:
        assert figure in text
