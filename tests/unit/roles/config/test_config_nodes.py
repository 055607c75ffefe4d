"""The keys of a node that its agent obeys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabric.errors import ConfigError
from roles.config.read_config import parse_config

MODELS = [{"name": "m", "slo_ms": 50, "profile": {"alpha_ms": 1, "beta_ms": 1}}]


def document(**node: Any) -> dict[str, Any]:
    return {"models": MODELS, "cluster": {"nodes": [{"host": "a", **node}]}}


def test_a_node_is_served_as_before_unless_it_says_otherwise() -> None:
    (node,) = parse_config(document(), Path()).nodes
    assert (node.mps, node.pin_cores, node.workers_outlive_agent) == (True, None, False)
    said = document(mps=False, pin_cores=2, workers_outlive_agent=True)
    (node,) = parse_config(said, Path()).nodes
    assert (node.mps, node.pin_cores, node.workers_outlive_agent) == (False, 2, True)


@pytest.mark.parametrize(
    ("node", "error"),
    [
        ({"pin_cores": 0}, r"cluster.nodes\[0\].pin_cores: is 0; it must be from 1 to"),
        ({"pin_cores": True}, r"cluster.nodes\[0\].pin_cores: is True; it must be a whole number"),
        ({"mps": "auto"}, r"cluster.nodes\[0\].mps: is 'auto'; it must be true or false"),
        ({"device": "gpu"}, r"cluster.nodes\[0\].device: there is no 'gpu'; did you mean cuda\?"),
        ({"device": "GPU"}, r"there is no 'GPU'; did you mean cuda\?"),
        ({"device": "CUDA"}, r"there is no 'CUDA'; did you mean cuda\?"),
        ({"device": "cuda:0"}, r"there is no 'cuda:0'; did you mean cuda\?"),
        ({"device": "CPU"}, r"there is no 'CPU'; did you mean cpu\?"),
        ({"device": "tpu9"}, "there is no 'tpu9'; there is emulated, cpu, cuda"),
        ({"workers_outlive_agents": True}, "unknown key; did you mean workers_outlive_agent"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_right(node: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_config(document(**node), Path())
