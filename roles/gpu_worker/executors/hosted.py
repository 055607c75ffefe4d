"""One model on one device: batches in as numpy rows, numpy outputs out, and what that takes.

Inputs are copied once, row by row, into a reusable tensor that holds the largest batch; where there is CUDA that
tensor is pinned and a second one lies on the device, so the copy there does not block the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fabric.clock import Clock
from fabric.link import NamedTensor
from fabric.link import Tensor as Array
from fabric.messages import TensorInfo
from roles.gpu_worker.executors.loaders import LoadedModel, NotAModel

MEASUREMENTS_MAX = 5
MEASURE_FOR_MS = 300.0  # per batch size: a slow model is measured once, and is the steadier for it


class HostedModel:
    """A loaded model with its buffers. Made, warmed and run on the executor's thread."""

    def __init__(
        self, name: str, loaded: LoadedModel, batch_size_max: int, device: torch.device, clock: Clock
    ) -> None:
        self.inputs = _signature(loaded.example)
        self.outputs: tuple[TensorInfo, ...] = ()  # known from the first batch
        self.exec_ms: tuple[float, ...] = ()
        self._name = name
        self._loaded = loaded
        self._batch_size_max = batch_size_max
        self._device = device
        self._clock = clock
        is_cuda = device.type == "cuda"
        self._host = {
            key: torch.empty((batch_size_max, *value.shape), dtype=value.dtype, pin_memory=is_cuda)
            for key, value in loaded.example.items()
        }
        self._rows: dict[str, Array] = {key: buffer.numpy() for key, buffer in self._host.items()}
        self._on_device = {
            key: torch.empty_like(buffer, device=device) if is_cuda else buffer
            for key, buffer in self._host.items()
        }

    def run(self, rows: Sequence[Mapping[str, Array]]) -> list[NamedTensor]:
        """Infer for rows that fit the signature. Raises NotAModel, and whatever the model raises."""
        batch_size = len(rows)
        if batch_size > self._batch_size_max:
            raise NotAModel(f"a batch of {batch_size} is over the model's largest, {self._batch_size_max}")
        for key, buffer in self._rows.items():
            for index, row in enumerate(rows):
                buffer[index] = row[key]
        with torch.inference_mode():
            batch = {key: buffer[:batch_size] for key, buffer in self._on_device.items()}
            if self._device.type == "cuda":
                for key, tensor in batch.items():
                    tensor.copy_(self._host[key][:batch_size], non_blocking=True)
            outputs = self._to_numpy(self._loaded.model.infer(batch), batch_size)
        if self._device.type == "cuda":  # also what no output depends on: the buffers are written again now
            torch.cuda.current_stream(self._device).synchronize()
        return outputs

    @property
    def batch_size_max(self) -> int:
        """The largest batch that is worth running, known once it is warm."""
        return len(self.exec_ms)

    def warm(self, slo_ms: float) -> None:
        """Run every batch size 1, 2, 4, … and the largest; fills `outputs` and `exec_ms`.

        Stops at the first size that takes longer than `slo_ms`: no batch that large can ever be in time.
        """
        example = {key: value.cpu().numpy() for key, value in self._loaded.example.items()}
        self.outputs = tuple(
            TensorInfo(output.name, output.array.dtype.name, output.array.shape[1:])
            for output in self.run([example])
        )
        sizes: list[int] = []
        took_ms: list[float] = []
        for size in batch_sizes(self._batch_size_max):
            size_ms = self._measure([example] * size, slo_ms)
            if sizes and size_ms > slo_ms:
                break
            sizes.append(size)
            took_ms.append(size_ms)
        self.exec_ms = spread(sizes, took_ms)

    def _measure(self, rows: Sequence[Mapping[str, Array]], enough_ms: float) -> float:
        """The median run time after one run that nobody counts, unless that took twice `enough_ms` already."""
        first_at_ms = self._clock.now_ms()
        self.run(rows)
        first_ms = self._clock.now_ms() - first_at_ms
        if first_ms > 2 * enough_ms:
            return first_ms
        until_ms = self._clock.now_ms() + MEASURE_FOR_MS
        took_ms: list[float] = []
        while len(took_ms) < MEASUREMENTS_MAX and (not took_ms or self._clock.now_ms() < until_ms):
            began_ms = self._clock.now_ms()
            self.run(rows)
            took_ms.append(self._clock.now_ms() - began_ms)
        return statistics.median(took_ms)

    def _to_numpy(self, outputs: Mapping[str, Tensor], batch_size: int) -> list[NamedTensor]:
        if not isinstance(outputs, Mapping) or not outputs:
            raise NotAModel(f"{self._name}.infer() must give a dict of tensors, not {type(outputs).__name__}")
        arrays = []
        for key, output in outputs.items():
            if not isinstance(output, Tensor):
                raise NotAModel(
                    f"{self._name}.infer()[{key!r}] must be a tensor, not {type(output).__name__}"
                )
            if output.ndim == 0 or output.shape[0] != batch_size:
                raise NotAModel(
                    f"{self._name}.infer()[{key!r}] has shape {list(output.shape)}"
                    f" for a batch of {batch_size}: the first axis must be the batch"
                )
            arrays.append(NamedTensor(key, self._own(output)))
        return arrays

    def _own(self, output: Tensor) -> Array:
        """On the host, in a dtype numpy has, and never a view of the buffers that the next batch overwrites."""
        if output.dtype is torch.bfloat16:
            output = output.float()
        on_host = output.cpu()
        storage = on_host.untyped_storage().data_ptr()
        if any(buffer.untyped_storage().data_ptr() == storage for buffer in self._host.values()):
            on_host = on_host.clone()
        array: Array = np.ascontiguousarray(on_host.numpy())
        return array


def batch_sizes(batch_size_max: int) -> list[int]:
    """1, 2, 4, … and the largest."""
    sizes = [1 << power for power in range(batch_size_max.bit_length()) if 1 << power < batch_size_max]
    return [*sizes, batch_size_max]


def spread(sizes: Sequence[int], took_ms: Sequence[float]) -> tuple[float, ...]:
    """l(b) for every b up to the last size: linear between what was measured, never falling."""
    rising = np.maximum.accumulate(took_ms)
    every = np.interp(np.arange(1, sizes[-1] + 1), sizes, rising)
    return tuple(float(value) for value in every)


def _signature(example: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(key, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in example.items()
    )
