"""What every interference model answers: how much the neighbours on one GPU slow a batch down.

A slowdown is a factor on the profile's l(b) at the slice's own share. Without neighbours it is 1, with one
exception: where the profile knows the whole GPU only, a model may say what a smaller share costs (`sm`).
`DeviceModel` applies it in both cases, so the scheduler's tables, the simulator and the emulated worker agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fabric.ids import ModelId
from profiles.model import WHOLE_GPU_PERCENT


@dataclass(frozen=True, slots=True)
class Running:
    """A batch on a slice: the model, its size, and the slice's share (None: no limit)."""

    model_id: ModelId
    batch_size: int
    share_percent: float | None = None

    @property
    def share_or_whole(self) -> float:
        """The share in percent; a slice without a limit has the whole GPU."""
        return WHOLE_GPU_PERCENT if self.share_percent is None else self.share_percent


class Interference(Protocol):
    """How much the neighbours on the same GPU slow a batch down. Idle slices are no neighbours."""

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:
        """The factor on l(b), 1 or more; more neighbours never make it smaller."""
        ...


class NoInterference:
    """Slices of one GPU do not disturb each other."""

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:  # noqa: ARG002  the protocol's
        """Always 1."""
        return 1.0
