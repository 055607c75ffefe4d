from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.ssh.changes import plan_restart, plan_rollback
from deploy.ssh.config_bundle import carried_config
from deploy.ssh.facts import HostFacts, Unreachable
from deploy.ssh.inventory import CONFIG_FILE, inventory_of
from deploy.ssh.rollout import Ended, Rollout
from deploy.ssh.steps import Phase
from fabric.errors import ConfigError
from roles.config.read_config import parse_config
from tests.unit.deploy.ssh.stage import CLUSTER, MODEL, Stage, lines


def test_a_cluster_of_bare_hosts_is_prepared_everywhere_and_then_started_in_order() -> None:
    stage = Stage()
    name = stage.goods.config.name
    assert (
        lines(stage.plan())
        == f"""\
PREPARE    g1   wheels        2 wheels, 15.9 MB
PREPARE    g1   environment   tenuto[worker] 0.1.0+abc, from the wheels it has
PREPARE    g1   configuration {name}, 2 files
PREPARE    g1   keys          frontend.key, node-g1.key, trusted.json
PREPARE    g2   wheels        2 wheels, 15.9 MB
PREPARE    g2   environment   tenuto 0.1.0+abc, from the wheels it has
PREPARE    g2   configuration {name}, 2 files
PREPARE    g2   keys          node-g2.key, trusted.json
PREPARE    head wheels        2 wheels, 15.9 MB
PREPARE    head environment   tenuto 0.1.0+abc, from the wheels it has
PREPARE    head configuration {name}, 2 files
PREPARE    head keys          frontend.key, scheduler.key, trusted.json
AGENTS     g1   start         node-g1 starts
AGENTS     g2   start         node-g2 starts
SCHEDULERS head start         scheduler-0 starts
FRONTENDS  g1   start         frontend-1 starts
FRONTENDS  head start         frontend-0 starts
"""
    )


def test_what_is_done_is_not_planned_again() -> None:
    stage = Stage()
    stage.done(stage.plan())
    assert stage.plan().steps == ()


@given(st.data())
def test_whatever_was_done_before_an_interruption_the_rest_is_what_was_left(data: st.DataObject) -> None:
    stage = Stage()
    whole = stage.plan()
    rollout = Rollout(whole, at_once=data.draw(st.integers(1, 4)))
    going = list(rollout.begin())
    for _ in range(data.draw(st.integers(0, len(whole.steps)))):
        if not going:
            break
        step = going.pop(data.draw(st.integers(0, len(going) - 1)))
        stage.do(step)
        going += rollout.handle(Ended(step))
    left = [(step.host, step.what, step.detail) for step in whole.steps if step not in rollout.done]
    assert [(step.host, step.what, step.detail) for step in stage.plan().steps] == left


def test_another_version_and_another_configuration_start_everything_again_and_keep_what_was_before() -> None:
    stage = Stage()
    stage.done(stage.plan())
    before = stage.goods.config.name
    stage.version = "0.2.0+def"
    stage.document = {**stage.document, "models": [{**MODEL, "slo_ms": 40}]}
    plan = stage.plan()
    name = stage.goods.config.name
    assert (
        lines(plan)
        == f"""\
PREPARE    g1   environment   tenuto[worker] 0.2.0+def, from the wheels it has
PREPARE    g1   configuration {name}, 2 files
PREPARE    g2   environment   tenuto 0.2.0+def, from the wheels it has
PREPARE    g2   configuration {name}, 2 files
PREPARE    head environment   tenuto 0.2.0+def, from the wheels it has
PREPARE    head configuration {name}, 2 files
AGENTS     g1   start         node-g1 starts again: another version and configuration
AGENTS     g2   start         node-g2 starts again: another version and configuration
SCHEDULERS head start         scheduler-0 starts again: another version and configuration
FRONTENDS  g1   start         frontend-1 starts again: another version and configuration
FRONTENDS  head start         frontend-0 starts again: another version and configuration
"""
    )
    stage.done(plan)
    told = stage.facts["g1"]
    assert isinstance(told, HostFacts)
    assert (told.now.version, told.before.version, told.before.config) == ("0.2.0+def", "0.1.0+abc", before)


def test_a_role_that_left_the_file_is_stopped_and_its_key_goes() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, "cluster": {**CLUSTER, "frontends": [{"host": "head"}]}}
    found = [
        line for line in lines(stage.plan()).splitlines() if " g1 " in line and "configuration" not in line
    ]
    assert found == [
        "END_FRONTENDS g1   stop          frontend-1: not in the file any more",
        "REMOVE     g1   keys          without frontend.key",
    ]


MOVES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the scheduler": (
        {"schedulers": [{"host": "g2"}]},
        [
            "AGENTS     g1   start node-g1",
            "AGENTS     g2   start node-g2",
            "SCHEDULERS head stop scheduler-0",
            "SCHEDULERS g2   start scheduler-0",
            "FRONTENDS  g1   start frontend-1",
            "FRONTENDS  head start frontend-0",
            "REMOVE     head keys without",
        ],
    ),
    "a frontend": (
        {"frontends": [{"host": "head"}, {"host": "g2"}]},
        [
            "SCHEDULERS head start scheduler-0",
            "FRONTENDS  g2   start frontend-1",
            "END_FRONTENDS g1   stop frontend-1",
            "REMOVE     g1   keys without",
        ],
    ),
    "two frontends, each to where the other one was": (
        {"frontends": [{"host": "g1"}, {"host": "head"}]},
        [
            "SCHEDULERS head start scheduler-0",
            "FRONTENDS  g1   stop frontend-1",
            "FRONTENDS  g1   start frontend-0",
            "FRONTENDS  head stop frontend-0",
            "FRONTENDS  head start frontend-1",
        ],
    ),
}


@pytest.mark.parametrize("case", MOVES)
def test_a_role_that_moves_serves_until_its_new_host_is_prepared(case: str) -> None:
    changed, expected = MOVES[case]
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, "cluster": {**CLUSTER, **changed}}
    steps = [step for step in stage.plan().steps if step.phase not in (Phase.PREPARE, Phase.UNITS)]
    assert [
        f"{step.phase.name:10} {step.host:4} {step.what} {step.detail.split(':')[0].split()[0]}"
        for step in steps
    ] == expected
    stage.done(stage.plan())
    assert stage.plan().steps == ()


@pytest.mark.parametrize("case", ["the scheduler", "a frontend"])
@pytest.mark.parametrize("is_seen_before", [True, False])
def test_a_role_stays_where_it_is_when_its_new_host_cannot_be_prepared(
    case: str, *, is_seen_before: bool
) -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, "cluster": {**CLUSTER, **MOVES[case][0]}}
    if is_seen_before:
        stage.changed("g2", machine="Darwin")
    rollout = Rollout(stage.plan())
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        going += rollout.handle(Ended(step, "no room" if step.host == "g2" else ""))
    assert list(rollout.failed) == ["g2"]
    done = [(step.host, step.what) for step in rollout.done]
    assert not {("head", "stop"), ("g1", "stop")} & {*done}
    assert not [step for step in rollout.done if "without" in step.detail], "nor does its key go"
    started = {step.request["role_id"] for step in rollout.done if step.what == "start"}
    assert started == (set() if case == "the scheduler" else {"scheduler-0"})


def carried_out(stage: Stage, failing: str) -> Rollout:
    rollout = Rollout(stage.plan())
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        going += rollout.handle(Ended(step, "no room" if step.host == failing else ""))
    return rollout


INSERTED: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "frontends": ([{"host": "g1"}, {"host": "head"}], [{"host": "g2"}, {"host": "g1"}, {"host": "head"}]),
    "schedulers": (
        [{"host": "head"}, {"host": "g1", "standby": True}],
        [{"host": "g2"}, {"host": "head", "standby": True}, {"host": "g1", "standby": True}],
    ),
}


@pytest.mark.parametrize("kind", INSERTED)
@pytest.mark.parametrize("failing", ["is seen before", "g2", ""])
def test_no_role_starts_in_the_place_of_one_that_stays(kind: str, failing: str) -> None:
    """It would find its port taken: one host more, first in the list, moves every role to the next host."""
    before, after = INSERTED[kind]
    stage = Stage(cluster={**CLUSTER, kind: before})
    stage.keys["scheduler.key"] = b"scheduler.key"
    stage.done(stage.plan())
    stage.document = {**stage.document, "cluster": {**CLUSTER, kind: after}}
    if failing == "is seen before":
        stage.changed("g2", machine="Darwin")
    rollout = carried_out(stage, failing)
    assert list(rollout.failed) == (["g2"] if failing else [])
    its = [
        f"{step.host} {step.what} {step.request.get('role_id') or step.request['role_ids'][0]}"
        for step in rollout.done
        if step.phase in (Phase.SCHEDULERS, Phase.FRONTENDS, Phase.END_FRONTENDS)
    ]
    one = kind.removesuffix("s")
    moved = [line for line in its if f" {one}-" in line]
    hosts = [place["host"] for place in before]
    stops = {f"{host} stop {one}-{at}" for at, host in enumerate(hosts)}
    starts = {f"{host} start {one}-{at + 1}" for at, host in enumerate(hosts)} | {f"g2 start {one}-0"}
    assert set(moved) == (set() if failing else stops | starts)
    if failing:
        left = {step.request["role_id"] for step in rollout.left_out if step.what == "start"}
        assert left == {f"{one}-1", f"{one}-2"}
        assert rollout.without_scheduler == ({"g2"} if kind == "frontends" else {"head", "g1", "g2"})
        assert ("head start scheduler-0" in its) == (kind == "frontends"), "what is not moved goes on"
    else:
        stage.done(stage.plan())
        assert stage.plan().steps == ()


@pytest.mark.parametrize("kind", INSERTED)
def test_where_a_role_has_ended_the_next_one_starts_though_the_first_did_not_come_up_elsewhere(
    kind: str,
) -> None:
    before, after = INSERTED[kind]
    stage = Stage(cluster={**CLUSTER, kind: before})
    stage.keys["scheduler.key"] = b"scheduler.key"
    stage.done(stage.plan())
    stage.document = {**stage.document, "cluster": {**CLUSTER, kind: after}}
    one = kind.removesuffix("s")
    plan = stage.plan()
    rollout = Rollout(plan)
    going = list(rollout.begin())
    while going:
        # A start of another host ends after the stops that were begun beside it.
        step = min(going, key=lambda each: each.what == "start")
        going.remove(step)
        is_first = step.what == "start" and step.request["role_id"] == f"{one}-0"
        going += rollout.handle(Ended(step, "it ends at once" if is_first else ""))
    started = {step.request["role_id"] for step in rollout.done if step.what == "start"}
    assert {f"{one}-1", f"{one}-2"} <= started
    assert rollout.without_scheduler == {"g2"}


def test_a_scheduler_that_keeps_its_host_starts_though_another_one_cannot_leave_it() -> None:
    before = [{"host": "head"}, {"host": "g1", "standby": True}]
    stage = Stage(cluster={**CLUSTER, "schedulers": before})
    stage.keys["scheduler.key"] = b"scheduler.key"
    stage.done(stage.plan())
    after = [before[0], {"host": "g2", "standby": True}, {"host": "g1", "standby": True}]
    stage.document = {**stage.document, "cluster": {**CLUSTER, "schedulers": after}}
    rollout = carried_out(stage, "g2")
    started = {step.request["role_id"] for step in rollout.done if step.phase is Phase.SCHEDULERS}
    assert started == {"scheduler-0"}
    assert rollout.without_scheduler == {"g1", "g2"}


@pytest.mark.parametrize("failing", ["g1", "g2", ""])
def test_a_host_that_left_is_not_ended_while_a_role_of_it_has_no_other_place(failing: str) -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.left["head"] = stage.facts.pop("head")
    stage.document = {
        **stage.document,
        "cluster": {
            **CLUSTER,
            "schedulers": [{"host": "g2"}],
            "frontends": [{"host": "g1"}],
            "addresses": {},
        },
    }
    rollout = Rollout(stage.plan())
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        going += rollout.handle(Ended(step, "no room" if step.host == failing else ""))
    done = {(step.host, step.what) for step in rollout.done}
    of_its_end = {("head", "stop"), ("head", "remove"), ("g1", "forget"), ("g2", "forget")}
    assert done & of_its_end == (set() if failing else of_its_end)


def test_a_scheduler_that_ends_for_good_does_so_only_where_another_one_will_serve() -> None:
    schedulers = [{"host": "head"}, {"host": "g2", "standby": True}]
    for failing in ("head", ""):
        stage = Stage(cluster={**CLUSTER, "schedulers": schedulers})
        stage.done(stage.plan())
        stage.document = {**stage.document, "cluster": CLUSTER}
        rollout = Rollout(stage.plan())
        going = list(rollout.begin())
        while going:
            step = going.pop(0)
            going += rollout.handle(Ended(step, "no room" if step.host == failing else ""))
        assert (("g2", "stop") in {(step.host, step.what) for step in rollout.done}) == (not failing)


def test_a_rolling_change_ends_nothing_after_a_role_that_did_not_come_back() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, "cluster": {**CLUSTER, **MOVES["the scheduler"][0]}}
    rollout = Rollout(stage.plan(), is_rolling=True)
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        going += rollout.handle(Ended(step, "it ends at once" if step.what == "start" else ""))
    assert {step.what for step in rollout.done} == {"configuration", "keys"}


def test_what_a_change_without_an_end_left_drained_is_used_again() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.changed("g2", drained=("g2",))
    plan = stage.plan()
    assert [(step.host, step.phase, step.request["drained"]) for step in plan.steps] == [
        ("g2", Phase.BACK, ["g2"])
    ]
    stage.document = {**stage.document, "models": [{**MODEL, "slo_ms": 40}]}
    assert max(step.phase for step in stage.plan().steps) is Phase.BACK, "when all serve"
    stage.done(plan)
    stage.document = {**stage.document, "models": [MODEL]}
    assert stage.plan().steps == ()


def with_nodes(*hosts: str, **cluster: Any) -> Stage:
    """A cluster that is up, with these nodes of two GPUs each, and all else on `head`."""
    nodes = [{"host": host, "gpus": 2} for host in hosts]
    places = {"nodes": nodes, "schedulers": [{"host": "head"}], "frontends": [{"host": "head"}]}
    stage = Stage(models=[MODEL, {**MODEL, "name": "n"}], cluster={**places, **cluster})
    bare = stage.facts["g2"]
    assert isinstance(bare, HostFacts)
    for at, host in enumerate(hosts):
        stage.facts[host] = replace(bare, base=f"/home/u/.tenuto/{host}", address=f"10.0.1.{at}")
        stage.keys[f"node-{host}.key"] = host.encode()
    stage.done(stage.plan())
    return stage


def test_hosts_that_were_drained_beside_one_that_could_not_be_are_used_again() -> None:
    """And no host was told of the file without them: a restart would go by it."""
    stage = with_nodes("g1", "g2", "g3")
    before, served = stage.document, stage.goods.config.name
    stage.take_out("g1")
    stage.take_out("g2")
    rollout = Rollout(stage.plan())
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        is_refused = (step.host, step.what) == ("g2", "drain")
        if not is_refused:
            stage.do(step)
        going += rollout.handle(Ended(step, "no GPU would be left" if is_refused else ""))
    assert rollout.stay_drained == ["g1"]
    assert rollout.is_untouched
    assert {told.now.config for told in stage.facts.values() if isinstance(told, HostFacts)} == {served}
    stage.document = before
    stage.facts |= stage.left
    stage.left.clear()
    steps = [(step.host, step.what) for step in stage.plan().steps]
    assert steps == [("g1", "back")]


@pytest.mark.parametrize(
    ("failing", "stay"),
    [
        ((), []),
        (("head", "start"), ["g1", "g2"]),
        (("g1", "stop"), ["g1"]),
        (("g1", "remove"), []),
        (("g2", "drain"), ["g1"]),
    ],
)
def test_what_stays_drained_is_said_whatever_failed(failing: tuple[str, ...], stay: list[str]) -> None:
    stage = with_nodes("g1", "g2", "g3")
    stage.take_out("g1")
    stage.take_out("g2")
    rollout = Rollout(stage.plan())
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        going += rollout.handle(Ended(step, "it failed" if (step.host, step.what) == failing else ""))
    assert rollout.stay_drained == stay


def test_gpus_of_this_host_alone_are_no_cluster_to_deploy_wherever_its_schedulers_are() -> None:
    cluster = {"gpus": 2, "schedulers": [{"host": "head"}], "frontends": [{"host": "head"}]}
    with pytest.raises(ConfigError, match=r"^cluster\.gpus is this host alone: list cluster\.nodes"):
        inventory_of(Stage(cluster=cluster).source.config)


def test_a_node_that_a_host_less_moves_to_another_shard_starts_again_there() -> None:
    """Its agent speaks to the schedulers of its shard alone, and its own line of the file says nothing of that."""
    schedulers = [{"host": "head", "shard": 0}, {"host": "head", "shard": 1, "port": 5549}]
    hosts = [f"g{at}" for at in range(1, 6)]
    stage = with_nodes(*hosts, schedulers=schedulers, shards=2)
    before = {node.host: node.shard for node in stage.source.config.nodes}
    stage.take_out("g1")
    after = {node.host: node.shard for node in stage.source.config.nodes}
    moved = {f"node-{host}" for host, shard in after.items() if shard != before[host]}
    assert moved, "the case"
    started = {step.request["role_id"] for step in stage.plan().steps if step.what == "start"}
    assert started == {*moved, "scheduler-0", "scheduler-1"}


PAGES: dict[str, tuple[list[str], list[str], set[str]]] = {
    "a frontend more": (["head", "g1"], ["head", "g1", "g2"], {"node-g1", "node-g2", "frontend-2"}),
    "a frontend less": (["head", "g1"], ["head"], {"node-g1", "node-g2"}),
    "none": (["head", "g1"], ["head", "g2"], {"frontend-1"}),
}


@pytest.mark.parametrize("case", PAGES)
def test_a_role_whose_page_of_metrics_gets_another_port_starts_again(case: str) -> None:
    before, after, started = PAGES[case]
    stage = Stage(
        cluster={**CLUSTER, "frontends": [{"host": host} for host in before]},
        listen={"metrics": "10.0.0.1:8002"},
    )
    stage.done(stage.plan())
    stage.document = {
        **stage.document,
        "cluster": {**CLUSTER, "frontends": [{"host": host} for host in after]},
    }
    plan = stage.plan()
    assert {step.request["role_id"] for step in plan.steps if step.what == "start"} == {
        *started,
        "scheduler-0",
    }
    stage.done(plan)
    assert stage.plan().steps == ()


def test_an_extra_that_the_file_comes_to_need_is_installed_before_its_roles_start_again() -> None:
    """With the same Tenuto: the environment's name is that of the version, whatever is installed there."""
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, "listen": {"metrics": "10.0.0.1:8002"}}
    plan = stage.plan()
    installed = [line[11:] for line in lines(plan).splitlines() if " environment " in line]
    assert installed == [
        f"{host:4} environment   tenuto[{extras}] 0.1.0+abc, from the wheels it has"
        for host, extras in (("g1", "worker,metrics"), ("g2", "metrics"), ("head", "metrics"))
    ]
    assert {step.request["role_id"] for step in plan.steps if step.what == "start"} >= {
        "scheduler-0",
        "node-g2",
    }
    stage.done(plan)
    assert stage.plan().steps == ()
    del stage.document["listen"]
    assert "environment" not in {step.what for step in stage.plan().steps}, "one too many is no matter"


def test_an_extra_needs_the_room_that_its_own_wheels_take() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, "listen": {"metrics": "10.0.0.1:8002"}}
    stage.changed("g2", free_bytes=250 << 20)
    assert not stage.plan().problems, "all wheels are there"
    stage.changed("g2", wheels={})
    assert list(stage.plan().problems) == ["g2"]


def test_a_new_key_is_carried_and_its_roles_start_again() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.keys["node-g2.key"] = b"another"
    assert (
        lines(stage.plan())
        == """\
PREPARE    g2   keys          node-g2.key
AGENTS     g2   start         node-g2 starts again: another key or environment
"""
    )


def test_a_role_that_died_is_started_and_nothing_else() -> None:
    stage = Stage()
    stage.done(stage.plan())
    told = stage.facts["head"]
    assert isinstance(told, HostFacts)
    stage.changed("head", roles={**told.roles, "frontend-0": ""})
    assert lines(stage.plan()) == "FRONTENDS  head start         frontend-0 starts\n"


def test_a_host_that_is_down_is_left_out_and_its_address_remembered() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.facts["g2"] = Unreachable("does not answer")
    plan = stage.plan()
    assert plan.steps == ()  # the others keep their configuration, g2's address in it
    assert plan.problems == {"g2": ["does not answer"]}
    assert plan.unreachable == {"g2"}


PROBLEMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "full disk": (
        "g2",
        {"free_bytes": 100_000_000},
        "100 MB are free in /home/u/.tenuto/g2; it needs 289 MB",
    ),
    "no venv": ("g2", {"has_venv": False}, "install python3-venv"),
    "read-only": ("g2", {"is_writable": False}, "cannot be written there: set deploy.directory"),
    "clock ahead": ("g2", {"clock_off_ms": 5_000.0}, "5.0 s ahead of this host's: start an NTP client"),
    "clock behind": ("g2", {"clock_off_ms": -5_000.0}, "5.0 s behind this host's"),
    "port taken": (
        "head",
        {"taken": {"scheduler-0": [(5550, "nginx (process 7)")]}},
        "port 5550 of scheduler-0 is taken by nginx",
    ),
    "no driver": ("g1", {"has_driver": False}, "no NVIDIA driver"),
    "few files": ("g2", {"open_files": 1024}, "may open 1024 files"),
    "loopback": ("g2", {"address": "127.0.1.1"}, "127.0.1.1, which other hosts cannot reach"),
    "two names of one host": (
        "g2",
        {"address": "10.0.0.2"},
        "its address 10.0.0.2 is that of g1: are these two names of one host?",
    ),
    "another system": ("g2", {"machine": "Darwin arm64"}, "Tenuto needs Linux"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_a_host_lacks_is_one_line_and_stops_that_host_alone(case: str) -> None:
    host, facts, line = PROBLEMS[case]
    stage = Stage()
    stage.changed(host, **facts)
    plan = stage.plan()
    assert set(plan.problems) == {host}
    (found,) = plan.problems[host]
    assert line in found
    assert not any(step.host == host for step in plan.steps)


def test_what_a_host_could_do_better_without_is_a_warning() -> None:
    stage = Stage()
    stage.changed("g1", has_mps=False, has_cron=False)
    assert stage.plan().warnings == {
        "g1": [
            "nvidia-cuda-mps-control is not there: slices share its GPUs by time",
            "it has neither systemd nor cron: after a reboot, run `tenuto deploy up` again",
        ]
    }


def test_no_secret_is_in_a_request_or_in_what_people_see() -> None:
    stage = Stage()
    stage.keys = {name: f"SECRET-{name}".encode() for name in stage.keys}
    for step in stage.plan().steps:
        shown = f"{step.what} {step.detail} {json.dumps(step.request)}"
        assert "SECRET" not in shown


def test_a_script_runs_in_a_shell_as_it_is_meant(tmp_path: Path) -> None:
    stage = Stage()
    base = tmp_path / "it's here"
    stage.changed("g2", base=str(base), run_dir=f"{base}/run")
    (step,) = [step for step in stage.plan().steps if step.host == "g2" and step.what == "start"]
    name = stage.goods.config.name
    program = base / "versions/0.1.0+abc/bin/tenuto"
    program.parent.mkdir(parents=True)
    (base / "configs" / name).mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$PWD|$TENUTO_RUN_DIR|$HTTP_PROXY|$*"\n')
    program.chmod(0o700)
    script = tmp_path / "role.sh"
    script.write_text(step.request["script"])
    said = subprocess.run(["sh", str(script)], capture_output=True, text=True, check=True).stdout
    assert said == f"{base}/configs/{name}|{base}/run|http://it's:1|node-agent cluster.json --node g2\n"
    assert (base / "run/node-g2.stamp").read_text() == f"{step.request['stamp']}\n"


@pytest.mark.parametrize("kind", ["another user's", "a link", "everybody's"])
def test_a_script_writes_nothing_in_a_run_directory_that_others_may_write_in(
    tmp_path: Path, kind: str
) -> None:
    """Its directory may have gone, as what is temporary does, and another user have made it again."""
    stage = Stage()
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    stage.changed("g2", run_dir=str(run_dir))
    (step,) = [step for step in stage.plan().steps if step.host == "g2" and step.what == "start"]
    if kind == "everybody's":
        run_dir.chmod(0o777)
    elif kind == "a link":
        run_dir.rename(tmp_path / "elsewhere")
        run_dir.symlink_to("elsewhere")
    elif os.getuid() == 0:
        os.chown(run_dir, 65_534, 65_534)
    else:
        pytest.skip("only root gives a directory to another user")
    done = subprocess.run(
        ["sh"], input=step.request["script"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode != 0
    assert done.stderr.startswith(f"tenuto: {run_dir} ")
    assert list(run_dir.iterdir()) == []


def test_the_carried_configuration_says_where_everything_is_and_nothing_of_this_machine() -> None:
    stage = Stage()
    carried = json.loads(stage.goods.config.files["cluster.json"])  # type: ignore[arg-type]
    assert carried["cluster"]["schedulers"] == [{"host": "head", "port": 5550, "standby": False}]
    assert carried["cluster"]["addresses"] == {"g1": "10.0.0.2", "g2": "10.0.0.3", "head": "10.0.0.1"}
    assert carried["security"] == {"keys": "../../keys"}
    assert "deploy" not in carried
    parsed = parse_config(carried, Path("/x/configs/y"))
    assert [one.host for one in parsed.places.frontends] == ["head", "g1"]


def test_a_file_for_this_host_alone_or_without_keys_is_no_inventory() -> None:
    with pytest.raises(ConfigError, match=r"list cluster\.nodes"):
        inventory_of(parse_config({"models": [MODEL], "cluster": {"gpus": 1}}, Path()))
    with pytest.raises(ConfigError, match="that needs keys"):
        inventory_of(parse_config({"models": [MODEL], "cluster": CLUSTER}, Path()))


def test_a_host_more_starts_nothing_again_but_the_schedulers_the_standby_first() -> None:
    cluster = {**CLUSTER, "schedulers": [{"host": "head"}, {"host": "g1", "standby": True}]}
    stage = Stage(cluster=cluster)
    stage.done(stage.plan())
    bare = Stage().facts["g2"]
    assert isinstance(bare, HostFacts)
    stage.facts["g3"] = replace(bare, base="/home/u/.tenuto/g3", address="10.0.0.4")
    stage.keys["node-g3.key"] = b"third"
    nodes = [*CLUSTER["nodes"], {"host": "g3", "gpus": 1}]
    stage.document = {**stage.document, "cluster": {**cluster, "nodes": nodes}}
    name = stage.goods.config.name
    same = f"goes on; configuration {name} has the same for it"
    found = [line for line in lines(stage.plan()).splitlines() if " g3 " not in line]
    assert found == [
        f"PREPARE    g1   configuration {name}, 2 files",
        f"PREPARE    g2   configuration {name}, 2 files",
        f"PREPARE    head configuration {name}, 2 files",
        f"UNITS      g1   unit          node-g1 {same}",
        f"UNITS      g1   unit          frontend-1 {same}",
        f"UNITS      g2   unit          node-g2 {same}",
        f"UNITS      head unit          frontend-0 {same}",
        "SCHEDULERS g1   start         scheduler-1 starts again: another configuration",
        "SCHEDULERS head start         scheduler-0 starts again: another configuration",
    ]
    stage.done(stage.plan())
    assert stage.plan().steps == ()


def test_another_application_starts_frontends_again_and_no_agent() -> None:
    """They read it at their start; of models they hear from the scheduler."""
    application: dict[str, Any] = {"name": "shop", "slo_ms": 90, "stages": {"one": {"model": "m"}}}
    stage = Stage(applications=[application])
    stage.done(stage.plan())
    changes: list[dict[str, Any]] = [
        {"applications": [{**application, "slo_ms": 80}]},
        {"graph_deadlines": "equal"},
        {"seed": 7},
        {"applications": []},
        {"applications": [application]},
    ]
    for changed in changes:
        stage.document = {**stage.document, **changed}
        started = {step.detail for step in stage.plan().steps if step.what == "start"}
        again = "starts again: another configuration"
        assert started == {f"{role} {again}" for role in ("scheduler-0", "frontend-0", "frontend-1")}, changed
        stage.done(stage.plan())


def test_a_host_less_is_drained_first_ended_when_nobody_asks_for_it_and_then_forgotten() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.take_out("g1")
    plan = stage.plan()
    found = [line for line in lines(plan).splitlines() if not line.startswith(("PREPARE", "UNITS"))]
    assert found == [
        "DRAIN      g1   drain         its node is not in the file any more: its slices move to others",
        "SCHEDULERS head start         scheduler-0 starts again: another configuration",
        "END_FRONTENDS g1   stop          frontend-1",
        "END_AGENTS g1   stop          node-g1",
        "REMOVE     g1   remove        /home/u/.tenuto/g1",
        "FORGET     g2   forget        g1",
        "FORGET     head forget        g1",
    ]
    stage.done(plan)
    stage.left.clear()  # nobody tells of it any more
    told = stage.facts["head"]
    assert isinstance(told, HostFacts)
    assert "g1" not in told.addresses
    assert stage.plan().steps == ()


@given(st.data())
def test_an_interrupted_end_of_a_host_is_finished_by_the_next_up(data: st.DataObject) -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.take_out("g1")
    plan = stage.plan()
    for step in plan.steps[: data.draw(st.integers(0, len(plan.steps)))]:
        stage.do(step)
    known = {host for told in stage.facts.values() if isinstance(told, HostFacts) for host in told.addresses}
    if "g1" not in known:
        stage.left.clear()
    for step in stage.plan().steps:
        stage.do(step)
    told = {host for told in stage.facts.values() if isinstance(told, HostFacts) for host in told.addresses}
    assert told == {"head", "g2"}
    assert all(isinstance(one, HostFacts) and not one.is_there for one in stage.left.values())


def test_a_host_that_left_and_cannot_be_reached_is_not_forgotten_unless_that_is_said() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.take_out("g1")
    stage.left["g1"] = Unreachable("does not answer")
    plan = stage.plan()
    (problem,) = plan.problems["g1"]
    assert "what is on it stays: does not answer (`tenuto deploy up --forget g1`" in problem
    assert not any(step.what in ("forget", "drain") for step in plan.steps)
    assert plan.unreachable == frozenset(), "the cluster is not unreachable"
    stage.done(plan)
    stage.left.clear()
    assert [(step.host, step.what) for step in stage.plan().steps] == [("g2", "forget"), ("head", "forget")]


def test_a_node_that_leaves_while_its_host_stays_is_drained_and_its_agent_ends_last() -> None:
    stage = Stage()
    stage.done(stage.plan())
    nodes = [one for one in CLUSTER["nodes"] if one["host"] != "g1"]
    stage.document = {**stage.document, "cluster": {**CLUSTER, "nodes": nodes}}
    found = [
        line[:45].rstrip()
        for line in lines(stage.plan()).splitlines()
        if not line.startswith(("PREPARE", "UNITS"))
    ]
    assert found == [
        "DRAIN      g1   drain         its node is not",
        "SCHEDULERS head start         scheduler-0 sta",
        "END_AGENTS g1   stop          node-g1: not in",
        "REMOVE     g1   keys          without node-g1",
    ]


CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "an SLO": ({"models": [{**MODEL, "slo_ms": 40}]}, {"scheduler-0"}),
    "another policy": ({"placement": "exclusive"}, {"scheduler-0"}),
    "another port of the scheduler": (
        {"cluster": {**CLUSTER, "schedulers": [{"host": "head", "port": 7000}]}},
        {"scheduler-0", "node-g1", "node-g2", "frontend-0", "frontend-1"},
    ),
    "a standby": (
        {"cluster": {**CLUSTER, "schedulers": [{"host": "head"}, {"host": "g2", "standby": True}]}},
        {"scheduler-0", "scheduler-1", "node-g1", "node-g2", "frontend-0", "frontend-1"},
    ),
    "more GPUs of one host": (
        {"cluster": {**CLUSTER, "nodes": [CLUSTER["nodes"][0], {"host": "g2", "gpus": 2}]}},
        {"scheduler-0", "node-g2"},
    ),
    "a frontend's address": (
        {
            "cluster": {
                **CLUSTER,
                "frontends": [{"host": "head"}, {"host": "g1", "listen": {"client": "tcp://eth0:7000"}}],
            }
        },
        {"scheduler-0", "frontend-1"},
    ),
    "heartbeats": (
        {"cluster": {**CLUSTER, "heartbeats": {"interval_ms": 200, "patience_ms": 2_000}}},
        {"scheduler-0", "node-g1", "node-g2", "frontend-0", "frontend-1"},
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_the_file_starts_those_again_that_read_it(case: str) -> None:
    sections, roles = CHANGES[case]
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, **sections}
    plan = stage.plan()
    assert {step.request["role_id"] for step in plan.steps if step.what == "start"} == roles
    stage.done(plan)
    assert stage.plan().steps == ()


def test_a_standby_that_is_new_starts_when_the_first_scheduler_knows_of_it() -> None:
    """It would take over with the file's own plan while that one, which cannot tell it its plan, starts again."""
    stage = Stage()
    stage.done(stage.plan())
    schedulers = [{"host": "head"}, {"host": "g2", "standby": True}]
    stage.document = {**stage.document, "cluster": {**CLUSTER, "schedulers": schedulers}}
    rollout, begun = Rollout(stage.plan()), []
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        if step.what == "start" and step.request["role_id"].startswith("scheduler"):
            begun.append(step.request["role_id"])
        going += rollout.handle(Ended(step))
    assert begun == ["scheduler-0", "scheduler-1"]


def test_no_scheduler_that_runs_is_ended_after_one_that_did_not_come_up() -> None:
    stage = Stage()
    schedulers = [{"host": "head"}, {"host": "g2", "standby": True}]
    stage.document = {**stage.document, "cluster": {**CLUSTER, "schedulers": schedulers}}
    stage.keys["scheduler.key"] = b"scheduler.key"
    stage.done(stage.plan())
    stage.document = {**stage.document, "models": [{**MODEL, "slo_ms": 40}]}
    rollout, begun = Rollout(stage.plan()), []
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        begun += [step.request["role_id"]] if step.what == "start" else []
        is_first = step.what == "start" and step.request["role_id"] == "scheduler-1"
        going += rollout.handle(Ended(step, "it ends at once" if is_first else ""))
    assert [one for one in begun if one.startswith("scheduler")] == ["scheduler-1"]


def test_a_host_that_nobody_knows_is_found_by_its_name_and_stops_no_other() -> None:
    """Its name was carried as its address, which no role takes."""
    stage = Stage()
    stage.facts["g2"] = Unreachable("is an unknown host")
    plan = stage.plan()
    assert list(plan.problems) == ["g2"]
    carried = carried_config(stage.source, stage.goods.addresses)
    written = carried.files[CONFIG_FILE]
    assert isinstance(written, bytes)
    document = json.loads(written)
    assert document["cluster"]["addresses"] == {"head": "10.0.0.1", "g1": "10.0.0.2"}
    parse_config(document, Path("/there"))


def test_two_nodes_with_a_standby_are_warned_of() -> None:
    stage = Stage()
    assert not stage.plan().warnings.get("head")
    schedulers = [{"host": "head"}, {"host": "g2", "standby": True}]
    stage.document = {**stage.document, "cluster": {**CLUSTER, "schedulers": schedulers}}
    (warning,) = [one for one in stage.plan().warnings["head"] if "standby" in one]
    assert "of two both" in warning


def test_a_drain_that_fails_stops_everything_and_forgetting_waits_for_the_end_of_the_host() -> None:
    for failing in ("drain", "remove"):
        stage = Stage()
        stage.done(stage.plan())
        stage.take_out("g1")
        rollout = Rollout(stage.plan())
        going = list(rollout.begin())
        while going:
            step = going.pop(0)
            going += rollout.handle(Ended(step, "no" if step.what == failing else ""))
        assert rollout.failed == {"g1": "no"}
        done = {step.what for step in rollout.done}
        assert "forget" not in done
        assert ("start" in done) == (failing == "remove")


def test_a_restart_forgets_no_host_that_left_and_could_not_be_reached() -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.version = "0.2.0+def"
    stage.done(stage.plan())
    stage.take_out("g1")
    stage.left["g1"] = Unreachable("does not answer")
    stage.done(stage.plan())
    stage.left.clear()  # neither command asks it
    deploy = stage.source.config.deploy
    stage.done(plan_restart(stage.inventory, stage.facts, stage.goods, deploy, ()))
    stage.done(plan_rollback(stage.inventory, stage.facts, stage.goods, deploy))
    for told in stage.facts.values():
        assert isinstance(told, HostFacts)
        assert "g1" in told.addresses


def test_a_host_is_remembered_though_nobody_knows_an_ipv4_address_of_it() -> None:
    stage = Stage()
    stage.changed("g2", address=None)
    stage.done(stage.plan())
    told = stage.facts["head"]
    assert isinstance(told, HostFacts)
    assert told.addresses["g2"] == ""
    stage.take_out("g2")
    plan = stage.plan()
    assert [step.what for step in plan.steps if step.host == "g2"] == ["drain", "stop", "remove"]
    stage.done(plan)
    stage.left.clear()
    assert stage.plan().steps == ()


def test_a_name_under_which_no_host_ever_answered_is_not_remembered() -> None:
    """It may be a mistake, and would be asked for until it is said to be forgotten."""
    stage = Stage()
    stage.facts["g2"] = Unreachable("is an unknown host")
    stage.done(stage.plan())
    told = stage.facts["head"]
    assert isinstance(told, HostFacts)
    assert set(told.addresses) == {"head", "g1"}


# ---------------------------------------------------------------- rollout


def test_phases_wait_for_each_other_and_each_host_does_one_thing_at_a_time() -> None:
    stage = Stage()
    plan = stage.plan()
    rollout = Rollout(plan, at_once=2)
    going = list(rollout.begin())
    seen = []
    while going:
        assert len(going) <= 2
        assert len({step.host for step in going}) == len(going)
        assert len({step.phase for step in going}) == 1
        seen.append(going[0].phase)
        going += rollout.handle(Ended(going.pop(0)))
    assert rollout.is_over
    assert seen == sorted(seen)
    assert len(rollout.done) == len(plan.steps)


def test_a_host_that_fails_fails_alone_but_for_the_schedulers() -> None:
    for failing, started in (("g2", ["node-g1", "scheduler-0", "frontend-1", "frontend-0"]), ("head", [])):
        stage = Stage()
        rollout = Rollout(stage.plan())
        going = list(rollout.begin())
        while going:
            step = going.pop(0)
            going += rollout.handle(Ended(step, "no room" if step.host == failing else ""))
        assert rollout.failed == {failing: "no room"}
        assert [step.request["role_id"] for step in rollout.done if step.what == "start"] == started
