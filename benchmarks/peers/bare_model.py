"""A real model as a peer's server file runs it: tensors' bytes in, one batch, outputs' bytes out.

The weights are those of our loaders. Around them is what a careful user writes: pinned memory for a batch, inference mode,
one copy each way, and every batch size met before the first request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fabric.link import Tensor
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.profiled import device_named

Row = Sequence[Tensor]
"""One request's tensors, in the order of the model's inputs."""


class BareModel:
    """Loaded on `device`, for batches of up to `max_batch`."""

    def __init__(self, loader: Mapping[str, Any], device: str, max_batch: int) -> None:
        self._device = device_named(device)
        loaded = load_model(LoaderSpec(**loader), self._device)
        self._model = loaded.model
        self._example = {name: value.cpu().numpy() for name, value in loaded.example.items()}
        self._batch = {
            name: torch.empty((max_batch, *value.shape), dtype=value.dtype, pin_memory=self._is_cuda)
            for name, value in loaded.example.items()
        }
        self._rows = {name: tensor.numpy() for name, tensor in self._batch.items()}
        for size in range(1, max_batch + 1):
            self.run([list(self._example.values())] * size)

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def decode(self, body: bytes) -> Row:
        """A request's tensors, which lie in the body one after the other."""
        row, offset = [], 0
        for like in self._example.values():
            row.append(np.frombuffer(body, like.dtype, math.prod(like.shape), offset).reshape(like.shape))
            offset += like.nbytes
        return row

    def run(self, rows: Sequence[Row]) -> list[bytes]:
        """One batch. Of each request the outputs' bytes."""
        for place, row in enumerate(rows):
            for target, value in zip(self._rows.values(), row, strict=True):
                target[place] = value
        with torch.inference_mode():
            inputs = {
                name: tensor[: len(rows)].to(self._device, non_blocking=True)
                for name, tensor in self._batch.items()
            }
            outputs = [output.cpu().numpy() for output in self._model.infer(inputs).values()]
        return [b"".join(output[place].tobytes() for output in outputs) for place in range(len(rows))]
