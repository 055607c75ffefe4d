"""What devices a node has, checked against what its configuration says."""

from __future__ import annotations

import os

from fabric.errors import ConfigError
from fabric.messages import GpuInfo
from roles.config.cluster import NodeConfig
from roles.node_agent.discovery import Nvml, NvmlUnavailable


def open_nvml(node: NodeConfig) -> Nvml | None:
    """For a node of NVIDIA GPUs; None for the others. NvmlUnavailable says which node, and what to do."""
    if node.device != "cuda":
        return None
    try:
        return Nvml.open()
    except NvmlUnavailable as error:
        raise NvmlUnavailable(_advised(node, error)) from error


def discover(node: NodeConfig, nvml: Nvml | None) -> tuple[GpuInfo, ...]:
    """The node's devices in its own order. ConfigError where a real one that was promised is not there."""
    if nvml is None:
        memory_bytes = _host_memory_bytes() if node.device == "cpu" else node.memory_bytes
        return tuple(GpuInfo(gpu, node.gpu_type, node.device, memory_bytes) for gpu in range(node.gpus))
    try:
        count = nvml.count()
        if count < node.gpus:
            raise ConfigError(
                f"node {node.host}: the configuration says {node.gpus} cuda GPUs, this host has {count}; "
                f"say gpus: {count}, or device: cpu or emulated"
            )
        return tuple(nvml.describe(gpu, node.gpu_type) for gpu in range(node.gpus))
    except NvmlUnavailable as error:
        raise NvmlUnavailable(_advised(node, error)) from error


def _advised(node: NodeConfig, error: NvmlUnavailable) -> str:
    return f"node {node.host}: {error}; say device: cpu or device: emulated for this node"


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
