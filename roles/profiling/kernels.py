"""The kernels of one batch as a profile keeps them: launches that are alike count as one row."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.measured import KernelRow
from profiles.occupancy import DeviceLimits, Kernel, occupancy_percent, sm_percent


def kernel_rows(kernels: Sequence[Kernel], limits: DeviceLimits) -> list[KernelRow]:
    """By name and launch configuration, the longest together first."""
    alike: dict[tuple[object, ...], list[Kernel]] = {}
    for kernel in kernels:
        key = (kernel.name, kernel.grid, kernel.block, kernel.registers_per_thread, kernel.shared_bytes)
        alike.setdefault(key, []).append(kernel)
    rows = [
        KernelRow(
            name=same[0].name,
            launches=len(same),
            duration_ms=sum(kernel.duration_ms for kernel in same),
            grid=same[0].grid,
            block=same[0].block,
            registers_per_thread=same[0].registers_per_thread,
            shared_bytes=same[0].shared_bytes,
            occupancy_percent=sum(occupancy_percent(kernel, limits) for kernel in same) / len(same),
            sm_percent=sm_percent(same[0], limits),
        )
        for same in alike.values()
    ]
    return sorted(rows, key=lambda row: -row.duration_ms)
