"""One model on one device: batches in as numpy rows, numpy outputs out, and what that takes.

Inputs lie in one of two slots (`slots.py`), on CUDA put there by a stream of their own; the model runs on another,
by CUDA graphs where it can (`buckets.py`); outputs come back through pinned memory. The host waits once a batch.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fabric.clock import Clock
from fabric.link import NamedTensor
from fabric.link import Tensor as Array
from fabric.messages import TensorInfo
from profiles.profilers.memory import empty_cache, is_out_of_memory
from roles.gpu_worker.executors.base import HEAD_INPUT, JobPart, RejectedRow, sort_out
from roles.gpu_worker.executors.buckets import Buckets, Capture, Outputs, cuda_capture
from roles.gpu_worker.executors.loaders.base import LoadedModel, NotAModel
from roles.gpu_worker.executors.message_limits import travelling
from roles.gpu_worker.executors.slots import InputSlots, Slot, stream_of

MEASUREMENTS_MAX = 5
TRACED_MAX = 100_000  # objects of a model that are looked at as it goes
MEASURE_FOR_MS = 300.0  # per batch size: a slow model is measured once, and is the steadier for it


class DeviceReplica:
    """A loaded model with its buffers. Warmed and run on the executor's thread; `stage` on another.

    `capture` stands in for CUDA's in tests.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        batch_size_max: int,
        device: torch.device,
        clock: Clock,
        capture: Capture | None = None,
    ) -> None:
        self.inputs = signature(loaded.example)
        self.outputs: tuple[TensorInfo, ...] = ()  # known from the first batch
        self.exec_ms: tuple[float, ...] = ()
        self.no_memory_for: int | None = None
        """The batch size at which warming up ran out of memory."""
        self.no_larger = ""
        """Why batches as large as was asked for cannot be sent here; empty: they can."""
        self.not_finite: tuple[str, ...] = ()
        """Outputs of the example that hold NaN or infinity."""
        self.heads = loaded.heads
        self.merged = loaded.merged
        self.not_merged = loaded.not_merged
        self._name = name
        self._loaded = loaded
        self._batch_size_max = batch_size_max
        self._piece_max = batch_size_max
        self._piece_for_now = batch_size_max
        self._clock = clock
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = stream_of(device, "batches")
            # The weights came on this thread's. Of the device it cannot be asked: another thread may capture (ADR 0070).
            torch.cuda.current_stream(device).synchronize()
            if capture is None and loaded.may_capture:
                capture = cuda_capture(device)
        self.buckets = Buckets(loaded.model.infer, capture)
        self._pre: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = getattr(
            loaded.model, "pre", None
        )
        self._post: Callable[[Outputs], Outputs] | None = getattr(loaded.model, "post", None)
        self.slots = InputSlots(loaded.example, device)

    def stage(self, parts: Sequence[JobPart]) -> None:
        """Put a batch in place that may run next. A batch that cannot be is left to `run`, which says why."""
        rows, rejected = self._sorted_out(parts)
        if 0 < len(rows) <= self._batch_size_max:
            self.slots.stage(parts, rows, rejected)

    def run_parts(self, parts: Sequence[JobPart]) -> tuple[list[NamedTensor], list[RejectedRow]]:
        """Infer for the rows that fit the signature. Raises NotAModel, and whatever the model raises."""
        slot = self.slots.staged(parts)
        if slot is None:
            rows, rejected = self._sorted_out(parts)
            if not rows:
                return [], rejected
            slot = self._put(rows, rejected)
        rejected = slot.rejected  # the staging thread may fill the slot anew as soon as the run is over
        return self._run(slot), rejected

    def _sorted_out(self, parts: Sequence[JobPart]) -> tuple[list[dict[str, Array]], list[RejectedRow]]:
        return sort_out(parts, self.inputs, self._loaded.bounds, self._loaded.head_bounds)

    def run(self, rows: Sequence[Mapping[str, Array]]) -> list[NamedTensor]:
        """The same for rows that are known to fit."""
        return self._run(self._put(rows, []))

    @property
    def batch_size_max(self) -> int:
        """The largest batch that is worth running, known once it is warm."""
        return len(self.exec_ms)

    @property
    def limited_by(self) -> str:
        """Why larger batches, though asked for, cannot run here; empty: they can, or would be over the SLO."""
        if self.no_memory_for is not None:
            return f"the device has no memory for {self.no_memory_for}"
        return self.no_larger if self.batch_size_max == self._batch_size_max else ""

    def traces(self) -> list[weakref.ref[Any]]:
        """Of the user's object and its tensors, to see whether they are gone when this object is. Empty: that cannot be seen."""
        model = self._loaded.model
        tensors = _tensors_of(model)
        try:
            return [weakref.ref(one) for one in (model, *tensors)] if tensors else []
        except TypeError:  # a class without weak references
            return []

    def shrink(self, batch_size: int, *, is_for_now: bool = False) -> int:
        """There was no memory for a batch of that size: the largest one from now on.

        Larger ones that were granted already run in pieces; `is_for_now`: all do, until `grow_back`. A single request that does
        not fit says nothing about others.
        """
        most = min(self._piece_max, self._piece_for_now)
        most = max(1, min(most, batch_size) // 2) if batch_size > 1 else most
        if is_for_now:
            self._piece_for_now = most
            return self.batch_size_max
        self._piece_max = most
        self.exec_ms = self.exec_ms[: self._piece_max]
        self.buckets.forget_above(self._piece_max)
        return self.batch_size_max

    def grow_back(self) -> None:
        """What there was no memory for then may run whole again."""
        self._piece_for_now = self._batch_size_max

    def warm(self, slo_ms: float) -> None:
        """Run every batch size 1, 2, 4, … and the largest; fills `outputs` and `exec_ms`.

        Stops at the first size that takes longer than `slo_ms` (no batch that large can ever be in time), and
        at the first but the smallest that there is no memory for.
        """
        for _ in self.warming(slo_ms):
            pass

    def warming(self, slo_ms: float) -> Iterator[None]:
        """The same in steps of one run each, between which others may use the device."""
        example = self._met()
        yield
        sizes, took_ms = yield from self._measured(example, slo_ms)
        if self.buckets.problem is not None and len(sizes) > 1:  # the first ones may have been captured still
            sizes, took_ms = yield from self._measured(example, slo_ms)
        self.exec_ms = stepped(sizes, took_ms) if self.buckets.sizes else spread(sizes, took_ms)

    def try_sizes(self, slo_ms: float) -> None:
        """Run every batch size once, before it is warmed beside others, on another thread than theirs.

        A first run in a new shape may take seconds, as kernels are chosen or compiled for it: nobody should wait for it.
        """
        own = self._stream
        if own is not None:  # not on that of the batches, which may be capturing a graph
            self._stream = stream_of(own.device, "tries")
        try:
            self._try_sizes(slo_ms)
        finally:
            self._stream = own

    def _try_sizes(self, slo_ms: float) -> None:
        example = self._met()
        for size in batch_sizes(self._piece_max):
            began_ms = self._clock.now_ms()
            try:
                self.run(self._examples(example, size))
            except Exception as error:
                if is_out_of_memory(error):  # warming up comes to it again, and knows what to do
                    return
                raise
            if size > 1 and self._clock.now_ms() - began_ms > 2 * slo_ms:
                return

    def _met(self) -> Mapping[str, Array]:
        """One request's inputs, once they have shown what the outputs are and how many requests a message can hold."""
        travelling(self.inputs, (), self._batch_size_max)  # what cannot be sent may be nothing that numpy has
        example = {key: value.cpu().numpy() for key, value in self._loaded.example.items()}
        if self.outputs:
            return example
        answer = self.run([example])
        self.outputs = tuple(
            TensorInfo(output.name, output.array.dtype.name, output.array.shape[1:]) for output in answer
        )
        self.not_finite = tuple(
            output.name
            for output in answer
            if output.array.dtype.kind in "fc" and not np.isfinite(output.array).all()
        )
        travels = travelling(self.inputs, self.outputs, self._batch_size_max)
        self.no_larger = travels.limit
        self._batch_size_max = self._piece_max = min(self._piece_max, travels.batch_size_max)
        return example

    def _examples(self, example: Mapping[str, Array], size: int) -> Sequence[Mapping[str, Array]]:
        """A batch of that size; of a model with heads spread over them, which takes longest."""
        if not self.heads:
            return [example] * size
        return [{**example, HEAD_INPUT: np.array(row % len(self.heads))} for row in range(size)]

    def _measured(
        self, example: Mapping[str, Array], slo_ms: float
    ) -> Generator[None, None, tuple[list[int], list[float]]]:
        sizes: list[int] = []
        took_ms: list[float] = []
        for size in batch_sizes(self._piece_max):
            try:
                size_ms = yield from self._warm_size(self._examples(example, size), slo_ms)
            except Exception as error:
                if not (sizes and is_out_of_memory(error)):
                    raise
                self.no_memory_for = size
            # Where there is no memory, its error, which held what was computed, is gone by now.
            if size == self.no_memory_for or (sizes and size_ms > slo_ms):
                self._piece_max = sizes[-1]
                self.buckets.forget_above(sizes[-1])
                self.slots.shrink(sizes[-1])
                empty_cache()
                break
            sizes.append(size)
            took_ms.append(size_ms)
        return sizes, took_ms

    def _warm_size(self, rows: Sequence[Mapping[str, Array]], slo_ms: float) -> Generator[None, None, float]:
        self.run(rows)  # eagerly, before it is captured: kernels are chosen and memory is found on the way
        yield
        with torch.inference_mode(), self._on_stream():
            for piece in self._pieces(self._put(rows, [])):  # one: no size is over `_piece_max`
                self.buckets.prepare(self._before(piece))
        if self._stream is not None:  # the slot is written again now
            self._stream.synchronize()
        self.slots.give_back()
        yield
        return (yield from self._measure(rows, slo_ms))

    def _measure(self, rows: Sequence[Mapping[str, Array]], enough_ms: float) -> Generator[None, None, float]:
        """The median run time after one run that nobody counts, unless that took twice `enough_ms` already."""
        first_at_ms = self._clock.now_ms()
        self.run(rows)
        first_ms = self._clock.now_ms() - first_at_ms
        if first_ms > 2 * enough_ms:
            return first_ms
        took_ms: list[float] = []
        while len(took_ms) < MEASUREMENTS_MAX and sum(took_ms) < MEASURE_FOR_MS:
            yield
            began_ms = self._clock.now_ms()
            self.run(rows)
            took_ms.append(self._clock.now_ms() - began_ms)
        return statistics.median(took_ms)

    def _put(self, rows: Sequence[Mapping[str, Array]], rejected: list[RejectedRow]) -> Slot:
        if len(rows) > self._batch_size_max:
            raise NotAModel(f"a batch of {len(rows)} is over the model's largest, {self._batch_size_max}")
        return self.slots.take(rows, rejected)

    def _run(self, slot: Slot) -> list[NamedTensor]:
        try:
            with torch.inference_mode(), self._on_stream():
                pieces = [self._infer(piece) for piece in self._pieces(slot)]
        finally:
            if self._stream is not None:  # also what no output depends on: the slot is written again now
                self._stream.synchronize()
            self.slots.give_back()
        if len(pieces) == 1:
            return [NamedTensor(key, _as_numpy(output)) for key, output in pieces[0].items()]
        return [
            NamedTensor(key, np.concatenate([_as_numpy(piece[key]) for piece in pieces])) for key in pieces[0]
        ]

    def _pieces(self, slot: Slot) -> Iterator[dict[str, Tensor]]:
        """The requests of the batch, all at once unless there is no memory for that; what `pre` makes of them may have other rows."""
        if self._stream is not None and slot.copied is not None:
            self._stream.wait_event(slot.copied)
        most = min(self._piece_max, self._piece_for_now)
        for first in range(0, slot.batch_size, most):
            yield {key: tensor[first : first + most] for key, tensor in slot.batch.items()}

    def _before(self, requests: dict[str, Tensor]) -> dict[str, Tensor]:
        return requests if self._pre is None else self._pre(requests)

    def _infer(self, requests: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs on the host, or on their way there; never a view of what the next batch overwrites."""
        count = len(next(iter(requests.values())))
        outputs = self.buckets(self._before(requests))
        if self._post is not None:
            outputs = self._post(outputs)
        check_outputs(outputs, count, self._name)
        return {key: self._own(output) for key, output in outputs.items()}

    def _own(self, output: Tensor) -> Tensor:
        output = sendable(output)
        if output.device.type == "cuda":
            # torch keeps freed pinned blocks until the next capture, so this seldom allocates.
            host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
            return host.copy_(output, non_blocking=True)
        return output.clone(memory_format=torch.contiguous_format)  # a model may give a buffer that it keeps

    def _on_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _tensors_of(model: object) -> list[Tensor]:
    """Those that hang in its attributes, in containers and other objects too; none where there are too many objects to look at."""
    found: list[Tensor] = []
    seen: dict[int, object] = {}
    left: list[object] = [model]
    while left and len(seen) < TRACED_MAX:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        elif not isinstance(one, type | ModuleType | FunctionType):
            left += getattr(one, "__dict__", {}).values()
    return [] if left else found


def batch_sizes(batch_size_max: int) -> list[int]:
    """1, 2, 4, … and the largest."""
    sizes = [1 << power for power in range(batch_size_max.bit_length()) if 1 << power < batch_size_max]
    return [*sizes, batch_size_max]


def spread(sizes: Sequence[int], took_ms: Sequence[float]) -> tuple[float, ...]:
    """l(b) for every b up to the last size: linear between what was measured, never falling."""
    rising = np.maximum.accumulate(took_ms)
    every = np.interp(np.arange(1, sizes[-1] + 1), sizes, rising)
    return tuple(float(value) for value in every)


def stepped(sizes: Sequence[int], took_ms: Sequence[float]) -> tuple[float, ...]:
    """l(b) where a batch is padded up to the next of `sizes`: that size's own time, never falling."""
    rising = np.maximum.accumulate(took_ms)
    places = np.searchsorted(sizes, np.arange(1, sizes[-1] + 1))
    return tuple(float(rising[place]) for place in places)


def _as_numpy(output: Tensor) -> Array:
    array: Array = np.ascontiguousarray(output.numpy())
    return array


def sendable(output: Tensor) -> Tensor:
    """As an answer has it: numpy has no bfloat16."""
    return output.float() if output.dtype == torch.bfloat16 else output


def check_outputs(outputs: object, requests: int, name: str) -> None:
    """Raises NotAModel unless it is a dict of tensors with one row for each request: else some would get the rows of others."""
    if not isinstance(outputs, Mapping) or not outputs:
        raise NotAModel(f"{name} must give a dict of tensors, not {type(outputs).__name__}")
    for key, output in outputs.items():
        if not isinstance(key, str):
            raise NotAModel(f"{name} must name its outputs by texts, not {key!r}")
        if not isinstance(output, Tensor):
            raise NotAModel(f"{name}: its output {key!r} must be a tensor, not {type(output).__name__}")
        if output.ndim == 0 or output.shape[0] != requests:
            raise NotAModel(
                f"{name}: its output {key!r} has shape {list(output.shape)}"
                f" for a batch of {requests}: the first axis must be the batch"
            )


def signature(example: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    """What one request brings, or gets."""
    return tuple(
        TensorInfo(key, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in example.items()
        if key != HEAD_INPUT
    )
