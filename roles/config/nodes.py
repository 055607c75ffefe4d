"""`cluster.gpus` and `cluster.nodes`: the hosts with GPUs, and which shard has each."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fabric.errors import ConfigError
from profiles.gpu import GIB, gpu_profile
from roles.config.checks import finite, name_like, one_of, unique, whole
from roles.config.cluster import NodeConfig
from roles.config.sections import ClusterSection, NodeSection
from roles.config.shard_assignment import deal

DEVICES = ("emulated", "cpu", "cuda")
DEVICES_ELSEWHERE = {"gpu": "cuda", "nvidia": "cuda", "simulated": "emulated"}
GPUS_LIMIT = 65_536
MEMORY_GB_MAX = 1e6
PRICE_MAX = 1e9
PIN_CORES_MAX = 4096
SHARDS_MAX = 256


def checked_nodes(section: ClusterSection) -> tuple[NodeConfig, ...]:
    """The nodes, each in its shard. Raises ConfigError."""
    if (section.gpus is None) == (section.nodes is None):
        raise ConfigError("cluster: must have exactly one of gpus (a number) and nodes (a list of hosts)")
    if section.nodes is None:
        written = [NodeSection("local", section.gpus or 0, section.gpu_type or "generic")]
    else:
        if section.gpu_type is not None:
            raise ConfigError("cluster.gpu_type: goes with gpus; a node has its own type")
        written = list(section.nodes)
    nodes = []
    for place, node in enumerate(written):
        where = "cluster" if section.nodes is None else f"cluster.nodes[{place}]"
        name_like(node.host, f"{where}.host")
        one_of(node.device, DEVICES, f"{where}.device", DEVICES_ELSEWHERE)
        whole(node.gpus, f"{where}.gpus", 0, GPUS_LIMIT)
        memory_bytes = gpu_profile(node.type).memory_bytes
        if node.memory_gb is not None:
            memory_bytes = int(
                finite(node.memory_gb, f"{where}.memory_gb", over=0, at_most=MEMORY_GB_MAX) * GIB
            )
        if node.price_per_hour is not None:
            finite(node.price_per_hour, f"{where}.price_per_hour", at_most=PRICE_MAX)
        if node.pin_cores is not None:
            whole(node.pin_cores, f"{where}.pin_cores", 1, PIN_CORES_MAX)
        nodes.append(
            NodeConfig(
                node.host,
                node.gpus,
                node.type.lower(),
                memory_bytes,
                node.price_per_hour,
                node.device,
                node.mps,
                node.pin_cores,
                node.workers_outlive_agent,
            )
        )
    unique([node.host for node in nodes], "cluster.nodes[{}].host")
    if not 1 <= sum(node.gpus for node in nodes) <= GPUS_LIMIT:
        raise ConfigError(f"cluster: has no GPU; it must have from 1 to {GPUS_LIMIT} of them")
    return _in_shards(nodes, [node.shard for node in written], section.shards)


def _in_shards(
    nodes: Sequence[NodeConfig], said: Sequence[int | None], shards: int
) -> tuple[NodeConfig, ...]:
    """As the file says; where it says nothing, by name, so that shards have about as many GPUs each."""
    whole(shards, "cluster.shards", 1, SHARDS_MAX)
    for place, shard in enumerate(said):
        if shard is not None:
            whole(shard, f"cluster.nodes[{place}].shard", 0, shards - 1)
    if shards == 1:
        return tuple(nodes)
    if any(shard is not None for shard in said):
        if None in said:
            place = said.index(None)
            raise ConfigError(f"cluster.nodes[{place}].shard: is missing; all nodes say it, or none does")
        dealt = [shard or 0 for shard in said]
    else:
        dealt = _dealt(nodes, shards)
    empty = next(
        (k for k in range(shards) if not any(n.gpus for n, s in zip(nodes, dealt, strict=True) if s == k)),
        None,
    )
    if empty is not None:
        raise ConfigError(
            f"cluster.shards: is {shards}; shard {empty} of them would have no GPU: a node is in one shard as a whole"
        )
    return tuple(replace(node, shard=shard) for node, shard in zip(nodes, dealt, strict=True))


def _dealt(nodes: Sequence[NodeConfig], shards: int) -> list[int]:
    """Whose GPUs count first: a node without one can be anywhere."""
    even = [1.0] * shards
    dealt = {
        **deal({node.host: (float(node.gpus),) for node in nodes if node.gpus}, even),
        **deal({node.host: (0.0,) for node in nodes if not node.gpus}, even),
    }
    return [dealt[node.host] for node in nodes]
