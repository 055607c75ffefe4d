"""Which shard has each model, and a shard's part of a configuration (docs/operate/scaling.md).

Every process reads the same file and has to find the same partition, on any host, and nearly the same when a line of the file has
changed: so models are dealt by their names (`shard_assignment.py`), and by no search or solver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot
from roles.config.checks import whole
from roles.config.cluster import ClusterConfig, ModelConfig, NodeConfig, placed_models
from roles.config.shard_assignment import deal


def models_in_shards(
    models: Sequence[ModelConfig], said: Sequence[int | None], nodes: Sequence[NodeConfig], shards: int
) -> tuple[ModelConfig, ...]:
    """As the file says; the others so that each shard's load and memory are in proportion to its GPUs.

    Raises ConfigError where a shard would have no model.
    """
    for place, shard in enumerate(said):
        if shard is not None:
            whole(shard, f"models[{place}].shard", 0, shards - 1)
    if shards == 1:
        return tuple(models)
    if None in said:
        dealt = _dealt(models, said, nodes, shards)
    else:
        dealt = {model.model_id: shard or 0 for model, shard in zip(models, said, strict=True)}
    empty = next((k for k in range(shards) if k not in dealt.values()), None)
    if empty is not None:
        raise ConfigError(
            f"cluster.shards: is {shards}; shard {empty} would have none of the {len(models)} models"
        )
    return tuple(replace(model, shard=dealt[model.model_id]) for model in models)


def shard_document(document: Mapping[str, Any], config: ClusterConfig, shard: int) -> dict[str, Any]:
    """The part of the file that one shard's schedulers plan by: its models and nodes, as the file of a cluster of their own.

    Models have no rates there: those of `config` hold (`rate_rps` and `popularity` are of all shards together).
    """
    if config.shards == 1:
        return dict(document)
    own = config.of_shard(shard)
    names = {model.name for model in own.models}
    hosts = {node.host for node in own.nodes}
    plain = {key: value for key, value in document.items() if key not in ("rate_rps", "popularity")}
    plain["models"] = [
        _without(section, "shard", "rate_rps", "weight")
        for section in document["models"]
        if section["name"] in names
    ]
    cluster = _without(document["cluster"], "shards", "schedulers", "frontends", "addresses")
    cluster["nodes"] = [_without(node, "shard") for node in cluster["nodes"] if node["host"] in hosts]
    plain["cluster"] = cluster
    return plain


def _dealt(
    models: Sequence[ModelConfig], said: Sequence[int | None], nodes: Sequence[NodeConfig], shards: int
) -> dict[ModelId, int]:
    gpus: Counter[int] = Counter()
    for node in nodes:
        gpus[node.shard] += node.gpus
    profiles = {
        (model.model_id, gpu_type): profile
        for model in models
        for gpu_type in {node.gpu_type for node in nodes}
        if (profile := model.find_profile(gpu_type)) is not None
    }
    placed = placed_models(models, has_real_gpus=any(node.device != "emulated" for node in nodes))
    from policies.placement.symphony.subclusters import partition_models  # noqa: PLC0415  20 ms, and few files have shards

    # Shards with GPUs of the same kinds can have the same models.
    kinds: dict[tuple[GpuSlot, ...], list[int]] = {}
    for shard in range(shards):
        kinds.setdefault(_kinds(node for node in nodes if node.shard == shard), []).append(shard)
    fit: dict[str, set[int]] = {}
    for slots, alike in kinds.items():
        for one in partition_models(placed, slots, profiles):
            fit.setdefault(one.model_id, set()).update(alike)
    sizes: dict[str, Sequence[float]] = dict.fromkeys((model.name for model in models), (0.0, 0.0))
    sizes |= {
        one.model_id: (one.load, one.static_bytes)
        for one in partition_models(placed, _kinds(nodes), profiles)
    }
    home: dict[str, int] = {model.name: at for model, at in zip(models, said, strict=True) if at is not None}
    dealt = deal(sizes, [float(gpus[shard]) for shard in range(shards)], home, fit)
    return {model.model_id: dealt[model.name] for model in models}


def _kinds(nodes: Iterable[NodeConfig]) -> tuple[GpuSlot, ...]:
    """One GPU of each kind that these nodes have."""
    found = {(node.gpu_type, node.memory_bytes, node.device) for node in nodes if node.gpus}
    return tuple(
        GpuSlot(at, gpu_type, memory_bytes, NodeId(""), 0, device)
        for at, (gpu_type, memory_bytes, device) in enumerate(sorted(found))
    )


def _without(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}
