"""The configuration of a virtual cluster: models that are alike, and an application of two of them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from fabric.ids import ModelId
from roles.config.read_config import parse_config
from roles.scheduler.planning.saved_plan import Begun
from roles.scheduler.planning.start_config import Written
from tests.chaos.virtual.script import Shape

ALPHA_MS, BETA_MS, BATCH_MAX = 1.0, 6.0, 8
MEMORY_MB, ADDED_MEMORY_MB = 900, 30
PLANS_MAX: Final = 64
"""That are kept: a script that fails is played again and again, and there are some 30,000 shapes."""
APPLICATION: Final = ModelId("both")
COPIES: Final = 2
"""Requests of its last model that follow one answer of its first."""


def model_section(shape: Shape, number: int) -> dict[str, Any]:
    """Its section of the configuration; those that are added later are small."""
    is_first = number < shape.models
    return {
        "name": f"m{number}",
        "slo_ms": shape.slo_ms,
        "rate_rps": shape.rate_rps,
        "profile": {"alpha_ms": ALPHA_MS, "beta_ms": BETA_MS, "max_batch": BATCH_MAX},
        "memory_mb": MEMORY_MB // shape.models if is_first else ADDED_MEMORY_MB,
        "idempotent": not (shape.run_once and number == shape.models - 1),
    }


def _document(shape: Shape) -> dict[str, Any]:
    stages = {
        "first": {"model": "m0"},
        "last": {"model": f"m{shape.models - 1}", "after": "first", "fan_out": COPIES},
    }
    application = {
        "name": APPLICATION,
        "slo_ms": 2 * shape.slo_ms,
        "rate_rps": shape.rate_rps,
        "stages": stages,
    }
    return {
        "models": [model_section(shape, number) for number in range(shape.models)],
        **({"applications": [application]} if shape.application else {}),
        "cluster": {
            "nodes": [
                {
                    "host": chr(97 + node),
                    "gpus": shape.gpus,
                    "memory_gb": 1,
                    "workers_outlive_agent": shape.outlives,
                }
                for node in range(shape.nodes)
            ],
            "frontends": shape.frontends,
            "schedulers": shape.schedulers,
            "heartbeats": {"interval_ms": shape.heartbeat_ms, "patience_ms": 1_500.0},
        },
        "batching": shape.batching,
    }


class _Planned(Written, frozen=True):
    """Its first plan is made once: all histories of one shape begin with it."""

    def first_plan(self) -> Begun:
        return _first_plan(json.dumps(self.document))


def written_of(shape: Shape) -> Written:
    """The file of a cluster of that shape, read."""
    return _written(json.dumps(_document(shape)))


@lru_cache(PLANS_MAX)
def _written(text: str) -> _Planned:
    document = json.loads(text)
    return _Planned(parse_config(document, Path()), document, Path())


@lru_cache(PLANS_MAX)
def _first_plan(text: str) -> Begun:
    return Written.first_plan(_written(text))
