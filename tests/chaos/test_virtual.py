"""Histories in which things go wrong: whatever does, what always holds held. `make chaos` plays more, and real processes."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest

from fabric.messages import Host, NodeHello, SliceChanged, SliceReady, WorkerHello
from roles.node_agent.events import AgentAction
from roles.node_agent.lease import NO_LEASE, LeaseGrants
from roles.scheduler.planning import saved_plan
from tests.chaos.virtual.draw import draw
from tests.chaos.virtual.processes.roles import AgentProcess
from tests.chaos.virtual.script import Fault, Script, Shape, read
from tests.chaos.virtual.shrink import failure_of, shrunk
from tests.chaos.virtual.violated import Violated
from tests.chaos.virtual.world import World, play

HISTORIES, OF = 100, 20
"""About a fifth of a second each: a minute of one core."""


@pytest.mark.parametrize("first", range(0, HISTORIES, HISTORIES // OF))
def test_whatever_goes_wrong_what_always_holds_held(first: int) -> None:
    for seed in range(first, first + HISTORIES // OF):
        script = draw(seed)
        failure = failure_of(script)
        if failure is not None:
            small, what = shrunk(script, failure)
            replay = f"python -m tests.chaos.virtual --replay - <<< '{small.text()}'"
            pytest.fail(f"seed {seed}: {failure}\nmade small: {what}\n{replay}")


LONG = {"for_ms": 6_500.0}
"""Until connections break."""


@pytest.mark.parametrize(
    "script",
    [
        # The worker only answers, and a router answers whoever has spoken: it was taken for silent, and killed.
        Script(
            235,
            Shape(frontends=2, clients=2, models=2, delay_ms=2.0, start_ms=200.0, slo_ms=300.0),
            (Fault(53.9, "cut", "worker:0", "agent:0", **LONG),),
        ),
        # The next change had begun when the first one was answered, so that one was on no disk when the only agent was lost.
        Script(
            6059,
            Shape(schedulers=2, delay_ms=2.0, start_ms=20.0, models=2, rate_rps=40.0, slo_ms=40.0),
            (
                Fault(238.3, "change", "operator", "slo:1"),
                Fault(241.2, "kill", "agent:0", for_ms=350.0),
                Fault(244.8, "change", "operator", "add:2"),
            ),
        ),
        # The epoch of the next scheduler was under way: the worker never heard whom to obey.
        Script(
            1664,
            Shape(delay_ms=0.3, start_ms=80.0, slo_ms=300.0),
            (
                Fault(509.7, "restart", "scheduler:2", for_ms=30.0),
                Fault(512.2, "cut", "worker:1", "agent:1", **LONG),
            ),
        ),
    ],
)
def test_a_worker_and_its_agent_whose_connection_broke_tell_each_other_again(script: Script) -> None:
    play(script)


def test_a_frontend_that_standbys_took_for_lost_is_listed_again() -> None:
    """It was stopped while no scheduler was active: its connections stood, and it refused everything for ever."""
    faults = (
        Fault(300.0, "kill", "agent:0", for_ms=3_000.0),
        Fault(900.0, "pause", "frontend:0", for_ms=2_200.0),
    )
    play(Script(3, Shape(schedulers=2, rate_rps=0.5), faults))


def test_a_frontend_that_reads_its_schedulers_last_word_after_its_end_is_listed_by_the_next() -> None:
    """It takes itself for listed there, and its first ping came before that one had an epoch."""
    shape = Shape(delay_ms=0.05, start_ms=20.0, rate_rps=10.0)
    faults = (
        Fault(380.9, "vanish", "worker:2", for_ms=500.0),
        Fault(382.0, "pause", "frontend:1", for_ms=20.0),
        Fault(382.8, "kill", "scheduler:1", for_ms=700.0),
    )
    play(Script(7575, shape, faults))


def test_an_overtaken_scheduler_has_the_next_ones_plan() -> None:
    shape = Shape(schedulers=2, delay_ms=2.0, start_ms=200.0, slo_ms=40.0)
    play(Script(500_118, shape, (Fault(695.5, "reset", "agent:all", "scheduler:2"),)))


def test_a_plan_that_is_too_large_to_be_told_ends_nothing_and_no_standby_is_said_to_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved_plan, "DOCUMENT_CHARS_MAX", 100)
    with pytest.raises(Violated, match=r"\[\] have the plan, \['scheduler-\d/\w+'\] stand by"):
        play(Script(1, Shape(schedulers=2), ()))


def test_a_standby_that_never_heard_that_it_was_lost_has_the_plan() -> None:
    faults = (
        Fault(486.8, "sleep", "scheduler:1", for_ms=1_000.0),
        Fault(498.1, "full", "scheduler:1", "scheduler:0", for_ms=1_500.0),
    )
    play(Script(12_315, Shape(schedulers=2), faults))


def test_what_crossed_its_grant_and_was_preempted_is_no_violation() -> None:
    """Its frontend leaves it out of the next batch, too."""
    shape = Shape(gpus=2, batching="shepherd", delay_ms=0.05, start_ms=20.0, rate_rps=40.0)
    play(Script(12_315, shape, (Fault(486.8, "sleep", "scheduler:1", for_ms=250.0),)))


def test_a_frontend_that_scheduler_and_workers_took_for_lost_has_the_outputs_of_what_ran() -> None:
    shape = Shape(
        nodes=2, clients=2, delay_ms=0.05, start_ms=200.0, load_ms=300.0, rate_rps=100.0, slo_ms=300.0
    )
    play(Script(117, shape, (Fault(187.6, "reset", "frontend:0", "scheduler:active"),)))


def test_a_model_that_is_asked_alone_has_all_devices_though_its_discipline_leaves_them_idle() -> None:
    """At last each was asked 40 ms after the one before: `deferred` held two of them until both wanted the only device."""
    shape = Shape(
        schedulers=2,
        models=2,
        batching="deferred",
        delay_ms=2.0,
        start_ms=200.0,
        application=True,
        cancels=0.2,
        rate_rps=100.0,
        slo_ms=40.0,
    )
    play(Script(10_019, shape, (Fault(44.1, "slow", "agent:0", for_ms=600.0),)))


def test_one_script_is_one_history() -> None:
    script = draw(17)
    assert play(script).fates == play(script).fates


def test_a_history_gives_its_descriptors_back() -> None:
    """Else hundreds of them in one process leave none for the tests that follow."""
    play(draw(0))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for seed in (1, 2, 3, 17):
        play(draw(seed))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_script_is_read_as_it_was_written() -> None:
    for seed in range(50):
        assert read(draw(seed).text()) == draw(seed)


def test_without_faults_nearly_all_is_answered() -> None:
    fates = play(Script(1, Shape(gpus=2, rate_rps=20.0, slo_ms=300.0))).fates
    assert fates["answer"] >= 0.9 * fates.total()


class Silent(World):
    """Its frontends are killed and nobody hears of it."""

    def _settle(self) -> None:
        for wire in list(self.network.wires):
            if wire.far.owner.place.startswith("client") or wire.near.owner.place.startswith("client"):
                wire.is_broken = True
        self._ask(0, 0, next(iter(self.by_number[0].shell._core._shards.models)), 100.0)
        super()._settle()
        self._run_until(self.now_ms + 500.0)


def test_a_request_without_an_answer_is_found() -> None:
    with pytest.raises(Violated, match="no answer"):
        Silent(Script(1, Shape(rate_rps=1.0))).play()


def test_two_schedulers_that_both_think_they_are_the_active_one_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LeaseGrants, "is_free", lambda *_: True)  # agents grant whatever is higher
    with pytest.raises(
        Violated, match=r"is active, and so are|are active|does not come up|ends as|nothing has gone wrong"
    ):
        play(Script(1, Shape(schedulers=2)))


def test_a_scheduler_that_takes_an_epoch_of_a_minority_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AgentProcess._perform

    def forgets(self: AgentProcess, action: AgentAction) -> None:
        kept(self, action)
        self.host.lease = NO_LEASE

    monkeypatch.setattr(AgentProcess, "_perform", forgets)
    with pytest.raises(Violated, match="0 agents granted"):
        play(Script(1, Shape(schedulers=2)))


class Crowded(World):
    """The first five times queues do not take a message of that type."""

    def __init__(self, script: Script, word: type) -> None:
        self.left = 5
        self.started: list[str] = []
        self.known: list[str] = []
        super().__init__(script)
        self.network.refuses = partial(self._refuses, word)

    def clock_offset_ms(self, place: str) -> float:
        """Each process asks once."""
        self.started.append(place)
        return super().clock_offset_ms(place)

    def _probe(self) -> None:
        super()._probe()
        self.known = [one.state for agent in self.agents_alive() for one in agent.core._reports.alive()]

    def _refuses(self, word: type, message: object) -> bool:
        is_refused = self.left > 0 and isinstance(message, word)
        self.left -= is_refused
        return is_refused


@pytest.mark.parametrize("word", [WorkerHello, Host, SliceReady, NodeHello, SliceChanged])
def test_what_a_full_queue_does_not_take_is_said_again(word: type) -> None:
    """Before the limits of a start, after which another process begins."""
    world = Crowded(Script(1, Shape(nodes=2)), word)
    world.play()
    assert world.left == 0, "it was said"
    assert world.known == ["ready", "ready"], "to agents: they end workers that do not load in time"
    assert sorted(one for one in world.started if one.startswith("worker")) == ["worker-a-1", "worker-b-1"]
