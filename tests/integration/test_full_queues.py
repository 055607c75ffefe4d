"""What a shell does where a queue did not take its core's message. The cores' part is in unit tests, both together in virtual histories."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fabric.ids import NodeId, PeerId
from fabric.messages import AnyMessage, DesiredSlices, Directory, EpochGranted, Host, Ping, PlanCopy, Stop
from roles.config.read_config import parse_config
from roles.node_agent.events import WorkerUntold
from roles.node_agent.shell import AgentOptions, _Agent
from roles.runtime.core import Lost, Send
from roles.runtime.loop.sources import REFUSED
from roles.runtime.process import StopSignal
from roles.scheduler.planning.start_config import Written
from roles.scheduler.shell import SchedulerShell

DOCUMENT: dict[str, Any] = {
    "models": [{"name": "m", "slo_ms": 50, "profile": {"alpha_ms": 1, "beta_ms": 1}}],
    "cluster": {"nodes": [{"host": "a"}]},
}
GONE = PeerId("worker-a-1/0")


@pytest.mark.parametrize(
    ("message", "untold"),
    [
        (Host(NodeId("a"), (), ()), [WorkerUntold(GONE)]),
        (EpochGranted(16, ()), [WorkerUntold(GONE)]),
        (Stop(100.0), []),
    ],
)
def test_an_agent_hears_which_worker_did_not_take_what_it_has_to_know(
    tmp_path: Path, message: AnyMessage, untold: list[WorkerUntold]
) -> None:
    config = parse_config(DOCUMENT, tmp_path)
    with (
        StopSignal() as stop,
        closing(_Agent(config, config.nodes[0], tmp_path, AgentOptions(), stop, None)) as agent,
    ):
        agent._perform(Send(GONE, message))
        assert list(agent._later.take(8, 0.0)) == untold


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        (Directory(1, (), (), ()), [Lost(GONE, REFUSED)]),
        (DesiredSlices(1, ()), [Lost(GONE, REFUSED)]),
        (PlanCopy(16, 0, "", "{}"), []),
        (Ping(1), []),
    ],
)
def test_a_scheduler_takes_a_peer_for_lost_that_did_not_take_what_is_said_once(
    tmp_path: Path, message: AnyMessage, lost: list[Lost]
) -> None:
    config = parse_config(DOCUMENT, tmp_path)
    with closing(SchedulerShell(Written(config, DOCUMENT, tmp_path), tmp_path)) as shell:
        shell._outbox.put(GONE, message)
        shell._outbox.flush()
        found = [one for one in shell._heard.take(8, 0.0) if isinstance(one, Lost)]
        assert [one for one in found if one.reason == REFUSED] == lost
