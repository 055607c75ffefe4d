"""Whatever anybody says to a node agent, in whatever order: nothing raises, and strangers change nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    DesiredSlices,
    Directory,
    GpuInfo,
    SliceFailed,
    SliceReady,
    SliceSpec,
    StatusAsked,
    StatusListed,
    Stop,
    WorkerHello,
)
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import AgentAction, AgentEvent, AgentLimits, Kill, Spawn, Terminate
from roles.runtime.core import SCHEDULER, Heard, Send, Tick
from roles.runtime.peer_checks import OFFENDERS_MAX
from roles.runtime.process_events import ProcessExited, SchedulerFound
from tests.hostile import TYPES, Hostile, check_sendable
from tests.unit.roles.node_agent.test_node_agent_core import spec

NODE = NodeId("a")
WORKERS = tuple(f"worker-a-{number}" for number in range(1, 6))
BOOTS = (Incarnation("boot"), Incarnation("other"))
NAMES = {
    "SliceId": (SliceId("x"), SliceId("y"), SliceId("z"), SliceId("unknown")),
    "ModelId": (ModelId("m"),),
    "NodeId": (NODE, NodeId("b")),
    "Incarnation": BOOTS,
}
SPOKEN = (WorkerHello, SliceReady, SliceFailed, StatusListed)
WANTED = (spec("x", "emulated"), spec("y", "emulated", gpu=1), spec("z", "cpu", gpu=2), spec("x", "cpu"))
STRANGERS = tuple(PeerId(f"{role}/other") for role in (*WORKERS, "stranger", "scheduler-0", "worker-b-1"))


class Run:
    """An agent whose workers do as they are told. `strangers` speak in between."""

    def __init__(self, draws: random.Random, strangers: Hostile | None = None) -> None:
        infos = [
            GpuInfo(gpu, "generic", device) for gpu, device in enumerate(("emulated", "emulated", "cpu"))
        ]
        self.core = NodeAgentCore(AgentSelf(NODE, BOOTS[0]), FoundDevices(infos), AgentLimits())
        self.now_ms = 0.0
        self.done: list[tuple[float, AgentAction]] = []
        self.alive: dict[str, tuple[SliceSpec, ...]] = {}
        self._draws = draws
        self._strangers = strangers
        self._chances = random.Random(5)
        self.feed(SchedulerFound(("ipc://s",)))

    def step(self) -> None:
        draws = self._draws
        kind = draws.random()
        worker_id = draws.choice(list(self.alive)) if self.alive else ""
        if kind < 0.2:
            self.feed(
                Heard(SCHEDULER, DesiredSlices(1, tuple(draws.sample(WANTED[:3], draws.randint(0, 3)))))
            )
        elif kind < 0.25:
            self.feed(Heard(SCHEDULER, Directory(1, (), (), ())))
        elif kind < 0.45 and worker_id:
            self.say(worker_id, WorkerHello(worker_id, BOOTS[0], 9))
        elif kind < 0.65 and worker_id:
            slice_id = draws.choice(self.alive[worker_id]).slice_id
            news: AnyMessage = SliceReady(slice_id, BOOTS[0], NODE, 0, ("ipc://in",), ())
            failed = SliceFailed(slice_id, BOOTS[0], "no", is_unloadable=draws.random() < 0.5)
            self.say(worker_id, news if draws.random() < 0.8 else failed)
        elif kind < 0.7 and worker_id:
            del self.alive[worker_id]
            self.feed(ProcessExited(worker_id, 1, "last words"))
        elif kind < 0.75:
            self.say("operator", StatusAsked())
        else:
            self.wait(draws.choice((0.1, 30.0, 700.0, 12_000.0)))

    def say(self, role_id: str, message: AnyMessage) -> None:
        self.feed(Heard(PeerId(f"{role_id}/{BOOTS[0]}"), message))

    def wait(self, wait_ms: float) -> None:
        until_ms = self.now_ms + wait_ms
        while (at_ms := self.core.wake_at_ms) is not None and at_ms <= until_ms:
            self.now_ms = max(self.now_ms, at_ms)
            self.feed(Tick())
        self.now_ms = until_ms

    def feed(self, event: AgentEvent) -> None:
        if self._strangers is not None:
            for _ in range(self._chances.choice((0, 1, 3))):
                peer = self._chances.choice(STRANGERS)
                types = [one for one in (*TYPES, *SPOKEN * 6) if one is not StatusAsked]
                self.heard_stranger(peer, self._strangers.message(types))
        for action in self.core.handle(event, self.now_ms):
            check_sendable(action)
            self.do(action)

    def heard_stranger(self, peer: PeerId, message: AnyMessage) -> None:
        answers: Sequence[AgentAction] = self.core.handle(Heard(peer, message), self.now_ms)
        for action in answers:
            if isinstance(action, Send) and action.peer == peer:
                assert action.message == Stop(0.0), "it is nobody's child"
            else:
                self.do(action)  # what the agent wanted to say at this moment anyway

    def do(self, action: AgentAction) -> None:
        self.done.append((self.now_ms, action))
        match action:
            case Spawn(worker_id, slices):
                self.alive[worker_id] = slices
            case Kill(worker_id) | Terminate(worker_id):
                if self.alive.pop(worker_id, None):
                    self.feed(ProcessExited(worker_id, -9, ""))
            case _:
                pass


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_strangers_change_nothing_of_what_is_not_theirs(seed: int) -> None:
    runs = [Run(random.Random(seed)), Run(random.Random(seed), Hostile(random.Random(seed), NAMES))]
    for run in runs:
        for _ in range(80):
            run.step()
    quiet, disturbed = ([(at, one) for at, one in run.done if not is_status(one)] for run in runs)
    assert quiet == disturbed
    assert len(runs[1].core.offences) <= 2 * OFFENDERS_MAX


def is_status(action: AgentAction) -> bool:
    """It tells of offences, too."""
    return isinstance(action, Send) and isinstance(action.message, StatusListed)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_is_said_under_any_name_nothing_raises(seed: int) -> None:
    draws = random.Random(seed)
    hostile, run = Hostile(draws, NAMES), Run(random.Random(seed))
    wants = tuple(WANTED)
    for _ in range(150):
        kind = draws.random()
        if kind < 0.4:
            run.step()
        elif kind < 0.5:
            run.feed(Heard(SCHEDULER, hostile.mutant(DesiredSlices(1, tuple(draws.sample(wants, 2))))))
        elif kind < 0.55:
            run.feed(Heard(SCHEDULER, hostile.message((DesiredSlices, DesiredSlices, DesiredSlices, *TYPES))))
        else:
            role_id, boot = draws.choice((*WORKERS, "stranger")), draws.choice(BOOTS)
            message = hostile.message((*TYPES, *SPOKEN * 10))
            if isinstance(message, WorkerHello) and draws.random() < 0.8:
                message = WorkerHello(role_id, boot, 9, message.slices)
            run.feed(Heard(PeerId(f"{role_id}/{boot}"), message))
    run.wait(60_000.0)
