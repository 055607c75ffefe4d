"""Applications in the fast simulation: golden runs by hand, and what holds in every run."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.ids import ModelId
from fabric.messages import Arrivals, SeqRun, Withdraw
from policies.graphs import GRAPH_DEADLINES
from policies.graphs.graph import Stage
from roles.applications.events import TaskAnswered
from roles.config.read_config import parse_config
from roles.frontend.return_margin import ReturnPath
from roles.simulator.applications import TASKS_FROM, ApplicationPlay, PlayedApplication
from roles.simulator.network import KnownReturn
from roles.simulator.simulation import simulate
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import ApplicationOutcome, Outcome, Window
from tests.applications_stage import served


def model(name: str, run_ms: float, size_max: int = 8) -> dict[str, Any]:
    """A model whose batches all take the same."""
    return {"name": name, "profile": {"table": dict.fromkeys((1, size_max), run_ms)}}


def document(tmp_path: Path, stages: dict[str, Any], at_ms: list[float], **keys: Any) -> dict[str, Any]:
    """One application whose requests come at these moments; eager, on one GPU, unless told otherwise."""
    trace = tmp_path / "trace.csv"
    trace.write_text("at_ms\n" + "".join(f"{one}\n" for one in at_ms))
    application = {
        "name": "app",
        "slo_ms": 100,
        "stages": stages,
        "arrival": {"process": "trace", "path": str(trace)},
    }
    run_ms, size_max = {"a": 10.0, "b": 20.0, "c": 5.0}, keys.pop("size_max", 8)
    return {
        "models": [
            model(name, run_ms[name], size_max) for name in sorted({one["model"] for one in stages.values()})
        ],
        "applications": [application | keys.pop("application", {})],
        "cluster": {"gpus": 1} | keys.pop("cluster", {}),
        "batching": "eager",
        "graph_deadlines": "equal",
        **keys,
    }


def outcome_of(written: dict[str, Any], from_ms: float = 0.0, until_ms: float = 100.0) -> Outcome:
    config = parse_config(written, Path())
    return simulate(config, workload_of(config), Window(from_ms, until_ms)).outcome


def app(outcome: Outcome) -> ApplicationOutcome:
    return outcome.applications["app"]


CHAIN = {
    "first": {"model": "a"},
    "second": {"model": "b", "after": "first"},
    "third": {"model": "c", "after": "second"},
}


def test_a_chain_takes_its_models_one_after_the_other(tmp_path: Path) -> None:
    seen = app(outcome_of(document(tmp_path, CHAIN, [0.0, 1000.0])))
    assert (seen.requests.offered, seen.requests.good, seen.requests.p50_ms) == (1, 1, 35.0)
    assert [one.run_mean_ms for one in seen.stages.values()] == [10.0, 20.0, 5.0]
    assert [one.waited_mean_ms for one in seen.stages.values()] == [0.0, 0.0, 0.0]


def models_of(outcome: Outcome) -> Any:
    return outcome.as_json()["models"]


def fates(told: dict[str, Any]) -> tuple[int, ...]:
    return tuple(told[name] for name in ("offered", "good", "late", "dropped"))


@pytest.mark.parametrize("is_full", [False, True])
def test_what_stages_ask_is_told_of_their_models_and_counts_once_in_all(
    tmp_path: Path, is_full: bool
) -> None:
    """a is asked directly too, by a request that comes at 31 ms; the GPU runs c until 35, and a until 45."""
    written = document(tmp_path, CHAIN, [0.0, 1000.0])
    (tmp_path / "own.csv").write_text("at_ms\n31\n1031\n")
    written["models"][0] |= {
        "slo_ms": 100,
        "arrival": {"process": "trace", "path": str(tmp_path / "own.csv")},
    }
    config = parse_config(written, Path())
    outcome = simulate(config, workload_of(config), Window(0.0, 100.0), is_full=is_full).outcome
    told = models_of(outcome)
    assert {name: fates(one) for name, one in told.items()} == {
        "a": (2, 2, 0, 0),
        "b": (1, 1, 0, 0),
        "c": (1, 1, 0, 0),
    }
    latencies_ms = [told[name][key] for name in "abc" for key in ("p50_ms", "p99_ms")]
    assert latencies_ms == pytest.approx([10.0, 14.0, 20.0, 20.0, 5.0, 5.0], abs=1e-3)
    assert (outcome.offered, outcome.good, outcome.bad_rate) == (2, 2, 0.0)
    assert outcome.as_json()["offered_rps"] == 20.0


@pytest.mark.parametrize("is_full", [False, True])
def test_what_stages_ask_in_vain_was_dropped(tmp_path: Path, is_full: bool) -> None:
    """Three requests at once come to 90 ms of work, and their SLO is 64."""
    stages = {"first": {"model": "a"}, "second": {"model": "b", "after": "first"}}
    written = document(tmp_path, stages, [0.0, 0.0, 0.0, 1000.0], application={"slo_ms": 64}, size_max=1)
    config = parse_config(written, Path())
    outcome = simulate(config, workload_of(config), Window(0.0, 100.0), is_full=is_full).outcome
    asked = app(outcome).stages
    told = models_of(outcome)
    for name, stage in (("a", "first"), ("b", "second")):
        offered, good, late, dropped = fates(told[name])
        assert (offered, good + late, dropped) == (
            asked[stage].asked,
            asked[stage].answered,
            asked[stage].dropped + asked[stage].cancelled,
        )
    assert told["a"]["dropped"] + told["b"]["dropped"] > 0
    assert outcome.worst_bad_rate == outcome.bad_rate == app(outcome).requests.bad_rate


def test_the_way_back_of_each_stage_counts(tmp_path: Path) -> None:
    network = {"control_ms": 1.0, "data_ms_per_item": 0.5, "result_ms": 2.0}
    seen = app(outcome_of(document(tmp_path, CHAIN, [0.0, 1000.0], cluster={"gpus": 1, "network": network})))
    # To the scheduler and back 2 ms, the input 0.5, the outputs 2: three times beside the 35 of the models.
    assert seen.requests.p50_ms == pytest.approx(35.0 + 3 * 4.5)


def test_side_by_side_stages_share_the_gpus_and_are_answered_together(tmp_path: Path) -> None:
    stages = {"left": {"model": "a"}, "right": {"model": "b"}}
    assert app(outcome_of(document(tmp_path, stages, [0.0, 1000.0]))).requests.p50_ms == 30.0
    two = document(tmp_path, stages, [0.0, 1000.0], cluster={"gpus": 2})
    assert app(outcome_of(two)).requests.p50_ms == 20.0


def test_a_fan_out_is_one_batch_where_it_fits(tmp_path: Path) -> None:
    stages = {"first": {"model": "a"}, "second": {"model": "b", "after": "first", "fan_out": 8}}
    seen = app(outcome_of(document(tmp_path, stages, [0.0, 1000.0], application={"slo_ms": 60})))
    assert (seen.requests.good, seen.requests.p50_ms) == (1, 30.0)
    assert seen.stages["second"].asked == 8 * seen.stages["first"].answered


def test_a_join_waits_for_the_slower_side(tmp_path: Path) -> None:
    stages = {
        "left": {"model": "a"},
        "right": {"model": "b"},
        "last": {"model": "c", "after": ["left", "right"]},
    }
    seen = app(outcome_of(document(tmp_path, stages, [0.0, 1000.0], cluster={"gpus": 2})))
    assert seen.requests.p50_ms == 25.0
    assert seen.stages["last"].asked == seen.stages["left"].asked


def test_a_lost_task_loses_its_request_and_its_siblings_do_not_run(tmp_path: Path) -> None:
    """Of two at once on one GPU that runs one at a time: b takes 20 of an SLO of 36, c 5 before it."""
    stages = {"left": {"model": "b"}, "right": {"model": "c"}}
    written = document(tmp_path, stages, [0.0, 0.0, 1000.0, 1000.0], application={"slo_ms": 36}, size_max=1)
    seen = app(outcome_of(written))
    assert (seen.requests.offered, seen.requests.good, seen.requests.late, seen.requests.dropped) == (
        2,
        1,
        0,
        1,
    )


def test_a_request_that_is_given_up_asks_no_more(tmp_path: Path) -> None:
    """The second request's first stage would end at 20 ms: of an SLO of 44 are left 24, and 20 + 5 are needed."""
    written = document(tmp_path, CHAIN, [0.0, 0.0, 1000.0, 1000.0], application={"slo_ms": 44}, size_max=1)
    seen = app(outcome_of({**written, "graph_deadlines": "pard"}))
    assert (seen.requests.good, seen.requests.dropped) == (1, 1)
    assert (seen.stages["first"].asked, seen.stages["second"].asked, seen.stages["third"].asked) == (2, 1, 1)


MIXED: dict[str, Any] = {
    "seed": 3,
    "models": [
        {"name": "ssd", "profile": {"alpha_ms": 2.0, "beta_ms": 10.0, "max_batch": 16}},
        {
            "name": "cars",
            "slo_ms": 60,
            "rate_rps": 50,
            "profile": {"alpha_ms": 1.0, "beta_ms": 5.0, "max_batch": 16},
        },
        {"name": "faces", "profile": {"alpha_ms": 1.5, "beta_ms": 8.0, "max_batch": 16}},
    ],
    "applications": [
        {
            "name": "app",
            "slo_ms": 140,
            "rate_rps": 300,
            "stages": {
                "detect": {"model": "ssd"},
                "cars": {"model": "cars", "after": "detect", "fan_out": {"poisson": 1.2}},
                "people": {"model": "faces", "after": "detect", "fan_out": {"share": 0.8}},
            },
        },
        {"name": "other", "slo_ms": 90, "rate_rps": 60, "stages": {"only": {"model": "faces", "fan_out": 2}}},
    ],
    "cluster": {
        "gpus": 2,
        "frontends": 2,
        "network": {"control_ms": 0.1, "data_ms_per_item": 0.02, "result_ms": 0.3, "jitter_ms": 0.05},
    },
}


@pytest.mark.parametrize("rule", GRAPH_DEADLINES)
@pytest.mark.parametrize("batching", ["tenuto", "deferred", "shepherd"])
@pytest.mark.parametrize("load", [0.5, 3.0])
def test_every_request_and_every_task_has_one_fate(rule: str, batching: str, load: float) -> None:
    config = parse_config({**MIXED, "graph_deadlines": rule, "batching": batching}, Path())
    run = simulate(config, workload_of(config).scaled(load), Window(0.0, 800.0))
    for one in run.outcome.applications.values():
        fates = one.requests
        assert fates.offered == fates.good + fates.late + fates.dropped > 0
        assert fates.good > 0
        for stage in one.stages.values():
            assert stage.asked == stage.answered + stage.dropped + stage.cancelled
    assert run.outcome.models[ModelId("cars")].good > 0
    assert run.outcome.offered == sum(
        one.offered
        for one in (
            *run.outcome.models.values(),
            *(one.requests for one in run.outcome.applications.values()),
        )
    )


def test_a_seed_is_one_history_and_fan_outs_do_not_depend_on_the_rule() -> None:
    calm: list[list[int]] = []
    written = copy.deepcopy(MIXED)
    written["applications"][0]["slo_ms"] = written["applications"][1]["slo_ms"] = 1000
    for rule in ("carried", "carried", "equal", "pard"):
        config = parse_config({**written, "graph_deadlines": rule, "batching": "eager"}, Path())
        outcome = simulate(config, workload_of(config).scaled(0.1), Window(0.0, 3000.0)).outcome
        assert app(outcome).requests.dropped == 0
        calm.append([stage.asked for stage in app(outcome).stages.values()])
    assert calm[0] == calm[1] == calm[2] == calm[3]


def test_fan_outs_have_the_mean_that_was_asked_for_and_may_double() -> None:
    written = copy.deepcopy(MIXED)
    stages = written["applications"][0]["stages"]
    stages["cars"]["fan_out"] = {"poisson": [[0, 0.5], [5, 2.0]]}
    config = parse_config(written, Path())
    stages_seen = app(simulate(config, workload_of(config).scaled(0.2), Window(0.0, 10_000.0)).outcome).stages
    detected = stages_seen["detect"].answered
    assert stages_seen["cars"].asked / detected == pytest.approx(1.25, rel=0.1)
    assert stages_seen["people"].asked / detected == pytest.approx(0.8, rel=0.05)


def test_an_idle_cluster_answers_all_and_a_hopeless_one_none() -> None:
    config = parse_config(MIXED, Path())
    calm = simulate(config, workload_of(config).scaled(0.05), Window(0.0, 5000.0)).outcome
    assert calm.bad_rate == 0.0
    written = copy.deepcopy(MIXED)
    written["cluster"]["network"]["control_ms"] = 60.0
    config = parse_config(written, Path())
    hopeless = simulate(config, workload_of(config).scaled(0.05), Window(0.0, 2000.0)).outcome
    assert app(hopeless).requests.good == 0
    assert hopeless.worst_bad_rate == 1.0


def test_what_is_reported() -> None:
    config = parse_config(MIXED, Path())
    outcome = simulate(config, workload_of(config), Window(0.0, 1000.0)).outcome
    told = outcome.as_json()
    applications = told["applications"]
    assert isinstance(applications, dict)
    assert set(applications) == {"app", "other"}
    assert set(applications["app"]) == {
        "offered",
        "good",
        "late",
        "dropped",
        "bad_rate",
        "p50_ms",
        "p99_ms",
        "stages",
    }
    assert np.isclose(applications["app"]["bad_rate"], app(outcome).requests.bad_rate)


class NotedReturn(KnownReturn):
    """What a frontend would learn of the way back of one model."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.noted: list[tuple[str, float, float]] = []

    def note_batch(self, return_ms: float) -> None:
        self.noted.append(("batch", return_ms, 0.0))

    def note_answer(self, late_ms: float, budget_ms: float) -> None:
        self.noted.append(("answer", late_ms, budget_ms))


class World:
    """Around one application's requests, by hand."""

    def __init__(self) -> None:
        self.path = NotedReturn()
        self.told: list[Arrivals | Withdraw] = []
        self._later: list[tuple[float, Callable[[Any, float], None], object]] = []

    def schedule(self, at_ms: float, callback: Callable[[Any, float], None], argument: object) -> None:
        self._later.append((at_ms, callback, argument))

    def next(self) -> None:
        at_ms, callback, argument = self._later.pop(0)
        callback(argument, at_ms)

    def tell_scheduler(self, frontend: int, message: Arrivals | Withdraw, now_ms: float) -> None:
        self.told.append(message)

    def return_of(self, model_id: ModelId) -> NotedReturn:
        return self.path


def lone_task() -> tuple[ApplicationPlay, World]:
    """One request of one stage of model d, announced at 0 with 100 ms."""
    application = served(Stage("a", ModelId("d")), slo_ms=100.0)
    traffic = ModelTraffic(ModelId("app"), 100.0, np.array([0.0]))
    play, world = ApplicationPlay([PlayedApplication(application, traffic)], 1), World()
    play.begin(world)
    world.next()
    return play, world


TASK = [SeqRun(TASKS_FROM, 1)]


def test_the_way_back_of_a_task_is_a_wait_to_its_rule_and_learned() -> None:
    play, world = lone_task()
    heard = play.answered(ModelId("d"), 0, TASK, (5.0, 15.0), 18.0)
    assert heard == [(0, TaskAnswered(1, 8.0, 10.0))]
    assert world.path.noted == [("answer", -82.0, 100.0), ("batch", 3.0, 0.0)]
    assert (play.tallies[0]["a"].waited_ms, play.tallies[0]["a"].run_ms) == (5.0, 10.0)


def test_how_late_a_task_is_that_was_cancelled_when_it_was_due_is_learned_of_its_outputs() -> None:
    play, world = lone_task()
    world.next()  # its time is up
    assert isinstance(world.told[-1], Withdraw)
    assert play.answered(ModelId("d"), 0, TASK, (90.0, 102.0), 100.0 + 4.0) == []
    assert world.path.noted == [("answer", 4.0, 100.0)]


def test_where_the_network_jitters_what_becomes_of_tasks_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: Counter[str] = Counter()
    monkeypatch.setattr(ReturnPath, "note_batch", lambda path, return_ms: noted.update(batches=1))
    monkeypatch.setattr(ReturnPath, "note_answer", lambda path, late_ms, budget_ms: noted.update(answers=1))
    monkeypatch.setattr(ReturnPath, "note_dropped", lambda path, count: noted.update(dropped=count))
    written = copy.deepcopy(MIXED)
    del written["models"][1]["slo_ms"], written["models"][1]["rate_rps"]
    config = parse_config(written, Path())
    outcome = simulate(config, workload_of(config).scaled(3.0), Window(0.0, 800.0)).outcome
    stages = [stage for one in outcome.applications.values() for stage in one.stages.values()]
    assert noted["batches"] > 0
    assert noted["answers"] >= sum(stage.answered for stage in stages) > 0
    assert 0 < noted["dropped"] <= sum(stage.dropped for stage in stages)
