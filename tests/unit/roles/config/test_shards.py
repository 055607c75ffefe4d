"""How a configuration is divided into shards, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import ConfigError
from roles.config.choices import placement_choices
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.config.shards import shard_document
from roles.scheduler.planning.make_plan import plan_document

LINE = {"alpha_ms": 1, "beta_ms": 5}


def document(models: int = 8, gpus: tuple[int, ...] = (4, 4, 4, 4), **cluster: Any) -> dict[str, Any]:
    return {
        "rate_rps": 800,
        "popularity": {"zipf": 0.9},
        "models": [{"name": f"m{at}", "slo_ms": 50, "profile": LINE} for at in range(models)],
        "cluster": {
            "shards": 2,
            "nodes": [{"host": f"h{at}", "gpus": count} for at, count in enumerate(gpus)],
            **cluster,
        },
    }


def reason(written: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(written, Path())
    return str(caught.value)


def shard_of(config: ClusterConfig) -> dict[str, int]:
    """Of each node and model."""
    return {
        **{node.host: node.shard for node in config.nodes},
        **{model.name: model.shard for model in config.models},
    }


def with_hosts(names: Sequence[str], shards: int, models: int = 12) -> dict[str, Any]:
    written = document(models, shards=shards)
    written["cluster"]["nodes"] = [{"host": name, "gpus": 4} for name in names]
    del written["popularity"], written["rate_rps"]
    for section in written["models"]:
        section["rate_rps"] = 60
    return written


@pytest.mark.parametrize("gpus", [(4, 4, 2, 2, 2, 2), (4,) * 7, (8, 1, 1, 1, 1, 1, 1)])
def test_nodes_are_dealt_with_about_as_many_gpus_to_each(gpus: tuple[int, ...]) -> None:
    config = parse_config(document(gpus=gpus), Path())
    each = [sum(node.gpus for node in config.nodes if node.shard == shard) for shard in (0, 1)]
    assert min(each) >= (sum(gpus) / 2 - max(gpus)), each


def test_no_host_that_comes_or_goes_makes_a_file_invalid_or_moves_many_others() -> None:
    """Of a cluster that serves, what is dealt to another shard ends here and is loaded there."""
    moved_hosts, moved_models, changes = 0, 0, 0
    for shards, count in ((2, 2), (2, 3), (2, 5), (3, 7), (4, 9), (4, 16)):
        names = [f"gpu-{shards}-{count}-{at}" for at in range(count + 1)]
        before = shard_of(parse_config(with_hosts(names, shards), Path()))
        for gone in names:
            left = [name for name in names if name != gone]
            after = shard_of(parse_config(with_hosts(left, shards), Path()))
            moved = [name for name, shard in after.items() if before[name] != shard]
            moved_hosts += sum(name in left for name in moved)
            moved_models += sum(name not in left for name in moved)
            changes += 1
            assert set(after.values()) == set(range(shards)), "none is left without anything"
    assert moved_hosts <= 1.0 * changes, "of 2 to 16 others"
    assert moved_models <= 2.0 * changes, "of 12"


def test_nor_does_the_order_of_the_file() -> None:
    names = [f"h{at}" for at in range(9)]
    written = with_hosts(names, 3)
    other = with_hosts(names[::-1], 3)
    other["models"].reverse()
    assert shard_of(parse_config(written, Path())) == shard_of(parse_config(other, Path()))


def test_a_model_goes_where_there_are_gpus_that_can_serve_it() -> None:
    written = with_hosts(["a", "b"], 2)
    written["cluster"]["nodes"] = [
        {"host": "a", "gpus": 4, "type": "v100"},
        {"host": "b", "gpus": 4, "type": "t4"},
    ]
    for at, section in enumerate(written["models"]):
        section["profile"] = {"by_type": {("v100", "t4")[at % 2]: LINE}}
    config = parse_config(written, Path())
    of_type = {node.gpu_type: node.shard for node in config.nodes}
    assert [model.shard for model in config.models] == [of_type["v100"], of_type["t4"]] * 6


def test_a_file_without_shards_is_one() -> None:
    written = document()
    del written["cluster"]["shards"]
    config = parse_config(written, Path())
    assert {node.shard for node in config.nodes} == {model.shard for model in config.models} == {0}
    assert config.of_shard(0) is config
    assert shard_document(written, config, 0) == written


def test_models_are_dealt_by_load() -> None:
    config = parse_config(document(), Path())
    rates = [sum(m.rate_rps or 0 for m in config.models if m.shard == k) for k in (0, 1)]
    assert sum(rates) == pytest.approx(800)
    assert max(rates) <= 1.5 * 400, "a quarter more, and half a model"


def test_every_reader_finds_the_same_partition() -> None:
    dealt = [[m.shard for m in parse_config(document(models=40), Path()).models] for _ in range(2)]
    assert dealt[0] == dealt[1]


def test_what_the_file_says_of_a_model_holds() -> None:
    written = document()
    written["models"][0]["shard"] = 1
    assert parse_config(written, Path()).models[0].shard == 1


def test_a_shard_is_a_cluster_of_its_own() -> None:
    written = document(schedulers=2, frontends=3)
    config = parse_config(written, Path())
    own = config.of_shard(1)
    assert own.shards == 1
    assert [node.host for node in own.nodes] == [node.host for node in config.nodes if node.shard == 1]
    assert {model.model_id for model in own.models} == {m.model_id for m in config.models if m.shard == 1}
    plain = shard_document(written, config, 1)
    again = parse_config(plain, Path())
    assert [model.name for model in again.models] == [model.name for model in own.models]
    assert again.gpus == own.gpus
    assert plan_document(plain)["models"] == plain["models"], "rates travel beside it"


def test_each_shard_has_its_schedulers_the_active_ones_first() -> None:
    places = parse_config(document(schedulers=2), Path()).places
    assert [places.schedulers_of(shard) for shard in (0, 1)] == [(0, 2), (1, 3)]
    assert [place.is_standby for place in places.schedulers] == [False, False, True, True]


def test_a_placement_is_of_each_shard_by_itself() -> None:
    config = parse_config(document(), Path())
    shard_of_node = {node.node_id: node.shard for node in config.nodes}
    shard_of_gpu = {gpu.index: shard_of_node[gpu.node_id] for gpu in config.gpus}
    shard_of = {model.model_id: model.shard for model in config.models}
    placed = config.place()
    assert {planned.gpu for planned in placed.slices} == set(range(16))
    for planned in placed.slices:
        assert {shard_of[model.model_id] for model in planned.models} == {shard_of_gpu[planned.gpu]}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (document(shards=9), "shard"),
        (document(models=1), "would have none of the 1 models"),
        (document(gpus=(8,)), "would have no GPU"),
        (document(schedulers=[{"host": "h0"}]), "none is of shard 1"),
        (
            document(schedulers=[{"host": "h0"}, {"host": "h1", "shard": 1, "standby": True}]),
            "of shard 1 is the active",
        ),
    ],
)
def test_shards_that_cannot_be_are_refused(written: dict[str, Any], said: str) -> None:
    assert said in reason(written)


def test_slices_that_are_given_have_one_scheduler() -> None:
    """Each shard's GPUs are numbered from 0 again, so that they would be other ones."""
    slices = [{"gpu": 0, "models": [{"model": f"m{at}"} for at in range(8)]}]
    said = "given numbers the GPUs of all nodes"
    written = {**document(), "placement": {"given": {"slices": slices}}}
    assert said in reason(written)
    with pytest.raises(ConfigError, match=said):
        placement_choices(json.dumps(written["placement"]), parse_config(document(), Path()), "--placement")
    written["cluster"]["shards"] = 1
    assert [planned.gpu for planned in parse_config(written, Path()).place().slices] == [0]


def test_one_node_that_says_its_shard_wants_all_to() -> None:
    written = document()
    written["cluster"]["nodes"][2]["shard"] = 1
    assert "cluster.nodes[0].shard: is missing" in reason(written)


def test_uneven_shards_have_as_uneven_loads() -> None:
    written = with_hosts(["big", "small"], 2, models=40)
    written["cluster"]["nodes"][0]["gpus"] = 16
    config = parse_config(written, Path())
    shard = shard_of(config)["small"]
    assert 2 <= sum(model.shard == shard for model in config.models) <= 1.25 * 40 / 5
