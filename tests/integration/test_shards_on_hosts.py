"""Four shards on four hosts, 256 emulated GPUs: a model moves between hosts under load, and one host dies alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from fabric.keys import TRUSTED_FILE
from tests.integration.hosts_stage import (
    NETWORK,
    TENUTO,
    Host,
    hosts,
    lay_out,
    loaded,
    needs_hosts,
    start_role,
    with_keys,
)
from tests.integration.proc import until

pytestmark = [needs_hosts, pytest.mark.timeout(400)]

NAMES = ("a", "b", "c", "d")
CONTROL = ",".join(f"tcp://{NETWORK}.{at}:5550" for at in range(1, 5))
CLIENTS = [f"tcp://{NETWORK}.1:5555", f"tcp://{NETWORK}.2:5555"]
BUDGET_MS = 20_000.0
CLUSTER: dict[str, Any] = {
    "models": [
        {
            "name": f"m{at}",
            "slo_ms": BUDGET_MS,
            "shard": at % 4,
            "profile": {"alpha_ms": 1, "beta_ms": 4, "max_batch": 8},
        }
        for at in range(8)
    ],
    "cluster": {
        "shards": 4,
        "nodes": [{"host": name, "gpus": 64} for name in NAMES],
        "schedulers": [{"host": name, "shard": at} for at, name in enumerate(NAMES)],
        "frontends": [{"host": "a"}, {"host": "b"}],
        "addresses": {name: f"{NETWORK}.{at}" for at, name in enumerate(NAMES, start=1)},
    },
    "batching": "eager",
    "security": {"keys": "keys"},
}


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    file = with_keys(tmp_path_factory.mktemp("file"), yaml.safe_dump(CLUSTER))
    with hosts([*NAMES, "laptop"], tmp_path_factory.mktemp("hosts") / "home") as made:
        lay_out(file, made)
        for name in ("operator.key", TRUSTED_FILE):
            made["laptop"].put(f"keys/{name}", (file.parent / "keys" / name).read_bytes(), "600")
        for name in NAMES:
            start_role(made[name], "node-agent", "cluster.yaml", "--node", name)
            start_role(made[name], "scheduler", "cluster.yaml", "--index", str(NAMES.index(name)))
        for index, name in enumerate("ab"):
            start_role(made[name], "frontend", "cluster.yaml", "--index", str(index))
        until(lambda: ready(made["laptop"]) == [64] * 4, 200_000.0, "a cluster that is ready")
        yield made


def asked(laptop: Host, *words: str) -> dict[str, Any]:
    """What a command says that asks the schedulers of all hosts; empty where it says nothing."""
    line = f"{' '.join(words)} --scheduler {CONTROL} --key {laptop.home}/keys/operator.key --json"
    done = laptop.run(f"env {' '.join(TENUTO)} {line}", check=False)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def ready(laptop: Host) -> list[int]:
    """Slices that are ready, on each host."""
    slices = asked(laptop, "status").get("slices", ())
    return [
        sum(one["state"] == "ready" and one["slice_id"].startswith(f"{name}/") for one in slices)
        for name in NAMES
    ]


def shard_of(laptop: Host, model: str) -> list[int]:
    return [one["shard"] for one in asked(laptop, "status").get("shards", ()) if model in one["models"]]


def answering(laptop: Host) -> list[int]:
    return [one["shard"] for one in asked(laptop, "status").get("shards", ())]


def test_a_model_moves_to_another_host_and_no_request_is_refused(placed: dict[str, Host]) -> None:
    laptop = placed["laptop"]
    with loaded(laptop, "m0", 20.0, BUDGET_MS, CLIENTS) as found:
        assert asked(laptop, "models", "move", "m0", "--to", "3")["status"] == "ok"
        assert shard_of(laptop, "m0") == [3]
    assert set(found["fates"]) == {"ok"}, found["fates"]


def test_a_changed_file_moves_a_model_to_another_host_and_no_request_is_refused(
    placed: dict[str, Host],
) -> None:
    """Each scheduler reads it when it starts again, and goes on with the slices that run."""
    laptop = placed["laptop"]
    models = [{**one, "shard": 3} if one["name"] == "m4" else one for one in CLUSTER["models"]]
    changed = yaml.safe_dump({**CLUSTER, "models": models}).encode()
    with loaded(laptop, "m4", 20.0, BUDGET_MS, CLIENTS) as found:
        assert shard_of(laptop, "m4") == [0]
        for name in ("a", "d"):
            host, role_id = placed[name], f"scheduler-{NAMES.index(name)}"
            host.put("cluster.yaml", changed)
            written = json.loads(host.run(f"cat {host.home}/run/{role_id}.json").stdout)
            host.run(f"kill -9 {written['pid']}")
            start_role(host, "scheduler", "cluster.yaml", "--index", role_id.rpartition("-")[2])
        until(lambda: shard_of(laptop, "m4") == [3], 120_000.0, "the new host alone has it")
    assert set(found["fates"]) == {"ok"}, found["fates"]
    assert ready(laptop) == [64] * 4


def test_a_host_that_dies_takes_its_own_models_with_it_and_no_others(placed: dict[str, Host]) -> None:
    laptop = placed["laptop"]
    with loaded(laptop, "m3", 20.0, BUDGET_MS, CLIENTS) as found:
        placed["c"].kill()
        until(lambda: answering(laptop) == [0, 1, 3], 60_000.0, "an answer of the others alone")
    assert set(found["fates"]) == {"ok"}, found["fates"]
