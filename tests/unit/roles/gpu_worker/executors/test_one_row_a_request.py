"""Whoever answers a batch, and whatever a class does around `infer`, a request gets the row that was made of it, or an error."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fabric.ids import FrontendId
from fabric.link import NamedTensor
from fabric.messages import BatchFailed, LoaderSpec, Outputs
from roles.gpu_worker.events import HeadRows, PushOutputs
from roles.gpu_worker.executors.buckets import Capture
from roles.gpu_worker.executors.loaders.base import LoaderError, NotAModel
from roles.gpu_worker.executors.profiled import ProfiledModel
from roles.gpu_worker.shell import WorkerShell
from roles.runtime.core import Handle
from tests.unit.roles.gpu_worker.executors.test_worker_batches_on_device import (
    CPU,
    MODELS,
    Replayed,
    hosted,
    part,
    stand_in,
    totals,
)

CAPTURES = pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
NAN = float("nan")


def capture(made: list[Replayed] | None = None) -> Capture:
    return stand_in([] if made is None else made)


@CAPTURES
def test_a_class_that_looks_at_each_input_twice_and_takes_the_mean_is_served(is_captured: bool) -> None:
    model = hosted("TwoViews", capture=capture() if is_captured else None)
    assert model.batch_size_max == 8
    for size in range(1, 9):
        values = [float(value) for value in range(1, size + 1)]
        assert totals(model, part(*values)) == [3 * value for value in values]


@CAPTURES
@pytest.mark.parametrize("piece", [1, 2, 3])
def test_it_is_served_in_pieces_as_well(piece: int, is_captured: bool) -> None:
    model = hosted("TwoViews", capture=capture() if is_captured else None)
    model.shrink(2 * piece)
    assert totals(model, part(1, 2, 3, 4, 5, 6, 7)) == [3, 6, 9, 12, 15, 18, 21]


@CAPTURES
@pytest.mark.parametrize("name", ["TwoViewsOnly", "OneOfAll", "WrongBatch"])
def test_a_class_that_always_answers_another_number_of_rows_is_found_while_it_warms_up(
    name: str, is_captured: bool
) -> None:
    with pytest.raises(NotAModel, match="the first axis must be the batch"):
        hosted(name, capture=capture() if is_captured else None)


@CAPTURES
@pytest.mark.parametrize("values", [(1.0, NAN, 3.0), (NAN,), (NAN, 2.0), (NAN, NAN)])
def test_a_batch_of_which_rows_are_left_out_fails_whole_so_that_its_halves_are_run(
    values: tuple[float, ...], is_captured: bool
) -> None:
    model = hosted("LeavesOut", capture=capture() if is_captured else None)
    with pytest.raises(NotAModel, match=f"for a batch of {len(values)}"):
        model.run_parts([part(*values)])
    assert totals(model, part(1, 2)) == [3, 6]


def test_rows_left_out_of_one_piece_fail_the_batch() -> None:
    model = hosted("LeavesOut")
    model.shrink(4)
    with pytest.raises(NotAModel, match="for a batch of 2"):
        model.run_parts([part(1, 2, NAN, 4)])


# ---------------------------------------------------------------- the profiler


@pytest.mark.parametrize("name", ["TwoViewsOnly", "WrongBatch", "OneOfAll", "NotADict", "NotATensor"])
def test_what_a_worker_would_refuse_is_not_measured(name: str) -> None:
    model = ProfiledModel(LoaderSpec(python=f"{MODELS}:{name}"), CPU)
    with pytest.raises(LoaderError, match="must"):
        model.batch(4)()


def test_what_a_worker_serves_is_measured() -> None:
    outputs = ProfiledModel(LoaderSpec(python=f"{MODELS}:TwoViews"), CPU).batch(4)()
    assert {key: len(value) for key, value in outputs.items()} == {"twice": 4, "total": 4}


# ---------------------------------------------------------------- on the way to the frontend


OUTPUTS = Outputs(1, "s", "m", (7, 8), 2, 0.0, 0.0, 1.0)  # type: ignore[arg-type]  # names are texts
SHAPES = {"y": (2,)}


@pytest.mark.parametrize("shape", [(), (0, 2), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    "push",
    [
        PushOutputs(FrontendId("f"), OUTPUTS, Handle(5), 1),
        PushOutputs(FrontendId("f"), OUTPUTS, Handle(5), head=HeadRows((0, 2), SHAPES)),
    ],
    ids=["rows in order", "those of a head"],
)
def test_outputs_that_lack_a_requests_row_are_answered_and_the_worker_does_not_end(
    push: PushOutputs, shape: tuple[int, ...]
) -> None:
    sent: list[object] = []

    def send(*message: object) -> bool:
        sent.append(message[1])
        return True

    counters = {"outputs_unsendable": 0, "outputs_refused": 0}
    worker = SimpleNamespace(
        _payloads={5: [NamedTensor("y", np.zeros(shape, np.float32))]},
        _core=SimpleNamespace(counters=counters),
        _frontends=SimpleNamespace(send=send),
    )
    WorkerShell._push(worker, push)  # type: ignore[arg-type]  # only what it needs
    (answer,) = sent
    assert isinstance(answer, BatchFailed)
    assert (answer.seqs, answer.code) == ((7, 8), "Internal")
    assert counters == {"outputs_unsendable": 1, "outputs_refused": 0}
