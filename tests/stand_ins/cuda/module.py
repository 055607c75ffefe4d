"""`torch.cuda`, `torch.profiler` and pinned memory as the stand-in of CUDA has them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from tests.stand_ins.cuda import gpus, operators, streams
from tests.stand_ins.cuda.operators import MEMORY, Tracer

BLOCK = 256
_kept: list[object] = []  # a library's operators go with it


def install() -> None:
    """Put it all into torch."""
    _kept.append(operators.register())
    cuda: Any = torch.cuda
    for name, value in _cuda().items():
        setattr(cuda, name, value)
    cuda.graphs.CUDAGraph = streams.CUDAGraph
    c: Any = torch._C
    c._cuda_endAllocateToPool = c._cuda_releasePool = lambda gpu, pool: None
    c._host_emptyCache = lambda: None
    c._set_cudnn_enabled(False)  # a build with CUDA would choose operators that only it has
    c._cuda_getDevice = gpus.current
    _patch_tensors()
    real_profile = torch.profiler.profile

    def profile(*args: Any, activities: Sequence[Any] = (), **kwargs: Any) -> Any:
        if torch.profiler.ProfilerActivity.CUDA in activities:
            return _Profile()
        return real_profile(*args, activities=activities or None, **kwargs)

    torch.profiler.profile = profile  # type: ignore[assignment,misc]


def _cuda() -> dict[str, Any]:
    """What of `torch.cuda` a program may ask."""

    def synchronize(device: Any = None) -> None:
        gpus.check()
        streams.refuse_while_capturing(gpus.device(device))
        streams.do_all()

    def empty_cache() -> None:
        gpus.check()
        if streams.current_stream().graph is not None:
            streams.current_stream().synchronize()

    def held(device: Any = None) -> int:
        return MEMORY.held(gpus.device(device).index)

    def most(device: Any = None) -> int:
        return MEMORY.most(gpus.device(device).index)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total = gpus.properties(device).total_memory
        return total - held(device), total

    return {
        "_lazy_init": gpus.start,
        "init": gpus.start,
        "is_initialized": lambda: True,
        "is_available": lambda: bool(gpus.visible()),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: streams.current_stream().graph is not None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "device_count": lambda: len(gpus.visible()),
        "current_device": gpus.current,
        "set_device": gpus.set_device,
        "device": _Within,
        "get_device_properties": gpus.properties,
        "get_device_name": lambda device=None: gpus.properties(device).name,
        "get_device_capability": lambda device=None: (
            gpus.properties(device).major,
            gpus.properties(device).minor,
        ),
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.stream,
        "set_stream": streams.set_stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "memory_allocated": held,
        "memory_reserved": held,
        "max_memory_allocated": most,
        "max_memory_reserved": most,
        "reset_peak_memory_stats": lambda device=None: MEMORY.forget_most(gpus.device(device).index),
        "mem_get_info": mem_get_info,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": streams.CUDAGraph,
    }


class _Within:
    """`torch.cuda.device`: inside, it is the current one."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = gpus.current()
        gpus.set_device(self._device)

    def __exit__(self, *exc: object) -> None:
        gpus.set_device(self._before)


def _patch_tensors() -> None:
    """What in torch asks CUDA before any operator is called: the current GPU's number, and pinned memory."""
    tensor: Any = torch.Tensor
    to, empty = tensor.to, torch.empty

    def numbered(value: Any) -> Any:
        is_cuda = isinstance(value, str | torch.device) and torch.device(value).type == "cuda"
        return gpus.device(value) if is_cuda else value

    def moved_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        there: Tensor = to(self, *map(numbered, args), **{key: numbered(one) for key, one in kwargs.items()})
        return there

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return moved_to(self, gpus.device(device), non_blocking=non_blocking, **kwargs)

    def made_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return operators.pin(made) if pin_memory else made

    def with_number(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(data: Any, **kwargs: Any) -> Tensor:
            return make(data, **{key: numbered(one) for key, one in kwargs.items()})

        return made

    tensor.to, tensor.cuda = moved_to, cuda
    tensor.pin_memory = lambda self: operators.pin(self.clone())
    tensor.is_pinned = operators.is_pinned
    made: Any = torch
    made.empty, made.tensor, made.as_tensor = (
        made_empty,
        with_number(torch.tensor),
        with_number(torch.as_tensor),
    )


class _Profile:
    """`torch.profiler.profile` of a GPU: every operator that writes is a kernel."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._tracer = Tracer.active = Tracer()
        return self

    def __exit__(self, *exc: object) -> None:
        Tracer.active = None

    def add_metadata_json(self, key: str, value: str) -> None:
        """For the trace."""
        self._told[key] = json.loads(value)

    def export_chrome_trace(self, path: str) -> None:
        """As torch writes it, packed where the name ends in .gz."""
        events = [
            {
                "ph": "X",
                "cat": "kernel",
                "name": f"void at::native::{name}_kernel(float*)",
                "ts": began_ms * 1e3,
                "dur": took_ms * 1e3,
                "args": {
                    "device": 0,
                    "stream": 7,
                    "correlation": number,
                    "grid": [max(1, elements // BLOCK), 1, 1],
                    "block": [BLOCK, 1, 1],
                    "registers per thread": 32,
                    "shared memory": 0,
                    "est. achieved occupancy %": 50,
                },
            }
            for number, (name, began_ms, took_ms, elements) in enumerate(self._tracer.kernels)
        ]
        said = [_told(number, gpus.properties(number)) for number in range(len(gpus.visible()))]
        text = json.dumps({**self._told, "deviceProperties": said, "traceEvents": events}).encode()
        Path(path).write_bytes(gzip.compress(text) if path.endswith(".gz") else text)


def _told(number: int, gpu: SimpleNamespace) -> dict[str, Any]:
    return {
        "id": number,
        "name": gpu.name,
        "computeMajor": gpu.major,
        "computeMinor": gpu.minor,
        "numSms": gpu.multi_processor_count,
        "maxThreadsPerMultiprocessor": gpu.max_threads_per_multi_processor,
        "regsPerMultiprocessor": gpu.regs_per_multiprocessor,
        "sharedMemPerMultiprocessor": gpu.shared_memory_per_multiprocessor,
    }
