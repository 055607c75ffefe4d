"""Models that are loaded beside those that run: torch on a CPU, its thread and the loading one; and emulated ones."""

from __future__ import annotations

import gc
import select
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from fabric.clock import MonotonicClock
from fabric.ids import BatchId, ModelId
from fabric.link import NamedTensor
from fabric.messages import LoaderSpec, ModelSpec, ReplicaInfo, SliceSpec
from roles.gpu_worker.executors.base import (
    ExecutorEvent,
    Job,
    JobPart,
    JobRan,
    LoadBegins,
    Loaded,
    ModelLoaded,
    Warming,
)
from roles.gpu_worker.executors.emulated import EmulatedExecutor
from roles.gpu_worker.executors.thread import ThreadExecutor
from roles.gpu_worker.executors.torch import TorchDevice
from roles.gpu_worker.shell import WorkerShell
from tests.scarcity import no_threads
from tests.unit.roles.gpu_worker.executors import models_for_tests
from tests.worker_builders import SLICE, model_spec, slice_spec

CLOCK = MonotonicClock()
MODELS = "tests.unit.roles.gpu_worker.executors.models_for_tests"


def user_model(name: str) -> ModelSpec:
    return model_spec(name, (), 4, LoaderSpec(python=f"{MODELS}:{name}"), slo_ms=60_000.0)


def hosting(*names: str) -> SliceSpec:
    return slice_spec(models=[user_model(name) for name in names], device="cpu")


def job(model_id: str, value: float = 1.0, batch_id: int = 1) -> Job:
    tensor = NamedTensor("x", np.full(3, value, np.float32))
    return Job(SLICE, BatchId(batch_id), ModelId(model_id), [JobPart(1, [tensor])])


@contextmanager
def serving(*names: str) -> Iterator[tuple[ThreadExecutor, TorchDevice]]:
    device = TorchDevice(MonotonicClock())
    executor = ThreadExecutor(lambda: device, CLOCK.now_ms)
    try:
        executor.load(hosting(*names))
        assert isinstance(next_event(executor), Loaded)
        yield executor, device
    finally:
        executor.close()


def next_event(executor: ThreadExecutor) -> ExecutorEvent:
    while True:
        assert executor.has_more or select.select([executor], [], [], 60)[0], "nothing came of it"
        for event in executor.take(1, 0.0):
            if not isinstance(event, LoadBegins | Warming):
                return event


def test_batches_run_while_a_model_loads_and_then_it_runs_too() -> None:
    models_for_tests.may_load.clear()
    with serving("Doubler") as (executor, _):
        executor.load_model(hosting("LoadsWhenTold"), 7)
        for number in range(5):
            executor.run(job("Doubler", batch_id=number), 0.0)
            ran = next_event(executor)
            assert isinstance(ran, JobRan), ran
        models_for_tests.may_load.set()
        ready = next_event(executor)
        assert isinstance(ready, ModelLoaded), ready
        assert (ready.number, ready.reason) == (7, "")
        assert ready.replica is not None
        assert len(ready.replica.exec_ms) == 4
        executor.run(job("LoadsWhenTold"), 0.0)
        assert isinstance(next_event(executor), JobRan)


def test_a_model_for_which_there_is_no_thread_is_not_loaded_and_the_others_serve() -> None:
    with serving("Doubler") as (executor, _):
        with no_threads():
            executor.load_model(hosting("Adder"), 7)
        refused = next_event(executor)
        assert isinstance(refused, ModelLoaded)
        assert (refused.number, refused.replica) == (7, None)
        assert "thread" in refused.reason
        executor.run(job("Doubler"), 0.0)
        assert isinstance(next_event(executor), JobRan)


def test_a_batch_waits_for_one_run_of_what_warms_up_at_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: what is asked for in a run of the new model has its turn before the next step."""
    order = models_for_tests.NotesItsRuns.order
    with serving("NotesItsRuns") as (executor, _):
        order.clear()
        ask = staticmethod(lambda: executor.run(job("NotesItsRuns"), 0.0))
        monkeypatch.setattr(models_for_tests.AsksForAnother, "ask", ask)
        executor.load_model(hosting("AsksForAnother"), 1)
        while not isinstance(next_event(executor), ModelLoaded):
            pass
    rounds = " ".join(order).split("asked")[1:]
    assert len(rounds) > 10
    # A step of the warm-up is one run or two.
    assert all(one.split().count("run") <= 2 for one in rounds), order


@pytest.mark.parametrize("name", ["RaisesInLoad", "NoExample", "WrongBatch", "NotADict", "Nowhere"])
def test_a_load_that_fails_says_why_and_what_serves_serves_on(name: str) -> None:
    with serving("Doubler") as (executor, _):
        executor.load_model(hosting(name), 3)
        failed = next_event(executor)
        assert isinstance(failed, ModelLoaded)
        assert (failed.number, failed.replica) == (3, None)
        assert failed.reason
        executor.run(job("Doubler"), 0.0)
        assert isinstance(next_event(executor), JobRan)


def test_a_load_that_hangs_is_given_up_and_the_next_one_does_not_wait_for_it() -> None:
    models_for_tests.may_load.clear()
    with serving("Doubler") as (executor, device):
        executor.load_model(hosting("LoadsWhenTold"), 1)
        executor.unload_model(SLICE, ModelId("LoadsWhenTold"))
        executor.load_model(hosting("Echo"), 2)
        ready = next_event(executor)
        assert isinstance(ready, ModelLoaded)
        assert (ready.number, ready.replica is not None) == (2, True)
        models_for_tests.may_load.set()
        until(lambda: not any(one.name == "loading" for one in threading.enumerate()))
        executor.run(job("Doubler"), 0.0)
        assert isinstance(next_event(executor), JobRan), "what was given up says nothing more"
        assert set(device._hosted[SLICE]) == {"Doubler", "Echo"}


@pytest.mark.parametrize(
    "name",
    [
        "Weighty",
        "WeightyInACircle",
        "WeightyInside",
        "WeightyInAMapping",
        "WeightyInAnObject",
        "WeightyInAClosure",
    ],
)
def test_the_memory_of_a_model_is_given_back_when_it_goes(name: str) -> None:
    with serving("Doubler") as (executor, _):
        executor.load_model(hosting(name), 1)
        assert isinstance(next_event(executor), ModelLoaded)
        gc.freeze()  # as the worker does
        (weight,) = models_for_tests.Weighty.made
        assert isinstance(weight(), torch.nn.Parameter)
        executor.unload_model(SLICE, ModelId(name))
        executor.run(job("Doubler"), 0.0)
        assert isinstance(next_event(executor), JobRan)
        assert weight() is None
        gc.unfreeze()


def weight_of_a_load_that_failed(executor: ThreadExecutor) -> weakref.ref[torch.Tensor]:
    executor.load_model(hosting("WeightyAndWrong"), 1)
    failed = next_event(executor)
    assert isinstance(failed, ModelLoaded)
    assert failed.replica is None
    (weight,) = models_for_tests.Weighty.made
    return weight


def test_the_memory_of_a_load_that_failed_is_given_back_whatever_is_loaded_next() -> None:
    with serving("Doubler") as (executor, _):
        weight = weight_of_a_load_that_failed(executor)
        until(lambda: not any(one.name == "loading" for one in threading.enumerate()))
        executor.load_model(hosting("Echo"), 2)
        ready = next_event(executor)
        assert isinstance(ready, ModelLoaded)
        assert ready.replica is not None
        assert weight() is None, "before the worker puts what is there out of the collector's sight"


@pytest.fixture
def only_asked_to_collect() -> Iterator[None]:
    """Nothing goes by chance: the collector looks only where it is told to."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.usefixtures("only_asked_to_collect")
def test_the_memory_of_a_load_that_failed_is_given_back_though_nothing_else_is_loaded() -> None:
    with serving("Doubler") as (executor, _):
        weight = weight_of_a_load_that_failed(executor)
        until(lambda: weight() is None)


@pytest.mark.usefixtures("only_asked_to_collect")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_memory_of_a_load_that_ends_after_it_was_given_up_is_given_back(*, is_frozen: bool) -> None:
    models_for_tests.may_load.clear()
    models_for_tests.Weighty.made.clear()
    with serving("Doubler") as (executor, _):
        executor.load_model(hosting("WeightyWhenTold"), 1)
        until(lambda: models_for_tests.Weighty.made)
        (weight,) = models_for_tests.Weighty.made
        executor.unload_model(SLICE, ModelId("WeightyWhenTold"))
        if is_frozen:
            executor.load_model(hosting("Echo"), 2)
            assert isinstance(next_event(executor), ModelLoaded)
            gc.freeze()  # as the worker does then
        models_for_tests.may_load.set()
        until(lambda: weight() is None)


@pytest.mark.usefixtures("only_asked_to_collect")
def test_the_memory_of_a_slice_is_given_back_when_it_goes() -> None:
    with serving("WeightyInACircle") as (executor, _):
        gc.freeze()  # as the worker does
        (weight,) = models_for_tests.Weighty.made
        executor.unload(SLICE)
        until(lambda: weight() is None)


@pytest.mark.usefixtures("only_asked_to_collect")
def test_the_memory_of_a_slices_model_that_cannot_be_loaded_is_given_back() -> None:
    with serving("WeightyAndWrong", "Doubler"):
        (weight,) = models_for_tests.Weighty.made
        assert weight() is None


@pytest.mark.parametrize(("name", "is_good"), [("Echo", True), ("OutOfSteps", False)])
def test_the_worker_hears_when_the_device_warms_a_model_up(name: str, *, is_good: bool) -> None:
    with serving("Doubler") as (executor, _):
        executor.load_model(hosting(name), 1)
        heard: list[ExecutorEvent] = []
        while not heard or not isinstance(heard[-1], ModelLoaded):
            assert executor.has_more or select.select([executor], [], [], 60)[0], "nothing came of it"
            heard += executor.take(10, 0.0)
        *steps, ready = heard
        assert isinstance(ready, ModelLoaded)
        assert (ready.replica is not None) == is_good
        begun, over = (Warming(SLICE, ModelId(name), is_over) for is_over in (False, True))
        assert steps == [begun, over] * (len(steps) // 2)
        assert len(steps) >= 2


def test_what_is_there_is_put_out_of_the_collectors_sight_when_a_model_is_loaded_not_when_that_failed() -> (
    None
):
    replica = ReplicaInfo(model_id=ModelId("m"), batch_size_max=1, exec_ms=(1.0,))
    shell = WorkerShell.__new__(WorkerShell)
    gc.unfreeze()
    try:
        shell._from_thread(ModelLoaded(SLICE, 1, None, "no file"))
        assert gc.get_freeze_count() == 0
        shell._from_thread(ModelLoaded(SLICE, 2, replica))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def until(is_so: object) -> None:
    deadline = time.monotonic() + 30
    while not is_so():  # type: ignore[operator]  # a function without arguments
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_emulated_slice_takes_a_model_more_and_a_model_less() -> None:
    device = EmulatedExecutor()
    device.load(slice_spec(models=[model_spec("a")]))
    device.take(10, 0.0)
    device.load_model(slice_spec(models=[model_spec("b", (3.0, 4.0))]), 5)
    (ready,) = device.take(10, 0.0)
    assert isinstance(ready, ModelLoaded)
    assert ready.replica is not None
    assert ready.replica.exec_ms == (3.0, 4.0)
    device.run(Job(SLICE, BatchId(1), ModelId("b"), [JobPart(1, [])]), 0.0)
    assert device.wake_at_ms == 3.0
    device.take(10, 3.0)
    device.unload_model(SLICE, ModelId("b"))
    device.load_model(slice_spec(models=[model_spec("b", (3.0,), 8)]), 6)
    (failed,) = device.take(10, 3.0)
    assert isinstance(failed, ModelLoaded)
    assert failed.replica is None
    assert "1 run times" in failed.reason
