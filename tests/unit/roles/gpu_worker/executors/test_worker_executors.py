"""The emulated device on virtual time, the torch device on a CPU, and the thread around it."""

from __future__ import annotations

import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from fabric.clock import MonotonicClock
from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor, Tensor
from fabric.messages import LoaderSpec, ReplicaInfo, SliceSpec, TensorInfo
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    ExecutorEvent,
    Job,
    JobPart,
    JobRan,
    LoadBegins,
    Loaded,
    LoadFailed,
    RejectedRow,
    RunAborted,
    RunFailed,
    sort_out,
)
from roles.gpu_worker.executors.emulated import EmulatedExecutor
from roles.gpu_worker.executors.hosted import batch_sizes, spread
from roles.gpu_worker.executors.loaders.base import NotAModel
from roles.gpu_worker.executors.thread import ThreadExecutor
from roles.gpu_worker.executors.torch import TorchDevice
from roles.runtime.loop.mailbox import Mailbox
from tests.worker_builders import MODEL, SLICE, SteppingClock, model_spec, slice_spec

CLOCK = MonotonicClock()
MODELS = "tests.unit.roles.gpu_worker.executors.models_for_tests"
PIXELS = (TensorInfo("x", "float32", (3,)),)


def numbers(value: float, name: str = "x", dtype: str = "float32", length: int = 3) -> NamedTensor:
    return NamedTensor(name, np.full(length, value, dtype))


def job(*values: float, batch_id: int = 1, slice_id: str = SLICE, model_id: str = MODEL) -> Job:
    tensors = [numbers(value) for value in values]
    return Job(SliceId(slice_id), BatchId(batch_id), ModelId(model_id), [JobPart(len(values), tensors)])


def user_slice(name: str = "Doubler", batch_size_max: int = 4, slo_ms: float = 60_000.0) -> SliceSpec:
    loader = LoaderSpec(python=f"{MODELS}:{name}")
    model = model_spec(loader=loader, batch_size_max=batch_size_max, slo_ms=slo_ms)
    return slice_spec(models=[model], device="cpu")


# ---------------------------------------------------------------- sorting out


def test_rows_that_do_not_fit_are_sorted_out_of_their_part() -> None:
    parts = [
        JobPart(2, [numbers(1), numbers(2, length=4)]),
        JobPart(3, [numbers(3, dtype="float64"), numbers(4), numbers(5, name="y")]),
    ]
    rows, rejected = sort_out(parts, PIXELS)
    assert [float(row["x"][0]) for row in rows] == [1.0, 4.0]
    assert rejected == [
        RejectedRow(1, "input 'x' has shape [4], not [3]"),
        RejectedRow(2, "input 'x' has dtype float64, not float32"),
        RejectedRow(4, "inputs ['y'] are not ['x']"),
    ]


def test_tensors_that_cannot_be_shared_by_a_part_reject_the_part_only() -> None:
    parts = [JobPart(2, [numbers(1)]), JobPart(1, [numbers(2)]), JobPart(2, [])]
    rows, rejected = sort_out(parts, PIXELS)
    assert len(rows) == 1
    assert [each.row for each in rejected] == [0, 1, 3, 4]


def test_the_same_input_twice_is_not_two_inputs() -> None:
    _, rejected = sort_out([JobPart(1, [numbers(1), numbers(2)])], PIXELS)
    assert len(rejected) == 1


# ---------------------------------------------------------------- emulated


def test_an_emulated_batch_takes_its_run_time_and_answers_zeros() -> None:
    device = EmulatedExecutor()
    device.load(slice_spec())
    (ready,) = device.take(10, 0.0)
    assert isinstance(ready, Loaded)
    assert ready.replicas[0].exec_ms == (6.0, 7.0, 8.0, 9.0)
    assert ready.replicas[0].inputs == ()
    device.run(job(1, 2), 100.0)
    assert device.wake_at_ms == 107.0
    assert device.take(10, 106.9) == []
    (ran,) = device.take(10, 107.2)
    assert isinstance(ran, JobRan)
    assert (ran.exec_ms, ran.rejected) == (7.0, ())
    assert ran.outputs[0].name == "output"
    assert ran.outputs[0].array.tolist() == [[0.0], [0.0]]
    assert device.wake_at_ms is None


def test_emulated_slices_run_side_by_side_and_each_one_batch_at_a_time() -> None:
    device = EmulatedExecutor()
    for slice_id in ("n/gpu0/0", "n/gpu1/0"):
        device.load(slice_spec(slice_id))
    device.take(10, 0.0)
    device.run(job(1, slice_id="n/gpu0/0", batch_id=1), 0.0)
    device.run(job(1, slice_id="n/gpu1/0", batch_id=2), 1.0)
    device.run(job(1, slice_id="n/gpu0/0", batch_id=3), 2.0)
    ended = []
    while device.wake_at_ms is not None:
        now_ms = device.wake_at_ms
        ended += [(now_ms, event.batch_id) for event in device.take(1, now_ms) if isinstance(event, JobRan)]
    assert ended == [(6.0, 1), (7.0, 2), (12.0, 3)]


def test_an_emulated_slice_without_run_times_fails_to_load() -> None:
    device = EmulatedExecutor()
    device.load(slice_spec(models=[model_spec(exec_ms=(5.0,), batch_size_max=8)]))
    (failed,) = device.take(10, 0.0)
    assert isinstance(failed, LoadFailed)
    assert "1 run times" in failed.reason


def test_an_emulated_batch_over_the_largest_fails() -> None:
    device = EmulatedExecutor()
    device.load(slice_spec())
    device.take(10, 0.0)
    device.run(job(*range(5)), 0.0)
    (failed,) = device.take(10, 0.0)
    assert isinstance(failed, RunFailed)


def test_an_emulated_batch_can_be_aborted() -> None:
    device = EmulatedExecutor()
    device.load(slice_spec())
    device.take(10, 0.0)
    device.run(job(1), 0.0)
    device.abort(SLICE, BatchId(9), 1.0)
    assert not device.has_more
    device.abort(SLICE, BatchId(1), 1.0)
    assert device.take(10, 1.0) == [RunAborted(SLICE, BatchId(1))]
    assert device.wake_at_ms is None
    device.run(job(1, batch_id=2), 2.0)
    assert device.wake_at_ms == 8.0


def test_emulation_needs_no_torch() -> None:
    code = "import sys; import roles.gpu_worker.shell; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- tables


def test_batch_sizes_are_the_powers_of_two_and_the_largest() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(8) == [1, 2, 4, 8]


def test_a_measured_table_is_whole_and_never_falls() -> None:
    assert spread([1, 2, 4], [3.0, 2.0, 7.0]) == (3.0, 3.0, 5.0, 7.0)


# ---------------------------------------------------------------- torch


def device_with(name: str = "Doubler", batch_size_max: int = 4) -> TorchDevice:
    device = TorchDevice(MonotonicClock())
    device.load(user_slice(name, batch_size_max))
    return device


def by_name(outputs: Sequence[NamedTensor]) -> dict[str, Tensor]:
    return {output.name: output.array for output in outputs}


def test_a_loaded_model_tells_its_signature_and_its_run_times() -> None:
    (replica,) = TorchDevice(MonotonicClock()).load(user_slice(batch_size_max=6))
    assert isinstance(replica, ReplicaInfo)
    assert replica.inputs == PIXELS
    assert replica.outputs == (TensorInfo("twice", "float32", (3,)), TensorInfo("total", "float32", ()))
    assert len(replica.exec_ms) == 6
    assert list(replica.exec_ms) == sorted(replica.exec_ms)
    assert replica.exec_ms[0] > 0


def test_why_batches_are_smaller_than_asked_for_is_announced() -> None:
    device = TorchDevice(MonotonicClock())
    (many,) = device.load(user_slice("ManyInputs", batch_size_max=32))
    reason = "it has 130 inputs a request, and a message holds 4096 tensors"
    assert (many.batch_size_max, many.reason) == (31, reason)
    (few,) = device.load(user_slice("ManyInputs", batch_size_max=31))
    assert (few.batch_size_max, few.reason) == (31, "")


def test_sizes_that_can_never_be_in_time_are_not_offered() -> None:
    (one,) = TorchDevice(SteppingClock()).load(user_slice(batch_size_max=8, slo_ms=8.0))
    assert (one.batch_size_max, one.exec_ms, one.reason) == (1, (10.0,), "")
    (all_of_them,) = TorchDevice(SteppingClock()).load(user_slice(batch_size_max=8, slo_ms=12.0))
    assert all_of_them.batch_size_max == len(all_of_them.exec_ms) == 8


def test_a_batch_is_stacked_and_answered_row_by_row() -> None:
    ran = device_with().run(job(1, 2, 3))
    outputs = by_name(ran.outputs)
    assert outputs["twice"].tolist() == [[2] * 3, [4] * 3, [6] * 3]
    assert outputs["total"].tolist() == [3, 6, 9]
    assert ran.exec_ms > 0


def test_a_row_that_does_not_fit_is_left_out() -> None:
    tensors = [numbers(1), numbers(2, length=5), numbers(3)]
    ran = device_with().run(Job(SLICE, BatchId(1), MODEL, [JobPart(3, tensors)]))
    assert by_name(ran.outputs)["total"].tolist() == [3, 9]
    assert [each.row for each in ran.rejected] == [1]


def test_a_batch_of_misfits_runs_nothing() -> None:
    ran = device_with().run(Job(SLICE, BatchId(1), MODEL, [JobPart(1, [numbers(1, length=5)])]))
    assert (list(ran.outputs), len(ran.rejected)) == ([], 1)


def test_outputs_are_not_overwritten_by_the_next_batch() -> None:
    device = device_with("Echo")
    outputs = by_name(device.run(job(1)).outputs)
    device.run(job(5))
    assert outputs["x"].tolist() == [[1, 1, 1]]
    assert outputs["half"].dtype == np.float32  # numpy has no bfloat16


def test_read_only_inputs_are_taken() -> None:
    tensor = numbers(1)
    tensor.array.flags.writeable = False
    ran = device_with().run(Job(SLICE, BatchId(1), MODEL, [JobPart(1, [tensor])]))
    assert by_name(ran.outputs)["total"].tolist() == [3]


def test_a_batch_over_the_largest_is_refused() -> None:
    with pytest.raises(NotAModel, match="over the model's largest"):
        device_with(batch_size_max=2).run(job(1, 2, 3))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WrongBatch", "first axis must be the batch"),
        ("NotADict", "must give a dict of tensors, not Tensor"),
        ("NotATensor", "must be a tensor, not list"),
    ],
)
def test_a_model_that_answers_nonsense_is_found_out_while_it_is_warmed(name: str, reason: str) -> None:
    with pytest.raises(NotAModel, match=reason):
        device_with(name)


def test_a_worker_leaves_cores_to_its_neighbours() -> None:
    TorchDevice(MonotonicClock(), threads=1)
    assert torch.get_num_threads() == 1


# ---------------------------------------------------------------- the thread


def wait_for(executor: ThreadExecutor, events: int = 1) -> list[ExecutorEvent]:
    taken: list[ExecutorEvent] = []
    while len(taken) < events:
        assert executor.has_more or select.select([executor], [], [], 60)[0], "nothing came of it"
        taken += [event for event in executor.take(64, 0.0) if not isinstance(event, LoadBegins)]
    return taken


def test_what_a_model_raises_ends_its_batch_and_not_the_thread() -> None:
    executor = ThreadExecutor(lambda: TorchDevice(CLOCK), CLOCK.now_ms)
    try:
        executor.load(user_slice())
        assert isinstance(wait_for(executor)[0], Loaded)
        for batch_id, value in enumerate((float("nan"), -1, -2, 1)):
            executor.run(job(value, batch_id=batch_id), 0.0)
        nan, memory, leaving, good = wait_for(executor, 4)
        assert isinstance(nan, RunFailed)
        assert nan.reason == "ValueError: not a number"
        assert isinstance(memory, RunFailed)
        assert memory.reason.startswith("out of memory on the host")
        assert isinstance(leaving, RunFailed)
        assert "the model wants to leave" in leaving.reason
        assert isinstance(good, JobRan)
    finally:
        executor.close()


def test_whatever_a_model_raises_ends_its_batch_and_not_the_thread() -> None:
    """What is no Exception, what has no text, and outputs whose name is no text, which nobody could send."""
    executor = ThreadExecutor(lambda: TorchDevice(CLOCK), CLOCK.now_ms)
    try:
        executor.load(user_slice("RaisesAnything"))
        assert isinstance(wait_for(executor)[0], Loaded)
        for batch_id in (1, 2, 3, 4, 9, 5):
            executor.run(job(batch_id, batch_id=batch_id), 0.0)
        *failed, good = wait_for(executor, 6)
        reasons = [event.reason for event in failed if isinstance(event, RunFailed)]
        assert reasons == [
            "CancelledError: ",
            "KeyboardInterrupt: ",
            "GeneratorExit: ",
            "Untold",
            reasons[4],
        ]
        assert "must name its outputs by texts, not 9" in reasons[4]
        assert isinstance(good, JobRan)
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (user_slice("RaisesNoExceptionInLoad"), "CancelledError"),
        (user_slice("RaisesNoTextInLoad"), "Untold"),
        (user_slice("RaisesInLoad"), "RuntimeError: no weights today"),
        (user_slice("NoExample"), "no method 'example'"),
        (slice_spec(device="cpu"), "has no loader"),
        (slice_spec(device="tpu"), "torch finds no CUDA|has no loader"),
    ],
)
def test_a_load_that_fails_says_why_and_the_next_one_works(spec: SliceSpec, reason: str) -> None:
    executor = ThreadExecutor(lambda: TorchDevice(CLOCK), CLOCK.now_ms)
    try:
        executor.load(spec)
        executor.load(user_slice())
        failed, ready = wait_for(executor, 2)
        assert isinstance(failed, LoadFailed)
        assert isinstance(ready, Loaded)
        assert re.search(reason, failed.reason)
    finally:
        executor.close()


class Broken:
    """A device whose context is poisoned by its first batch."""

    is_broken = False

    def load(self, spec: SliceSpec) -> tuple[ReplicaInfo, ...]:
        return ()

    def load_beside(self, spec: SliceSpec) -> Iterator[ReplicaInfo | None]:
        return iter(())

    def unload(self, slice_id: SliceId) -> None: ...

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None: ...

    def collect(self, *, is_frozen: bool) -> None: ...

    def run(self, job: Job) -> JobRan:
        self.is_broken = True
        raise RuntimeError("CUDA error: device-side assert triggered")

    def stage(self, job: Job) -> None: ...

    def shrunk(self, job: Job, error: BaseException) -> int | None:
        return None

    def explain(self, error: BaseException) -> str:
        return str(error)


@pytest.mark.parametrize(
    "name", ["RaisesInLoad", "NoExample", "WrongBatch", "NotADict", "EmptyExample", "Nowhere"]
)
def test_a_model_that_cannot_be_loaded_leaves_only_itself_out(name: str) -> None:
    executor = ThreadExecutor(lambda: TorchDevice(CLOCK), CLOCK.now_ms)
    try:
        for models in ([name, "Doubler"], ["Doubler", name]):
            specs = [
                model_spec(each, (), 2, LoaderSpec(python=f"{MODELS}:{each}"), slo_ms=60_000.0)
                for each in models
            ]
            executor.load(slice_spec(models=specs, device="cpu"))
            (ready,) = wait_for(executor)
            assert isinstance(ready, Loaded)
            assert [replica.model_id for replica in ready.replicas] == ["Doubler"]
            assert [left.model_id for left in ready.left_out] == [name]
            assert ready.left_out[0].reason
            executor.run(job(1, model_id="Doubler"), 0.0)
            assert isinstance(wait_for(executor)[0], JobRan)
    finally:
        executor.close()


def test_an_emulated_model_without_run_times_leaves_only_itself_out() -> None:
    device = EmulatedExecutor()
    device.load(slice_spec(models=[model_spec("bad", (5.0,), 8), model_spec()]))
    (ready,) = device.take(10, 0.0)
    assert isinstance(ready, Loaded)
    assert [replica.model_id for replica in ready.replicas] == [MODEL]
    assert "1 run times" in ready.left_out[0].reason


def test_a_poisoned_context_is_told_as_such() -> None:
    executor = ThreadExecutor(Broken, CLOCK.now_ms)
    try:
        executor.load(slice_spec())
        executor.run(job(1), 0.0)
        assert wait_for(executor, 2)[1] == DeviceBroken("CUDA error: device-side assert triggered")
    finally:
        executor.close()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_device_that_cannot_be_made_fails_the_load(is_prepared: bool) -> None:
    def not_installed() -> Broken:
        raise ModuleNotFoundError("No module named 'torch'")

    executor = ThreadExecutor(not_installed, CLOCK.now_ms)
    try:
        if is_prepared:
            executor.prepare()
        executor.load(slice_spec())
        assert wait_for(executor) == [LoadFailed(SLICE, "ModuleNotFoundError: No module named 'torch'")]
    finally:
        executor.close()


def test_a_closed_executor_leaves_a_stuck_thread_behind_within_bounds() -> None:
    release = threading.Event()

    class Stuck(Broken):
        def load(self, spec: SliceSpec) -> tuple[ReplicaInfo, ...]:
            release.wait(60)
            return ()

    executor = ThreadExecutor(Stuck, CLOCK.now_ms)
    executor.load(slice_spec())
    executor.close()
    release.set()  # what it posts now goes nowhere


def test_a_mailbox_is_quiet_once_everything_was_taken() -> None:
    mailbox: Mailbox[int] = Mailbox()
    try:
        for number in range(3):
            mailbox.post(number)
        assert mailbox.take(2, 0.0) == [0, 1]
        assert [mailbox.has_more, mailbox.take(2, 0.0), mailbox.has_more] == [True, [2], False]
        assert select.select([mailbox], [], [], 0)[0] == []
    finally:
        mailbox.close()
