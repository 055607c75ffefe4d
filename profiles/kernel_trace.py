"""Kernels and device limits out of a trace as torch.profiler exports it (Chrome's JSON), sans-IO.

The trace carries what the driver said of each launch and of the device, so no tool of NVIDIA's is needed beside
torch. It says everything but how many blocks an SM may hold: that is fixed per compute capability.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fabric.errors import ProfileError
from profiles.occupancy import DeviceLimits, Kernel

# CUDA C++ Programming Guide, table "Technical specifications per compute capability".
BLOCKS_PER_SM: Final[Mapping[tuple[int, int], int]] = {
    (5, 0): 32,
    (5, 2): 32,
    (6, 0): 32,
    (6, 1): 32,
    (7, 0): 32,
    (7, 5): 16,
    (8, 0): 32,
    (8, 6): 16,
    (8, 7): 16,
    (8, 9): 24,
    (9, 0): 32,
    (10, 0): 32,
    (10, 3): 32,
    (12, 0): 24,
}
BLOCKS_PER_SM_UNKNOWN: Final = 32


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """Every kernel of the trace in order of its start; ProfileError where the trace is not one."""
    try:
        found = [_kernel(event) for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"not a trace of torch.profiler: {error!r}") from error
    return sorted(found, key=lambda kernel: kernel.start_ms)


def limits_of(trace: Mapping[str, Any], device: int = 0) -> DeviceLimits:
    """The limits of the traced device; ProfileError where the trace names none."""
    try:
        properties = next(one for one in trace["deviceProperties"] if one["id"] == device)
        capability = (int(properties["computeMajor"]), int(properties["computeMinor"]))
        return DeviceLimits(
            sm_count=int(properties["numSms"]),
            threads_per_sm=int(properties["maxThreadsPerMultiprocessor"]),
            blocks_per_sm=BLOCKS_PER_SM.get(capability, BLOCKS_PER_SM_UNKNOWN),
            registers_per_sm=int(properties["regsPerMultiprocessor"]),
            shared_bytes_per_sm=int(properties["sharedMemPerMultiprocessor"]),
        )
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise ProfileError(f"the trace says nothing of device {device}: {error!r}") from error


def _kernel(event: Mapping[str, Any]) -> Kernel:
    said = event["args"]
    occupancy = said.get("est. achieved occupancy %")
    return Kernel(
        name=str(event["name"]),
        start_ms=float(event["ts"]) / 1e3,
        duration_ms=float(event["dur"]) / 1e3,
        grid=_three(said["grid"]),
        block=_three(said["block"]),
        registers_per_thread=int(said.get("registers per thread", 0)),
        shared_bytes=int(said.get("shared memory", 0)),
        # A kernel shorter than the tracer's clock is estimated as 0: no kernel runs on no warp.
        occupancy_percent=float(occupancy) if occupancy else None,
    )


def _three(sizes: Any) -> tuple[int, int, int]:
    x, y, z = (int(size) for size in sizes)
    return x, y, z
