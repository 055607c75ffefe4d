"""A plan made while the cluster serves is the one that its configuration would begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fabric.messages import PlanAsked
from roles.config.read_config import parse_config
from roles.scheduler.planning.make_plan import make_plan

MODELS = [
    {"name": name, "slo_ms": slo_ms, "rate_rps": rate_rps, "profile": {"ref": f"igniter-v100/{name}"}}
    for name, slo_ms, rate_rps in (("alexnet", 15, 500), ("resnet50", 40, 400), ("vgg19", 60, 200))
]


def test_no_plan_of_a_running_cluster_has_pipelines() -> None:
    """However it comes about: with models that are added, with rates that drift, after another file."""
    model = {"name": "m", "slo_ms": 100, "profile": {"table": {1: 20}, "stages": {2: [11, 11]}}}
    pipeline = {"gpu": 0, "following": [1], "models": [{"model": "m"}]}
    document = {
        "models": [model],
        "cluster": {"gpus": 2},
        "placement": {"given": {"slices": [pipeline]}},
    }
    asked = PlanAsked(1, json.dumps(document), "", (), {})
    assert [start.spec.following for start in make_plan(asked).moves[0].starts] == [(1,)]
    assert "pipelines over several GPUs" in make_plan(asked, is_live=True).reason


@pytest.mark.parametrize("batching", ["fixed", "deferred"])
@pytest.mark.parametrize("interference", ["none", "igniter"])
def test_a_plan_knows_what_it_will_run_under(batching: str, interference: str) -> None:
    document: dict[str, Any] = {
        "models": MODELS,
        "cluster": {"gpus": 4, "gpu_type": "v100", "interference": interference},
        "placement": "tenuto",
        "batching": batching,
    }
    wanted = [
        (slice_.gpu, slice_.share_percent, [(one.model_id, one.batch) for one in slice_.models])
        for slice_ in parse_config(document, Path()).place().slices
    ]
    plan = make_plan(PlanAsked(1, json.dumps(document), "", (), {}))
    assert plan.reason == ""
    made = [
        (start.spec.gpu, start.spec.share_percent, [(hint.model_id, hint.batch) for hint in start.hints])
        for move in plan.moves
        for start in move.starts
    ]
    assert sorted(made, key=str) == sorted(wanted, key=str)
