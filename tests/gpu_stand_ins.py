"""Hosts with GPUs that are not there: what NVML says of them, and the environment in which they are found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.environment import AT_ONCE

STAND_INS = Path(__file__).parent / "stand_ins"
MPS_CONTROL = STAND_INS / "nvidia-cuda-mps-control"
A100 = {
    "uid": "GPU-0",
    "name": "NVIDIA A100-SXM4-40GB",
    "capability": "8.0",
    "cores": 6912,
    "mig": 0,
    "memory_bytes": 40 << 30,
    "used_bytes": 3 << 30,
    "busy_percent": 37,
    "milliwatts": 151_500,
    "milliwatts_max": 400_000,
    "clocks_mhz": [0, 1410, 1215],
    "clocks_max_mhz": [0, 1410, 1215],
    "throttle": 0x4 | 0x1,
    "celsius": 41,
}


def a100(number: int = 0, **changes: Any) -> dict[str, Any]:
    """One that is called GPU-<number>; None for what it should not support."""
    said = {**A100, "uid": f"GPU-{number}", **changes}
    return {name: value for name, value in said.items() if value is not None}


def write_gpus(path: Path, *gpus: dict[str, Any]) -> None:
    """What the stand-in of pynvml reads. Whole or not at all: it may be reading now."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(gpus), encoding="utf-8")
    draft.replace(path)


def gpu_environment(gpus: Path, *, has_mps: bool = True, has_cuda: bool = False) -> dict[str, str]:
    """For a process that should find these GPUs, and the stand-in of the MPS control program; and of torch's CUDA, where asked for."""
    repository = STAND_INS.parents[1]
    programs = Path(sys.executable).parent  # the stand-ins' own interpreter
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return AT_ONCE | {
        "TENUTO_STAND_IN_NVML": str(gpus),
        "PYTHONPATH": os.pathsep.join(
            str(path) for path in [*[STAND_INS / "cuda"] * has_cuda, STAND_INS / "nvml", repository]
        ),
        "PATH": f"{STAND_INS}{os.pathsep}{path}" if has_mps else path,
    }


if __name__ == "__main__":  # for `gpu/measure.sh`: the second one's operators are small
    write_gpus(Path(sys.argv[1]), a100(used_bytes=0), a100(1, used_bytes=0, memory_bytes=1 << 20))
