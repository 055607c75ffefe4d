"""A model's batches as CUDA graphs of a few fixed sizes; eager where that does not work.

A small model spends more time being launched than computing. A captured graph launches all its kernels at once, but
only for one batch size and for inputs at one address: a batch is padded with copies of the example up to the
next captured size, the *bucket*, and its rows are copied there. Capture fails where a model looks at its own results
on the way (a `.item()`, a mask that is checked); such a model runs eagerly, as it would have without us.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from profiles.profilers.memory import empty_cache, is_out_of_memory
from roles.gpu_worker.executors.slots import stream_of

Outputs = Mapping[str, Tensor]
Infer = Callable[[dict[str, Tensor]], Outputs]


class Graph(Protocol):
    """Captured work that can be done again."""

    def replay(self) -> None:
        """Do it again with what its inputs hold now."""
        ...


Capture = Callable[[Callable[[], Outputs]], tuple[Graph, Outputs]]


@dataclass(slots=True, frozen=True)
class _Captured:
    graph: Graph
    inputs: dict[str, Tensor]
    filler: dict[str, Tensor]
    outputs: Outputs

    def takes(self, batch: Mapping[str, Tensor], size: int) -> bool:
        """Whether its inputs can hold these rows as they are: copying would cast and repeat."""
        return batch.keys() == self.inputs.keys() and all(
            _has_rows(batch[key], size)
            and batch[key].shape[1:] == own.shape[1:]
            and batch[key].dtype == own.dtype
            for key, own in self.inputs.items()
        )


class Buckets:
    """`infer`, called with batches of any size; `capture` None: always eager."""

    def __init__(self, infer: Infer, capture: Capture | None) -> None:
        self.problem: str | None = None
        """Why nothing is captured although it could have been."""
        self._infer = infer
        self._capture = capture
        self._captured: dict[int, _Captured] = {}
        self._sizes: list[int] = []

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured batch sizes, ascending."""
        return tuple(self._sizes)

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        """Capture a batch of examples of this very size, which has run once; a failure is kept in `problem`."""
        if self._capture is None or self.problem is not None:
            return
        size = _size(batch)
        if not all(_has_rows(tensor, size) for tensor in batch.values()):
            self._give_up("an input's first axis is not the batch")
            return
        inputs = {key: tensor.clone() for key, tensor in batch.items()}
        problem = ""
        try:
            graph, outputs = self._capture(lambda: self._infer(dict(inputs)))
        except RuntimeError as error:  # every refusal of CUDA to capture is one
            if is_out_of_memory(error):
                raise
            problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if problem:  # and its error, which held what was computed, is gone
            self._give_up(problem)
            return
        if not all(_has_rows(output, size) for output in outputs.values()):
            self._give_up("an output's first axis is not the batch")
            return
        filler = {key: tensor[:1].clone() for key, tensor in batch.items()}
        self._captured[size] = _Captured(graph, inputs, filler, outputs)
        insort(self._sizes, size)

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._captured.clear()
        self._sizes.clear()
        empty_cache()

    def forget_above(self, batch_size: int) -> None:
        """Give up graphs of larger batches and their inputs. Their part of the pool is given back with the last graph of it."""
        for size in [size for size in self._sizes if size > batch_size]:
            self._sizes.remove(size)
            del self._captured[size]

    def __call__(self, batch: dict[str, Tensor]) -> Outputs:
        """The batch's outputs; captured ones are valid until the next call. What is not as it was captured runs eagerly."""
        if not self._sizes:
            return self._infer(batch)
        size = _size(batch)
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes):
            return self._infer(batch)
        bucket = self._sizes[place]
        captured = self._captured[bucket]
        if not captured.takes(batch, size):
            return self._infer(batch)
        for key, tensor in captured.inputs.items():
            tensor[:size].copy_(batch[key], non_blocking=True)
            if size < bucket:
                tensor[size:].copy_(captured.filler[key].expand_as(tensor[size:]), non_blocking=True)
        captured.graph.replay()
        return {key: output[:size] for key, output in captured.outputs.items()}


def cuda_capture(device: torch.device) -> Capture:
    """Capture on a device. All graphs share one pool of memory: they never run side by side.

    Nothing else is ever asked of the stream that captures; graphs are replayed on the caller's own (ADR 0070).
    """
    stream = stream_of(device, "captures")
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()

    def capture(call: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        nonlocal pool
        graph = torch.cuda.CUDAGraph()
        raised: BaseException | None = None
        try:
            # thread_local: the staging thread may copy inputs meanwhile, which must not end the capture.
            # torch.cuda.graph leaves its stream the current one where the capture's end fails; torch.cuda.stream does not.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                try:
                    outputs = call()
                except BaseException as error:  # users' code may raise anything
                    raised = error
                    raise
        except BaseException as error:  # noqa: BLE001  as above
            end_failed_capture(stream.device.index, pool)
            pool = torch.cuda.graph_pool_handle()
            # Nor is the generator of random numbers told that the capture is over; one that ends well tells it.
            with (
                contextlib.suppress(RuntimeError),
                torch.cuda.stream(stream),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"),
            ):
                torch.zeros(1, device=device)
            # The end of a capture that has failed raises as well, and less is to be learned from it.
            raise raised or error from None
        finally:
            raised = None  # which would hold this frame, and all that was computed
        return graph, outputs

    return capture


def end_failed_capture(gpu: int, pool: tuple[int, int]) -> None:
    """Tell torch's allocator that a capture is over, which torch up to 2.11 leaves undone where its end fails.

    It would take the capture for one that goes on: caches could not be emptied, no other capture would work, and memory would never be
    given back (pytorch/pytorch#180395, #190348). Where torch has done it, it refuses the first call, and the second is left out.
    """
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(gpu, pool)  # noqa: SLF001  as torch.cuda.use_mem_pool does
        torch._C._cuda_releasePool(gpu, pool)  # noqa: SLF001  likewise
    empty_cache()


def _size(batch: Mapping[str, Tensor]) -> int:
    """How many rows it has; 0: none that can be told."""
    first = next(iter(batch.values()), None)
    return int(first.shape[0]) if isinstance(first, Tensor) and first.ndim else 0


def _has_rows(value: object, size: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size
