from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch

from benchmarks.figures import Figures
from benchmarks.worker_throughput import BareLoop, Comparison, Limits, WorkerLoop, add_row, rps
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.hosted import DeviceReplica
from roles.gpu_worker.executors.loaders.registry import load_model

CPU = torch.device("cpu")
DIGITS = LoaderSpec(python="deploy.local.demo.digits_model:Digits")
MEASURED = {"bare": 100.0, "eager": 96.0, "bare graphs": 200.0, "graphs": 144.0}


@pytest.mark.parametrize(
    ("limits", "turns"), [(Limits(5, 1e9), 5), (Limits(1_000_000, 0.0), 2), (Limits(0, 0.0), 2)]
)
def test_a_loop_ends_by_turns_or_by_time_but_never_before_two(limits: Limits, turns: int) -> None:
    calls: list[None] = []
    assert rps(lambda: calls.append(None), 8, limits) > 0
    assert len(calls) == 2 + turns  # of which two warm it up


def test_both_loops_run_the_same_model() -> None:
    loop = BareLoop(load_model(DIGITS, CPU), CPU, 3)
    assert {len(output) for output in loop().values()} == {3}
    compared = Comparison(DIGITS, CPU, 2)
    assert (compared.batch_size_max, compared.has_graphs, compared.how) == (
        2,
        False,
        "a CPU has no CUDA graphs",
    )
    assert compared.rates(2, Limits(2, 1e9), 1).keys() == {"bare", "eager"}


def test_the_batch_that_runs_is_the_one_that_was_staged() -> None:
    class Hosted:
        def __init__(self) -> None:
            self.staged: list[object] = []
            self.ran: list[object] = []

        def stage(self, parts: object) -> None:
            self.staged.append(parts)

        def run_parts(self, parts: object) -> None:
            self.ran.append(parts)

    hosted = Hosted()
    with ThreadPoolExecutor(1) as stager:
        loop = WorkerLoop(cast("DeviceReplica", hosted), {"x": torch.zeros(2)}, 2, stager)
        for _ in range(5):
            loop()
    assert all(ran is staged for ran, staged in zip(hosted.ran[1:], hosted.staged, strict=False))


@pytest.mark.parametrize(
    ("arch", "batch_size", "lines"),
    [
        ("resnet18", 8, [("the worker's part of a bare loop", 1.44), ("CUDA graphs of eager", 1.5)]),
        ("resnet18", 32, [("the worker's part of a bare loop", 1.44)]),
        ("resnet50", 1, [("the worker's part of a bare loop", 1.44)]),
    ],
)
def test_graphs_are_held_to_a_line_where_a_small_model_has_small_batches(
    arch: str, batch_size: int, lines: list[tuple[str, float]]
) -> None:
    figures = Figures("")
    add_row(figures, figures.table(""), arch, batch_size, MEASURED)
    assert [line.what.partition(",")[0] for line in figures.lines] == [what for what, _ in lines]
    assert [line.measured for line in figures.lines] == pytest.approx([measured for _, measured in lines])
    assert figures.tables[0].rows == [(batch_size, 100.0, 96.0, 0.96, 200.0, 144.0, 0.72, 1.5)]


def test_without_graphs_the_worker_is_held_to_its_eager_runs() -> None:
    figures = Figures("")
    add_row(figures, figures.table(""), "resnet18", 1, {"bare": 100.0, "eager": 96.0})
    assert [(line.measured, line.at_least) for line in figures.lines] == [(0.96, 0.95)]
