"""The GPUs of the stand-in: those of the stand-in of NVML, as this process may see them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CORES_PER_SM = 64
ASSERTED = "CUDA error: device-side assert triggered"


class _Process:
    current = 0
    is_broken = False


@cache
def visible() -> tuple[Mapping[str, Any], ...]:
    """In the order of $CUDA_VISIBLE_DEVICES; CUDA, too, reads it once."""
    found = json.loads(Path(os.environ["TENUTO_STAND_IN_NVML"]).read_text(encoding="utf-8"))
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return tuple(found)
    by_name = {**{str(place): gpu for place, gpu in enumerate(found)}, **{gpu["uid"]: gpu for gpu in found}}
    return tuple(by_name[name] for name in names.split(",") if name in by_name)


def device(asked: Any = None) -> torch.device:
    """With its number."""
    if isinstance(asked, int):
        return torch.device("cuda", asked)
    found = torch.device("cuda") if asked is None else torch.device(asked)
    return torch.device("cuda", _Process.current) if found.index is None else found


def set_device(asked: Any) -> None:
    number = device(asked).index
    if number >= len(visible()):
        raise RuntimeError("CUDA error: invalid device ordinal")
    _Process.current = number


def current() -> int:
    return _Process.current


def share_percent() -> float:
    return float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))


def properties(asked: Any = None) -> SimpleNamespace:
    gpu = visible()[device(asked).index]
    major, minor = (int(part) for part in gpu["capability"].split("."))
    return SimpleNamespace(
        name=gpu["name"],
        major=major,
        minor=minor,
        total_memory=gpu["memory_bytes"],
        multi_processor_count=max(1, int(gpu["cores"] / CORES_PER_SM * share_percent() / 100)),
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2_048,
        shared_memory_per_multiprocessor=167_936,
        warp_size=32,
        uuid=gpu["uid"],
        is_integrated=False,
    )


def check() -> None:
    """Raises RuntimeError in a context in which an assertion has failed."""
    if _Process.is_broken:
        raise RuntimeError(ASSERTED)


def breaks() -> RuntimeError:
    """An assertion in a kernel fails: nothing will run any more."""
    _Process.is_broken = True
    return RuntimeError(ASSERTED)


@cache
def start() -> None:
    """The context: an MPS client joins its daemon. Without one it runs on all the same, and says nothing."""
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if pipe is None:
        return
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "-")
    limit = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "-")
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.settimeout(2.0)
        connection.connect(f"{pipe}/control")
        connection.sendall(f"join {os.getpid()} {share} {limit}\n".encode())
        connection.makefile().read()
