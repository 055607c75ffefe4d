"""What a sender is about to send, before the run begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from roles.benchmark.share import LoadPlan, planned_requests
from roles.config.read_config import parse_config
from roles.workload.arrivals import ArrivalSource, Moments, workload_of

LINE = {"alpha_ms": 1.0, "beta_ms": 5.0}


def plan_of(path: Path, *models: dict[str, Any], processes: int = 1) -> LoadPlan:
    config = parse_config({"models": list(models), "cluster": {"gpus": 1}}, path)
    return LoadPlan(config, workload_of(config), ("ipc:///f",), 1_000.0, processes, 4)


def test_requests_of_a_trace_keep_the_priorities_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "at_ms,model,priority\n0,a,7\n1,b,\n2,a,0\n3,a,\n900,b,9\n", encoding="utf-8"
    )
    arrival = {"process": "trace", "path": "t.csv"}
    models = [{"name": name, "slo_ms": 50, "arrival": arrival, "profile": LINE} for name in ("a", "b")]
    sent = list(planned_requests(plan_of(tmp_path, *models), 0, {}))
    assert [(one.model, one.priority) for one in sent] == [
        ("a", 7),
        ("b", None),
        ("a", 0),
        ("a", None),
        ("b", 9),
    ]
    second = list(planned_requests(plan_of(tmp_path, *models, processes=2), 1, {}))
    assert [(one.at_ms, one.model) for one in second] == [(one.at_ms, one.model) for one in sent[1::2]]
    assert [one.priority for one in second] == [one.priority for one in sent[1::2]]


def test_requests_without_a_trace_have_none(tmp_path: Path) -> None:
    model = {"name": "a", "slo_ms": 50, "rate_rps": 100, "profile": LINE}
    assert {one.priority for one in planned_requests(plan_of(tmp_path, model), 0, {})} == {None}


def test_arrivals_are_made_before_anybody_waits_for_the_first_one(tmp_path: Path) -> None:
    """Made when the run had begun, the first requests of a long one were late by a second."""
    plan = plan_of(tmp_path, {"name": "a", "slo_ms": 50, "rate_rps": 100, "profile": LINE})
    made: list[int] = []

    class Watched(ArrivalSource):
        def arrivals(self, seed: int, until_ms: float) -> Moments:
            made.append(seed)
            return super().arrivals(seed, until_ms)

    (source,) = plan.workload.sources
    watched = Watched(source.model_id, steps=source.steps)
    planned_requests(replace(plan, workload=replace(plan.workload, sources=(watched,))), 0, {})
    assert len(made) == 1
