"""Which GPUs are equal to a placement: the one definition, for all policies and for the moves between two placements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from policies.placement.common.base import GpuSlot


class GpuKind(NamedTuple):
    """What two GPUs must agree in to be equal: either may then carry what was planned for the other."""

    gpu_type: str
    memory_bytes: int
    device: str
    price_per_hour: float | None


def gpu_kind(gpu: GpuSlot) -> GpuKind:
    """The kind of that GPU."""
    return GpuKind(gpu.gpu_type, gpu.memory_bytes, gpu.device, gpu.price_per_hour)


class GpuClass(Struct, frozen=True):
    """GPUs of one kind, ascending by index."""

    gpus: tuple[GpuSlot, ...]

    @property
    def slot(self) -> GpuSlot:
        """One of them, for what they have in common."""
        return self.gpus[0]


def gpu_classes(gpus: Iterable[GpuSlot]) -> tuple[GpuClass, ...]:
    """Equal GPUs together, in the order of their first one."""
    classes: dict[GpuKind, list[GpuSlot]] = {}
    for gpu in sorted(gpus, key=lambda slot: slot.index):
        classes.setdefault(gpu_kind(gpu), []).append(gpu)
    return tuple(GpuClass(tuple(members)) for members in classes.values())
