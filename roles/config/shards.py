"""Which shard has each model, and a shard's part of a configuration (docs/operate/scaling.md).

Every scheduler reads the same file and has to find the same partition, on any host: so it is the search alone that
finds it, which is bounded by a count, and no solver, which may be missing here or stopped by its time limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fabric.errors import ConfigError
from fabric.ids import ModelId
from policies.placement.common.base import GpuSlot
from policies.placement.symphony.subclusters import partition_models
from policies.subclusters.base import NO_BOUNDS, Problem
from policies.subclusters.search import search_partition
from roles.config.checks import whole
from roles.config.cluster import ClusterConfig, ModelConfig, NodeConfig, placed_models

UNEVEN_MAX: Final = 1.25
"""How many times the GPUs of the smallest shard the largest one may have, where models are dealt out evenly."""


def models_in_shards(
    models: Sequence[ModelConfig], said: Sequence[int | None], nodes: Sequence[NodeConfig], shards: int
) -> tuple[ModelConfig, ...]:
    """As the file says; the others so that load and memory are even. Raises ConfigError where shards are not."""
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
    if max(gpus.values()) > UNEVEN_MAX * min(gpus.values()):
        raise ConfigError(
            f"cluster.shards: they have {', '.join(str(gpus[k]) for k in range(shards))} GPUs; models are dealt out"
            " evenly, so make shards alike (cluster.nodes[].shard), or say models[].shard of each model"
        )
    slots = [
        GpuSlot(at, node.gpu_type, node.memory_bytes, node.node_id, 0, node.device, node.price_per_hour)
        for at, node in enumerate(nodes)
        if node.gpus
    ]
    profiles = {
        (model.model_id, gpu_type): profile
        for model in models
        for gpu_type in {node.gpu_type for node in nodes}
        if (profile := model.find_profile(gpu_type)) is not None
    }
    inputs = partition_models(placed_models(models), slots, profiles)
    home = {model.model_id: shard for model, shard in zip(models, said, strict=True) if shard is not None}
    found = search_partition(Problem.of(inputs, shards, None, NO_BOUNDS)).subcluster_of
    dealt = {model.model_id: found.get(model.model_id, 0) for model in models}
    return {**dealt, **home}


def _without(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}
