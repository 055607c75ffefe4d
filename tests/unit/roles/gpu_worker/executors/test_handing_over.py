"""What an executor is given ahead begins when the batch before has ended, whoever has heard of that, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import SliceSpec
from roles.gpu_worker.executors.base import (
    ExecutorEvent,
    Job,
    JobPart,
    JobRan,
    LeftFirstStage,
    Loaded,
    RunAborted,
)
from roles.gpu_worker.executors.emulated import EmulatedExecutor
from roles.gpu_worker.executors.thread import ThreadExecutor
from tests.unit.roles.gpu_worker.executors.test_worker_executors import Broken, wait_for
from tests.worker_builders import MODEL, SLICE, model_spec, slice_spec

FOREVER_MS = 1e9


def job(
    batch_id: int,
    size: int = 1,
    expires_at_ms: float = FOREVER_MS,
    slice_id: str = SLICE,
    model_id: str = MODEL,
) -> Job:
    return Job(SliceId(slice_id), BatchId(batch_id), ModelId(model_id), [JobPart(size, ())], expires_at_ms)


def device_with(*specs: SliceSpec) -> EmulatedExecutor:
    """Batches of 1 to 4 take 6 to 9 ms."""
    device = EmulatedExecutor()
    for spec in specs or (slice_spec(),):
        device.load(spec)
    device.take(10, 0.0)
    return device


def runs(events: Sequence[ExecutorEvent]) -> list[tuple[int, float, float]]:
    """Which batches ran, from when and for how long."""
    return [(one.batch_id, one.began_at_ms, one.exec_ms) for one in events if isinstance(one, JobRan)]


# ---------------------------------------------------------------- emulated


def test_it_begins_when_the_one_before_ends_however_late_somebody_asks() -> None:
    device = device_with()
    device.run(job(1), 0.0)
    device.run(job(2, 3), 1.0)
    assert device.wake_at_ms == 6.0
    assert runs(device.take(10, 6.5)) == [(1, 0.0, 6.0)]
    assert device.wake_at_ms == 14.0
    device.run(job(3), 7.0)
    assert runs(device.take(10, 50.0)) == [(2, 6.0, 8.0), (3, 14.0, 6.0)]
    device.run(job(4), 51.0)
    assert runs(device.take(10, 57.0)) == [(4, 51.0, 6.0)]


def test_what_is_given_to_a_device_that_was_free_unheard_begins_at_once() -> None:
    device = device_with()
    device.run(job(1), 0.0)
    device.run(job(2), 8.0)
    assert device.wake_at_ms == 14.0, "the first one ended at 6"
    assert runs(device.take(10, 14.0)) == [(1, 0.0, 6.0), (2, 8.0, 6.0)]


@pytest.mark.parametrize(("expires_at_ms", "begins"), [(6.1, True), (6.0, False), (5.0, False)])
def test_it_expires_at_the_moment_at_which_it_would_begin(expires_at_ms: float, begins: bool) -> None:
    device = device_with()
    device.run(job(1), 0.0)
    device.run(job(2, expires_at_ms=expires_at_ms), 1.0)
    device.run(job(3), 1.0)
    events = device.take(10, 30.0)
    assert runs(events) == [(1, 0.0, 6.0), *([(2, 6.0, 6.0)] * begins), (3, 12.0 if begins else 6.0, 6.0)]
    assert (RunAborted(SLICE, BatchId(2)) in events) is not begins


def test_it_can_be_called_back_until_it_begins_and_not_later() -> None:
    device = device_with()
    device.run(job(1), 0.0)
    device.run(job(2), 1.0)
    device.recall(SLICE, BatchId(1), 2.0)
    assert not device.has_more, "that one runs"
    device.recall(SLICE, BatchId(2), 6.0)
    assert device.take(1, 5.9) == [RunAborted(SLICE, BatchId(2))]
    assert runs(device.take(10, 6.0)) == [(1, 0.0, 6.0)]
    assert device.wake_at_ms is None
    device.run(job(3), 7.0)
    device.run(job(4), 8.0)
    device.recall(SLICE, BatchId(4), 13.1)
    assert runs(device.take(10, 20.0)) == [(3, 7.0, 6.0), (4, 13.0, 6.0)]


def test_one_that_is_stopped_makes_room_for_it_at_that_moment() -> None:
    device = device_with()
    device.run(job(1), 0.0)
    device.run(job(2), 1.0)
    device.abort(SLICE, BatchId(1), 2.0)
    assert runs(device.take(10, 8.0)) == [(2, 2.0, 6.0)]
    device.run(job(3), 9.0)
    device.run(job(4), 9.0)
    device.abort(SLICE, BatchId(4), 10.0)
    assert device.take(10, 10.0) == [RunAborted(SLICE, BatchId(4))]


def test_one_that_ends_at_the_moment_at_which_it_is_to_be_stopped_has_ended() -> None:
    """The next one may have begun at that moment, and has the device alone."""
    device = device_with()
    device.run(job(1), 0.0)
    device.run(job(2), 6.0)
    device.abort(SLICE, BatchId(1), 6.0)
    device.run(job(3), 7.0)
    assert runs(device.take(10, 30.0)) == [(1, 0.0, 6.0), (2, 6.0, 6.0), (3, 12.0, 6.0)]


def test_a_pipeline_hands_over_behind_its_first_stage() -> None:
    model = replace(model_spec(exec_ms=(10.0,)), stages_ms=((4.0,), (6.0,)))
    device = device_with(replace(slice_spec(models=[model]), following=(1,)))
    for number in (1, 2, 3):
        device.run(job(number, expires_at_ms=5.0 if number == 2 else FOREVER_MS), 0.0)
    device.abort(SLICE, BatchId(1), 1.0)  # it has begun
    events = device.take(10, 30.0)
    assert runs(events) == [(1, 0.0, 10.0), (2, 4.0, 10.0), (3, 8.0, 10.0)]
    assert [one.batch_id for one in events if isinstance(one, LeftFirstStage)] == [1, 2, 3]
    device.run(job(4), 40.0)
    device.run(job(5), 40.0)
    device.recall(SLICE, BatchId(5), 41.0)
    assert device.take(10, 41.0) == [RunAborted(SLICE, BatchId(5))]


def test_a_slice_that_is_gone_takes_along_what_it_had() -> None:
    device = device_with()
    device.run(job(1), 0.0)
    device.run(job(2), 0.0)
    device.unload(SLICE)
    device.load(slice_spec())
    device.take(10, 0.0)
    device.run(job(3), 1.0)
    device.run(job(4), 1.0)
    assert runs(device.take(10, 30.0)) == [(3, 1.0, 6.0), (4, 7.0, 6.0)]


# ---------------------------------------------------------------- the thread


class Stepping(Broken):
    """Each batch runs until it is let go, in this order."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.began: list[int] = []
        self.begins = threading.Semaphore(0)
        self.ends = threading.Semaphore(0)

    def run(self, job: Job) -> JobRan:
        began_at_ms = self.now_ms
        self.began.append(job.batch_id)
        self.begins.release()
        assert self.ends.acquire(timeout=60)
        return JobRan(job.slice_id, job.batch_id, (), (), self.now_ms - began_at_ms, began_at_ms)


def test_the_thread_goes_on_unheard_with_what_was_not_called_back_and_is_not_too_late() -> None:
    device = Stepping()
    executor = ThreadExecutor(lambda: device, lambda: device.now_ms)
    try:
        executor.load(slice_spec())
        assert isinstance(wait_for(executor)[0], Loaded)
        executor.run(job(1), 0.0)
        assert device.begins.acquire(timeout=60)
        for number, expires_at_ms in ((2, FOREVER_MS), (3, 7.0), (4, FOREVER_MS)):
            executor.run(job(number, expires_at_ms=expires_at_ms), 0.0)
        executor.recall(SLICE, BatchId(1), 1.0)  # too late
        executor.abort(SLICE, BatchId(2), 1.0)
        executor.recall(SLICE, BatchId(9), 1.0)  # nobody knows it
        device.now_ms = 7.0
        device.ends.release()
        assert device.begins.acquire(timeout=60), "before anybody has taken what became of the others"
        assert device.began == [1, 4]
        device.ends.release()
        assert wait_for(executor, 4) == [
            RunAborted(SLICE, BatchId(2)),
            JobRan(SLICE, BatchId(1), (), (), 7.0, 0.0),
            RunAborted(SLICE, BatchId(3)),
            JobRan(SLICE, BatchId(4), (), (), 0.0, 7.0),
        ]
    finally:
        executor.close()
