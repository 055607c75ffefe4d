from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from deploy.moments import shown_moment
from deploy.ssh.changes import plan_down, plan_restart, plan_rollback
from deploy.ssh.commands import deploy
from deploy.ssh.facts import HostFacts, Running, Unreachable
from deploy.ssh.on_host.logs import TURN_BYTES_MAX, LogReader
from deploy.ssh.operations import host_rows, logs
from deploy.ssh.rollout import Ended, Rollout
from deploy.ssh.shell import Deployment, Result, exit_code_of
from deploy.ssh.steps import Plan
from fabric.errors import FabricError, PeerLost
from roles.runtime.exit_codes import EXIT_PARTIAL
from tests.unit.deploy.ssh.stage import MODEL, Stage, lines


@pytest.fixture
def stage() -> Stage:
    """A cluster that is up."""
    made = Stage()
    made.done(made.plan())
    return made


def restart(stage: Stage, *only: str) -> Plan:
    return plan_restart(stage.inventory, stage.facts, stage.goods, stage.source.config.deploy, only)


def rollback(stage: Stage) -> Plan:
    return plan_rollback(stage.inventory, stage.facts, stage.goods, stage.source.config.deploy)


def test_a_restart_starts_what_runs_again_whatever_the_file_says_by_now(stage: Stage) -> None:
    stage.document = {**stage.document, "models": [{**MODEL, "slo_ms": 40}]}
    plan = restart(stage)
    assert (
        lines(plan)
        == """\
AGENTS     g1   start         node-g1 starts again
AGENTS     g2   start         node-g2 starts again
SCHEDULERS head start         scheduler-0 starts again
FRONTENDS  g1   start         frontend-1 starts again
FRONTENDS  head start         frontend-0 starts again
"""
    )
    assert all(step.request["is_again"] for step in plan.steps)
    told = stage.facts["g1"]
    assert isinstance(told, HostFacts)
    assert told.now.config in plan.steps[0].request["script"]
    assert stage.goods.config.name not in plan.steps[0].request["script"]
    assert lines(restart(stage, "frontend-1")) == "FRONTENDS  g1   start         frontend-1 starts again\n"


@pytest.mark.parametrize("change", ["restart", "rollback"])
def test_a_role_that_is_started_with_its_hosts_key_is_not_taken_for_one_with_the_key_that_is_here(
    stage: Stage, change: str
) -> None:
    """Neither carries keys, and what was rotated is refused once the former key is revoked."""
    if change == "rollback":
        stage.version = "0.2.0+def"
        stage.done(stage.plan())
    stage.keys["scheduler.key"] = b"another"
    stage.done(restart(stage) if change == "restart" else rollback(stage))
    if change == "rollback":
        stage.version = "0.1.0+abc"
    assert (
        lines(stage.plan())
        == """\
PREPARE    head keys          scheduler.key
SCHEDULERS head start         scheduler-0 starts again: another key or environment
"""
    )
    stage.done(stage.plan())
    stage.done(restart(stage))
    assert stage.plan().steps == ()


def test_every_start_uses_again_what_a_change_without_an_end_left_drained(stage: Stage) -> None:
    stage.version = "0.2.0+def"
    stage.done(stage.plan())
    stage.changed("g2", drained=("g2/gpu0",))
    for plan in (restart(stage), restart(stage, "frontend-0"), rollback(stage)):
        assert plan.steps[-1].request == {"do": "back", "drained": ["g2/gpu0"]}
    assert not [step for step in plan_down(stage.inventory, stage.facts).steps if step.what == "back"]


def test_a_rollback_goes_to_what_ran_before_and_a_second_one_back_again(stage: Stage) -> None:
    first = stage.goods.config.name
    stage.version = "0.2.0+def"
    stage.document = {**stage.document, "models": [{**MODEL, "slo_ms": 40}]}
    stage.done(stage.plan())
    second = stage.goods.config.name
    plan = rollback(stage)
    assert lines(plan).splitlines()[0] == (
        f"AGENTS     g1   start         node-g1 starts again: back to 0.1.0+abc, configuration {first}"
    )
    assert len(plan.steps) == 5
    stage.done(plan)
    told = stage.facts["head"]
    assert isinstance(told, HostFacts)
    assert (told.now.version, told.now.config, told.before.version) == ("0.1.0+abc", first, "0.2.0+def")
    assert f"configuration {second}" in lines(rollback(stage))
    assert stage.plan().steps != ()  # `up` goes to what the file says
    stage.document = {**stage.document, "models": [MODEL]}
    stage.version = "0.1.0+abc"
    assert stage.plan().steps == ()


def test_a_rollback_with_nothing_before_it_is_a_problem(stage: Stage) -> None:
    problem = ["nothing ran before what runs now"]
    assert rollback(stage).problems == {"g1": problem, "g2": problem, "head": problem}
    stage.version = "0.2.0+def"
    stage.done(stage.plan())
    stage.changed("g2", versions={"0.2.0+def": []})
    assert [line.partition(" with")[0] for line in rollback(stage).problems["g2"]] == ["0.1.0+abc"]


def test_a_rollback_goes_to_what_served_and_never_to_what_failed(stage: Stage) -> None:
    first = stage.facts["g1"]
    assert isinstance(first, HostFacts)
    for version in ("0.2.0+bad", "0.3.0+bad", "0.4.0+bad"):
        stage.version = version
        plan = stage.plan()
        for step in plan.steps:
            if step.what == "start":
                assert step.request["state"]["before"]["version"] == first.now.version
            elif step.what == "environment":
                assert first.now.version in step.request["kept"]
                stage.do(step)
        for host, told in stage.facts.items():
            assert isinstance(told, HostFacts)
            roles = dict.fromkeys(told.roles, "")  # none comes up
            stage.changed(host, now=Running(version, first.now.config), before=first.now, roles=roles)
    plan = rollback(stage)
    assert all(first.now.version in step.request["script"] for step in plan.steps)
    stage.done(plan)
    assert {told.now for told in stage.facts.values() if isinstance(told, HostFacts)} == {first.now}
    assert rollback(stage).problems["g1"] == ["nothing ran before what runs now"], (
        "what failed is no way back"
    )


def test_a_rollback_leaves_hosts_alone_that_the_last_change_did_not_reach(stage: Stage) -> None:
    stage.version = "0.2.0+def"
    stage.done(stage.plan())
    stage.version = "0.3.0+ghi"
    for step in stage.plan().steps:
        if step.host == "g1":
            stage.do(step)
    plan = rollback(stage)
    assert not plan.problems
    assert {step.host for step in plan.steps} == {"g1"}
    stage.done(plan)
    versions = {told.now.version for told in stage.facts.values() if isinstance(told, HostFacts)}
    assert versions == {"0.2.0+def"}
    again = {step.detail.partition("back to ")[2].partition(",")[0] for step in rollback(stage).steps}
    assert again == {"0.1.0+abc"}, "all go to one, and that one has served everywhere"


def test_a_rollback_that_was_interrupted_is_not_repeated_for_it_would_go_both_ways(stage: Stage) -> None:
    stage.version = "0.2.0+def"
    stage.done(stage.plan())
    for step in rollback(stage).steps:
        if step.host == "g1":
            stage.do(step)
    plan = rollback(stage)
    assert plan.steps == ()
    assert all("run `tenuto deploy up`" in problem for (problem,) in plan.problems.values())
    assert set(plan.problems) == set(stage.facts)


def test_the_end_is_frontends_first_and_the_schedulers_last(stage: Stage) -> None:
    assert (
        lines(plan_down(stage.inventory, stage.facts))
        == """\
END_FRONTENDS g1   stop          frontend-1
END_FRONTENDS head stop          frontend-0
END_AGENTS g1   stop          node-g1
END_AGENTS g2   stop          node-g2
END_SCHEDULERS head stop          scheduler-0
REMOVE     g1   remove        /home/u/.tenuto/g1
REMOVE     g2   remove        /home/u/.tenuto/g2
REMOVE     head remove        /home/u/.tenuto/head
"""
    )
    for host in ("g1", "g2", "head"):
        stage.changed(host, is_there=False, roles={})
    assert plan_down(stage.inventory, stage.facts).steps == ()


def test_the_end_says_which_hosts_that_left_the_file_it_does_not_reach(stage: Stage) -> None:
    """The others, which remember it, are about to forget all."""
    stage.take_out("g1")
    stage.left["g1"] = Unreachable("does not answer")
    plan = plan_down(stage.inventory, stage.facts, stage.left)
    assert plan.problems == {"g1": ["is not in the file any more, and what is on it stays: does not answer"]}
    assert {step.host for step in plan.steps} == {"g2", "head"}
    assert exit_code_of(plan) == EXIT_PARTIAL


def test_all_that_can_be_reached_ends_though_the_scheduler_cannot(stage: Stage) -> None:
    stage.facts["head"] = Unreachable("does not answer")
    rollout = Rollout(plan_down(stage.inventory, stage.facts))
    going = list(rollout.begin())
    while going:
        going += rollout.handle(Ended(going.pop(0)))
    assert {step.host for step in rollout.done if step.what == "remove"} == {"g1", "g2"}


def test_a_host_without_the_cluster_or_that_is_down_is_said(stage: Stage) -> None:
    stage.facts["g2"] = Unreachable("does not answer")
    told = stage.facts["g1"]
    assert isinstance(told, HostFacts)
    stage.facts["g1"] = replace(told, now=replace(told.now, version="", config=""))
    plan = restart(stage)
    assert set(plan.problems) == {"g1", "g2"}
    assert plan.unreachable == {"g2"}
    assert {step.host for step in plan.steps} == {"head"}
    assert {step.host for step in plan_down(stage.inventory, stage.facts).steps} == {"g1", "head"}


def test_a_rolling_restart_is_one_role_at_a_time_and_stops_at_the_first_that_does_not_come_back(
    stage: Stage,
) -> None:
    rollout = Rollout(restart(stage), is_rolling=True)
    going = list(rollout.begin())
    started = []
    while going:
        (step,) = going
        started.append(step.request["role_id"])
        going = list(rollout.handle(Ended(step, "it died" if step.request["role_id"] == "node-g2" else "")))
    assert started == ["node-g1", "node-g2"]
    assert rollout.failed == {"g2": "it died"}
    assert rollout.is_over


def test_each_host_and_each_role_has_its_state(stage: Stage) -> None:
    stage.facts["g2"] = Unreachable("does not answer")
    stage.changed("g1", roles={"node-g1": "stamp", "frontend-1": ""}, serving=["node-g1"])
    stage.changed(
        "head", roles={"scheduler-0": "stamp"}
    )  # its process ends before it serves, again and again
    rows = {row["host"]: row for row in host_rows(stage.inventory, stage.facts)}
    assert rows["g2"]["problem"] == "does not answer"
    assert rows["g1"]["roles"] == {"node-g1": "runs", "frontend-1": "down"}
    assert rows["head"]["roles"] == {"scheduler-0": "starting", "frontend-0": "absent"}


def test_a_log_is_read_on_where_it_was_left_over_its_rotation(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    reader = LogReader(log)
    assert list(reader.read()) == []
    log.write_text("2026-11-23 04:03:29,123 level=info one\nand more\n2026-11-23 04:03:30,000 half")
    (at_ms, first), (same_ms, more) = reader.read()
    assert (first, more, same_ms) == ("level=info one", "and more", at_ms)
    with log.open("a") as file:
        file.write(" whole\n")
    ((later_ms, line),) = reader.read()
    assert (line, later_ms - at_ms) == ("half whole", 877.0)
    log.rename(tmp_path / "a.log.1")
    log.write_text("2026-11-23 04:03:31,000 new\n")
    assert [line for _, line in reader.read()] == ["new"]


def test_what_a_log_said_before_it_began_anew_comes_first_and_all_of_it_is_the_end_of_what_was_said(
    tmp_path: Path,
) -> None:
    log, one, two = paths = [tmp_path / name for name in ("a.log", "a.log.1", "a.log.2")]
    for path, text in zip(paths, ("3 after\n", "2026-11-23 04:03:31,000 2 before\n", "1\n"), strict=True):
        path.write_text(text)
    reader = LogReader(log, [one, two])
    assert [line for _, line in reader.read()] == ["1", "2 before", "3 after"]
    assert list(reader.read()) == []
    at_most = log.stat().st_size + one.stat().st_size
    assert [line for _, line in LogReader(log, [one, two], at_most).read()] == ["2 before", "3 after"]
    assert [line for _, line in LogReader(log, [one, two], log.stat().st_size).read()] == ["3 after"]


def test_lines_without_a_moment_are_as_new_as_they_can_be(tmp_path: Path) -> None:
    """A process that cannot start says why and no more: `--since` showed nothing of it."""
    log = tmp_path / "a.log"
    log.write_text(
        "tenuto: first\n2026-11-23 04:03:29,123 one\nof one\n2026-11-23 04:03:30,123 two\ntenuto: last\n"
    )
    changed_at_ms = log.stat().st_mtime * 1e3
    (first, one, of_one, two, last) = (at_ms for at_ms, _ in LogReader(log).read())
    assert first == one == of_one == two - 1_000.0
    assert last == changed_at_ms


@pytest.mark.parametrize("size", [-1, 0, 1, TURN_BYTES_MAX])
def test_a_line_without_an_end_hides_nothing_that_comes_after_it(tmp_path: Path, size: int) -> None:
    log = tmp_path / "a.log"
    bar = ("\r 50%" * TURN_BYTES_MAX)[: TURN_BYTES_MAX + size]
    log.write_text("2026-11-23 04:03:29,123 one\n" + bar, newline="")
    reader = LogReader(log)
    said = [line for _, line in reader.read()]
    with log.open("a") as file:
        file.write("\n2026-11-23 04:03:30,123 two\n")
    said += [line for _, line in reader.read()]
    assert (said[0], said[-1]) == ("one", "two")
    assert "".join(said[1:-1]) == bar.replace("\r", "")


@pytest.mark.parametrize(
    "written",
    [
        "0000-00-00 00:00:00,000",
        "0001-01-01 00:00:00,000",
        "9999-12-31 23:59:59,999",
        "2026-02-31 10:00:00,000",
        "2026-02-01 10:00:99,000",
    ],
)
def test_a_moment_that_is_none_is_a_part_of_its_line(tmp_path: Path, written: str) -> None:
    log = tmp_path / "a.log"
    log.write_text(f"{written} a model says\n2026-11-23 04:03:30,123 two\n")
    (first_ms, first), (second_ms, _) = LogReader(log).read()
    assert (first, first_ms) == (f"{written} a model says", second_ms)
    assert shown_moment(first_ms).startswith("2026-11-23")


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_an_end_of_nothing_is_said_as_such(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = mock.Mock(plan_down=lambda: Plan((), {}, {}, ("a",)))
    deployment.tear_down.return_value = Result((), {}, {})
    monkeypatch.setattr(Deployment, "of", lambda _: deployment)
    (tmp_path / "c.yaml").touch()
    result = CliRunner().invoke(deploy, ["down", str(tmp_path / "c.yaml"), *words])
    assert (result.exit_code, result.output) == (0, "nothing to do: there is nothing of it on any host\n")


@pytest.mark.parametrize(
    ("is_untouched", "how"), [(True, "nothing was started or ended"), (False, "the cluster is not up")]
)
def test_a_change_that_reached_no_scheduler_does_not_say_that_the_cluster_is_not_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, *, is_untouched: bool
) -> None:
    plan = Plan((), {"a": ["does not answer"]}, {}, ("a", "b"), ("a",), frozenset({"a"}))
    deployment = mock.Mock(plan=lambda _: plan)
    deployment.source.is_changed = False
    deployment.carry_out.return_value = Result((), {"a": "does not answer"}, None, is_untouched=is_untouched)
    monkeypatch.setattr(Deployment, "of", lambda _: deployment)
    (tmp_path / "c.yaml").touch()
    result = CliRunner().invoke(deploy, ["up", str(tmp_path / "c.yaml")])
    assert isinstance(result.exception, FabricError)
    assert str(result.exception) == f"{how}: a: does not answer"


def test_logs_are_told_by_host_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(request: Any, limit_s: float, on_progress: Callable[[Mapping[str, Any]], None]) -> None:
        assert (request["do"], limit_s) == ("logs", 60.0)
        on_progress({"role": "node-a", "lines": [[2.0, "later"], [1.0, "first"]]})

    asked = mock.Mock(side_effect=ask)
    away = mock.Mock(side_effect=PeerLost("b: no route"))
    connections = {"a": mock.Mock(ask=asked), "b": mock.Mock(ask=away)}
    monkeypatch.setattr(Deployment, "of", lambda _: mock.Mock(connections=connections))
    (tmp_path / "c.yaml").touch()
    result = CliRunner().invoke(logs, [str(tmp_path / "c.yaml"), "--json"])
    assert result.exit_code == EXIT_PARTIAL
    assert json.loads(result.stdout) == {
        "a": {
            "problem": "",
            "lines": [
                {"at_ms": 1.0, "role": "node-a", "line": "first"},
                {"at_ms": 2.0, "role": "node-a", "line": "later"},
            ],
        },
        "b": {"problem": "b: no route", "lines": []},
    }
    result = CliRunner().invoke(logs, [str(tmp_path / "c.yaml"), "--json", "--follow"])
    assert (result.exit_code, "not with --follow" in result.output) == (2, True)


@pytest.mark.parametrize("ago", ["5", "m", "-1s", "9999999s", "1w"])
def test_a_while_ago_that_is_none_is_a_usage_error(ago: str) -> None:
    result = CliRunner().invoke(logs, ["c.yaml", "--since", ago])
    assert result.exit_code == 2
    assert "is no such time" in result.output
