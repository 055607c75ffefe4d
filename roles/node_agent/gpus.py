"""What devices a node has, checked against what its configuration says."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fabric.errors import ConfigError
from fabric.messages import GpuInfo
from roles.cluster import NodeConfig


def discover(node: NodeConfig) -> tuple[GpuInfo, ...]:
    """The node's devices in its own order. ConfigError where a real one that was promised is not there."""
    if node.device == "cuda":
        return _cuda_gpus(node)
    memory_bytes = _host_memory_bytes() if node.device == "cpu" else node.memory_bytes
    return tuple(GpuInfo(gpu, node.gpu_type, node.device, memory_bytes) for gpu in range(node.gpus))


def _cuda_gpus(node: NodeConfig) -> tuple[GpuInfo, ...]:
    memories_bytes = _nvml_memories_bytes(node.host)
    if len(memories_bytes) < node.gpus:
        raise ConfigError(
            f"node {node.host}: the configuration says {node.gpus} cuda GPUs, this host has "
            f"{len(memories_bytes)}; say gpus: {len(memories_bytes)}, or device: cpu or emulated"
        )
    return tuple(
        GpuInfo(gpu, node.gpu_type, "cuda", memory_bytes)
        for gpu, memory_bytes in enumerate(memories_bytes[: node.gpus])
    )


def _nvml_memories_bytes(host: str) -> Sequence[int]:
    """Bytes of every GPU that the driver shows; ConfigError when there is no driver to ask."""
    advice = "say device: cpu or device: emulated for this node"
    try:
        import pynvml  # noqa: PLC0415  an extra: only hosts with GPUs need it
    except ImportError as error:
        raise ConfigError(
            f"node {host}: device cuda needs the package nvidia-ml-py (pip install 'tenuto[worker]'), or {advice}"
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ConfigError(f"node {host}: no usable NVIDIA GPU or driver here ({error}); {advice}") from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError as error:
        raise ConfigError(f"node {host}: a GPU cannot be asked ({error}); {advice}") from error
    finally:
        pynvml.nvmlShutdown()


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
