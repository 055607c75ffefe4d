"""The GPUs in `tenuto status`."""

from __future__ import annotations

import io

from rich.console import Console

from fabric.ids import NodeId
from fabric.messages import GpuInfo, GpuReport, GpuSample, GpuSharing
from roles.cli.cluster_tables import gpu_tables

INFO = GpuInfo(0, "a100", "cuda", 40_000_000_000, name="NVIDIA A100")


def shown(*reports: GpuReport) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    for table in gpu_tables(reports):
        console.print(table)
    return console.export_text()


def test_a_gpu_is_shown_with_how_it_is_shared_and_what_it_does() -> None:
    sample = GpuSample(0, 37.0, 3_000_000_000, 151.5, 1410, 1215, 41, ("sw_power_cap",))
    sharing = GpuSharing(0, "mps", "the shares of its slices add up to 130 %")
    text = shown(GpuReport(NodeId("a"), INFO, sharing, sample, 400.0))
    for words in (
        "a/gpu0",
        "NVIDIA A100",
        "mps: the shares of its slices add up to 130 %",
        "37 %",
        "3/40",
    ):
        assert words in text
    for words in ("152", "1410", "41", "sw_power_cap"):
        assert words in text


def test_what_is_not_known_is_a_question_mark() -> None:
    text = shown(GpuReport(NodeId("a"), INFO), GpuReport(NodeId("a"), INFO, None, GpuSample(0), 10.0))
    assert text.count("?") > 8


def test_there_is_no_table_where_no_gpu_is_real() -> None:
    assert gpu_tables([GpuReport(NodeId("a"), GpuInfo(0, "v100", "emulated"))]) == []
