"""What is heard of a deployed cluster through its hosts: when it is ready, and what is said while it is not."""

from __future__ import annotations

from typing import Any, cast

import pytest

from deploy.ssh import deployed_cluster
from deploy.ssh.connection import HostConnection
from deploy.ssh.deployed_cluster import DeployedCluster
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import SliceId
from fabric.messages import SliceReport, SliceState
from roles.cli.json_output import as_plain
from roles.runtime.exit_codes import EXIT_UNREACHABLE
from tests.unit.deploy.ssh.stage import CLUSTER, MODEL, Stage

STANDS_BY = {"code": EXIT_UNREACHABLE, "answer": None, "said": "it stands by"}


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
    scheduler: str, *standbys: str, slices: tuple[str, ...] = ("g1/gpu0/0",), shard: int = 0
) -> dict[str, Any]:
    listed = [as_plain(SliceReport(SliceId(one), SliceState.READY, "", (), 0, 0)) for one in slices]
    status = {
        "slices": listed,
        "plan": {"state": "steady"},
        "scheduling": {"standbys": [{"scheduler_id": one, "has_plan": True} for one in standbys]},
        "shards": [{"shard": shard, "scheduler": scheduler, "standbys": list(standbys)}],
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


def test_all_shards_are_one_cluster(stage: Stage) -> None:
    schedulers = [{"host": "head", "shard": 0}, {"host": "g2", "shard": 1}]
    nodes = [{**node, "shard": at} for at, node in enumerate(CLUSTER["nodes"])]
    cluster = {**CLUSTER, "schedulers": schedulers, "shards": 2, "nodes": nodes}
    models = [{**MODEL, "name": f"m{shard}", "shard": shard} for shard in (0, 1)]
    stage.document = {**stage.document, "models": models, "cluster": cluster}
    head, g2 = Told(says("scheduler-0")), Told(says("scheduler-1", slices=("g2/gpu0/0",), shard=1))
    found = cluster_of(stage, head=head, g2=g2)
    status, _ = found.until_ready((), ["scheduler-0", "scheduler-1"], lambda *_: None)
    assert status is not None
    assert [one["slice_id"] for one in status["slices"]] == ["g1/gpu0/0", "g2/gpu0/0"]
    assert set(status["endpoints"]) == {"scheduler-0", "scheduler-1"}
