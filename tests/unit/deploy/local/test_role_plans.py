"""Which processes a cluster on this host has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deploy.local.role_plans import is_better_together, role_plans
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config

HERE = Path("/here")


def config(frontends: int) -> ClusterConfig:
    document: dict[str, Any] = {
        "models": [{"name": "m", "slo_ms": 50, "rate_rps": 1, "profile": {"alpha_ms": 1, "beta_ms": 5}}],
        "cluster": {"gpus": 1, "frontends": frontends},
    }
    return parse_config(document, HERE, source="test")


def role_ids(frontends: int, *, is_together: bool) -> list[str]:
    plans = role_plans(config(frontends), HERE / "c.yaml", HERE / "run", is_together=is_together)
    scheduler = next(plan for plan in plans if plan.role_id == "scheduler-0")
    assert ("--with-frontend" in scheduler.command) == is_together
    return [plan.role_id for plan in plans]


def test_every_role_has_a_process_of_its_own() -> None:
    assert role_ids(2, is_together=False) == ["scheduler-0", "node-local", "frontend-0", "frontend-1"]


def test_together_the_first_frontend_has_none() -> None:
    assert role_ids(1, is_together=True) == ["scheduler-0", "node-local"]
    assert role_ids(2, is_together=True) == ["scheduler-0", "node-local", "frontend-1"]


@pytest.mark.parametrize(
    ("cores", "frontends", "is_together"), [(1, 1, True), (3, 1, True), (4, 1, False), (2, 2, False)]
)
def test_one_frontend_on_few_cores_is_better_off_together(
    monkeypatch: pytest.MonkeyPatch, cores: int, frontends: int, *, is_together: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert is_better_together(config(frontends)) == is_together
