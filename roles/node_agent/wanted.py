"""What the wanted slices mean for this host: whether they can be here, and which of them share a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fabric.ids import NodeId
from fabric.messages import GpuInfo, SliceSpec

EMULATED_PER_PROCESS = 64


def problem_of(spec: SliceSpec, node_id: NodeId, gpus: Sequence[GpuInfo]) -> str:
    """Why that slice cannot be on this node; empty: it can."""
    devices = {gpu.gpu: gpu.device for gpu in gpus}
    for gpu in spec.gpus:
        if gpu not in devices:
            return f"node {node_id} has no gpu {gpu} (it has {len(devices)})"
        if spec.device != devices[gpu]:
            return f"gpu {gpu} of node {node_id} is {devices[gpu]}, not {spec.device}"
    return ""


def shares_percent(specs: Iterable[SliceSpec], gpus: Sequence[GpuInfo]) -> dict[int, float]:
    """What the shares of each GPU's slices add up to."""
    sums = {gpu.gpu: 0.0 for gpu in gpus}
    for spec in specs:
        if spec.gpu in sums:
            sums[spec.gpu] += spec.share_percent or 0.0
    return sums


def by_process(specs: Iterable[SliceSpec]) -> list[list[SliceSpec]]:
    """Who shares a process: emulated slices in the order they were wanted, everyone else alone."""
    emulated: list[SliceSpec] = []
    groups = []
    for spec in specs:
        if spec.device == "emulated":
            emulated.append(spec)
        else:
            groups.append([spec])
    groups.extend(
        emulated[first : first + EMULATED_PER_PROCESS]
        for first in range(0, len(emulated), EMULATED_PER_PROCESS)
    )
    return groups
