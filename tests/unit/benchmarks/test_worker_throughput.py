from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.figures import Figures
from benchmarks.worker_throughput import BareLoop, Comparison, Limits, WorkerLoop, add_row, rps
from fabric.messages import LoaderSpec
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


def test_batches_find_their_inputs_in_place_but_the_first_one() -> None:
    compared = Comparison(DIGITS, CPU, 2)
    with ThreadPoolExecutor(1) as stager:
        loop = WorkerLoop(compared.eager, load_model(DIGITS, CPU).example, 2, stager)
        assert loop.staged_part == 0
        for _ in range(20):
            loop()
    assert 0 < loop.staged_part < 1


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
