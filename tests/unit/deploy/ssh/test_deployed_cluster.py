"""What is heard of a deployed cluster through its hosts: when it is ready, and what is said while it is not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, cast

import pytest

from deploy.ssh import deployed_cluster
from deploy.ssh.changes import plan_restart
from deploy.ssh.connection import HostConnection
from deploy.ssh.deployed_cluster import READY_LIMIT_MS, DeployedCluster
from deploy.ssh.shell import Deployment, Result
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import SliceId
from fabric.messages import SliceReport, SliceState
from roles.cli.json_output import as_plain
from roles.node_agent.events import AgentLimits
from roles.runtime.exit_codes import (
    EXIT_CONFIG,
    EXIT_DEFECT,
    EXIT_FAILURE,
    EXIT_NOT_STARTED,
    EXIT_PARTIAL,
    EXIT_UNREACHABLE,
)
from roles.runtime.operator_request import ANSWER_LIMIT_MS, NOT_KNOWN
from tests.unit.deploy.ssh.stage import CLUSTER, MODEL, Stage

STANDS_BY = {"code": EXIT_UNREACHABLE, "answer": None, "said": "it stands by"}
LED_ELSEWHERE: dict[str, Any] = {
    "code": EXIT_UNREACHABLE,
    "answer": None,
    "said": "scheduler-1 stands by; the active one is scheduler-0: ask on its host",
}
UNKNOWN_GPU = {"code": EXIT_CONFIG, "answer": None, "said": "tenuto: UnknownGpu: there is no node g2"}
FELL_SILENT = {"code": EXIT_UNREACHABLE, "answer": None, "said": f"nobody answers at x; {NOT_KNOWN}"}


class Told:
    """A host that answers so, one answer after the other, the last one for ever."""

    def __init__(self, *answers: dict[str, Any] | FabricError) -> None:
        self.answers = list(answers)
        self.asked = 0

    def ask(self, *_: object, **__: object) -> dict[str, Any]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, FabricError):
            raise answer
        return answer


class Clock:
    def __init__(self) -> None:
        self.at_ms = 0.0

    def now_ms(self) -> float:
        self.at_ms += 5_000.0
        return self.at_ms


def says(
    scheduler: str,
    *standbys: str,
    slices: tuple[str, ...] = ("g1/gpu0/0",),
    shard: int = 0,
    shards: int = 1,
) -> dict[str, Any]:
    """The active one of its shard. Of the others, which are active elsewhere, it says that there are so many."""
    listed = [as_plain(SliceReport(SliceId(one), SliceState.READY, "", (), 0, 0)) for one in slices]
    status = {
        "slices": listed,
        "gpus": [{"node_id": one.partition("/")[0]} for one in slices],
        "plan": {"state": "steady"},
        "scheduling": {"standbys": [{"scheduler_id": one, "has_plan": True} for one in standbys]},
        "shards": [
            {"shard": one, "scheduler": scheduler, "standbys": list(standbys)}
            if one == shard
            else {"shard": one, "scheduler": "", "standbys": []}
            for one in range(shards)
        ],
        "endpoints": {scheduler: "tcp://x"},
    }
    return {"code": 0, "answer": status, "said": ""}


def cluster_of(stage: Stage, **hosts: Told) -> DeployedCluster:
    connections = cast("dict[str, HostConnection]", hosts)
    clock = cast("MonotonicClock", Clock())
    return DeployedCluster(stage.source.config, stage.inventory, connections, clock)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Two schedulers, on `head` and `g2`."""
    monkeypatch.setattr(deployed_cluster, "READY_EVERY_S", 0.0)
    made = Stage()
    schedulers = [{"host": "head"}, {"host": "g2", "standby": True}]
    made.document = {**made.document, "cluster": {**CLUSTER, "schedulers": schedulers}}
    return made


def test_a_scheduler_that_was_started_is_waited_for_and_no_other_and_that_is_said(stage: Stage) -> None:
    found = cluster_of(
        stage, head=Told(says("scheduler-0")), g2=Told(STANDS_BY, STANDS_BY, STANDS_BY, STANDS_BY)
    )
    lines: list[str] = []
    status, problems = found.until_ready((), ["scheduler-0"], lambda _, line: lines.append(line))
    assert status is not None
    assert (problems, lines) == ([], [])
    status, problems = found.until_ready((), ["scheduler-1"], lambda _, line: lines.append(line))
    assert status is None
    assert "scheduler-1: neither active nor standing by with the plan" in problems[0]
    assert set(lines) == {"waits: scheduler-1: neither active nor standing by with the plan"}


def test_the_active_one_may_be_on_a_host_that_nothing_can_be_done_on(stage: Stage) -> None:
    """Its key is missing here, and what runs there serves."""
    found = cluster_of(stage, head=Told(says("scheduler-0", "scheduler-1")), g2=Told(STANDS_BY))
    status, _ = found.until_ready(["head"], ["scheduler-1"], lambda *_: None)
    assert status is not None


def test_a_plan_that_waits_for_a_host_that_cannot_come_is_not_waited_for(stage: Stage) -> None:
    answer = says("scheduler-0", slices=("g1/gpu0/0", "g2/gpu0/0"))
    answer["answer"]["plan"]["state"] = "moving"
    answer["answer"]["slices"][1]["state"] = "starting"
    found = cluster_of(stage, head=Told(answer), g2=Told(STANDS_BY))
    assert found.until_ready(["g2"], ["scheduler-0"], lambda *_: None)[0] is not None
    assert found.until_ready((), ["scheduler-0"], lambda *_: None)[0] is None
    answer["answer"]["slices"][1]["slice_id"] = (
        "taken-out/gpu0/0"  # the active one has not heard that it left
    )
    assert found.until_ready((), ["scheduler-0"], lambda *_: None)[0] is not None


def test_a_host_that_could_not_be_reached_is_not_asked_again(stage: Stage) -> None:
    head = Told(PeerLost("no connection"))
    found = cluster_of(stage, head=head, g2=Told(says("scheduler-1")))
    found.silent = frozenset({"head"})
    status, _ = found.until_ready(["head"], ["scheduler-1"], lambda *_: None)
    assert status is not None
    assert head.asked == 0


def sharded(stage: Stage) -> Stage:
    """One shard for each host with GPUs; of the second one the scheduler is on its own host."""
    schedulers = [{"host": "head", "shard": 0}, {"host": "g2", "shard": 1}]
    nodes = [{**node, "shard": at} for at, node in enumerate(CLUSTER["nodes"])]
    cluster = {**CLUSTER, "schedulers": schedulers, "shards": 2, "nodes": nodes}
    models = [{**MODEL, "name": f"m{shard}", "shard": shard} for shard in (0, 1)]
    stage.document = {**stage.document, "models": models, "cluster": cluster}
    return stage


def test_all_shards_are_one_cluster(stage: Stage) -> None:
    head = Told(says("scheduler-0", shards=2))
    g2 = Told(says("scheduler-1", slices=("g2/gpu0/0",), shard=1, shards=2))
    found = cluster_of(sharded(stage), head=head, g2=g2)
    status, _ = found.until_ready((), ["scheduler-0", "scheduler-1"], lambda *_: None)
    assert status is not None
    assert [one["slice_id"] for one in status["slices"]] == ["g1/gpu0/0", "g2/gpu0/0"]
    assert set(status["endpoints"]) == {"scheduler-0", "scheduler-1"}


def test_a_model_without_a_place_is_a_problem_of_whichever_shard(stage: Stage) -> None:
    head = says("scheduler-0", shards=2)
    g2 = says("scheduler-1", slices=("g2/gpu0/0",), shard=1, shards=2)
    g2["answer"]["plan"]["unplaced"] = [{"model_id": "m1", "rate_rps": 2.0, "reason": "it needs more memory"}]
    line = "unplaced: m1 (2.00 r/s): it needs more memory"
    alone = cluster_of(stage, head=Told(STANDS_BY), g2=Told(g2))
    assert alone.until_ready((), ["scheduler-1"], lambda *_: None)[1] == [line]
    found = cluster_of(sharded(stage), head=Told(head), g2=Told(g2))
    assert found.until_ready((), ["scheduler-0", "scheduler-1"], lambda *_: None)[1] == [line]
    del g2["answer"]["plan"]["unplaced"][0]["reason"]  # of another version
    with pytest.raises(FabricError, match="cannot be understood"):
        found.until_ready((), ["scheduler-0"], lambda *_: None)


def test_a_node_is_drained_by_the_shard_that_has_it(stage: Stage) -> None:
    drained: dict[str, Any] = {"code": 0, "answer": {}, "said": ""}
    found = cluster_of(sharded(stage), head=Told(UNKNOWN_GPU), g2=Told(drained))
    assert found.ask_to_drain("g2") == drained
    assert found.active_host == "g2"


@pytest.mark.parametrize("of_shard_1", [STANDS_BY, LED_ELSEWHERE, PeerLost("it is down")])
def test_a_node_is_unknown_only_where_the_active_schedulers_of_all_shards_say_so(
    stage: Stage, of_shard_1: dict[str, Any] | FabricError
) -> None:
    head = says("scheduler-0", shards=2)
    of_both = Told(UNKNOWN_GPU, says("scheduler-1", slices=(), shard=1, shards=2))
    known = cluster_of(sharded(stage), head=Told(UNKNOWN_GPU, head), g2=of_both)
    assert known.ask_to_drain("g2") == UNKNOWN_GPU
    found = cluster_of(sharded(stage), head=Told(UNKNOWN_GPU, head), g2=Told(of_shard_1))
    with pytest.raises(FabricError, match=r"shard 1 answers|it is down"):
        found.ask_to_drain("g2")
    unreached = cluster_of(sharded(stage), head=Told(UNKNOWN_GPU, head), g2=Told({}))
    unreached.silent = frozenset({"g2"})
    with pytest.raises(FabricError, match="shard 1 answers"):
        unreached.ask_to_drain("g2")


def test_an_agent_is_not_ended_where_the_scheduler_of_its_shard_says_nothing(stage: Stage) -> None:
    head, g2 = Told(says("scheduler-0", shards=2)), Told(STANDS_BY)
    found = cluster_of(sharded(stage), head=head, g1=Told({}), g2=g2)
    with pytest.raises(FabricError, match="no active scheduler of shard 1 answers"):
        found.drain("g2", lambda *_: None)
    assert not found.drained
    found.drain("g1", lambda *_: None)
    assert found.drained == {"g1": ["g1"]}, "shard 0 has it, whatever becomes of shard 1"


def test_an_active_scheduler_that_nobody_could_ask_may_serve_the_node(stage: Stage) -> None:
    """What it has is not known, and of those that were asked none is it."""
    told_of = cluster_of(stage, head=Told(STANDS_BY), g2=Told(LED_ELSEWHERE))
    with pytest.raises(FabricError, match="the active one is scheduler-0"):
        told_of.ask_to_drain("g1")
    unreached = cluster_of(stage, head=Told({}), g2=Told(STANDS_BY))
    unreached.silent = frozenset({"head"})
    with pytest.raises(FabricError, match="it stands by; head cannot be asked"):
        unreached.ask_to_drain("g1")
    assert unreached.status() == (None, "it stands by; head cannot be asked")


def test_a_scheduler_that_is_to_move_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, "cluster": {**CLUSTER, "schedulers": [{"host": "g2"}]}}
    none = {"code": EXIT_UNREACHABLE, "answer": None, "said": "no scheduler runs here, only node-g2"}
    found = cluster_of(stage, head=Told({"code": 0, "answer": {}, "said": ""}), g2=Told(none))
    monkeypatch.setattr(Deployment, "_looked", lambda *_: stage.facts)
    Deployment(stage.source, found).facts()
    assert found.ask_to_drain("g1")["code"] == 0
    assert found.active_host == "head"


@pytest.mark.parametrize(
    "of_active", [FabricError("it was not over"), PeerLost("the connection broke"), FELL_SILENT]
)
def test_a_drain_that_was_not_heard_to_end_is_not_taken_for_one_that_was_not_begun(
    stage: Stage, of_active: dict[str, Any] | FabricError
) -> None:
    """That another scheduler stands by says nothing of what the active one does."""
    found = cluster_of(stage, head=Told(of_active), g1=Told({}), g2=Told(STANDS_BY))
    found.drained = {"g1": ["g1"]}
    lines: list[str] = []
    with pytest.raises(FabricError, match="head: ") as raised:
        found.drain("g1", lambda _, line: lines.append(line))
    assert not isinstance(raised.value, PeerLost), "g2 was reached"
    assert (lines, found.drained) == ([], {"g1": ["g1"]})
    taken_over = cluster_of(stage, head=Told(of_active), g1=Told({}), g2=Told({**STANDS_BY, "code": 0}))
    taken_over.drained = {"g1": ["g1"]}
    taken_over.drain("g1", lambda *_: None)
    assert taken_over.active_host == "g2"


@pytest.mark.parametrize("of_active", [FabricError("it was not over"), PeerLost("it is down")])
def test_while_a_standby_is_about_to_take_over_the_cluster_is_waited_for(
    stage: Stage, of_active: FabricError
) -> None:
    found = cluster_of(stage, head=Told(of_active), g2=Told(STANDS_BY, says("scheduler-1")))
    assert found.until_ready((), ["scheduler-1"], lambda *_: None)[0] is not None


def loading(*models: int, ready: int = 0) -> dict[str, Any]:
    """A scheduler that says how many models each slice has, and that so many of these are ready."""
    answer = says("scheduler-0", slices=tuple(f"g1/gpu{gpu}/0" for gpu in range(len(models))))
    for at, (one, count) in enumerate(zip(answer["answer"]["slices"], models, strict=True)):
        state = SliceState.READY if at < ready else SliceState.STARTING
        one.update(state=state, models=[f"m{model}" for model in range(count)])
    return answer


LOOK_MS = 5_000.0
"""From one look to the next, by `Clock`."""


def test_a_cluster_is_waited_for_as_long_as_a_worker_may_take_to_load_all_models_of_a_slice(
    stage: Stage,
) -> None:
    takes_ms = 8 * 105_000.0 + 100_000.0
    looks = int(takes_ms / LOOK_MS)
    found = cluster_of(stage, head=Told(*[loading(8)] * looks, loading(8, ready=1)), g2=Told(STANDS_BY))
    assert found.until_ready((), ["scheduler-0"], lambda *_: None)[0] is not None
    never = cluster_of(stage, head=Told(loading(8)), g2=Told(STANDS_BY))
    limit_s = (READY_LIMIT_MS + 7 * AgentLimits().load_ms) / 1e3
    why = f"nothing more became ready within {limit_s:g} s: g1/gpu0/0 are not ready"
    assert never.until_ready((), ["scheduler-0"], lambda *_: None) == (None, [why])


def test_a_cluster_is_waited_for_as_long_as_more_and_more_of_it_is_ready(stage: Stage) -> None:
    """As where the slices of one worker load after each other. One that comes and goes is not more."""
    looks = int(READY_LIMIT_MS / LOOK_MS) - 10
    steps = [one for ready in range(3) for one in [loading(1, 1, 1, ready=ready)] * looks]
    found = cluster_of(stage, head=Told(*steps, loading(1, 1, 1, ready=3)), g2=Told(STANDS_BY))
    assert found.until_ready((), ["scheduler-0"], lambda *_: None)[0] is not None
    flapping = [loading(1, 1, ready=ready) for ready in (0, 1)] * looks
    found = cluster_of(stage, head=Told(*flapping, loading(1, 1, ready=2)), g2=Told(STANDS_BY))
    assert found.until_ready((), ["scheduler-0"], lambda *_: None)[0] is None


# ---------------------------------------------------------------- rolling


DONE: Mapping[str, Any] = {"code": 0, "answer": {}, "said": ""}


class Hosts:
    """Of one cluster that is ready. `answers`: to `tenuto` commands and to starts, where they are not as they should be."""

    def __init__(self, answers: Mapping[str, Mapping[str, Any] | FabricError]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.limits_s: dict[str, float] = {}
        self.unheard = 0
        """So many times the status is asked for in vain."""
        self.noted: dict[str, list[str]] = {}
        self.status = says("scheduler-0", slices=("g1/gpu0/0", "g2/gpu0/0"))

    def ask(self, host: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request.get("words") == ["status", "--json"]:
            self.unheard -= 1
            return STANDS_BY if self.unheard >= 0 else self.status
        match request["do"]:
            case "note":
                self.noted[host] = request["state"].get("drained", [])
                return {}
            case "start":
                asked = f"start {request['role_id']}"
            case "ask":
                asked = " ".join(request["words"]).removesuffix(" --json")
                self.limits_s[asked] = request["limit_s"]
            case other:
                asked = " ".join([other, *request.get("role_ids", ())])
        self.asked.append(asked)
        answer = self.answers.get(asked, DONE)
        if isinstance(answer, FabricError):
            raise answer
        return answer


class HostOf:
    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts, self.name = hosts, name

    def ask(self, request: Mapping[str, Any], *_: object, **__: object) -> Mapping[str, Any]:
        return self.hosts.ask(self.name, request)


def restarted(hosts: Hosts, *only: str, drained: Mapping[str, list[str]] | None = None) -> Result:
    """Rolling. `drained`: what is noted as left drained by a former one."""
    stage = Stage()
    stage.done(stage.plan())
    for host, noted in (drained or {}).items():
        stage.changed(host, drained=tuple(noted))
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in stage.facts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    cluster.drained.update(drained or {})
    plan = plan_restart(stage.inventory, stage.facts, stage.goods, stage.source.config.deploy, only)
    return Deployment(stage.source, cluster).carry_out(plan, lambda *_: None, is_rolling=True)


def said(code: int, line: str) -> Mapping[str, Any]:
    return {"code": code, "answer": None, "said": line}


def test_a_node_is_drained_before_its_agent_ends_and_used_again_when_it_serves() -> None:
    hosts = Hosts({})
    assert restarted(hosts, "node-g1", "frontend-0").exit_code == 0
    assert hosts.asked == ["drain g1", "start node-g1", "drain g1 --back", "start frontend-0"]
    assert hosts.noted == {"g1": []}


def test_a_node_that_is_drained_though_not_every_model_has_a_place_is_used_again_too() -> None:
    for command in ("drain g1", "drain g1 --back"):
        hosts = Hosts({command: said(EXIT_PARTIAL, "not every model has a place")})
        assert restarted(hosts, "node-g1").exit_code == 0
        assert hosts.asked == ["drain g1", "start node-g1", "drain g1 --back"]
        assert hosts.noted == {"g1": []}


def test_a_node_that_cannot_be_used_again_is_told_and_noted_and_is_the_last_one() -> None:
    """As where its workers cannot load what they are to serve: it stays drained."""
    hosts = Hosts({"drain g1 --back": said(EXIT_FAILURE, "rolled back: no worker of it came up")})
    result = restarted(hosts)
    assert result.exit_code == EXIT_PARTIAL
    assert result.failed["g1"] == "g1 stays drained: rolled back: no worker of it came up; run it again"
    assert [one for one in hosts.asked if one.startswith("start")] == ["start node-g1"]
    assert hosts.noted == {"g1": ["g1"]}


@pytest.mark.parametrize("failing", ["start node-g1", "drain g1"])
def test_a_node_is_used_again_whatever_becomes_of_its_agents_start(failing: str) -> None:
    """A drain that is not over in time goes on, for the scheduler has heard of it."""
    hosts = Hosts({failing: FabricError("it was not over")})
    host = "head: " if failing == "drain g1" else ""
    assert restarted(hosts, "node-g1").failed == {"g1": f"{host}it was not over"}
    assert hosts.asked[-1] == "drain g1 --back"
    assert hosts.noted == {"g1": []}


def test_draining_and_using_again_may_take_as_long_as_the_command_itself_allows() -> None:
    """As a node does that loads large models."""
    hosts = Hosts({})
    restarted(hosts, "node-g1")
    assert {"drain g1", "drain g1 --back"} == hosts.limits_s.keys()
    assert min(hosts.limits_s.values()) * 1e3 > ANSWER_LIMIT_MS


def test_an_agent_is_not_ended_where_it_is_not_known_what_its_drain_does() -> None:
    for answer in (FELL_SILENT, said(EXIT_DEFECT, ""), said(-9, "")):
        hosts = Hosts({"drain g1": answer})
        assert list(restarted(hosts, "node-g1").failed) == ["g1"]
        assert hosts.asked == ["drain g1", "drain g1 --back"]
        assert hosts.noted == {"g1": []}


@pytest.mark.parametrize(
    ("answer", "is_ended"),
    [
        (FELL_SILENT, False),
        (said(-9, ""), False),
        (said(EXIT_FAILURE, "rolled back"), False),
        (said(EXIT_PARTIAL, ""), True),
        (said(EXIT_UNREACHABLE, "no cluster runs here"), True),
        (said(EXIT_NOT_STARTED, "there is no tenuto"), True),
        (said(EXIT_CONFIG, "UnknownGpu: there is no node g1"), True),
        (said(EXIT_CONFIG, "InvalidConfig: no GPU would be left"), False),
        (said(EXIT_CONFIG, "InvalidConfig: the plan was not computed within 60 s"), False),
        (said(EXIT_UNREACHABLE, LED_ELSEWHERE["said"]), False),
    ],
)
def test_a_node_that_leaves_is_ended_only_where_it_is_known_to_serve_nothing(
    answer: Mapping[str, Any], *, is_ended: bool
) -> None:
    stage = Stage()
    stage.done(stage.plan())
    stage.take_out("g1")
    plan = stage.plan()
    hosts = Hosts({"drain g1": answer})
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in plan.hosts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    result = Deployment(stage.source, cluster).carry_out(plan, lambda *_: None)
    assert ("stop node-g1" in hosts.asked) == is_ended
    assert list(result.failed) == ([] if is_ended else ["g1"])


@pytest.mark.parametrize(
    ("answer", "noted"),
    [
        (DONE, ["g1"]),
        (said(EXIT_PARTIAL, ""), ["g1"]),
        (FELL_SILENT, ["g1"]),
        (said(EXIT_CONFIG, "InvalidConfig: no GPU would be left"), []),
        (said(EXIT_FAILURE, "rolled back"), []),
        (said(EXIT_UNREACHABLE, "no cluster runs here"), []),
    ],
)
@pytest.mark.parametrize("is_drained_before", [True, False])
def test_what_is_drained_for_good_is_noted_on_its_host_until_that_has_ended(
    answer: Mapping[str, Any], noted: list[str], *, is_drained_before: bool
) -> None:
    """Where another host cannot be drained it is not ended, and a file that has it again uses it again."""
    stage = Stage()
    hosts = Hosts({"drain g1": answer})
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in stage.facts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    cluster.drained = {"g1": ["g1"]} if is_drained_before else {}
    with contextlib.suppress(FabricError):
        cluster.drain_for_good("g1", lambda *_: None)
    assert hosts.noted == {"g1": ["g1"] if is_drained_before else noted}


def test_what_an_operator_keeps_out_of_use_is_not_noted_as_drained_for_good() -> None:
    hosts = Hosts({})
    answer = hosts.status["answer"]
    answer["gpus"] = [{"node_id": "g1"}, {"node_id": "g1"}, {"node_id": "g2"}]
    answer["plan"]["drained"] = [{"node_id": "g1", "gpu": 0}]
    stage = Stage()
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in stage.facts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    cluster.drain_for_good("g1", lambda *_: None)
    assert (hosts.asked, hosts.noted) == (["drain g1"], {"g1": ["g1/gpu1"]})


@pytest.mark.parametrize("status", [None, said(EXIT_FAILURE, "it does not answer"), FELL_SILENT])
def test_what_an_operator_may_keep_out_of_use_is_not_drained_as_ours(status: dict[str, Any] | None) -> None:
    """A drain of all of it takes effect, and what is noted is used again by a later file that has the host."""
    hosts = Hosts({})
    if status is None:  # one takes over in this moment
        hosts.unheard = 1
    else:
        hosts.status = status
    stage = Stage()
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in stage.facts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    with pytest.raises(FabricError):
        cluster.drain_for_good("g1", lambda *_: None)
    assert (hosts.asked, hosts.noted) == ([], {})


def test_where_nobody_serves_nothing_is_drained_and_that_is_said() -> None:
    hosts = Hosts({})
    hosts.status = dict(said(EXIT_UNREACHABLE, "no cluster runs here"))
    stage = Stage()
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in stage.facts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    said_of: dict[str, str] = {}
    cluster.drain_for_good("g1", said_of.__setitem__)
    assert (hosts.asked, hosts.noted) == ([], {})
    assert said_of == {"g1": "not drained: no cluster runs here"}


def test_hosts_that_stay_drained_beside_one_that_could_not_be_are_said() -> None:
    stage = Stage(cluster={**CLUSTER, "frontends": [{"host": "head"}]})
    stage.done(stage.plan())
    stage.document = {
        **stage.document,
        "cluster": {**CLUSTER, "nodes": [{"host": "head", "gpus": 1}], "frontends": [{"host": "head"}]},
    }
    stage.keys["node-head.key"] = b"head"
    for host in ("g1", "g2"):
        stage.left[host] = stage.facts.pop(host)
    hosts = Hosts({"drain g2": said(EXIT_CONFIG, "InvalidConfig: no GPU would be left")})
    hosts.status = says("scheduler-0", slices=("g1/gpu0/0", "g2/gpu0/0", "head/gpu0/0"))
    plan = stage.plan()
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in plan.hosts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    said_of: dict[str, str] = {}
    result = Deployment(stage.source, cluster).carry_out(plan, said_of.__setitem__)
    assert said_of["g1"].startswith("stays drained")
    assert list(result.failed) == ["g2"]
    assert hosts.noted == {"g1": ["g1"], "g2": []}
    assert not [one for one in hosts.asked if one.startswith(("start", "stop"))]


@pytest.mark.parametrize(
    ("answers", "is_untouched"),
    [
        ({"receive": FabricError("no room")}, True),
        ({"start scheduler-0": FabricError("it ends at once")}, False),
    ],
)
def test_whether_a_role_was_started_or_ended_is_told_where_no_scheduler_can_be(
    answers: Mapping[str, FabricError], *, is_untouched: bool
) -> None:
    """A cluster whose scheduler's host could not be prepared may serve as before."""
    stage = Stage()
    stage.done(stage.plan())
    stage.document = {**stage.document, "models": [{**MODEL, "slo_ms": 40}]}
    hosts = Hosts(answers)
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in stage.facts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    result = Deployment(stage.source, cluster).carry_out(stage.plan(), lambda *_: None)
    assert (result.status, result.is_untouched) == (None, is_untouched)


def test_a_scheduler_whose_place_is_not_free_is_said_and_not_waited_for() -> None:
    stage = Stage(cluster={**CLUSTER, "schedulers": [{"host": "head"}, {"host": "g1", "standby": True}]})
    stage.keys["scheduler.key"] = b"scheduler.key"
    stage.done(stage.plan())
    schedulers = [{"host": "head"}, *({"host": host, "standby": True} for host in ("g2", "g1"))]
    stage.document = {**stage.document, "cluster": {**CLUSTER, "schedulers": schedulers}}
    stage.changed("g2", machine="Darwin")
    hosts = Hosts({})
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in stage.facts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    lines: list[str] = []
    result = Deployment(stage.source, cluster).carry_out(
        stage.plan(), lambda *line: lines.append(": ".join(line))
    )
    assert (list(result.failed), result.exit_code, result.problems) == (["g2"], EXIT_PARTIAL, [])
    assert "g1: left out, as g2 failed: start: scheduler-2 starts" in lines
    assert "start scheduler-2" not in hosts.asked


@pytest.mark.parametrize("code", [EXIT_FAILURE, EXIT_CONFIG, EXIT_UNREACHABLE, EXIT_NOT_STARTED])
def test_a_node_that_could_not_be_drained_is_not_asked_to_be_used_again(code: int) -> None:
    hosts = Hosts({"drain g1": said(code, "rolled back: a slice did not start")})
    assert restarted(hosts, "node-g1").exit_code == 0
    assert hosts.asked == ["drain g1", "start node-g1"]
    assert hosts.noted == {"g1": []}


@pytest.mark.parametrize("code", [EXIT_FAILURE, EXIT_CONFIG, EXIT_UNREACHABLE, EXIT_NOT_STARTED])
def test_what_a_former_change_drained_is_used_again_though_this_one_could_not_drain_it(code: int) -> None:
    """It is drained since then, however this drain ends."""
    hosts = Hosts({"drain g1": said(code, "Busy: another change is under way")})
    assert restarted(hosts, "node-g1", drained={"g1": ["g1"]}).exit_code == 0
    assert hosts.asked == ["drain g1", "start node-g1", "drain g1 --back"]
    assert hosts.noted == {"g1": []}


def test_what_a_former_change_drained_and_is_not_there_any_more_is_noted_no_more() -> None:
    hosts = Hosts({"drain g2/gpu1 --back": said(EXIT_CONFIG, "UnknownGpu: there is no g2/gpu1")})
    assert restarted(hosts, "frontend-0", drained={"g2": ["g2/gpu1"]}).exit_code == 0
    assert hosts.noted == {"g2": []}


@pytest.mark.parametrize(("drained", "ours"), [((0, 1), []), ((0,), ["g1/gpu1"])])
def test_what_an_operator_keeps_out_of_use_stays_so(drained: tuple[int, ...], ours: list[str]) -> None:
    hosts = Hosts({})
    answer = hosts.status["answer"]
    answer["gpus"] = [{"node_id": "g1"}, {"node_id": "g1"}, {"node_id": "g2"}]
    answer["plan"]["drained"] = [{"node_id": "g1", "gpu": gpu} for gpu in drained]
    assert restarted(hosts, "node-g1").exit_code == 0
    assert hosts.asked == [
        *(f"drain {where}" for where in ours),
        "start node-g1",
        *(f"drain {where} --back" for where in ours),
    ]


def test_where_no_scheduler_says_what_an_operator_keeps_out_of_use_nothing_is_drained_or_started() -> None:
    hosts = Hosts({})
    hosts.unheard = 1
    hosts.status["answer"]["plan"]["drained"] = [{"node_id": "g1", "gpu": 0}]
    assert restarted(hosts, "node-g1").failed == {"g1": "cannot be drained: it stands by"}
    assert (hosts.asked, hosts.noted) == ([], {})


def test_a_node_that_the_scheduler_does_not_know_has_nothing_to_drain() -> None:
    hosts = Hosts({})
    hosts.status["answer"]["gpus"] = [{"node_id": "g2"}]
    assert restarted(hosts, "node-g1").exit_code == 0
    assert (hosts.asked, hosts.noted) == (["start node-g1"], {})


def test_what_a_former_change_left_drained_is_used_again_whatever_else_this_one_does() -> None:
    for role_id in ("node-g1", "frontend-0"):
        hosts = Hosts({})
        hosts.status["answer"]["plan"]["drained"] = [{"node_id": "g1", "gpu": 0}, {"node_id": "g1", "gpu": 1}]
        assert restarted(hosts, role_id, drained={"g1": ["g1"]}).exit_code == 0
        assert hosts.asked.count("drain g1 --back") == 1
        assert hosts.noted == {"g1": []}
    failing = Hosts({"drain g1 --back": said(EXIT_UNREACHABLE, "no cluster runs here")})
    assert list(restarted(failing, "frontend-0", drained={"g1": ["g1"]}).failed) == ["g1"]
