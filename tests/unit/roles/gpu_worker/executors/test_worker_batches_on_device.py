"""How a batch gets to a device and back: staged slots, captured graphs, memory that is not there; all on a CPU."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from fabric.clock import MonotonicClock
from fabric.ids import BatchId, ModelId
from fabric.link import NamedTensor, Tensor
from fabric.messages import LoaderSpec, SliceSpec
from roles.gpu_worker.executors import hosted as hosted_module
from roles.gpu_worker.executors.base import Job, JobPart, JobRan, Loaded, RunFailed, Shrunk
from roles.gpu_worker.executors.buckets import Buckets, Capture, Graph, cuda_capture, end_failed_capture
from roles.gpu_worker.executors.hosted import DeviceReplica, stepped
from roles.gpu_worker.executors.loaders.base import LoadedModel, NotAModel
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.slots import InputSlots, Slot, stream_of
from roles.gpu_worker.executors.thread import ThreadExecutor
from roles.gpu_worker.executors.torch import TorchDevice
from tests.integration.proc import until
from tests.unit.roles.gpu_worker.executors import models_for_tests
from tests.unit.roles.gpu_worker.executors.test_worker_executors import by_name, job, user_slice, wait_for
from tests.worker_builders import MODEL, SLICE, SteppingClock

CLOCK = MonotonicClock()
MODELS = "tests.unit.roles.gpu_worker.executors.models_for_tests"
CPU = torch.device("cpu")
Outputs = Mapping[str, torch.Tensor]


class Replayed:
    """What a captured graph does, by doing it again: same inputs' addresses, same outputs' addresses."""

    def __init__(self, call: Callable[[], Outputs]) -> None:
        self._call = call
        self.outputs = {key: value.clone() for key, value in call().items()}
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for key, value in self._call().items():
            self.outputs[key].copy_(value)


def stand_in(made: list[Replayed]) -> Capture:
    def capture(call: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        made.append(Replayed(call))
        return made[-1], made[-1].outputs

    return capture


def hosted(name: str = "Doubler", batch_size_max: int = 8, capture: Capture | None = None) -> DeviceReplica:
    loaded = load_model(LoaderSpec(python=f"{MODELS}:{name}"), CPU)
    model = DeviceReplica("m", loaded, batch_size_max, CPU, MonotonicClock(), capture)
    model.warm(60_000.0)
    return model


def part(*values: float) -> JobPart:
    return JobPart(len(values), [NamedTensor("x", np.full(3, value, np.float32)) for value in values])


def totals(model: DeviceReplica, *parts: JobPart) -> list[float]:
    outputs, _ = model.run_parts(parts)
    return [float(value) for value in by_name(outputs)["total"]]


# ---------------------------------------------------------------- slots


def test_a_batch_that_was_staged_runs_as_it_would_have() -> None:
    model = hosted()
    staged, other = part(1, 2, 3), part(7)
    model.stage([staged])
    assert totals(model, other) == [21]  # another one goes first, in the other slot
    assert totals(model, staged) == [3, 6, 9]
    assert model.slots.staged_ahead == 1
    assert totals(model, staged) == [3, 6, 9]  # and once more, unstaged
    assert model.slots.staged_ahead == 1


def test_a_batch_of_the_same_number_with_other_inputs_is_not_mistaken_for_the_staged_one() -> None:
    model = hosted()
    model.stage([part(1, 2)])
    assert totals(model, part(1, 5)) == [3, 15]
    assert model.slots.staged_ahead == 0


def test_the_batch_staged_last_takes_the_place_of_the_one_before() -> None:
    model = hosted()
    first, second = part(1), part(2)
    running = model.slots.take([{"x": np.zeros(3, np.float32)}], [])
    model.stage([first])
    model.stage([second])
    assert running.batch["x"].tolist() == [[0, 0, 0]]
    model.slots.give_back()
    assert totals(model, second) == [6]
    assert totals(model, first) == [3]
    assert model.slots.staged_ahead == 1


def test_a_batch_that_is_staged_between_two_runs_leaves_the_next_one_its_place() -> None:
    model = hosted()
    upcoming, behind = part(1), part(2)
    model.stage([upcoming])
    model.stage([behind])  # one run is over, and the thread has not taken the next one yet
    assert totals(model, upcoming) == [3]
    assert totals(model, behind) == [6]
    assert model.slots.staged_ahead == 2


def test_misfits_of_a_staged_batch_are_told_when_it_runs() -> None:
    model = hosted()
    long = JobPart(1, [NamedTensor("x", np.zeros(5, np.float32))])
    parts = [part(1), long, part(2)]
    model.stage(parts)
    outputs, rejected = model.run_parts(parts)
    assert by_name(outputs)["total"].tolist() == [3, 6]
    assert [each.row for each in rejected] == [1]
    model.stage([long])  # nothing fits: left to the run, which says why
    assert model.run_parts([long])[0] == []


def test_misfits_are_those_of_the_batch_that_ran_whatever_is_staged_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its slot is free before its answer is made, and the staging thread may be quicker."""
    model = hosted()
    long = JobPart(1, [NamedTensor("x", np.zeros(5, np.float32))])
    misfit, good = [part(1), long, part(2)], [part(5), part(6), part(7)]
    as_numpy = hosted_module._as_numpy
    for running, upcoming, answers, misfits in [
        (misfit, good, [3, 6], [1]),
        (good, misfit, [15, 18, 21], []),
        (misfit, misfit, [3, 6], [1]),
    ]:

        def staged_meanwhile(output: torch.Tensor, upcoming: Sequence[JobPart] = upcoming) -> Tensor:
            model.stage(upcoming)
            return as_numpy(output)

        monkeypatch.setattr(hosted_module, "_as_numpy", staged_meanwhile)
        outputs, rejected = model.run_parts(running)
        assert by_name(outputs)["total"].tolist() == answers
        assert [each.row for each in rejected] == misfits


@pytest.mark.parametrize("name", ["Echo", "KeepsItsOutputs", "PrePost"])
@pytest.mark.parametrize("size", [1, 3])
def test_an_answer_is_not_changed_by_the_batches_after_it(name: str, size: int) -> None:
    model = hosted(name)
    answers = [model.run_parts([part(*[float(turn)] * size)])[0] for turn in range(4)]
    alone = [hosted(name).run_parts([part(*[float(turn)] * size)])[0] for turn in range(4)]
    for together, own in zip(answers, alone, strict=True):
        assert {one.name: one.array.tolist() for one in together} == {
            one.name: one.array.tolist() for one in own
        }


@pytest.fixture
def threads_change_often() -> Iterator[None]:
    """Each call into torch gives the interpreter away, and a busy thread gives it back after an interval."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("threads_change_often")
def test_staging_while_a_batch_runs_never_changes_it() -> None:
    model = hosted(batch_size_max=64)
    parts = [[part(*([float(number)] * 64))] for number in range(1, 9)]
    stop = threading.Event()

    def stage_all() -> None:
        while not stop.is_set():
            for each in parts:
                model.stage(each)

    stager = threading.Thread(target=stage_all)
    stager.start()
    try:
        for turn in range(200):
            number = turn % 8 + 1
            assert totals(model, *parts[number - 1]) == [3.0 * number] * 64
    finally:
        stop.set()
        stager.join(10)


# ---------------------------------------------------------------- graphs


def test_batches_are_padded_to_the_next_captured_size() -> None:
    made: list[Replayed] = []
    model = hosted(capture=stand_in(made))
    assert model.buckets.sizes == (1, 2, 4, 8)
    before = [graph.replays for graph in made]
    assert totals(model, part(1, 2, 3)) == [3, 6, 9]
    assert [graph.replays - was for graph, was in zip(made, before, strict=True)] == [0, 0, 1, 0]
    assert totals(model, part(5)) == [15]  # nothing of the batch before is left in it
    assert model.exec_ms[2] == model.exec_ms[3]  # three take as long as four
    assert list(model.exec_ms) == sorted(model.exec_ms)


def test_outputs_of_a_graph_are_not_overwritten_by_the_next_batch() -> None:
    model = hosted(capture=stand_in([]))
    first = by_name(model.run_parts([part(1)])[0])
    model.run_parts([part(9)])
    assert first["total"].tolist() == [3]


def test_a_model_that_cannot_be_captured_runs_eagerly_and_the_reason_is_kept() -> None:
    calls = 0

    def capture(call: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        nonlocal calls
        calls += 1
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    model = hosted(capture=capture)
    assert model.buckets.problem == "operation not permitted when stream is capturing"
    assert (model.buckets.sizes, calls) == ((), 1)  # not tried again for every size
    assert totals(model, part(1, 2)) == [3, 6]


def test_a_capture_that_fails_late_leaves_no_graph_and_a_table_of_eager_times() -> None:
    made: list[Replayed] = []
    good = stand_in(made)

    def capture(call: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        if len(made) == 2:
            raise RuntimeError("no more")
        return good(call)

    model = hosted(capture=capture)
    assert model.buckets.sizes == ()
    assert len(model.exec_ms) == 8


@pytest.mark.parametrize("is_over", [False, True])
def test_torchs_allocator_hears_once_that_a_capture_which_failed_is_over(
    monkeypatch: pytest.MonkeyPatch, *, is_over: bool
) -> None:
    """Where torch itself has told it, the first call is refused, and the pool is not this capture's any more."""
    calls: list[tuple[str, int, tuple[int, int]]] = []

    def end(gpu: int, pool: tuple[int, int]) -> None:
        calls.append(("end", gpu, pool))
        if is_over:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release(gpu: int, pool: tuple[int, int]) -> None:
        calls.append(("release", gpu, pool))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    end_failed_capture(1, (0, 7))
    assert calls == [("end", 1, (0, 7)), ("release", 1, (0, 7))][: 1 if is_over else 2]


class Stream:
    """A stream of a GPU that is not there; `error`: what its context has."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.waits = 0
        self.error: RuntimeError | None = None

    def synchronize(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error


class Cuda:
    """What of `torch.cuda` captures and waits use, while another thread captures: the device as a whole cannot be waited for.

    `end`: the error with which a capture ends, which leaves its stream the current one, as `torch.cuda.graph` does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = Stream()
        self.end: RuntimeError | None = None
        stand_ins = {
            "Stream": Stream,
            "stream": self.within,
            "graph": self.capturing,
            "device": lambda device: nullcontext(),
            "current_stream": lambda device=None: self.current,
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": object,
            "synchronize": raises(
                RuntimeError("CUDA error: operation not permitted when stream is capturing")
            ),
        }
        for name, value in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "zeros", partial(self._zeros, torch.zeros))

    @staticmethod
    def _zeros(made: Callable[..., torch.Tensor], *shape: int, device: object = CPU) -> torch.Tensor:
        return made(*shape)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capturing(self, graph: object, *, stream: Stream, **_: object) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        if self.end is not None:
            raise self.end
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    stream_of.cache_clear()
    yield Cuda(monkeypatch)
    stream_of.cache_clear()


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("end", [None, RuntimeError("CUDA error: operation failed due to a previous error")])
def test_a_capture_has_a_stream_to_itself_and_batches_go_on_in_theirs(
    cuda: Cuda, end: RuntimeError | None
) -> None:
    """Pinned memory is watched by events on the streams that used it; one that captures would make them worthless."""
    captured_on: list[Stream] = []

    def call() -> Outputs:
        captured_on.append(cuda.current)
        return {}

    batches, captures, *others = (stream_of(GPU, use) for use in ("batches", "captures", "copies", "tries"))
    cuda.end = end
    with torch.cuda.stream(batches), pytest.raises(RuntimeError) if end else nullcontext():
        cuda_capture(GPU)(call)
    with torch.cuda.stream(batches):
        with suppress(RuntimeError):
            cuda_capture(GPU)(call)
        assert {id(cuda.current)} == {id(batches)}
    assert {id(one) for one in captured_on} == {id(captures)}
    assert captures not in [batches, *others]


def test_a_model_that_is_loaded_while_another_one_is_captured_waits_for_its_own_weights_only(
    cuda: Cuda,
) -> None:
    loaded = load_model(LoaderSpec(python=f"{MODELS}:Doubler"), CPU)
    DeviceReplica("m", loaded, 8, GPU, MonotonicClock())
    assert cuda.current.waits == 1


def test_what_fails_while_another_model_is_captured_has_not_broken_the_device(cuda: Cuda) -> None:
    device = TorchDevice(MonotonicClock())
    device._uses_cuda = True
    assert not device.is_broken
    cuda.current.error = RuntimeError("CUDA error: device-side assert triggered")
    assert device.is_broken


def test_no_memory_for_a_capture_is_no_memory() -> None:
    def capture(call: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    buckets = Buckets(lambda batch: batch, capture)
    with pytest.raises(torch.OutOfMemoryError):
        buckets.prepare({"x": torch.zeros(2, 3)})
    assert buckets.problem is None


@pytest.mark.parametrize("constant", [torch.ones(4, 4), torch.ones(1, 3), torch.tensor(2.0), None])
def test_a_model_that_takes_more_than_its_rows_runs_eagerly(constant: torch.Tensor | None) -> None:
    """As where `pre` adds a mask: it has no row for each request, so it cannot be padded."""
    buckets = Buckets(lambda batch: {"y": batch["x"] * 2}, stand_in([]))
    for size in (1, 2, 4):
        batch = {"x": torch.ones(size, 3), "constant": constant}
        buckets.prepare(batch)  # type: ignore[arg-type]
        assert buckets(batch)["y"].shape == (size, 3)  # type: ignore[arg-type]
    assert buckets.sizes == ()
    assert buckets.problem == "an input's first axis is not the batch"


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.full((2, 1), 5.0)},
        {"x": torch.full((2, 5), 5.0)},
        {"x": torch.full((2, 3), 5, dtype=torch.int64)},
        {"x": torch.full((2, 3), 1e300, dtype=torch.float64)},
        {"x": torch.full((2, 3), 5.0), "scale": torch.ones(2)},
        {"x": torch.full((2, 3), 5.0), "scale": torch.ones(1)},
        {"x": torch.full((2, 3, 3), 5.0)},
    ],
    ids=["narrow", "wide", "whole", "double", "another", "constant", "deep"],
)
def test_a_batch_that_is_not_as_it_was_captured_gets_its_own_answer(batch: dict[str, torch.Tensor]) -> None:
    def infer(given: dict[str, torch.Tensor]) -> Outputs:
        return {"y": given["x"].flatten(1).sum(dim=1) * given.get("scale", torch.ones(1))}

    made: list[Replayed] = []
    buckets = Buckets(infer, stand_in(made))
    for size in (1, 2, 4):
        buckets.prepare({"x": torch.ones(size, 3)})
    assert torch.equal(buckets(batch)["y"], infer(batch)["y"])
    assert not any(one.replays for one in made)
    assert buckets({"x": torch.full((3, 3), 5.0)})["y"].tolist() == [15, 15, 15]
    assert made[-1].replays == 1


def test_a_table_in_steps_holds_the_time_of_the_size_that_runs() -> None:
    assert stepped([1, 2, 4, 6], [3.0, 2.0, 5.0, 9.0]) == (3.0, 3.0, 5.0, 5.0, 9.0, 9.0)


# ---------------------------------------------------------------- users' own steps


@pytest.mark.parametrize("capture", [None, stand_in([])], ids=["eager", "captured"])
def test_pre_and_post_run_around_infer(capture: Capture | None) -> None:
    model = hosted("PrePost", capture=capture)
    assert [output.name for output in model.outputs] == ["total"]
    assert totals(model, part(1, 2)) == [6, 9]


# ---------------------------------------------------------------- memory


def raises(error: BaseException) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


@pytest.mark.parametrize(
    "lack",
    [
        lambda: torch.empty(1 << 50, dtype=torch.uint8),
        raises(MemoryError()),
        raises(torch.OutOfMemoryError("CUDA out of memory")),
        raises(RuntimeError("CUDA error: out of memory")),
        raises(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
        raises(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")),
        raises(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ],
    ids=["torch", "host", "device", "cuda", "cublas", "handle", "cudnn"],
)
def test_warming_up_ends_at_the_first_size_that_there_is_no_memory_for(
    lack: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_for_tests.FailsAboveFour, "error", staticmethod(lack))
    loaded = load_model(LoaderSpec(python=f"{MODELS}:FailsAboveFour"), CPU)
    model = DeviceReplica("m", loaded, 32, CPU, MonotonicClock())
    model.try_sizes(60_000.0)
    model.warm(60_000.0)
    assert (model.batch_size_max, model.limited_by) == (4, "the device has no memory for 8")


def test_warming_up_fails_with_anything_else_that_a_model_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        models_for_tests.FailsAboveFour, "error", staticmethod(raises(ValueError("four rows at most")))
    )
    loaded = load_model(LoaderSpec(python=f"{MODELS}:FailsAboveFour"), CPU)
    model = DeviceReplica("m", loaded, 32, CPU, MonotonicClock())
    for step in (model.try_sizes, model.warm):
        with pytest.raises(ValueError, match="four rows at most"):
            step(60_000.0)


def test_lack_of_memory_of_the_device_is_said_whoever_was_refused() -> None:
    device = TorchDevice(MonotonicClock())
    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c()`"):
        assert device.explain(RuntimeError(text)).startswith("out of memory on the device")
    assert device.explain(RuntimeError("CUDA error: misaligned address")).startswith("RuntimeError: CUDA")


def test_inputs_have_room_for_the_batches_that_run_and_not_for_all_that_were_asked_for() -> None:
    loaded = load_model(LoaderSpec(python=f"{MODELS}:Doubler"), CPU)
    model = DeviceReplica("m", loaded, 1 << 40, CPU, SteppingClock())  # a slot of that would be 12 TiB
    model.warm(slo_ms=1.0)  # every run takes 10
    assert model.batch_size_max == 1
    assert model.slots.rows <= 2
    small = hosted(batch_size_max=8)
    assert small.slots.rows == 8
    assert totals(small, part(*range(8))) == [3.0 * value for value in range(8)]


class Slowing(Replayed):
    """A ms for each row."""

    def __init__(self, call: Callable[[], Outputs], clock: FakeClock) -> None:
        super().__init__(call)
        self._clock = clock

    def replay(self) -> None:
        super().replay()
        self._clock.ms += len(self.outputs["total"])


class FakeClock:
    def __init__(self) -> None:
        self.ms = 0.0

    def now_ms(self) -> float:
        return self.ms


def test_nothing_is_kept_of_a_size_that_is_over_the_slo(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, graphs, emptied = FakeClock(), weakref.WeakSet[Slowing](), []

    def capture(call: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        graph = Slowing(call, clock)
        graphs.add(graph)
        return graph, graph.outputs

    monkeypatch.setattr(hosted_module, "empty_cache", lambda: emptied.append(len(graphs)))
    loaded = load_model(LoaderSpec(python=f"{MODELS}:Doubler"), CPU)
    model = DeviceReplica("m", loaded, 32, CPU, clock, capture)
    model.warm(5.0)
    assert (model.batch_size_max, model.limited_by) == (4, "")
    assert (model.buckets.sizes, len(graphs), emptied) == ((1, 2, 4), 3, [3])
    assert model.slots.rows == 4
    assert totals(model, part(1, 2, 3)) == [3, 6, 9]


def test_no_memory_for_the_inputs_of_a_batch_is_no_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = InputSlots._made

    def made_or_not(slots: InputSlots, rows: int) -> Slot:
        if rows > 4:
            raise RuntimeError("CUDA error: out of memory")
        return made(slots, rows)

    monkeypatch.setattr(InputSlots, "_made", made_or_not)
    model = hosted(batch_size_max=32)
    assert (model.batch_size_max, model.limited_by) == (4, "the device has no memory for 8")
    assert totals(model, part(1, 2, 3)) == [3, 6, 9]


def test_an_example_that_cannot_be_sent_is_named_and_one_with_a_gradient_can_be() -> None:
    with pytest.raises(NotAModel, match="input 'x' has dtype bfloat16, which cannot be sent"):
        hosted("Bfloat16Example")
    assert hosted("ExampleWithGradient").batch_size_max == 8


def test_a_batch_without_memory_is_answered_and_later_ones_are_smaller_or_in_pieces() -> None:
    device = TorchDevice(MonotonicClock())
    device.load(user_slice("Hungry", batch_size_max=8))
    batch = job(1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        device.run(batch)
    assert device.explain(caught.value).startswith("out of memory on the host")
    assert device.shrunk(batch, caught.value) == 3
    with pytest.raises(RuntimeError):
        device.run(batch)  # was granted before anybody knew: in pieces of 3, which still are too large
    assert device.shrunk(batch, caught.value) == 1
    assert by_name(device.run(batch).outputs)["total"].tolist() == [3, 6, 9, 12, 15, 18, 21]
    assert device.shrunk(batch, caught.value) is None
    assert device.shrunk(batch, ValueError("something else")) is None


OTHER = ModelId("other")


def other_slice(name: str = "Doubler") -> SliceSpec:
    spec = user_slice(name)
    return replace(spec, models=(replace(spec.models[0], model_id=OTHER),))


class Neighbour:
    """A model that lacks memory, where other ones are loaded beside it."""

    def __init__(self) -> None:
        self.device = TorchDevice(MonotonicClock())
        self.device.load(user_slice("Hungry", batch_size_max=8))
        self._batch = job(1, 2, 3, 4, 5, 6, 7)

    def failed(self) -> int | None:
        """The largest batch that it is told after one that failed; None: it failed for now."""
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
            self.device.run(self._batch)
        return self.device.shrunk(self._batch, caught.value)

    def totals(self) -> list[float]:
        answer: list[float] = by_name(self.device.run(self._batch).outputs)["total"].tolist()
        return answer


def test_what_another_model_takes_while_it_is_tried_halves_nothing_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neighbour = Neighbour()

    def tried(*_: object) -> None:
        assert neighbour.failed() is None
        assert neighbour.failed() is None  # in pieces of 3, which still are too large
        assert neighbour.totals() == [3, 6, 9, 12, 15, 18, 21]

    monkeypatch.setattr(DeviceReplica, "try_sizes", tried)
    for _ in neighbour.device.load_beside(other_slice()):
        pass
    assert neighbour.device._hosted[SLICE][MODEL].batch_size_max == 8
    assert neighbour.failed() == 3, "it was whole again, and there is no memory without the other one either"


def test_from_the_first_weights_until_it_is_warm_a_model_halves_nothing_of_its_neighbours_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neighbour = Neighbour()

    def loaded(*arguments: Any) -> LoadedModel:
        assert neighbour.failed() is None
        return load_model(*arguments)

    monkeypatch.setattr("roles.gpu_worker.executors.torch.load_model", loaded)
    steps = neighbour.device.load_beside(other_slice())
    while next(steps) is None:
        neighbour.device._hosted[SLICE][MODEL].grow_back()
        assert neighbour.failed() is None
    assert neighbour.failed() == 3


@pytest.mark.parametrize("end", ["tries", "steps", "not begun"])
def test_a_load_that_comes_to_nothing_halves_nothing_for_good_until_it_is_collected(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    neighbour, fails = Neighbour(), raises(ValueError("no"))
    if end == "tries":
        monkeypatch.setattr(DeviceReplica, "try_sizes", lambda *_: fails())
        with pytest.raises(ValueError, match="no"):
            neighbour.device.load_beside(other_slice())
    else:
        steps = neighbour.device.load_beside(other_slice())
        if end == "steps":
            monkeypatch.setattr(DeviceReplica, "run", lambda *_: fails())
            with pytest.raises(ValueError, match="no"):
                list(steps)
        del steps
    assert neighbour.failed() is None
    neighbour.device.collect(is_frozen=False)
    assert neighbour.failed() == 3


@pytest.mark.parametrize("is_whole_slice", [False, True])
def test_a_load_that_hangs_and_is_given_up_holds_its_memory_for_good(
    monkeypatch: pytest.MonkeyPatch, *, is_whole_slice: bool
) -> None:
    neighbour = Neighbour()
    began, may_end = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        began.set()
        assert may_end.wait(60)

    monkeypatch.setattr(DeviceReplica, "try_sizes", hangs)
    loading = threading.Thread(target=neighbour.device.load_beside, args=(other_slice(),), daemon=True)
    loading.start()
    assert began.wait(60)
    assert neighbour.failed() is None
    if is_whole_slice:
        neighbour.device.unload(SLICE)
        neighbour.device.load(user_slice("Hungry", batch_size_max=8))
    else:
        neighbour.device.unload_model(SLICE, OTHER)
    assert neighbour.failed() == 3
    may_end.set()
    loading.join(60)
    assert not neighbour.device._beside


def test_a_load_that_was_given_up_and_ends_after_all_is_not_taken_for_the_next_one() -> None:
    neighbour = Neighbour()
    given_up = neighbour.device.load_beside(other_slice())
    neighbour.device.unload_model(SLICE, OTHER)
    again = neighbour.device.load_beside(other_slice())
    del given_up
    neighbour.device.collect(is_frozen=False)
    assert neighbour.failed() is None
    del again


def test_a_batch_that_outlasts_the_tries_beside_it_halves_nothing_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = TorchDevice(MonotonicClock())
    device.load(user_slice("Hungry", batch_size_max=8))
    model, batch = device._hosted[SLICE][MODEL], job(1, 2, 3, 4)
    began, may_end = threading.Event(), threading.Event()
    run_parts = model.run_parts

    def tried(*_: object) -> None:
        began.set()
        assert may_end.wait(60)

    def outlasting(parts: Sequence[JobPart]) -> object:
        may_end.set()
        loading.join(60)
        return run_parts(parts)

    monkeypatch.setattr(DeviceReplica, "try_sizes", tried)
    monkeypatch.setattr(model, "run_parts", outlasting)
    loading = threading.Thread(target=device.load_beside, args=(other_slice(),))
    loading.start()
    assert began.wait(60)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        device.run(batch)
    assert device.shrunk(batch, caught.value) is None


def test_the_executor_says_what_size_is_left_before_it_fails_the_batch() -> None:
    executor = ThreadExecutor(lambda: TorchDevice(CLOCK), CLOCK.now_ms)
    try:
        executor.load(user_slice("Hungry", batch_size_max=8))
        assert isinstance(wait_for(executor)[0], Loaded)
        executor.run(job(1, 2, 3, 4), 0.0)
        shrunk, failed = wait_for(executor, 2)
        assert shrunk == Shrunk(SLICE, MODEL, 2)
        assert isinstance(failed, RunFailed)
        assert failed.reason.startswith("out of memory on the host")
    finally:
        executor.close()


class Held(TorchDevice):
    """Its first batch takes until `go_on`."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.began, self.go_on = threading.Event(), threading.Event()
        self.staged: list[int] = []

    def run(self, job: Job) -> JobRan:
        if not self.began.is_set():
            self.began.set()
            assert self.go_on.wait(60)
        return super().run(job)

    def stage(self, job: Job) -> None:
        self.staged.append(job.batch_id)
        if job.batch_id == 3:
            self.go_on.set()
        super().stage(job)


def test_what_is_behind_a_batch_is_staged_while_that_runs_and_nonsense_is_survived() -> None:
    device = Held()
    executor = ThreadExecutor(lambda: device, CLOCK.now_ms)
    try:
        executor.load(user_slice())
        assert isinstance(wait_for(executor)[0], Loaded)
        executor.run(job(1, batch_id=1), 0.0)
        assert device.began.wait(60)
        executor.run(Job(SLICE, BatchId(2), MODEL, [JobPart(0, [])]), 0.0)  # divides by zero
        executor.run(Job(SLICE, BatchId(3), MODEL, [part(4, 5)]), 0.0)
        first, nonsense, last = wait_for(executor, 3)
        assert isinstance(nonsense, RunFailed)
        assert isinstance(first, JobRan)
        assert isinstance(last, JobRan)
        assert by_name(last.outputs)["total"].tolist() == [12, 15]
        assert device.staged == [2, 3]
        assert last.began_at_ms >= first.began_at_ms + first.exec_ms
    finally:
        executor.close()


def test_nothing_of_a_batch_is_held_when_it_has_run_or_was_called_back() -> None:
    """Its inputs may lie in the memory of a frontend that is gone."""
    device = Held()
    executor = ThreadExecutor(lambda: device, CLOCK.now_ms)
    parts = {number: part(number) for number in (1, 2, 3)}
    inputs = [weakref.ref(tensor.array) for one in parts.values() for tensor in one.tensors]
    try:
        executor.load(user_slice())
        assert isinstance(wait_for(executor)[0], Loaded)
        for number in (1, 2, 3):  # the third one has the device go on when it is staged
            executor.run(Job(SLICE, BatchId(number), MODEL, [parts.pop(number)]), 0.0)
            assert device.began.wait(60)
            if number == 2:
                executor.recall(SLICE, BatchId(2), 0.0)
        events = wait_for(executor, 3)
        assert sorted(type(one).__name__ for one in events) == ["JobRan", "JobRan", "RunAborted"]
        del events
        until(lambda: gc.collect() >= 0 and not any(one() is not None for one in inputs), what="their end")
    finally:
        executor.close()


def test_a_batch_that_is_staged_too_late_or_never_runs_holds_no_slot_and_no_input() -> None:
    model = hosted()
    late, never = part(1), part(2)
    inputs = [weakref.ref(one.tensors[0].array) for one in (late, never)]
    assert totals(model, late) == [3]
    model.stage([late])
    model.stage([never])
    del late, never
    assert [one() for one in inputs] == [None, None]
    next_one, other = part(3), part(4)
    model.stage([next_one])
    assert totals(model, other) == [12]
    assert totals(model, next_one) == [9]
    assert model.slots.staged_ahead == 1


def test_warming_up_finds_outputs_that_are_not_finite() -> None:
    assert hosted().not_finite == ()
    assert hosted("NotFinite").not_finite == ("nan",)
