"""MPS daemons in the agent's core, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fabric.ids import Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    DesiredSlices,
    GpuInfo,
    GpuSample,
    GpuSharing,
    Host,
    ModelSpec,
    NodeHello,
    SliceChanged,
    SliceReady,
    SliceSpec,
    StatusAsked,
    StatusListed,
    Telemetry,
    WorkerHello,
)
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import (
    AgentAction,
    AgentEvent,
    AgentLimits,
    CheckDaemon,
    DaemonChecked,
    EndLeftovers,
    GpusSampled,
    Kill,
    Orphan,
    Remember,
    SampleGpus,
    SharingPlan,
    Spawn,
    StartDaemon,
    Terminate,
)
from roles.runtime.core import SCHEDULER, Heard, Send, Tick
from roles.runtime.exit_codes import EXIT_GUARD_REFUSED, EXIT_UNKNOWN
from roles.runtime.process_events import ProcessExited, SchedulerFound, StopAsked, Warn
from roles.runtime.restarts import RestartRule

LIMITS = AgentLimits(restart=RestartRule(first_ms=100.0, failures_max=3))
MPS = SharingPlan("mps", has_shares=True)
ORPHAN = Orphan("worker-a-7", 77, Incarnation("old"), is_mps=True)


def spec(name: str, gpu: int = 0, share: float | None = 40.0) -> SliceSpec:
    return SliceSpec(SliceId(name), gpu, "cuda", share, (ModelSpec(ModelId("m"), 25.0, 8),))


class Agent:
    """An agent of a node with two GPUs, its time, and all it did."""

    def __init__(
        self,
        *,
        plan: SharingPlan = MPS,
        orphans: Sequence[Orphan] = (),
        daemons: Sequence[int] = (),
        limits: AgentLimits = LIMITS,
    ) -> None:
        gpus = [GpuInfo(gpu, "a100", "cuda", uid=f"GPU-{gpu}") for gpu in range(2)]
        found = FoundDevices(gpus, {0: plan, 1: MPS}, orphans, daemons)
        self.core = NodeAgentCore(
            AgentSelf(NodeId("a"), Incarnation("new"), pid=1, outlives=True), found, limits
        )
        self.now_ms = 0.0
        self.adopted = daemons
        self.done: list[AgentAction] = []
        self.feed(SchedulerFound(("ipc://s",)))
        self.until(0.0)

    def feed(self, event: AgentEvent) -> list[AgentAction]:
        actions = list(self.core.handle(event, self.now_ms))
        self.done += actions
        return actions

    def until(self, moment_ms: float) -> list[AgentAction]:
        done: list[AgentAction] = []
        while self.core.wake_at_ms is not None and self.core.wake_at_ms <= moment_ms:
            self.now_ms = max(self.now_ms, self.core.wake_at_ms)
            done += self.feed(Tick())
        self.now_ms = moment_ms
        return done

    def want(self, *specs: SliceSpec) -> list[AgentAction]:
        return self.feed(Heard(SCHEDULER, DesiredSlices(1, specs)))

    def checked(self, gpu: int = 0, problem: str = "", *servers: int) -> list[AgentAction]:
        start = sum(action == StartDaemon(gpu) for action in self.done) + (gpu in self.adopted)
        return self.feed(DaemonChecked(gpu, start, problem, servers))

    def up(self) -> None:
        self.checked(0)
        self.checked(1)

    def serve(self, *specs: SliceSpec) -> list[str]:
        """Want them and bring their workers up; the workers' ids."""
        started = [action.worker_id for action in self.want(*specs) if isinstance(action, Spawn)]
        for worker_id, one in zip(started, specs, strict=True):
            self.ready(worker_id, one)
        return started

    def ready(self, worker_id: str, one: SliceSpec, incarnation: str = "boot") -> None:
        peer, boot = PeerId(f"{worker_id}/{incarnation}"), Incarnation(incarnation)
        self.feed(Heard(peer, WorkerHello(worker_id, boot, 9)))
        self.feed(Heard(peer, SliceReady(one.slice_id, boot, NodeId("a"), one.gpu, (), ())))

    def sharing(self, gpu: int = 0) -> GpuSharing:
        told = [action.message for action in self.done if isinstance(action, Send)]
        newest = [message for message in told if isinstance(message, Telemetry)][-1]
        return next(one for one in newest.sharing if one.gpu == gpu)

    def state(self, slice_id: str) -> tuple[str, str]:
        told = [action.message for action in self.done if isinstance(action, Send)]
        changes = [message.status for message in told if isinstance(message, SliceChanged)]
        status = [status for status in changes if status.slice_id == slice_id][-1]
        return status.state, status.reason


def spawned(actions: Sequence[AgentAction]) -> list[Spawn]:
    return [action for action in actions if isinstance(action, Spawn)]


def test_no_worker_starts_before_the_daemon_of_its_gpu_answers() -> None:
    agent = Agent()
    assert [action for action in agent.done if isinstance(action, StartDaemon)] == [
        StartDaemon(0),
        StartDaemon(1),
    ]
    assert spawned(agent.want(spec("x"), spec("y", gpu=1))) == []
    assert agent.state("x") == ("starting", "waits for the MPS daemon of gpu 0")
    assert CheckDaemon(0, 1) in agent.until(LIMITS.daemon_look_ms)
    assert spawned(agent.checked(0, "no answer")) == []
    (start,) = spawned(agent.checked(0))
    assert (start.slices, start.is_mps) == ((spec("x"),), True)
    assert agent.sharing(0) == GpuSharing(0, "mps")
    assert agent.sharing(1).mode == "starting"


def test_a_daemon_that_ends_takes_its_workers_along_and_they_come_back_with_it() -> None:
    agent = Agent()
    agent.up()
    one, other = agent.serve(spec("x"), spec("y", gpu=1))
    actions = agent.feed(ProcessExited("mps-a-0", 1, "the MPS daemon was killed by signal 9"))
    assert Kill(one, at_once=True) in actions
    assert not [a for a in actions if isinstance(a, Kill | Terminate) and a.worker_id == other]
    assert agent.state("x") == ("lost", "the MPS daemon was killed by signal 9")
    agent.feed(ProcessExited(one, -9, ""))
    # Its restart waits for the daemon, and is no failure of its own.
    assert StartDaemon(0) in agent.until(100.0)
    assert spawned(agent.until(2_000.0)) == []
    agent.checked(0)
    (again,) = spawned(agent.until(agent.now_ms))
    assert again.is_mps
    assert agent.sharing(0).mode == "mps"


def test_a_daemon_is_sick_after_three_unanswered_checks() -> None:
    agent = Agent()
    agent.up()
    (worker,) = agent.serve(spec("x"))
    for _ in range(2):
        assert CheckDaemon(0, 1) in agent.until(agent.now_ms + LIMITS.daemon_check_ms)
        assert Kill("mps-a-0") not in agent.checked(0, "no answer")
        agent.checked(1)
    agent.until(agent.now_ms + LIMITS.daemon_check_ms)
    actions = agent.checked(0, "no answer")
    assert Kill("mps-a-0") in actions
    assert Kill(worker, at_once=True) in actions
    assert agent.state("x") == ("lost", "its MPS daemon is sick: no answer")


def test_an_answer_forgives_the_checks_that_had_none() -> None:
    agent = Agent()
    agent.up()
    for problem in ("no answer", "no answer", "", "no answer", "no answer"):
        agent.until(agent.now_ms + LIMITS.daemon_check_ms)
        assert Kill("mps-a-0") not in agent.checked(0, problem)
        agent.checked(1)


def test_a_server_that_is_gone_makes_its_daemon_sick_at_once() -> None:
    agent = Agent()
    agent.up()
    (worker,) = agent.serve(spec("x"))
    assert Kill("mps-a-0") not in agent.checked(0, "", 500)
    actions = agent.checked(0, "", 501)
    assert Kill("mps-a-0") in actions
    assert Kill(worker, at_once=True) in actions
    assert agent.state("x")[1] == "its MPS daemon is sick: its server (process 500) ended"


def test_a_server_that_ended_before_anybody_had_seen_it_makes_its_daemon_sick_all_the_same() -> None:
    agent = Agent()
    agent.up()
    (worker,) = agent.serve(spec("x"))
    assert CheckDaemon(0, 1) in agent.until(agent.now_ms), "its first client is a reason to ask at once"
    actions = agent.checked(0)
    assert Kill("mps-a-0") in actions
    assert Kill(worker, at_once=True) in actions
    assert agent.state("x")[1] == "its MPS daemon is sick: it has clients and no server"


def test_an_answer_of_before_the_first_client_says_nothing_of_its_server() -> None:
    agent = Agent()
    agent.up()
    assert CheckDaemon(0, 1) in agent.until(agent.now_ms + LIMITS.daemon_check_ms)
    agent.serve(spec("x"))
    assert CheckDaemon(0, 1) not in agent.until(agent.now_ms), "one answer is on its way"
    assert Kill("mps-a-0") not in agent.checked(0)
    assert CheckDaemon(0, 1) in agent.until(agent.now_ms)
    assert Kill("mps-a-0") not in agent.checked(0, "", 500)
    assert CheckDaemon(0, 1) not in agent.until(agent.now_ms + LIMITS.daemon_check_ms - 1.0)


def test_a_new_daemon_knows_nothing_of_the_former_ones_clients() -> None:
    agent = Agent()
    agent.up()
    agent.serve(spec("x"))
    agent.until(agent.now_ms)
    agent.checked(0)
    agent.feed(ProcessExited("mps-a-0", 1, ""))
    agent.until(agent.now_ms + 1_000.0)
    agent.checked(0)
    agent.until(agent.now_ms + LIMITS.daemon_check_ms)
    assert Kill("mps-a-0") not in agent.checked(0)


def test_a_daemon_that_keeps_failing_is_given_up_and_its_gpu_shared_in_time() -> None:
    agent = Agent()
    agent.want(spec("x"))
    for _ in range(LIMITS.restart.failures_max):
        agent.until(agent.now_ms + 1_000.0)
        actions = agent.feed(ProcessExited("mps-a-0", 1, "it crashed"))
    assert Warn("mps_given_up gpu=0 sharing=time-sharing reason='it crashed'") in actions
    assert agent.done.count(EndLeftovers(0)) == 1, "no guard follows that would"
    (start,) = spawned(actions)
    assert not start.is_mps
    assert Warn("share_not_enforced slice=x share_percent=40 reason='it crashed'") in actions
    assert agent.sharing(0) == GpuSharing(0, "time-sharing", "it crashed")
    assert StartDaemon(0) not in agent.until(60_000.0)


def test_a_guard_that_says_that_it_is_hopeless_is_not_tried_again() -> None:
    agent = Agent()
    agent.feed(ProcessExited("mps-a-0", EXIT_GUARD_REFUSED, "somebody else's"))
    assert agent.sharing(0) == GpuSharing(0, "time-sharing", "somebody else's")
    assert StartDaemon(0) not in agent.until(60_000.0)


def test_a_daemon_that_never_answers_is_killed_and_started_again() -> None:
    agent = Agent()
    agent.checked(0, "cannot find it")
    done = agent.until(LIMITS.daemon_start_ms)
    assert Kill("mps-a-0") in done
    actions = agent.feed(ProcessExited("mps-a-0", -9, ""))
    why = "its MPS daemon did not answer within 15 s: cannot find it"
    assert Warn(f"mps_lost gpu=0 reason={why!r}") in actions


@pytest.mark.parametrize("is_up", [False, True], ids=["it never answers", "it answers once"])
def test_a_daemon_that_hangs_each_time_is_given_up_however_long_it_is_waited_for(is_up: bool) -> None:
    limits = AgentLimits()
    agent = Agent(limits=limits)
    agent.checked(1)
    for _ in range(limits.restart.failures_max):
        agent.until(agent.now_ms + limits.restart.longest_ms)
        if is_up:
            agent.checked(0)
        killed = Kill("mps-a-0")
        while killed not in agent.done:
            agent.until(agent.now_ms + limits.daemon_check_ms)
            agent.until(agent.now_ms + 5_000.0)
            agent.checked(0, "no answer")
        agent.done.remove(killed)
        actions = agent.feed(ProcessExited("mps-a-0", -9, ""))
    assert [one.text.split()[0] for one in actions if isinstance(one, Warn)] == ["mps_given_up"]
    assert agent.now_ms > limits.restart.window_ms


def test_failures_of_a_daemon_that_answers_in_between_for_long_are_forgiven() -> None:
    agent = Agent()
    for _ in range(3 * LIMITS.restart.failures_max):
        agent.until(agent.now_ms + LIMITS.restart.longest_ms)
        agent.checked(0)
        agent.checked(1)
        for _ in range(10):
            agent.until(agent.now_ms + LIMITS.daemon_check_ms)
            agent.checked(0)
            agent.until(agent.now_ms + LIMITS.daemon_check_ms)
            agent.checked(0, "no answer")
        actions = agent.feed(ProcessExited("mps-a-0", 1, "it crashed"))
        assert Warn("mps_lost gpu=0 reason='it crashed'") in actions


def test_a_worker_that_is_no_client_says_nothing_of_a_daemons_server() -> None:
    """A pipeline's or a gang's: it runs beside MPS, whose daemon has no server while nobody is its client."""
    agent = Agent()
    agent.up()
    (start,) = spawned(agent.want(replace(spec("p"), following=(1,))))
    assert not start.is_mps
    agent.ready(start.worker_id, spec("p"))
    for _ in range(5):
        agent.until(agent.now_ms + LIMITS.daemon_check_ms)
        agent.checked(0)
        agent.checked(1)
    assert Kill("mps-a-0") not in agent.done


def test_a_gpu_without_mps_is_shared_in_time_and_every_share_on_it_is_said_to_be_a_word() -> None:
    agent = Agent(plan=SharingPlan("time-sharing", "no MPS: it is not installed"))
    actions = agent.want(spec("x"), spec("whole", share=100.0), spec("any", share=None))
    assert [start.is_mps for start in spawned(actions)] == [False] * 3
    warned = [action.text for action in actions if isinstance(action, Warn)]
    assert warned == [
        "shares_over_100 gpu=0 sum_percent=140",
        "share_not_enforced slice=x share_percent=40 reason='no MPS: it is not installed'",
    ]


def test_shares_over_a_whole_gpu_are_said_once_and_for_as_long_as_they_are() -> None:
    agent = Agent()
    agent.up()
    text = "shares_over_100 gpu=0 sum_percent=120"
    assert Warn(text) in agent.want(spec("x", share=60.0), spec("y", share=60.0))
    assert Warn(text) not in agent.want(spec("x", share=60.0), spec("y", share=60.0))
    agent.checked(0)
    assert agent.feed(GpusSampled(()))
    assert agent.sharing(0).reason == "the shares of its slices add up to 120 %"
    agent.want(spec("x", share=60.0))
    agent.feed(GpusSampled(()))
    assert agent.sharing(0).reason == ""


def test_daemons_end_after_the_last_worker() -> None:
    agent = Agent()
    agent.up()
    (worker,) = agent.serve(spec("x"))
    assert Terminate("mps-a-0") not in agent.feed(StopAsked())
    actions = agent.feed(ProcessExited(worker, 0, ""))
    assert actions.count(Terminate("mps-a-0")) == actions.count(Terminate("mps-a-1")) == 1
    agent.feed(ProcessExited("mps-a-0", 0, ""))
    assert not agent.core.is_stopped
    agent.feed(ProcessExited("mps-a-1", 0, ""))
    assert agent.core.is_stopped


def test_a_stop_is_bounded_whatever_the_daemons_do() -> None:
    agent = Agent()
    agent.up()
    agent.feed(StopAsked())
    done = agent.until(LIMITS.daemon_end_ms + LIMITS.kill_ms)
    assert Kill("mps-a-0") in done
    assert agent.core.is_stopped


@pytest.mark.parametrize("event", [ProcessExited("mps-a-0", 1, ""), StopAsked()])
def test_a_guard_that_was_taken_over_runs_from_the_first_event_on(event: AgentEvent) -> None:
    """It may end, or the agent be told to stop, before anything else has happened."""
    found = FoundDevices([GpuInfo(0, "a100", "cuda")], {0: MPS}, daemons=[0])
    core = NodeAgentCore(AgentSelf(NodeId("a"), Incarnation("new")), found, LIMITS)
    actions = core.handle(event, 7.0)
    assert (Terminate("mps-a-0") in actions) == isinstance(event, StopAsked)
    core.handle(StopAsked(), 8.0)
    assert core.is_stopped == isinstance(event, ProcessExited)


def test_a_guard_that_does_not_die_of_sigkill_keeps_the_others_from_no_orderly_end() -> None:
    agent = Agent()
    agent.checked(0, "", 7)
    agent.checked(1)
    assert Kill("mps-a-0") in agent.checked(0, "", 8), "the server that it had is gone"
    agent.until(agent.now_ms + LIMITS.kill_ms)
    assert Terminate("mps-a-1") in agent.feed(StopAsked())
    agent.feed(ProcessExited("mps-a-1", 0, ""))
    assert agent.core.is_stopped


def test_gpus_are_sampled_once_a_second_one_sample_at_a_time() -> None:
    agent = Agent()
    assert SampleGpus() in agent.done
    assert SampleGpus() not in agent.until(5_000.0), "the first is not back yet"
    sample = GpuSample(0, busy_percent=50.0)
    agent.feed(GpusSampled((sample,)))
    assert SampleGpus() not in agent.until(5_999.0)
    assert SampleGpus() in agent.until(6_000.0)
    (answer,) = agent.feed(Heard(PeerId("someone"), StatusAsked()))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, StatusListed)
    report = answer.message.gpus[0]
    assert (report.info.uid, report.sample, report.sampled_ago_ms) == ("GPU-0", sample, 1_000.0)


# ---------------------------------------------------------------- adoption


def hello(incarnation: str = "old", pid: int = 77, *slices: SliceSpec) -> Heard:
    message = WorkerHello("worker-a-7", Incarnation(incarnation), pid, slices)
    return Heard(PeerId(f"worker-a-7/{incarnation}"), message)


def hellos(actions: Sequence[AgentAction]) -> list[NodeHello]:
    messages = [action.message for action in actions if isinstance(action, Send)]
    return [message for message in messages if isinstance(message, NodeHello)]


def test_an_orphan_is_adopted_before_the_scheduler_is_greeted() -> None:
    agent = Agent(orphans=[ORPHAN], daemons=[0])
    assert StartDaemon(0) not in agent.done, "it runs, and is asked first"
    assert StartDaemon(1) in agent.done
    assert hellos(agent.done) == []
    (greeting,) = hellos(agent.feed(hello("old", 77, spec("x"))))
    assert [(status.slice_id, status.incarnation) for status in greeting.slices] == [("x", "old")]
    agent.up()
    beside = (spec("x"),)
    assert spawned(agent.want(spec("x"), spec("new"))) == [Spawn("worker-a-8", (spec("new"),), True, beside)]
    agent.feed(
        Heard(PeerId("worker-a-7/old"), SliceReady(SliceId("x"), Incarnation("old"), NodeId("a"), 0, (), ()))
    )
    assert agent.state("x") == ("ready", "")


def test_of_two_orphans_that_host_the_same_slice_one_does() -> None:
    other = Orphan("worker-a-9", 79, Incarnation("older"), is_mps=True)
    agent = Agent(orphans=[ORPHAN, other], daemons=[0])
    agent.feed(hello("old", 77, spec("x")))
    message = WorkerHello("worker-a-9", Incarnation("older"), 79, (spec("x"), spec("y")))
    done = agent.feed(Heard(PeerId("worker-a-9/older"), message))
    (host,) = [one.message for one in done if isinstance(one, Send) and isinstance(one.message, Host)]
    assert [one.slice_id for one in host.slices] == ["y"]
    (greeting,) = hellos(done)
    assert sorted((one.slice_id, one.incarnation) for one in greeting.slices) == [
        ("x", "old"),
        ("y", "older"),
    ]


def test_an_orphan_without_slices_is_killed() -> None:
    agent = Agent(orphans=[ORPHAN], daemons=[0])
    actions = agent.feed(hello("old", 77))
    assert Kill("worker-a-7") in actions
    assert hellos(actions)[0].slices == ()
    agent.feed(ProcessExited("worker-a-7", EXIT_UNKNOWN, ""))


def test_nobody_speaks_for_an_orphan_of_another_incarnation_or_pid() -> None:
    for stranger in (hello("new", 77, spec("x")), hello("old", 78, spec("x"))):
        agent = Agent(orphans=[ORPHAN], daemons=[0])
        assert agent.feed(stranger) == []
        assert agent.core.offences.counters == {"offences_wrong_identity": 1}
        (greeting,) = hellos(agent.feed(hello("old", 77, spec("x"))))
        assert [status.slice_id for status in greeting.slices] == ["x"]


def test_a_worker_does_not_take_the_name_of_an_orphan_that_has_not_ended_yet() -> None:
    agent = Agent(orphans=[ORPHAN], daemons=[0])
    agent.feed(hello("old", 77))
    agent.up()
    assert [spawn.worker_id for spawn in spawned(agent.want(spec("x")))] == ["worker-a-8"]


def test_an_orphan_that_says_nothing_is_killed_in_time() -> None:
    agent = Agent(orphans=[ORPHAN], daemons=[0])
    done = agent.until(LIMITS.adopt_ms)
    assert Kill("worker-a-7") in done
    assert hellos(done)


def test_an_orphan_that_ends_by_itself_holds_nobody_up() -> None:
    agent = Agent(orphans=[ORPHAN], daemons=[0])
    assert hellos(agent.feed(ProcessExited("worker-a-7", EXIT_UNKNOWN, "")))


def test_an_adopted_worker_ends_when_the_daemon_it_came_with_does() -> None:
    agent = Agent(orphans=[ORPHAN], daemons=[0])
    agent.feed(hello("old", 77, spec("x")))
    agent.want(spec("x"))
    actions = agent.feed(ProcessExited("mps-a-0", EXIT_UNKNOWN, ""))
    assert Kill("worker-a-7", at_once=True) in actions
    assert agent.state("x") == ("lost", "the guard of its MPS daemon ended")


def test_an_orphan_whose_daemon_ended_before_its_hello_is_sent_away() -> None:
    """It is a client of the one that is gone, and nothing would end it when the next one is up."""
    agent = Agent(orphans=[ORPHAN], daemons=[0])
    agent.feed(ProcessExited("mps-a-0", EXIT_UNKNOWN, ""))
    agent.until(0.0)
    assert StartDaemon(0) in agent.done
    assert Kill("worker-a-7") in agent.feed(hello("old", 77, spec("x")))


@pytest.mark.parametrize(
    ("one", "is_given_up", "is_adopted"),
    [
        (spec("x"), False, False),
        (spec("x"), True, True),
        (replace(spec("x"), following=(1,)), False, True),
    ],
    ids=["beside a daemon", "where it is given up", "a pipeline's"],
)
def test_an_orphan_that_is_no_client_is_adopted_where_no_other_one_could_be(
    one: SliceSpec, is_given_up: bool, is_adopted: bool
) -> None:
    """A former agent gave the daemon up, and this one has begun it anew: beside its clients that worker had no share."""
    agent = Agent(orphans=[Orphan("worker-a-7", 77, Incarnation("old"), is_mps=False)])
    if is_given_up:
        agent.feed(ProcessExited("mps-a-0", EXIT_GUARD_REFUSED, "somebody else's"))
    else:
        agent.checked(0)
    assert (Kill("worker-a-7") in agent.feed(hello("old", 77, one))) is not is_adopted
    assert agent.core.counters["workers_adopted"] == int(is_adopted)


@pytest.mark.parametrize("is_waiting", [False, True], ids=["starting", "waiting"])
def test_an_orphan_that_is_no_client_serves_until_a_daemon_answers(*, is_waiting: bool) -> None:
    """A former agent gave the daemon up; whether this one brings it up is not known before it answers."""
    agent = Agent(orphans=[Orphan("worker-a-7", 77, Incarnation("old"), is_mps=False)])
    one = spec("x")
    if is_waiting:
        agent.feed(ProcessExited("mps-a-0", 1, "it ended"))
    assert Kill("worker-a-7") not in agent.feed(hello("old", 77, one))
    agent.ready("worker-a-7", one, "old")
    assert agent.core.counters["workers_adopted"] == 1
    assert not spawned(agent.want(one))
    if is_waiting:
        agent.until(agent.now_ms + LIMITS.restart.first_ms)
    assert Kill("worker-a-7", at_once=True) in agent.checked(0)
    agent.feed(ProcessExited("worker-a-7", -9, ""))
    again = spawned(agent.until(agent.now_ms))
    assert [one.is_mps for one in again] == [True]


def test_an_orphan_that_is_no_client_serves_on_where_the_daemon_is_given_up_again() -> None:
    agent = Agent(orphans=[Orphan("worker-a-7", 77, Incarnation("old"), is_mps=False)])
    agent.feed(hello("old", 77, spec("x")))
    agent.feed(ProcessExited("mps-a-0", EXIT_GUARD_REFUSED, "somebody else's"))
    agent.checked(1)
    assert not [action for action in agent.done if isinstance(action, Kill)]
    assert agent.core.counters["workers_adopted"] == 1


def test_a_pipeline_is_no_client_and_serves_on_when_a_daemon_answers() -> None:
    agent = Agent(orphans=[Orphan("worker-a-7", 77, Incarnation("old"), is_mps=False)])
    agent.feed(hello("old", 77, replace(spec("x"), following=(1,))))
    agent.up()
    assert not [action for action in agent.done if isinstance(action, Kill)]


def test_a_stop_before_all_are_adopted_ends_the_others_too() -> None:
    agent = Agent(orphans=[ORPHAN], daemons=[0])
    assert Kill("worker-a-7") in agent.feed(StopAsked())
    assert not agent.core.is_stopped
    agent.feed(ProcessExited("worker-a-7", EXIT_UNKNOWN, ""))
    for gpu in (0, 1):
        agent.feed(ProcessExited(f"mps-a-{gpu}", 0, ""))
    assert agent.core.is_stopped


@pytest.mark.parametrize("is_late", [False, True], ids=["never ends", "ends after all"])
def test_an_orphan_that_does_not_die_of_sigkill_holds_no_stop_up(is_late: bool) -> None:
    """Nor does its end surprise anybody when nobody waits for it any more."""
    found = FoundDevices([GpuInfo(0, "generic", "emulated")], orphans=[ORPHAN])
    core = NodeAgentCore(AgentSelf(NodeId("a"), Incarnation("new"), outlives=True), found, LIMITS)
    assert Kill("worker-a-7") in core.handle(StopAsked(), 0.0)
    end_ms = LIMITS.client_end_ms + LIMITS.kill_ms
    assert (core.is_stopped, core.wake_at_ms) == (False, end_ms)
    (warning,) = core.handle(Tick(), end_ms)
    assert warning == Warn("orphan_abandoned worker=worker-a-7 after_s=7")
    if is_late:
        core.handle(ProcessExited("worker-a-7", -9, ""), end_ms + 1.0)
    assert core.is_stopped
    assert core.wake_at_ms is None


def test_every_worker_that_said_hello_is_written_down() -> None:
    agent = Agent()
    agent.up()
    (worker,) = agent.serve(spec("x"))
    assert Remember(Orphan(worker, 9, Incarnation("boot"), is_mps=True)) in agent.done


@pytest.mark.parametrize("problem", ["", "no answer"])
def test_a_late_answer_of_a_daemon_that_has_ended_says_nothing_of_the_next_one(problem: str) -> None:
    agent = Agent()
    agent.up()
    agent.checked(0, "", 11)
    assert CheckDaemon(0, 1) in agent.until(agent.now_ms + LIMITS.daemon_check_ms)
    agent.feed(ProcessExited("mps-a-0", -9, ""))
    assert StartDaemon(0) in agent.until(agent.now_ms + LIMITS.restart.first_ms)
    agent.want(spec("x"))
    assert agent.feed(DaemonChecked(0, 1, problem, (11,))) == []
    assert agent.sharing(0).mode == "starting"
    assert len(spawned(agent.checked(0, "", 12))) == 1
    assert agent.sharing(0) == GpuSharing(0, "mps")


def test_an_agent_that_was_stopped_itself_gives_orphans_and_daemons_their_time_anew() -> None:
    agent = Agent(orphans=[ORPHAN])
    agent.now_ms += 1_000_000.0
    assert not [one for one in agent.feed(Tick()) if isinstance(one, Kill)]
    assert hellos(agent.feed(hello("old", 77, spec("x"))))
    assert not [one for one in agent.feed(Tick()) if isinstance(one, Kill)]
    agent.up()
    assert agent.sharing().mode == "mps"
    agent = Agent(orphans=[ORPHAN])
    agent.now_ms += 1_000_000.0
    agent.feed(Tick())
    killed = [one.worker_id for one in agent.until(agent.now_ms + 20_000.0) if isinstance(one, Kill)]
    assert killed == ["worker-a-7", "mps-a-0", "mps-a-1"], "from then on they are judged as ever"
