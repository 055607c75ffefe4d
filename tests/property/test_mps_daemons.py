"""Whatever MPS daemons and their guards do and whenever a stop comes: nothing raises, and no guard is left alone."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import Incarnation, NodeId
from fabric.messages import GpuInfo
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import (
    AgentEvent,
    AgentLimits,
    CheckDaemon,
    DaemonChecked,
    Kill,
    SharingPlan,
    StartDaemon,
    Terminate,
)
from roles.node_agent.mps.daemons import guard_name
from roles.runtime.core import Tick
from roles.runtime.exit_codes import EXIT_GUARD_REFUSED
from roles.runtime.process_events import ProcessExited, StopAsked
from roles.runtime.restarts import RestartRule

NODE = NodeId("a")
GPUS = (0, 1, 2)
LIMITS = AgentLimits(restart=RestartRule(first_ms=100.0, failures_max=3))
STOP_MS = LIMITS.daemon_end_ms + LIMITS.kill_ms


class Run:
    """An agent without workers, and guards that heed a signal, or do not."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        adopted = draws.sample(GPUS, draws.randint(0, len(GPUS)))
        infos = [GpuInfo(gpu, "a100", "cuda", uid=f"GPU-{gpu}") for gpu in GPUS]
        sharing = {gpu: SharingPlan("mps", has_shares=True) for gpu in GPUS}
        found = FoundDevices(infos, sharing, daemons=adopted)
        self.core = NodeAgentCore(AgentSelf(NODE, Incarnation("boot"), outlives=True), found, LIMITS)
        self.now_ms = 5.0
        self.alive = {guard_name(NODE, gpu): gpu for gpu in adopted}
        self.told: set[str] = set()
        """Living guards that were sent a signal."""
        self._asked: list[tuple[int, int]] = []

    def step(self) -> None:
        kind = self._draws.random()
        if kind < 0.25 and self.alive:
            self.exit(self._draws.choice(list(self.alive)))
        elif kind < 0.6 and self._asked:
            gpu, start = self._asked.pop()
            problem = self._draws.choice(("", "", "it does not answer"))
            self.feed(
                DaemonChecked(
                    gpu, start, problem, tuple(self._draws.sample((7, 8), self._draws.randint(0, 2)))
                )
            )
        else:
            self.wait(self._draws.choice((1.0, 100.0, 2_000.0, 15_000.0)))

    def wait(self, wait_ms: float) -> None:
        until_ms = self.now_ms + wait_ms
        while not self.core.is_stopped and (at_ms := self.core.wake_at_ms) is not None and at_ms <= until_ms:
            self.now_ms = max(self.now_ms, at_ms)
            self.feed(Tick())
        self.now_ms = until_ms

    def exit(self, name: str) -> None:
        del self.alive[name]
        self.told.discard(name)
        code = self._draws.choice((0, 1, -9, EXIT_GUARD_REFUSED))
        self.feed(ProcessExited(name, code, ""))

    def feed(self, event: AgentEvent) -> None:
        for action in self.core.handle(event, self.now_ms):
            match action:
                case StartDaemon(gpu):
                    assert guard_name(NODE, gpu) not in self.alive, "the former one has ended"
                    self.alive[guard_name(NODE, gpu)] = gpu
                case CheckDaemon(gpu, start):
                    self._asked.append((gpu, start))
                case Terminate(name) | Kill(name):
                    self.told.add(name)
                    if self._draws.random() < 0.5:
                        self.exit(name)
                case _:
                    pass


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(0, 30))
def test_a_stop_at_any_moment_ends_every_guard_in_bounded_time(seed: int, steps: int) -> None:
    run = Run(random.Random(seed))
    for _ in range(steps):
        run.step()
    run.feed(StopAsked())
    assert run.told == set(run.alive), "each that lives has been told"
    run.wait(STOP_MS)
    assert run.core.is_stopped
