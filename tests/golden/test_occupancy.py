"""Thesis section 5.3 by hand: blocks per SM, waves, and the metrics of a small trace."""

from __future__ import annotations

from typing import Any

import pytest

from fabric.errors import ProfileError
from profiles.kernel_trace import kernels_of, limits_of
from profiles.occupancy import (
    DeviceLimits,
    Kernel,
    blocks_per_sm,
    launch_gaps,
    occupancy_percent,
    requirements_of,
    sm_percent,
    sms_needed,
    waves,
)

V100 = DeviceLimits(80, 2048, 32, 65_536, 98_304)


def kernel(
    blocks: int = 1,
    threads: int = 256,
    start_ms: float = 0.0,
    duration_ms: float = 1.0,
    registers: int = 0,
    shared: int = 0,
    occupancy: float | None = None,
) -> Kernel:
    return Kernel("k", start_ms, duration_ms, (blocks, 1, 1), (threads, 1, 1), registers, shared, occupancy)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (kernel(threads=256), 8),  # 2048 / 256
        (kernel(threads=32), 32),  # 2048 / 32 = 64, but an SM holds 32 blocks
        (kernel(threads=768), 2),  # 2048 / 768 = 2.67
        (kernel(threads=256, registers=64), 4),  # 65536 / (256 · 64) = 4
        (kernel(threads=256, registers=65), 3),  # 65536 / 16640 = 3.94
        (kernel(threads=128, shared=40_000), 2),  # 98304 / 40000 = 2.46; threads alone would allow 16
        (kernel(threads=1024, registers=32, shared=1), 2),  # 2048 / 1024 = 2 = 65536 / 32768
    ],
)
def test_blocks_per_sm_are_the_smallest_of_the_four_bounds(launch: Kernel, expected: int) -> None:
    assert blocks_per_sm(launch, V100) == expected


def test_sms_and_waves_of_a_launch() -> None:
    """2500 blocks of 256 threads at 64 registers: 4 on an SM, so 625 SMs of 80, in 8 rounds."""
    large = kernel(2500, registers=64)
    assert (sms_needed(large, V100), waves(large, V100), sm_percent(large, V100)) == (625, 8, 100.0)
    small = kernel(70)  # 8 on an SM: 8.75, so 9 of 80
    assert (sms_needed(small, V100), waves(small, V100), sm_percent(small, V100)) == (9, 1, 11.25)
    assert sm_percent(kernel(640), V100) == 100.0  # exactly one wave
    assert waves(kernel(641), V100) == 2


def test_a_launch_that_cannot_have_run_is_no_measurement() -> None:
    with pytest.raises(ProfileError, match="does not fit on an SM"):
        blocks_per_sm(kernel(threads=4096), V100)


def test_occupancy_by_launch_where_the_tracer_made_no_estimate() -> None:
    """160 blocks of 256 threads on 80 SMs: 2 on each, 16 of 64 warps."""
    assert occupancy_percent(kernel(160), V100) == 25.0
    assert occupancy_percent(kernel(10_000), V100) == 100.0
    assert occupancy_percent(kernel(10_000, registers=64), V100) == 50.0  # 4 · 8 of 64 warps
    assert occupancy_percent(kernel(160, occupancy=23.0), V100) == 23.0


def test_one_stream_is_weighted_by_time_with_its_gaps() -> None:
    """40 % for 2 ms, nothing for 1 ms, 90 % for 1 ms: (80 + 0 + 90) / 4 = 42.5; SMs 50 % and 100 %: 200 / 4."""
    kernels = [kernel(320, duration_ms=2.0, occupancy=40.0), kernel(640, start_ms=3.0, occupancy=90.0)]
    found = requirements_of(kernels, V100, memory_percent=12.0)
    assert found.achieved_occupancy_percent == 90.0
    assert found.weighted_occupancy_percent == pytest.approx(42.5)
    assert found.weighted_sm_percent == pytest.approx((50 * 2 + 100 * 1) / 4)
    assert found.memory_percent == 12.0


def test_kernels_that_overlap_add_up_to_all_of_the_gpu_at_most() -> None:
    """0 to 2 ms 30 %, 1 to 3 ms 50 %: 30, 80, 50 over a ms each; SMs 50 % and 75 %: 50, 100 (not 125), 75."""
    kernels = [
        kernel(320, duration_ms=2.0, occupancy=30.0),
        kernel(480, start_ms=1.0, duration_ms=2.0, occupancy=50.0),
    ]
    found = requirements_of(kernels, V100)
    assert found.achieved_occupancy_percent == 80.0
    assert found.weighted_occupancy_percent == pytest.approx(160 / 3)
    assert found.weighted_sm_percent == pytest.approx(225 / 3)


def test_gaps_between_kernels_are_shared_by_all_of_them() -> None:
    """Busy 0 to 2 and 2.5 to 3 (two at once): 2.5 ms active, 0.5 ms idle, 3 kernels."""
    kernels = [
        kernel(duration_ms=2.0),
        kernel(start_ms=2.5, duration_ms=0.5),
        kernel(start_ms=2.6, duration_ms=0.1),
    ]
    found = launch_gaps(kernels)
    assert found.kernels == 3
    assert (found.gap_ms_per_kernel, found.active_ms) == pytest.approx((0.5 / 3, 2.5))


def trace(**changes: Any) -> dict[str, Any]:
    said = {
        "grid": [160, 1, 1],
        "block": [16, 16, 1],
        "registers per thread": 32,
        "shared memory": 1024,
        "est. achieved occupancy %": 24,
    }
    device = {
        "id": 0,
        "computeMajor": 7,
        "computeMinor": 5,
        "numSms": 40,
        "maxThreadsPerMultiprocessor": 1024,
        "regsPerMultiprocessor": 65_536,
        "sharedMemPerMultiprocessor": 65_536,
    }
    events = [
        {"ph": "X", "cat": "kernel", "name": "second", "ts": 2000.0, "dur": 5.0, "args": said},
        {"ph": "X", "cat": "kernel", "name": "first", "ts": 1000.0, "dur": 500.0, "args": said | changes},
        {"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", "ts": 1.0, "dur": 1.0, "args": {}},
        {"ph": "M", "name": "process_name"},
    ]
    return {"deviceProperties": [device], "traceEvents": events}


def test_a_trace_is_read_in_order_and_in_milliseconds() -> None:
    first, second = kernels_of(trace())
    assert (first.name, first.start_ms, first.duration_ms) == ("first", 1.0, 0.5)
    assert (first.blocks, first.threads_per_block, first.registers_per_thread) == (160, 256, 32)
    assert (first.shared_bytes, first.occupancy_percent, second.name) == (1024, 24.0, "second")
    assert limits_of(trace()) == DeviceLimits(40, 1024, 16, 65_536, 65_536)


def test_an_estimate_of_nothing_is_no_estimate() -> None:
    first = kernels_of(trace(**{"est. achieved occupancy %": 0}))[0]
    assert first.occupancy_percent is None


@pytest.mark.parametrize("broken", [{}, {"traceEvents": [{"cat": "kernel"}]}, {"traceEvents": [1]}])
def test_what_is_no_trace_is_a_profile_error(broken: dict[str, Any]) -> None:
    with pytest.raises(ProfileError):
        kernels_of(broken)
    with pytest.raises(ProfileError):
        limits_of(broken)
    with pytest.raises(ProfileError):
        requirements_of([], V100)
