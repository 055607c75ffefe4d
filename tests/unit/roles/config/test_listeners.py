"""Two of a file's listeners at one port of a host are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabric.errors import ConfigError
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config

MODEL = {"name": "m", "slo_ms": 25, "profile": {"alpha_ms": 1, "beta_ms": 5}}
PAGE = "page of metrics (listen.metrics and the ports above)"


def parsed(listen: dict[str, Any], **cluster: Any) -> ClusterConfig:
    document = {"models": [MODEL], "cluster": {"gpus": 1, **cluster}, "listen": listen}
    return parse_config({**document, "security": {"keys": "keys"}}, Path("/nowhere"))


@pytest.mark.parametrize(
    ("listen", "cluster", "reason"),
    [
        ({"http": "127.0.0.1:8111"}, {}, f"listen.http: is '127.0.0.1:8111', where frontend-0's {PAGE} is"),
        ({"http": "localhost:8111"}, {}, f"listen.http: is 'localhost:8111', where frontend-0's {PAGE} is"),
        ({"grpc": "127.0.0.1:8110"}, {}, f"listen.grpc: is '127.0.0.1:8110', where scheduler-0's {PAGE} is"),
        ({"page": "127.0.0.1:8112"}, {}, f"listen.page: is '127.0.0.1:8112', where node-local's {PAGE} is"),
        (
            {"client": "tcp://127.0.0.1:8112"},
            {},
            f"listen.client of frontend-0: is 'tcp://127.0.0.1:8112', where node-local's {PAGE} is",
        ),
        (
            {"control": "tcp://127.0.0.1:8109"},
            {"schedulers": 2},
            f"listen.control of scheduler-1: is 'tcp://127.0.0.1:8110', where scheduler-0's {PAGE} is",
        ),
        (
            {"client": "tcp://127.0.0.1:7000", "control": "tcp://127.0.0.1:7001"},
            {"frontends": 2},
            "listen.control of scheduler-0: is 'tcp://127.0.0.1:7001', where listen.client of frontend-1 is",
        ),
        (
            {"metrics": "10.0.0.1:5550"},
            {"schedulers": [{"host": "a"}], "frontends": [{"host": "a"}], "addresses": {"a": "10.0.0.1"}},
            "cluster.schedulers[0].port: is 'tcp://10.0.0.1:5550', where scheduler-0's",
        ),
        (
            {"metrics": "10.0.0.1:5551"},
            {"schedulers": [{"host": "a"}], "frontends": [{"host": "a"}] * 6, "addresses": {"a": "10.0.0.1"}},
            "listen.client of frontend-0: is 'tcp://10.0.0.1:5555', where frontend-3's",
        ),
    ],
)
def test_two_at_one_port_are_refused(listen: dict[str, Any], cluster: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed({"metrics": "127.0.0.1:8110", **listen}, **cluster)
    assert str(refused.value).startswith(f"configuration: {reason}")


@pytest.mark.parametrize(
    ("listen", "cluster"),
    [
        ({"http": "127.0.0.1:8109", "grpc": "127.0.0.1:8113", "page": "127.0.0.2:8110"}, {}),
        ({"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "metrics": "127.0.0.1:0", "page": "127.0.0.1:0"}, {}),
        # Each host has ports of its own, and whose the gateway is the file does not say.
        (
            {"http": "127.0.0.1:8111", "page": "127.0.0.1:8110"},
            {"schedulers": [{"host": "a"}], "frontends": [{"host": "b"}, {"host": "c"}]},
        ),
    ],
)
def test_others_are_not(listen: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert parsed({"metrics": "127.0.0.1:8110", **listen}, **cluster).listen.metrics
