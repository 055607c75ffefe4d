from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fabric import frames
from fabric.ids import Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    DesiredSlices,
    Directory,
    EpochGranted,
    GpuInfo,
    Host,
    LeftOut,
    Loading,
    ModelSpec,
    NodeHello,
    Ping,
    Pong,
    SliceChanged,
    SliceFailed,
    SliceReady,
    SliceSpec,
    StatusAsked,
    StatusListed,
    Stop,
    WorkerHello,
)
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import (
    AgentAction,
    AgentEvent,
    AgentLimits,
    Kill,
    Spawn,
    StrangerGreeted,
    Terminate,
    WorkerUntold,
)
from roles.node_agent.status_requests import ANSWER_MS, ASKERS_MAX
from roles.node_agent.workers.processes import TELL_AGAIN_MS
from roles.node_agent.workers.suspect_models import FORGIVEN_AFTER_MS
from roles.runtime.core import SCHEDULER, Heard, Lost, Send, Tick
from roles.runtime.loop.driver import DriverStats
from roles.runtime.process_events import ProcessExited, SchedulerFound, StopAsked, Warn

NODE = NodeId("a")
LIMITS = AgentLimits()


def spec(name: str, device: str = "cpu", gpu: int = 0, share: float | None = None) -> SliceSpec:
    model = ModelSpec(ModelId("m"), 25.0, 8, exec_ms=(1.0,) * 8)
    return SliceSpec(SliceId(name), gpu, device, share, (model,))


class Agent:
    """An agent with its time, its last actions, and what the scheduler was told."""

    def __init__(self, device: str = "cpu", gpus: int = 4) -> None:
        infos = [GpuInfo(gpu, "generic", device) for gpu in range(gpus)]
        self.core = NodeAgentCore(AgentSelf(NODE, Incarnation("boot")), FoundDevices(infos), LIMITS)
        self.now_ms = 0.0
        self.silent: set[PeerId] = set()
        """Who does not answer pings; everybody else does at once."""
        self.find_scheduler()

    def find_scheduler(self, address: str = "ipc://scheduler") -> Sequence[AgentAction]:
        return self.feed(SchedulerFound((address,)))

    def feed(self, event: AgentEvent) -> Sequence[AgentAction]:
        return self.core.handle(event, self.now_ms)

    def want(self, *specs: SliceSpec) -> Sequence[AgentAction]:
        return self.feed(Heard(SCHEDULER, DesiredSlices(1, specs)))

    def hear(self, worker_id: str, message: AnyMessage) -> Sequence[AgentAction]:
        return self.feed(Heard(peer(worker_id), message))

    def greet(self, worker_id: str) -> Sequence[AgentAction]:
        return self.hear(worker_id, WorkerHello(worker_id, incarnation(worker_id), 1))

    def ready(self, worker_id: str, slice_id: str) -> Sequence[AgentAction]:
        message = SliceReady(SliceId(slice_id), incarnation(worker_id), NODE, 0, ("ipc://in",), ())
        return self.hear(worker_id, message)

    def exit(self, worker_id: str, code: int = -9, words: str = "") -> Sequence[AgentAction]:
        return self.feed(ProcessExited(worker_id, code, words))

    def serve(self, *specs: SliceSpec) -> list[Spawn]:
        """Want these and bring their workers up."""
        started = spawns(self.want(*specs))
        for action in started:
            self.greet(action.worker_id)
            for slice_ in action.slices:
                self.ready(action.worker_id, slice_.slice_id)
        return started

    def until(self, moment_ms: float) -> list[AgentAction]:
        """Tick whenever the core asks for it, up to that moment."""
        done: list[AgentAction] = []
        while self.core.wake_at_ms is not None and self.core.wake_at_ms <= moment_ms:
            self.now_ms = max(self.now_ms, self.core.wake_at_ms)
            for action in self.feed(Tick()):
                if not (isinstance(action, Send) and isinstance(action.message, Ping)):
                    done.append(action)
                elif action.peer not in self.silent:
                    assert self.feed(Heard(action.peer, Pong(action.message.number))) == []
        self.now_ms = moment_ms
        return done


def peer(worker_id: str) -> PeerId:
    return PeerId(f"{worker_id}/{incarnation(worker_id)}")


def incarnation(worker_id: str) -> Incarnation:
    return Incarnation(f"i-{worker_id}")


def spawns(actions: Sequence[AgentAction]) -> list[Spawn]:
    return [action for action in actions if isinstance(action, Spawn)]


def changes(actions: Sequence[AgentAction]) -> list[tuple[str, str]]:
    """(slice, state) of every report."""
    return [(change.status.slice_id, change.status.state) for change in reports(actions)]


def reports(actions: Sequence[AgentAction]) -> list[SliceChanged]:
    return [message for message in told(actions) if isinstance(message, SliceChanged)]


def told(actions: Sequence[AgentAction]) -> list[AnyMessage]:
    """What the scheduler hears."""
    return [action.message for action in actions if isinstance(action, Send) and action.peer == SCHEDULER]


def sent(actions: Sequence[AgentAction]) -> list[tuple[PeerId, AnyMessage]]:
    """What workers hear."""
    return [
        (action.peer, action.message)
        for action in actions
        if isinstance(action, Send) and action.peer != SCHEDULER
    ]


# ---------------------------------------------------------------- starting


def test_the_first_word_to_a_scheduler_says_what_is_there() -> None:
    found = FoundDevices([GpuInfo(0, "v100", "emulated")])
    core = NodeAgentCore(AgentSelf(NODE, Incarnation("boot")), found, LIMITS)
    (hello,) = core.handle(SchedulerFound(("ipc://s",)), 0.0)
    assert hello == Send(
        SCHEDULER, NodeHello(NODE, Incarnation("boot"), (GpuInfo(0, "v100", "emulated"),), ())
    )


def test_a_directory_means_that_the_scheduler_had_given_the_agent_up_so_it_says_hello_again() -> None:
    host = Agent()
    host.serve(spec("x"))
    (hello,) = told(host.feed(Heard(SCHEDULER, Directory(2, (), (), ()))))
    assert isinstance(hello, NodeHello)
    assert [status.slice_id for status in hello.slices] == ["x"]


def test_slices_of_real_devices_get_a_process_each() -> None:
    started = spawns(Agent("cpu").want(spec("x"), spec("y", gpu=1)))
    assert [[slice_.slice_id for slice_ in action.slices] for action in started] == [["x"], ["y"]]
    assert len({action.worker_id for action in started}) == 2


def test_emulated_slices_share_processes_up_to_sixty_four() -> None:
    wanted = [spec(f"s{number}", "emulated") for number in range(130)]
    started = spawns(Agent("emulated").want(*wanted))
    assert [len(action.slices) for action in started] == [64, 64, 2]


def test_a_worker_that_says_hello_hears_what_to_host_and_where_the_scheduler_is() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    assert sent(host.greet(started.worker_id)) == [
        (peer(started.worker_id), Host(NODE, (spec("x"),), ("ipc://scheduler",)))
    ]


def test_every_step_of_a_slice_is_reported() -> None:
    host = Agent()
    wanted = host.want(spec("x"))
    (started,) = spawns(wanted)
    assert changes(wanted) == [("x", "starting")]
    host.greet(started.worker_id)
    (report,) = reports(host.ready(started.worker_id, "x"))
    assert (report.status.state, report.status.incarnation) == ("ready", incarnation(started.worker_id))


def test_wanting_the_same_again_changes_nothing() -> None:
    host = Agent()
    host.serve(spec("x"))
    assert host.want(spec("x")) == []


def test_a_slice_on_a_gpu_that_is_not_there_fails_with_the_reason() -> None:
    (report,) = reports(Agent(gpus=1).want(spec("x", gpu=3)))
    assert (report.status.state, report.status.reason) == ("failed", "node a has no gpu 3 (it has 1)")


def test_a_slice_for_another_kind_of_device_fails_with_the_reason() -> None:
    (report,) = reports(Agent("cpu").want(spec("x", device="cuda")))
    assert report.status.reason == "gpu 0 of node a is cpu, not cuda"


# ---------------------------------------------------------------- other models


def hosting(name: str, *models: str, share: float | None = None, slo_ms: float = 25.0) -> SliceSpec:
    specs = tuple(ModelSpec(ModelId(model), slo_ms, 8, exec_ms=(1.0,) * 8) for model in models)
    return SliceSpec(SliceId(name), 0, "cpu", share, specs)


def test_a_slice_that_should_host_other_models_keeps_its_worker_which_is_told() -> None:
    host = Agent()
    (started,) = host.serve(hosting("x", "m"))
    wider = hosting("x", "m", "n")
    actions = host.want(wider)
    assert sent(actions) == [(peer(started.worker_id), Host(NODE, (wider,), ("ipc://scheduler",)))]
    assert (spawns(actions), changes(actions)) == ([], [])
    assert sent(host.want(hosting("x", "n"))) == [
        (peer(started.worker_id), Host(NODE, (hosting("x", "n"),), ("ipc://scheduler",)))
    ]


def test_another_share_is_another_worker() -> None:
    host = Agent()
    (_started,) = host.serve(hosting("x", "m", share=40.0))
    actions = host.want(hosting("x", "m", "n", share=50.0))
    assert changes(actions) == [("x", "stopped")]
    assert [type(message) for _, message in sent(actions)] == [Stop]


def test_a_gang_whose_model_gets_another_bound_is_another_worker() -> None:
    host = Agent()
    gang = replace(hosting("x", "m"), following=(1,), is_gang=True)
    host.serve(gang)
    assert host.want(gang) == []
    actions = host.want(replace(gang, models=(replace(gang.models[0], run_limit_ms=9_000.0),)))
    assert changes(actions) == [("x", "stopped")]
    assert [type(message) for _, message in sent(actions)] == [Stop]


def test_a_worker_that_is_not_up_yet_is_told_the_models_of_that_moment() -> None:
    host = Agent()
    (started,) = spawns(host.want(hosting("x", "m")))
    assert host.want(hosting("x", "m", "n")) == []
    ((_, told_it),) = sent(host.greet(started.worker_id))
    assert isinstance(told_it, Host)
    assert told_it.slices == (hosting("x", "m", "n"),)


def test_a_worker_that_ends_is_started_with_the_models_that_are_wanted_then() -> None:
    host = Agent()
    (started,) = host.serve(hosting("x", "m"))
    host.want(hosting("x", "m", "n"))
    host.exit(started.worker_id)
    (again,) = spawns(host.until(0.0))
    assert again.slices == (hosting("x", "m", "n"),)


def test_a_model_that_ended_its_worker_is_suspected_whatever_its_neighbours_are() -> None:
    host = Agent()
    (started,) = host.serve(hosting("x", "m"))
    left_out: tuple[LeftOut, ...] = ()
    for strike in range(3):
        names = ("m", "n", *(f"more-{number}" for number in range(strike)))
        host.want(hosting("x", *names))
        host.hear(started.worker_id, Loading(SliceId("x"), ModelId("n")))
        host.exit(started.worker_id)
        (started,) = spawns(host.until(host.now_ms + 1_000.0))
        ((_, told_it),) = sent(host.greet(started.worker_id))
        assert isinstance(told_it, Host)
        left_out = told_it.left_out
        host.ready(started.worker_id, "x")
    assert [one.model_id for one in left_out] == ["n"]
    host.want(hosting("x", "m", "n", slo_ms=50.0))
    host.exit(started.worker_id)
    (started,) = spawns(host.until(host.now_ms + 1_000.0))
    ((_, told_it),) = sent(host.greet(started.worker_id))
    assert isinstance(told_it, Host)
    assert told_it.left_out == (), "it is specified otherwise"


@pytest.mark.parametrize(("ready", "suspects"), [("x", 0), ("y", 1)])
def test_a_model_that_loads_beside_is_suspected_until_its_own_slice_is_ready_again(
    ready: str, suspects: int
) -> None:
    host = Agent("emulated")
    x = replace(hosting("x", "m", "n"), device="emulated")
    (started,) = host.serve(x, spec("y", "emulated"))
    host.hear(started.worker_id, Loading(x.slice_id, ModelId("n")))
    host.ready(started.worker_id, ready)
    warned = [action for action in host.exit(started.worker_id) if isinstance(action, Warn)]
    assert len(warned) == suspects
    assert all(f"slice={x.slice_id} model=n" in action.text for action in warned)


# ---------------------------------------------------------------- losing


def test_a_lost_worker_is_reported_at_once_and_started_again_at_once() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    (report,) = reports(host.exit(started.worker_id))
    assert (report.status.state, report.status.reason) == ("lost", "its worker was killed by signal 9")
    assert report.status.incarnation == incarnation(started.worker_id)
    (again,) = spawns(host.until(0.0))
    assert again.slices == started.slices
    assert again.worker_id != started.worker_id


def test_the_last_words_of_a_worker_are_in_the_reason() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    (report,) = reports(host.exit(started.worker_id, 1, "Traceback …\n\nValueError: no such file\n"))
    assert report.status.reason == (
        "its worker exited with code 1; its last words: Traceback … | ValueError: no such file"
    )


def test_lines_of_its_log_are_no_last_words() -> None:
    logged = "2026-07-01 10:00:00,123 level=INFO role=worker-1 slice_ready slice=a/gpu0/0"
    host = Agent()
    (started,) = host.serve(spec("x"))
    (report,) = reports(host.exit(started.worker_id, -9, f"{logged}\n"))
    assert report.status.reason == "its worker was killed by signal 9"
    host = Agent()
    (started,) = host.serve(spec("x"))
    (report,) = reports(host.exit(started.worker_id, 1, f"MemoryError\n{logged}\n"))
    assert report.status.reason == "its worker exited with code 1; its last words: MemoryError"


def test_pauses_grow_and_the_fifth_failure_within_a_minute_is_given_up_with_a_reason() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    pauses = []
    for _ in range(4):
        host.exit(started.worker_id, 1, "boom")
        failed_at_ms = host.now_ms
        again = spawns(host.until(host.now_ms))
        while not again:
            again = spawns(host.until(host.now_ms + 50.0))
        (started,) = again
        pauses.append(host.now_ms - failed_at_ms)
    assert pauses == [0, 100, 200, 400]
    lost, failed = reports(host.exit(started.worker_id, 1, "boom"))
    assert (lost.status.state, failed.status.state) == ("lost", "failed")
    assert failed.status.reason == (
        "given up after 5 failures in a row: its worker exited with code 1; its last words: boom"
    )


def rest_s(actions: Sequence[AgentAction]) -> float:
    """How long a slice rests that is given up now."""
    assert [state for _, state in changes(actions)][-1:] == ["failed"]
    (warned,) = [
        one.text for one in actions if isinstance(one, Warn) and one.text.startswith("slice_given_up")
    ]
    return float(warned.partition("again_in_s=")[2].split()[0])


def fail_five_times(host: Agent, started: Spawn) -> float:
    """The worker's process ends at once at each start, until it is given up; for how long, in s."""
    for _ in range(4):
        host.exit(started.worker_id, 1, "boom")
        (started,) = spawns(host.until(host.now_ms + 5_000.0))
    return rest_s(host.exit(started.worker_id, 1, "boom"))


def test_a_slice_that_was_given_up_is_tried_again_after_a_rest_that_doubles_for_as_long_as_it_is_wanted() -> (
    None
):
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    for seconds in (60, 120, 240, 480, 600, 600):
        assert fail_five_times(host, started) == seconds
        host.want(spec("x"))
        assert spawns(host.until(host.now_ms + 1e3 * seconds - 1.0)) == []
        (started,) = spawns(host.until(host.now_ms + 1.0))
        assert host.want(spec("x")) == []
    host.greet(started.worker_id)
    host.ready(started.worker_id, "x")
    host.until(host.now_ms + 600_000.0)
    assert fail_five_times(host, started) == 60, "it had served"
    host.want()
    assert spawns(host.until(host.now_ms + 3_600_000.0)) == []


def test_who_is_ready_each_time_and_dies_soon_rests_longer_each_time_too() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    for seconds in (60, 120, 240):
        for attempt in range(1, 6):
            host.greet(started.worker_id)
            host.ready(started.worker_id, "x")
            host.until(host.now_ms + 2_000.0)
            actions = host.exit(started.worker_id, -11)
            if attempt < 5:
                (started,) = spawns(host.until(host.now_ms + 5_000.0))
        assert rest_s(actions) == seconds
        (started,) = spawns(host.until(host.now_ms + 1e3 * seconds))


def test_a_slice_tried_again_may_load_the_model_that_was_left_out_once_more() -> None:
    """What killed its process while it loaded may have passed, such as a host short of memory."""
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    for _ in range(3):
        host.greet(started.worker_id)
        host.hear(started.worker_id, Loading(SliceId("x"), ModelId("m")))
        host.exit(started.worker_id, -9)
        (started,) = spawns(host.until(host.now_ms + 150.0))
    for rest_ms in (60_000.0, 120_000.0):
        (out,) = hosted_by(host, started.worker_id).left_out
        assert out.model_id == "m"
        assert changes(fail(host, started.worker_id, "x")) == [("x", "failed")], "nothing is left of it"
        host.exit(started.worker_id, 0)
        (started,) = spawns(host.until(host.now_ms + rest_ms))
        assert hosted_by(host, started.worker_id).left_out == ()
        host.hear(started.worker_id, Loading(SliceId("x"), ModelId("m")))
        host.exit(started.worker_id, -9)
        (started,) = spawns(host.until(host.now_ms + 150.0))


def test_an_agent_that_ends_tries_nothing_again() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    fail_five_times(host, started)
    host.feed(StopAsked())
    assert spawns(host.until(host.now_ms + 3_600_000.0)) == []
    assert host.core.wake_at_ms is None or host.core.wake_at_ms > host.now_ms


def test_all_slices_of_a_shared_process_are_lost_and_come_back_together() -> None:
    host = Agent("emulated")
    (started,) = host.serve(spec("x", "emulated"), spec("y", "emulated"))
    assert changes(host.exit(started.worker_id)) == [("x", "lost"), ("y", "lost")]
    (again,) = spawns(host.until(100.0))
    assert [slice_.slice_id for slice_ in again.slices] == ["x", "y"]


def test_a_worker_without_a_hello_is_killed_and_reported() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    actions = host.until(30_000.0)
    assert Kill(started.worker_id) in actions
    assert [report.status.reason for report in reports(actions)] == [
        "its worker did not say hello within 30 s"
    ]
    host.exit(started.worker_id)
    assert len(spawns(host.until(30_100.0))) == 1


def test_a_worker_that_never_gets_ready_is_killed_and_reported() -> None:
    host = Agent("emulated")
    (started,) = spawns(host.want(spec("x", "emulated"), spec("y", "emulated")))
    host.greet(started.worker_id)
    host.ready(started.worker_id, "x")
    actions = host.until(120_000.0)
    assert Kill(started.worker_id) in actions
    assert {report.status.reason for report in reports(actions)} == {"not loaded within 120 s: y"}


@pytest.mark.parametrize("is_specified_otherwise", [False, True])
def test_a_worker_whose_last_slice_that_loads_is_dropped_serves_on(is_specified_otherwise: bool) -> None:
    host = Agent("emulated")
    (started,) = spawns(host.want(spec("x", "emulated"), spec("y", "emulated")))
    host.greet(started.worker_id)
    host.ready(started.worker_id, "x")
    others = [spec("y", "emulated", share=50.0)] if is_specified_otherwise else []
    for one in spawns(host.want(spec("x", "emulated"), *others)):
        host.greet(one.worker_id)
        host.ready(one.worker_id, "y")
    assert not [one for one in host.until(2 * LIMITS.load_ms) if isinstance(one, Kill | Warn)]
    host.silent.add(peer(started.worker_id))
    assert Kill(started.worker_id) in host.until(host.now_ms + 2 * LIMITS.silence_ms), (
        "its silence is noticed"
    )


def test_each_model_of_a_slice_has_its_own_time_to_load() -> None:
    """They are loaded one after the other."""
    host = Agent()
    (started,) = spawns(host.want(hosting("x", "a", "b", "c")))
    host.greet(started.worker_id)
    for model_id, at_ms in (("a", 0.0), ("b", 105_000.0), ("c", 210_000.0)):
        assert Kill(started.worker_id) not in host.until(at_ms)
        host.hear(started.worker_id, Loading(SliceId("x"), ModelId(model_id)))
    assert Kill(started.worker_id) not in host.until(329_999.0)
    host.ready(started.worker_id, "x")
    assert Kill(started.worker_id) not in host.until(1e6)


def test_each_model_of_a_pipeline_has_its_time_in_the_first_stage_and_again_in_the_others() -> None:
    host = Agent()
    (started,) = spawns(host.want(replace(hosting("x", "a", "b"), following=(1,))))
    host.greet(started.worker_id)
    for model_id, at_ms in (
        ("a", 0.0),
        ("b", 105_000.0),
        ("a", 210_000.0),
        ("b", 315_000.0),
        ("a", 420_000.0),
    ):
        assert Kill(started.worker_id) not in host.until(at_ms)
        host.hear(started.worker_id, Loading(SliceId("x"), ModelId(model_id)))
    assert Kill(started.worker_id) not in host.until(434_999.0)
    assert Kill(started.worker_id) in host.until(435_500.0), "and no third time"


def test_but_once_for_each_start_however_often_its_worker_says_so() -> None:
    host = Agent()
    (started,) = spawns(host.want(hosting("x", "a", "b")))
    for _ in range(2):
        began_ms = host.now_ms
        host.greet(started.worker_id)
        for model_id, after_ms in (("a", 0.0), ("b", 100_000.0), ("a", 150_000.0), ("b", 200_000.0)):
            assert Kill(started.worker_id) not in host.until(began_ms + after_ms)
            host.hear(started.worker_id, Loading(SliceId("x"), ModelId(model_id)))
        assert Kill(started.worker_id) not in host.until(began_ms + 219_999.0)
        assert Kill(started.worker_id) in host.until(began_ms + 220_500.0)
        host.exit(started.worker_id, -9)
        (started,) = spawns(host.until(host.now_ms + 5_000.0))


def test_a_loader_that_hangs_at_every_start_is_given_up() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    for attempt in range(1, 6):
        host.greet(started.worker_id)
        assert Kill(started.worker_id) not in host.until(host.now_ms + 119_999.0)
        assert Kill(started.worker_id) in host.until(host.now_ms + 500.0)
        told = reports(host.exit(started.worker_id, -9))
        if attempt < 5:
            (started,) = spawns(host.until(host.now_ms + 5_000.0))
    assert told[-1].status.state == "failed"
    assert told[-1].status.reason == ("given up after 5 failures in a row: not loaded within 120 s: x")


@pytest.mark.parametrize("hello_s", [31.0, 54.0, 100.0, 114.0])
def test_on_a_host_too_busy_for_the_limit_a_worker_serves_in_the_end(hello_s: float) -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    for _ in range(4):
        said = host.until(host.now_ms + hello_s * 1e3)
        if Kill(started.worker_id) not in said:
            break
        host.exit(started.worker_id, -9)
        (started,) = spawns(host.until(host.now_ms + 5_000.0))
    host.greet(started.worker_id)
    assert [report.status.state for report in reports(host.ready(started.worker_id, "x"))] == ["ready"]

    # Once it has served, a start is held to the limit itself again.
    again = next(iter(spawns([*host.exit(started.worker_id, -9), *host.until(host.now_ms + 5_000.0)])))
    assert Kill(again.worker_id) in host.until(host.now_ms + 30_000.0)


def test_a_ready_worker_has_no_time_limit() -> None:
    host = Agent()
    host.serve(spec("x"))
    assert not [action for action in host.until(1e6) if isinstance(action, Kill | Spawn)]


def test_late_words_of_a_dead_worker_do_not_count() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    host.greet(started.worker_id)
    host.exit(started.worker_id)
    assert host.ready(started.worker_id, "x") == []
    (again,) = spawns(host.until(100.0))
    assert host.ready(started.worker_id, "x") == []
    assert host.greet(again.worker_id)


def test_a_stranger_that_says_hello_is_sent_away() -> None:
    assert sent(Agent().greet("nobody")) == [(peer("nobody"), Stop(0.0))]


# ---------------------------------------------------------------- loaders that fail


def fail(host: Agent, worker_id: str, slice_id: str) -> Sequence[AgentAction]:
    failed = SliceFailed(SliceId(slice_id), incarnation(worker_id), "loader raised", is_unloadable=True)
    return host.hear(worker_id, failed)


def test_a_slice_whose_loader_failed_is_reported_and_tried_again_after_a_rest() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    host.greet(started.worker_id)
    actions = fail(host, started.worker_id, "x")
    assert [(report.status.state, report.status.reason) for report in reports(actions)] == [
        ("failed", "loader raised")
    ]
    assert sent(actions) == [(peer(started.worker_id), Stop(LIMITS.grace_ms))]
    assert host.exit(started.worker_id, 0) == []
    assert spawns(host.want(spec("x"))) == []
    (again,) = spawns(host.until(60_000.0))
    host.greet(again.worker_id)
    assert changes(host.ready(again.worker_id, "x")) == [("x", "ready")]


def test_a_failure_is_told_again_to_whoever_asks_again() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    host.greet(started.worker_id)
    fail(host, started.worker_id, "x")
    assert changes(host.want(spec("x"))) == [("x", "failed")]


def test_a_failed_slice_with_a_new_specification_is_tried_again() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    host.greet(started.worker_id)
    fail(host, started.worker_id, "x")
    assert spawns(host.want(spec("x", share=50.0))) == []  # the old process still holds its device
    (again,) = spawns(host.exit(started.worker_id, 0))
    assert again.slices == (spec("x", share=50.0),)


def test_a_failed_slice_does_not_disturb_its_neighbours() -> None:
    host = Agent("emulated")
    (started,) = spawns(host.want(spec("x", "emulated"), spec("y", "emulated")))
    host.greet(started.worker_id)
    host.ready(started.worker_id, "y")
    (told_to_host,) = [message for _, message in sent(fail(host, started.worker_id, "x"))]
    assert isinstance(told_to_host, Host)
    assert [slice_.slice_id for slice_ in told_to_host.slices] == ["y"]
    done = host.until(60_000.0)
    assert not [action for action in done if isinstance(action, Kill)]
    (again,) = spawns(done)
    assert [slice_.slice_id for slice_ in again.slices] == ["x"], "in a process of its own"
    host.greet(again.worker_id)
    assert changes(host.ready(again.worker_id, "x")) == [("x", "ready")]
    assert changes(host.exit(started.worker_id)) == [("y", "lost")]
    (again,) = spawns(host.until(60_100.0))
    assert [slice_.slice_id for slice_ in again.slices] == ["y"]


def test_an_agent_that_stops_says_of_no_slice_that_it_is_tried_again() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    host.greet(started.worker_id)
    host.feed(StopAsked())
    assert not [one for one in fail(host, started.worker_id, "x") if isinstance(one, Warn)]


def test_a_slice_that_breaks_after_it_was_ready_gets_a_new_process() -> None:
    host = Agent("cuda")
    (started,) = host.serve(spec("x", "cuda"))
    broken = SliceFailed(SliceId("x"), incarnation(started.worker_id), "CUDA error")
    actions = host.hear(started.worker_id, broken)
    assert [(report.status.state, report.status.reason) for report in reports(actions)] == [
        ("lost", "CUDA error")
    ]
    assert Terminate(started.worker_id) in actions
    host.exit(started.worker_id, 1)
    assert len(spawns(host.until(100.0))) == 1


def test_a_failure_that_comes_after_the_news_of_the_end_still_stops_the_restarts() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    host.greet(started.worker_id)
    host.exit(started.worker_id, 1)
    assert changes(fail(host, started.worker_id, "x")) == [("x", "failed")]
    assert spawns(host.until(10_000.0)) == []


# ---------------------------------------------------------------- wanting less


def test_a_slice_no_longer_wanted_is_stopped_in_order() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    actions = host.want()
    assert changes(actions) == [("x", "stopped")]
    assert sent(actions) == [(peer(started.worker_id), Stop(LIMITS.grace_ms))]
    assert Terminate(started.worker_id) in host.until(2_500.0)
    assert Kill(started.worker_id) in host.until(4_500.0)
    assert host.exit(started.worker_id) == []


def test_a_worker_that_has_not_said_hello_is_terminated_when_unwanted() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    assert Terminate(started.worker_id) in host.want()


def test_a_changed_slice_starts_when_its_old_process_has_ended() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    assert spawns(host.want(spec("x", share=50.0))) == []
    (again,) = spawns(host.exit(started.worker_id, 0))
    assert again.slices == (spec("x", share=50.0),)


def test_an_unwanted_emulated_slice_leaves_its_neighbours_alone() -> None:
    host = Agent("emulated")
    (started,) = host.serve(spec("x", "emulated"), spec("y", "emulated"))
    actions = host.want(spec("y", "emulated"))
    assert changes(actions) == [("x", "stopped")]
    assert sent(actions) == [
        (peer(started.worker_id), Host(NODE, (spec("y", "emulated"),), ("ipc://scheduler",)))
    ]
    (second,) = spawns(host.want(spec("x", "emulated"), spec("y", "emulated")))
    assert second.slices == (spec("x", "emulated"),)
    assert host.ready(started.worker_id, "x") == []  # the old one has no say any more
    assert (peer(started.worker_id), Stop(LIMITS.grace_ms)) in sent(host.want(spec("x", "emulated")))


def test_a_slice_waiting_for_its_restart_is_forgotten_when_unwanted() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    host.exit(started.worker_id)
    host.want()
    assert spawns(host.until(10_000.0)) == []


# ---------------------------------------------------------------- the scheduler goes and comes


def test_a_scheduler_is_greeted_until_it_says_what_it_wants() -> None:
    host = Agent()
    assert len(told(host.until(1_000.0))) == 4
    host.want()
    assert host.until(10_000.0) == []


def test_a_scheduler_that_was_silent_hears_what_runs() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    assert host.feed(Lost(SCHEDULER, "silent")) == []
    hello, *_ = told(host.until(1_000.0))
    assert isinstance(hello, NodeHello)
    (status,) = hello.slices
    assert (status.slice_id, status.state) == ("x", "ready")
    assert status.incarnation == incarnation(started.worker_id)


def test_a_lost_slice_is_not_among_what_runs() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    host.exit(started.worker_id)
    (hello,) = told(host.find_scheduler())
    assert isinstance(hello, NodeHello)
    assert hello.slices == ()


def test_workers_serve_on_while_the_scheduler_is_away() -> None:
    host = Agent()
    host.serve(spec("x"))
    host.feed(Lost(SCHEDULER, "silent"))
    actions = host.until(600_000.0)
    assert not [action for action in actions if isinstance(action, Kill | Terminate | Spawn)]
    assert sent(actions) == []


def test_workers_hear_of_a_scheduler_at_another_address() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    assert sent(host.find_scheduler()) == []
    assert sent(host.find_scheduler("tcp://new")) == [
        (peer(started.worker_id), EpochGranted(0, ("tcp://new",)))
    ]


def test_anyone_may_ask_how_the_slices_are() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    assert sent(host.hear("operator", StatusAsked())) == [(peer(started.worker_id), StatusAsked())]
    own = StatusListed(started.worker_id, 1, (), (), {"turns": 7.0})
    ((asker, listed),) = sent(host.hear(started.worker_id, own))
    assert asker == peer("operator")
    assert isinstance(listed, StatusListed)
    assert [(report.slice_id, report.state, report.models) for report in listed.slices] == [
        ("x", "ready", ("m",))
    ]
    assert {name: value for name, value in listed.counters.items() if value} == {
        f"{started.worker_id}/turns": 7.0,
        f"{started.worker_id}/pid": 1.0,
        "is_ready": 1.0,
    }


@pytest.mark.parametrize(
    "counters",
    [
        {"x" * 512: 1.0},
        {f"c{number}": 1.0 for number in range(65_535)},
        {f"{number:0200}": 1.0 for number in range(65_535)},
    ],
    ids=["a long name", "many", "many bytes"],
)
def test_whatever_workers_say_of_themselves_the_agents_answer_can_be_sent(counters: dict[str, float]) -> None:
    host = Agent()
    started = host.serve(spec("x"), spec("y"), spec("z"))
    host.hear("operator", StatusAsked())
    for each in started:
        status = StatusListed(each.worker_id, 1, (), (), {"turns": 7.0, **counters})
        frames.pack(status)  # it can come
        answers = sent(host.hear(each.worker_id, status))
    ((_, listed),) = answers
    assert isinstance(listed, StatusListed)
    frames.pack(DriverStats().told_in(listed))
    assert all(listed.counters[f"{each.worker_id}/turns"] == 7.0 for each in started)


def test_who_asks_does_not_wait_long_for_a_worker_that_says_nothing() -> None:
    host = Agent()
    host.serve(spec("x"))
    host.hear("operator", StatusAsked())
    assert sent(host.until(ANSWER_MS - 1.0)) == []
    ((asker, listed),) = sent(host.until(ANSWER_MS))
    assert asker == peer("operator")
    assert isinstance(listed, StatusListed)
    assert listed.counters["is_ready"] == 1.0
    assert not any("/" in name for name in listed.counters), "nothing of a worker"


def test_an_agent_that_was_not_told_what_to_run_is_not_ready() -> None:
    host = Agent()
    ((_, listed),) = sent(host.hear("operator", StatusAsked()))
    assert isinstance(listed, StatusListed)
    assert (listed.slices, listed.counters["is_ready"]) == ((), 0.0)
    host.want()
    ((_, listed),) = sent(host.hear("operator", StatusAsked()))
    assert isinstance(listed, StatusListed)
    assert listed.counters["is_ready"] == 1.0, "also with nothing to run"


def test_askers_are_bounded() -> None:
    host = Agent()
    host.serve(spec("x"))
    for number in range(ASKERS_MAX):
        assert sent(host.hear(f"operator-{number}", StatusAsked()))
    assert sent(host.hear("one too many", StatusAsked())) == []
    assert host.core.counters["askers_refused"] == 1


def test_words_nobody_expects_are_counted() -> None:
    host = Agent()
    assert host.feed(Heard(SCHEDULER, StatusAsked())) == []
    assert host.hear("w", Stop(0.0)) == []
    assert host.core.offences.counters["offences_wrong_type"] == 2


# ---------------------------------------------------------------- the end


def test_stopping_asks_then_terminates_then_kills_and_is_bounded() -> None:
    host = Agent()
    (served,) = host.serve(spec("x"))
    (young,) = spawns(host.want(spec("x"), spec("y", gpu=1)))
    actions = host.feed(StopAsked())
    assert Terminate(young.worker_id) in actions
    assert ("x", "draining") in changes(actions)
    assert sent(actions) == [], "what was granted just now is still on its way to it"
    assert sent(host.until(LIMITS.unready_ms)) == [(peer(served.worker_id), Stop(LIMITS.grace_ms))]
    assert not host.core.is_stopped
    actions = host.until(10_000.0)
    assert {Terminate(served.worker_id), Kill(served.worker_id), Kill(young.worker_id)} <= set(actions)
    assert host.core.is_stopped  # even if the kernel never gives them back


def test_a_slice_that_drains_drains_whatever_its_worker_says_again() -> None:
    """As it does where its connection to the agent broke: it would be granted more."""
    host = Agent()
    (served,) = host.serve(spec("x"))
    host.feed(StopAsked())
    assert changes(host.ready(served.worker_id, "x")) == []


def test_a_scheduler_that_asks_anew_hears_that_slices_drain() -> None:
    """One that is not told takes them for lost, with what runs there."""
    host = Agent()
    host.serve(spec("x"))
    host.feed(StopAsked())
    said = [one.message for one in host.feed(SchedulerFound(("ipc://s",))) if isinstance(one, Send)]
    (hello,) = [one for one in said if isinstance(one, NodeHello)]
    assert [(one.slice_id, one.state) for one in hello.slices] == [("x", "draining")]


def test_a_stop_is_over_when_the_last_worker_is_gone() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    host.feed(StopAsked())
    assert ("x", "stopped") in changes(host.exit(started.worker_id, 0))
    assert host.core.is_stopped


def test_a_stopping_agent_starts_nothing() -> None:
    host = Agent()
    (started,) = host.serve(spec("x"))
    host.exit(started.worker_id)
    host.feed(StopAsked())
    assert host.core.is_stopped
    assert host.want(spec("x")) == []
    assert spawns(host.until(10_000.0)) == []


# ---------------------------------------------------------------- models that hang, loops that are stuck


def two(name: str = "x") -> SliceSpec:
    models = [ModelSpec(ModelId(model_id), 25.0, 8, exec_ms=(1.0,) * 8) for model_id in ("good", "bad")]
    return SliceSpec(SliceId(name), 0, "cpu", None, tuple(models))


def hang(host: Agent, worker_id: str, times: int) -> list[AgentAction]:
    """The model `bad` hangs on the slice, whose worker says so and ends; until its successor is asked for."""
    reason = "model 'bad' hung"
    actions = [
        *host.hear(worker_id, SliceFailed(SliceId("x"), incarnation(worker_id), reason, ModelId("bad")))
    ]
    assert ("x", "lost") in changes(actions)
    (warned,) = [action for action in actions if isinstance(action, Warn)]
    assert f"model=bad times={times} of=3" in warned.text
    actions += host.exit(worker_id, code=70)
    return actions + host.until(host.now_ms + 150.0)


def hosted_by(host: Agent, worker_id: str) -> Host:
    (message,) = [message for _, message in sent(host.greet(worker_id)) if isinstance(message, Host)]
    return message


def test_a_model_that_hangs_three_times_is_left_out_and_its_neighbours_are_served() -> None:
    host = Agent()
    host.serve(two())
    for times in (1, 2):
        (spawn,) = spawns(hang(host, f"worker-a-{times}", times))
        assert hosted_by(host, spawn.worker_id).left_out == ()
        host.ready(spawn.worker_id, "x")
    (spawn,) = spawns(hang(host, "worker-a-3", 3))
    told_to_host = hosted_by(host, spawn.worker_id)
    reason = "left out after it ended its worker 3 times: model 'bad' hung"
    assert told_to_host.slices == (two(),)
    assert told_to_host.left_out == (LeftOut(SliceId("x"), ModelId("bad"), reason),)
    assert ("x", "ready") in changes(host.ready(spawn.worker_id, "x"))
    assert host.until(1e6) == []


def test_a_model_that_breaks_the_device_when_it_is_loaded_is_left_out() -> None:
    host = Agent()
    (spawn,) = spawns(host.want(two()))
    for _ in range(3):
        assert hosted_by(host, spawn.worker_id).left_out == ()
        broken = SliceFailed(SliceId("x"), incarnation(spawn.worker_id), "CUDA error", ModelId("bad"))
        host.hear(spawn.worker_id, broken)
        host.exit(spawn.worker_id, code=1)
        (spawn,) = spawns(host.until(host.now_ms + 150.0))
    assert [one.model_id for one in hosted_by(host, spawn.worker_id).left_out] == ["bad"]


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("knows_its_end", [False, True])
def test_a_slice_whose_device_breaks_is_started_again_also_while_it_loads(
    knows_its_end: bool, is_loaded: bool
) -> None:
    """Only what no new process could load rests for a minute."""
    host = Agent()
    (spawn,) = spawns(host.want(two()))
    for _ in range(2):
        host.greet(spawn.worker_id)
        if is_loaded:
            host.ready(spawn.worker_id, "x")
        broken = SliceFailed(SliceId("x"), incarnation(spawn.worker_id), "it fell off the bus")
        if knows_its_end:
            host.exit(spawn.worker_id, code=1)
            assert changes(host.hear(spawn.worker_id, broken)) == []
        else:
            assert changes(host.hear(spawn.worker_id, broken)) == [("x", "lost")]
            host.exit(spawn.worker_id, code=1)
        (spawn,) = spawns(host.until(host.now_ms + 2_500.0))


@pytest.mark.parametrize("guilty", ["", "bad"])
def test_of_a_worker_whose_end_is_known_its_last_words_come_too_late(guilty: str) -> None:
    """They may: the end of a process is heard at once, what it said by a socket."""
    host = Agent()
    host.serve(two())
    host.exit("worker-a-1", code=1)
    last = SliceFailed(SliceId("x"), incarnation("worker-a-1"), "CUDA error", ModelId(guilty))
    assert changes(host.hear("worker-a-1", last)) == []
    assert spawns(host.until(host.now_ms + 150.0)), "it is started again"


def test_many_models_may_hang_without_taking_their_neighbours_out() -> None:
    """Hangs count for the model: five ends of a worker within a minute would give the whole slice up."""
    host = Agent()
    host.serve(two())
    for number in range(1, 8):
        model_id = ModelId("bad" if number % 2 else "good")
        name = f"worker-a-{number}"
        host.hear(name, SliceFailed(SliceId("x"), incarnation(name), "it hung", model_id))
        host.exit(name, code=70)
        (spawn,) = spawns(host.until(host.now_ms + 150.0))
        host.greet(spawn.worker_id)
        host.ready(spawn.worker_id, "x")


def test_a_model_that_the_slice_does_not_host_is_not_suspected() -> None:
    host = Agent()
    host.serve(two())
    stranger = SliceFailed(SliceId("x"), incarnation("worker-a-1"), "it hung", ModelId("stranger"))
    assert not [action for action in host.hear("worker-a-1", stranger) if isinstance(action, Warn)]
    host.exit("worker-a-1", code=70)
    (spawn,) = spawns(host.until(host.now_ms + 150.0))
    assert hosted_by(host, spawn.worker_id).left_out == ()


def test_hangs_long_ago_are_forgiven() -> None:
    host = Agent()
    host.serve(two())
    for number in (1, 2, 3):
        (spawn,) = spawns(hang(host, f"worker-a-{number}", 1))
        assert hosted_by(host, spawn.worker_id).left_out == ()
        host.ready(spawn.worker_id, "x")
        host.until(host.now_ms + FORGIVEN_AFTER_MS + 1.0)


def test_a_slice_that_is_wanted_otherwise_tries_its_models_anew() -> None:
    host = Agent()
    host.serve(two())
    for times in (1, 2, 3):
        (spawn,) = spawns(hang(host, f"worker-a-{times}", times))
        host.greet(spawn.worker_id)
        host.ready(spawn.worker_id, "x")
    host.want()
    host.exit("worker-a-4", code=0)
    (spawn,) = spawns(host.want(two()))
    assert hosted_by(host, spawn.worker_id).left_out == ()


@pytest.mark.parametrize("is_overdue", [False, True])
def test_a_model_whose_load_ends_or_hangs_its_process_is_left_out(is_overdue: bool) -> None:
    host = Agent()
    (spawn,) = spawns(host.want(two()))
    for _ in range(3):
        assert hosted_by(host, spawn.worker_id).left_out == ()
        for model_id in ("good", "bad"):
            host.hear(spawn.worker_id, Loading(SliceId("x"), ModelId(model_id)))
        if is_overdue:
            host.until(host.now_ms + LIMITS.load_ms)
        host.exit(spawn.worker_id, code=-11)
        (spawn,) = spawns(host.until(host.now_ms + 150.0))
    (out,) = hosted_by(host, spawn.worker_id).left_out
    assert out.model_id == "bad"
    assert "while it loaded bad" in out.reason


def test_a_worker_that_serves_and_does_not_answer_is_killed_and_started_again() -> None:
    host = Agent()
    host.serve(spec("x"))
    host.silent.add(peer("worker-a-1"))
    assert host.until(LIMITS.silence_ms - 1.0) == []
    actions = host.until(LIMITS.silence_ms + 1.0)
    assert [action.worker_id for action in actions if isinstance(action, Kill)] == ["worker-a-1"]
    (report,) = reports(actions)
    assert (report.status.state, report.status.reason) == ("lost", "its worker has not answered for 10 s")
    host.exit("worker-a-1")
    assert len(spawns(host.until(host.now_ms + 150.0))) == 1


def test_a_worker_that_did_not_take_what_to_host_is_told_again_until_it_does() -> None:
    """At its start, and while it serves: else it is taken for slow, and killed, or serves on as it did before."""
    for is_serving in (False, True):
        agent = Agent()
        (started,) = spawns(agent.want(spec("s")))
        name = started.worker_id
        told_first = sent(agent.greet(name))
        if is_serving:
            agent.ready(name, "s")
        for _ in range(3):
            agent.feed(WorkerUntold(peer(name)))
            again = sent(agent.until(agent.now_ms + TELL_AGAIN_MS))
            assert again == told_first
        assert sent(agent.until(agent.now_ms + 5 * TELL_AGAIN_MS)) == [], "and no more"


def test_what_a_worker_is_told_again_is_what_is_wanted_by_then() -> None:
    agent = Agent(device="emulated")
    (started,) = agent.serve(spec("s", "emulated"), spec("t", "emulated"))
    agent.want(spec("s", "emulated"))
    agent.feed(WorkerUntold(peer(started.worker_id)))
    ((_, again),) = sent(agent.until(agent.now_ms + TELL_AGAIN_MS))
    assert isinstance(again, Host)
    assert [one.slice_id for one in again.slices] == ["s"]


def test_a_worker_that_has_ended_is_told_nothing() -> None:
    agent = Agent()
    (started,) = agent.serve(spec("s"))
    agent.feed(WorkerUntold(peer(started.worker_id)))
    agent.exit(started.worker_id)
    assert not [one for _, one in sent(agent.until(agent.now_ms + TELL_AGAIN_MS)) if isinstance(one, Host)]


@pytest.mark.parametrize("left", [1, 2])
def test_a_slice_that_is_wanted_otherwise_while_its_shared_process_dies_starts_when_that_has_ended(
    left: int,
) -> None:
    host = Agent("emulated")
    names = [f"s{number}" for number in range(left + 1)]
    (started,) = host.serve(*(spec(name, "emulated") for name in names))
    host.silent.add(peer(started.worker_id))
    host.until(host.now_ms + LIMITS.silence_ms * 2)
    changed = [spec(name, "emulated", share=50.0) for name in names[left:]]
    assert spawns(host.want(*(spec(name, "emulated") for name in names[:left]), *changed)) == []
    ended = spawns(host.exit(started.worker_id))
    assert [action.slices for action in ended] == [tuple(changed)]
    later = spawns(host.until(host.now_ms + 1_000.0))
    assert [slice_.slice_id for action in later for slice_ in action.slices] == names[:left]


def test_another_process_under_a_workers_name_is_sent_away_and_the_worker_is_greeted() -> None:
    host = Agent()
    (started,) = spawns(host.want(spec("x")))
    stranger = PeerId(f"{started.worker_id}/former")
    assert host.feed(StrangerGreeted(stranger)) == [Send(stranger, Stop(0.0))]
    assert [one for one, _ in sent(host.greet(started.worker_id))] == [peer(started.worker_id)]
    assert host.feed(StrangerGreeted(peer(started.worker_id))) == [], "it is ours, whatever it calls itself"


@pytest.mark.parametrize("is_loading", [False, True])
def test_an_agent_that_was_stopped_itself_hears_what_came_meanwhile_before_it_ends_anybody(
    is_loading: bool,
) -> None:
    """A frozen container, a suspended host: the words of all wait, and each is followed by a look at the time."""
    host = Agent()
    workers = [one.worker_id for one in spawns(host.want(spec("x"), spec("y", gpu=1)))]
    for worker_id in workers:
        if is_loading:
            host.greet(worker_id)
    host.now_ms += 1_000_000.0
    for worker_id, slice_id in zip(workers, "xy", strict=True):
        done = [*(host.ready(worker_id, slice_id) if is_loading else host.greet(worker_id))]
        done += host.feed(Tick())
        assert not [one for one in done if isinstance(one, Kill | Warn)]
    if not is_loading:
        assert [Kill(worker_id) for worker_id in workers] == [
            one for one in host.until(host.now_ms + LIMITS.load_ms) if isinstance(one, Kill)
        ], "from then on they are judged as ever"


@pytest.mark.parametrize("wanted", [("m",), ("m", "n")], ids=["gone", "specified otherwise"])
def test_a_load_that_was_called_off_is_blamed_for_no_end(wanted: tuple[str, ...]) -> None:
    """But the one that went on beside it is."""
    host = Agent("emulated")
    x, y = (replace(hosting(name, "m", "n"), device="emulated") for name in "xy")
    (started,) = host.serve(x, y)
    for slice_id in "yx":
        host.hear(started.worker_id, Loading(SliceId(slice_id), ModelId("n")))
    host.want(replace(hosting("x", *wanted, slo_ms=50.0), device="emulated"), y)
    warned = [one.text for one in host.exit(started.worker_id) if isinstance(one, Warn)]
    assert [text.split()[:3] for text in warned] == [["model_suspected", "slice=y", "model=n"]]


def test_a_load_of_which_the_word_comes_when_it_is_called_off_is_blamed_for_nothing() -> None:
    host = Agent("emulated")
    x, y = (replace(hosting(name, "m", "n"), device="emulated") for name in "xy")
    (started,) = host.serve(x, y)
    host.hear(started.worker_id, Loading(SliceId("y"), ModelId("n")))
    host.want(replace(hosting("x", "m"), device="emulated"), y)
    host.hear(started.worker_id, Loading(SliceId("x"), ModelId("n")))
    assert [one for one in host.exit(started.worker_id) if isinstance(one, Warn)]
