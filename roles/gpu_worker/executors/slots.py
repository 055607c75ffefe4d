"""Two input buffers of one model: while a batch runs out of one, the next is put together in the other.

A batch is assembled once, row by row, straight into its slot; where there is CUDA the slot is pinned and has a twin on
the device, to which it is copied on a stream of its own. The one lock is held while a slot is filled: whoever
wants the slot meanwhile would have to wait for just that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fabric.link import Tensor as Array
from roles.gpu_worker.executors.base import JobPart, RejectedRow


@dataclass(slots=True)
class Slot:
    """One batch's inputs; the first `batch_size` rows of `on_device` are it, once `copied` has happened."""

    host: dict[str, Tensor]
    on_device: dict[str, Tensor]
    copied: torch.cuda.Event | None
    batch_size: int = 0
    rejected: list[RejectedRow] = field(default_factory=list)
    parts: Sequence[ref[JobPart]] = ()
    """Of the batch that was put together ahead of its run; empty: free, or running.

    A batch that was called back never runs, and its inputs may lie in the memory of a frontend that is gone: they are not held here.
    """

    @property
    def is_staged(self) -> bool:
        """Whether a batch waits here that may still run."""
        return bool(self.parts) and all(part() is not None for part in self.parts)

    @property
    def batch(self) -> dict[str, Tensor]:
        """Views of its rows."""
        return {key: tensor[: self.batch_size] for key, tensor in self.on_device.items()}


@cache
def stream_of(device: torch.device, use: str) -> torch.cuda.Stream:  # noqa: ARG001  it is kept by both
    """The one stream of this process for that use of a device, whatever its models.

    cuBLAS keeps a workspace for each stream it was ever used on (32 MiB on an H200), and a model that comes and goes would leave one
    behind. And torch has 32 streams a device, which it gives out in turn: one that captures a graph must be nobody else's (ADR 0070).
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class InputSlots:
    """`stage` is called by the staging thread, `take` and `give_back` by the device's own.

    They grow with the batches that are taken, as a model warms up: how large these may be is not known before. What was too much is
    given back by `shrink`.
    """

    def __init__(self, example: Mapping[str, Tensor], device: torch.device) -> None:
        self._example = example
        self._device = device
        self._stream = stream_of(device, "copies") if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._running: Slot | None = None
        self.rows = 0
        """What each slot has room for."""
        self.staged_ahead = 0
        """Batches that found their inputs in place."""

    def stage(
        self, parts: Sequence[JobPart], rows: Sequence[Mapping[str, Array]], rejected: list[RejectedRow]
    ) -> None:
        """Put a batch together where nothing runs and nothing is staged, else in the place of what was staged; one that is too large is left to `take`.

        Between two runs both may be free: the batch that is to run next keeps its place.
        """
        with self._lock:
            if len(rows) > self.rows:
                return
            free = (slot for slot in self._slots if slot is not self._running)
            slot = min(free, key=lambda slot: slot.is_staged)
            self._fill(slot, rows, rejected)
            slot.parts = [ref(part) for part in parts]

    def staged(self, parts: Sequence[JobPart]) -> Slot | None:
        """The slot of a batch of these parts if they were staged; it runs from now on.

        The very same parts must have been: a batch's number may come again from a scheduler that restarted.
        """
        with self._lock:
            for slot in self._slots:
                if parts and _are_same(slot.parts, parts):
                    slot.parts = ()
                    self._running = slot
                    self.staged_ahead += 1
                    return slot
            return None

    def take(self, rows: Sequence[Mapping[str, Array]], rejected: list[RejectedRow]) -> Slot:
        """Put a batch together that nobody staged; one that was staged keeps its slot. It runs from now on."""
        with self._lock:
            if len(rows) > self.rows:
                self._slots, self.rows = [self._made(len(rows)) for _ in range(2)], len(rows)
            slot = min(self._slots, key=lambda slot: slot.is_staged)
            self._fill(slot, rows, rejected)
            self._running = slot
            return slot

    def give_back(self) -> None:
        """What ran has ended."""
        with self._lock:
            self._running = None

    def shrink(self, rows: int) -> None:
        """Give back room for more rows than that, of a model that nobody has asked for a batch yet."""
        with self._lock:
            if self.rows > rows:
                self._slots, self.rows, self._running = [], 0, None  # first: there may be no memory for both
                self._slots, self.rows = [self._made(rows) for _ in range(2)], rows

    def _fill(self, slot: Slot, rows: Sequence[Mapping[str, Array]], rejected: list[RejectedRow]) -> None:
        slot.parts = ()
        slot.batch_size, slot.rejected = len(rows), rejected
        for key, buffer in slot.host.items():
            into: Array = buffer.numpy()
            for index, row in enumerate(rows):
                into[index] = row[key]
        stream: Any = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), stream:
            if slot.copied is not None:
                for key, tensor in slot.batch.items():
                    tensor.copy_(slot.host[key][: len(rows)], non_blocking=True)
                slot.copied.record(self._stream)

    def _made(self, rows: int) -> Slot:
        is_cuda = self._device.type == "cuda"
        host = {
            key: torch.empty((rows, *value.shape), dtype=value.dtype, pin_memory=is_cuda)
            for key, value in self._example.items()
        }
        if not is_cuda:
            return Slot(host, host, None)
        on_device = {key: torch.empty_like(buffer, device=self._device) for key, buffer in host.items()}
        return Slot(host, on_device, torch.cuda.Event())  # type: ignore[no-untyped-call]


def _are_same(staged: Sequence[ref[JobPart]], parts: Sequence[JobPart]) -> bool:
    return len(staged) == len(parts) and all(own() is part for own, part in zip(staged, parts, strict=True))
