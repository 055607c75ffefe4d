"""Which processes a cluster on this host has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deploy.local.events import SupervisorLimits
from deploy.local.role_plans import AGENT_STOP_MS, SCHEDULER_STOP_MS, is_better_together, role_plans
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.node_agent.events import AgentLimits
from roles.node_agent.left_behind import GUARD_WITHIN_S, KILL_WITHIN_S
from roles.node_agent.mps.control import KILL_LIMIT_S
from roles.runtime.run_directory import UP_STOP_LIMIT_MS
from roles.scheduler.availability.replica import HANDED_OVER_MS, HEIR_WITHIN_MS, SETTLED_MS

HERE = Path("/here")


def config(frontends: int, **more: Any) -> ClusterConfig:
    document: dict[str, Any] = {
        "models": [{"name": "m", "slo_ms": 50, "rate_rps": 1, "profile": {"alpha_ms": 1, "beta_ms": 5}}],
        "cluster": {"gpus": 1, "frontends": frontends},
        **more,
    }
    return parse_config(document, HERE, source="test")


def role_ids(frontends: int, *, is_together: bool) -> list[str]:
    plans = role_plans(
        config(frontends), HERE / "c.yaml", HERE / "copy.yaml", HERE / "run", is_together=is_together
    )
    scheduler = next(plan for plan in plans if plan.role_id == "scheduler-0")
    assert ("--with-frontend" in scheduler.command) == is_together
    assert scheduler.frontend == ("frontend-0" if is_together else "")
    return [plan.role_id for plan in plans]


def test_every_role_has_a_process_of_its_own() -> None:
    assert role_ids(2, is_together=False) == ["scheduler-0", "node-local", "frontend-0", "frontend-1"]


def test_together_the_first_frontend_has_none() -> None:
    assert role_ids(1, is_together=True) == ["scheduler-0", "node-local"]
    assert role_ids(2, is_together=True) == ["scheduler-0", "node-local", "frontend-1"]


def test_a_gateway_starts_when_its_frontends_are_there_and_ends_with_the_first() -> None:
    wanted = config(2, listen={"http": "127.0.0.1:0"})
    plans = role_plans(wanted, HERE / "c.yaml", HERE / "copy.yaml", HERE / "run", is_together=False)
    gateway = next(plan for plan in plans if plan.role_id == "gateway-0")
    others = [plan for plan in plans if plan is not gateway]
    assert gateway.start_rank > max(plan.start_rank for plan in others)
    assert gateway.stop_rank < min(plan.stop_rank for plan in others)


@pytest.mark.parametrize(
    ("cores", "frontends", "is_together"), [(1, 1, True), (3, 1, True), (4, 1, False), (2, 2, False)]
)
def test_one_frontend_on_few_cores_is_better_off_together(
    monkeypatch: pytest.MonkeyPatch, cores: int, frontends: int, *, is_together: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert is_better_together(config(frontends)) == is_together


@pytest.mark.parametrize("is_together", [False, True])
def test_who_waits_for_the_end_of_a_cluster_waits_longer_than_all_its_ranks_may_take(
    *, is_together: bool
) -> None:
    """Each rank has its slowest role's limit, and then SIGKILL's."""
    wanted = config(2, listen={"http": "127.0.0.1:0", "page": "127.0.0.1:0"})
    plans = role_plans(wanted, HERE / "c.yaml", HERE / "copy.yaml", HERE / "run", is_together=is_together)
    ranks: dict[int, float] = {}
    for plan in plans:
        ranks[plan.stop_rank] = max(ranks.get(plan.stop_rank, 0.0), plan.stop_limit_ms)
    assert len(ranks) == 4
    left_ms = 1e3 * (GUARD_WITHIN_S + KILL_WITHIN_S + KILL_LIMIT_S)
    assert sum(ranks.values()) + len(ranks) * SupervisorLimits().kill_ms + left_ms < UP_STOP_LIMIT_MS


def test_a_scheduler_has_the_time_that_a_handover_may_take() -> None:
    assert SCHEDULER_STOP_MS >= HEIR_WITHIN_MS + HANDED_OVER_MS + SETTLED_MS + 1_000


def test_an_agent_has_the_time_that_its_workers_and_daemons_may_take() -> None:
    limits = AgentLimits()
    by_message_ms = limits.unready_ms + limits.grace_ms + 500.0
    by_signals_ms = limits.terminate_ms + limits.kill_ms + 2 * limits.client_end_ms
    workers_ms = by_message_ms + by_signals_ms
    daemons_ms = limits.daemon_end_ms + limits.kill_ms + 1e3 * KILL_LIMIT_S
    assert workers_ms + daemons_ms < AGENT_STOP_MS
