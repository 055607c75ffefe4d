"""The world around a scripted scheduler: every moment here is worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    Arrivals,
    DesiredSlices,
    Done,
    Dropped,
    FrontendHello,
    GpuInfo,
    ModelSpec,
    NodeHello,
    Part,
    PreemptBatch,
    Returned,
    RunBatch,
    SeqRun,
    SliceReady,
    SliceSpec,
)
from profiles.device_model import DeviceModel
from profiles.interference import Running
from profiles.model import LinearProfile
from roles.gpu_worker.batch_start_rules import LATE_TOLERANCE_MS
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.simulator.fast_world import AGAIN_FROM, FastWorld
from roles.simulator.hardware import SimulatedHardware, SimulatedNode
from roles.simulator.network import Network, NetworkModel
from roles.simulator.traffic import ModelTraffic

MODEL = ModelId("m")
NODE = NodeId("n")
FIRST = Incarnation("00000000")
NEVER_MS = float("inf")
PROFILE = LinearProfile(1.0, 5.0, 8)  # l(b) = b + 5
SPEC = ModelSpec(MODEL, 20.0, 8, None, PROFILE.exec_table())

Rule = Callable[[Heard, float], Sequence[Send]]


def slice_id(k: int = 0) -> SliceId:
    return SliceId(f"n/gpu{k}/0")


@dataclass
class Scripted:
    """A scheduler that starts all slices and otherwise does what its rules say."""

    slices: tuple[SliceSpec, ...]
    on: dict[type, Rule] = field(default_factory=dict)
    wakes: list[float] = field(default_factory=list)
    on_tick: Callable[[float], Sequence[Send]] = lambda now_ms: ()
    log: list[tuple[float, AnyMessage, float]] = field(default_factory=list)
    workers: dict[SliceId, PeerId] = field(default_factory=dict)

    def handle(self, event: Heard | Lost | Tick, now_ms: float) -> Sequence[Send]:
        if isinstance(event, Tick):
            del self.wakes[0]
            return self.on_tick(now_ms)
        assert isinstance(event, Heard)
        message = event.message
        if isinstance(message, NodeHello):
            return [Send(event.peer, DesiredSlices(1, self.slices))]
        if isinstance(message, SliceReady):
            self.workers[message.slice_id] = event.peer
        elif not isinstance(message, FrontendHello):
            self.log.append((now_ms, message, event.late_ms))
        rule = self.on.get(type(message))
        return [] if rule is None else rule(event, now_ms)

    @property
    def wake_at_ms(self) -> float | None:
        return self.wakes[0] if self.wakes else None

    def of_type(self, kind: type) -> list[tuple[float, AnyMessage, float]]:
        return [entry for entry in self.log if isinstance(entry[1], kind)]


def whole(k: int = 0, gpu: int | None = None, share_percent: float | None = None) -> SliceSpec:
    return SliceSpec(slice_id(k), k if gpu is None else gpu, "emulated", share_percent, (SPEC,))


def run_batch(
    scheduler: Scripted,
    batch_id: int,
    *runs: tuple[int, int],
    k: int = 0,
    frontend: str = "frontend-0",
    start_in_ms: float = 0.0,
    latest_in_ms: float = NEVER_MS,
    expires_in_ms: float = NEVER_MS,
) -> Send:
    part = Part(FrontendId(frontend), tuple(SeqRun(*run) for run in runs))
    return Send(
        scheduler.workers[slice_id(k)],
        RunBatch(
            BatchId(batch_id),
            slice_id(k),
            FIRST,
            MODEL,
            (part,),
            start_in_ms,
            latest_in_ms,
            max(latest_in_ms, expires_in_ms),
        ),
    )


def one_each(scheduler: Scripted) -> Rule:
    """Every request is a batch of its own, at once."""

    def rule(event: Heard, now_ms: float) -> Sequence[Send]:
        message = event.message
        assert isinstance(message, Arrivals)
        batch_id = len(scheduler.of_type(Arrivals))
        return [run_batch(scheduler, batch_id, (message.first_seq, message.count))]

    return rule


def play(
    scheduler: Scripted,
    *arrived_at_ms: float,
    network: NetworkModel | None = None,
    device: DeviceModel | None = None,
    gpus: int = 1,
    frontends: int = 1,
) -> tuple[FastWorld, ModelTraffic]:
    traffic = ModelTraffic(MODEL, 20.0, np.array(arrived_at_ms))
    infos = tuple(GpuInfo(gpu, "generic", "emulated") for gpu in range(gpus))
    node = SimulatedNode(NODE, infos, (device or DeviceModel({MODEL: PROFILE}),) * gpus)
    network = network or NetworkModel()
    world = FastWorld(scheduler, SimulatedHardware((node,), Network(network, 1), frontends), [traffic])
    world.run()
    return world, traffic


def test_a_slice_runs_one_batch_after_the_other() -> None:
    scheduler = Scripted((whole(),))
    scheduler.on[Arrivals] = one_each(scheduler)
    world, traffic = play(scheduler, 0.0, 2.0, 20.0)
    assert traffic.started_at_ms.tolist() == [0.0, 6.0, 20.0]
    assert traffic.finished_at_ms.tolist() == [6.0, 12.0, 26.0]
    assert [(batch.sent_at_ms, batch.started_at_ms, batch.finished_at_ms) for batch in world.batches] == [
        (0.0, 0.0, 6.0),
        (2.0, 6.0, 12.0),
        (20.0, 20.0, 26.0),
    ]
    done = [(at_ms, message) for at_ms, message, _ in scheduler.of_type(Done)]
    assert done[1] == (12.0, Done(BatchId(2), slice_id(), MODEL, "ok", 1, (), 0.0, 4.0, 6.0))


def test_every_way_takes_its_time() -> None:
    scheduler = Scripted((whole(),))
    scheduler.on[Arrivals] = one_each(scheduler)
    network = NetworkModel(control_ms=1.0, data_ms_per_item=0.5, result_ms=2.0)
    world, traffic = play(scheduler, 3.0, network=network)
    (arrival,) = scheduler.of_type(Arrivals)
    assert arrival == (4.0, Arrivals(MODEL, 0, 1, 18.0), 1.0)  # 20 ms less the way back of the result
    (batch,) = world.batches  # sent at 4, there at 5, its input at 4 + 1 + 0.5
    assert (batch.sent_at_ms, batch.started_at_ms, batch.finished_at_ms) == (4.0, 5.5, 11.5)
    assert traffic.finished_at_ms.tolist() == [13.5]
    assert scheduler.of_type(Done) == [
        (12.5, Done(BatchId(1), slice_id(), MODEL, "ok", 1, (), 0.5, 0.0, 6.0), 1.0)
    ]


def test_the_first_batch_in_line_starts_when_its_inputs_are_there() -> None:
    scheduler = Scripted((whole(),))
    scheduler.on[Arrivals] = lambda event, now_ms: [run_batch(scheduler, 1, (0, 1), start_in_ms=7.0)]
    _, traffic = play(scheduler, 1.0)
    assert traffic.started_at_ms.tolist() == [1.0]


def test_of_two_batches_the_one_with_the_earlier_start_goes_first() -> None:
    scheduler = Scripted((whole(),))
    starts = iter([0.0, 9.0, 3.0])
    scheduler.on[Arrivals] = lambda event, now_ms: [
        run_batch(scheduler, int(now_ms) + 1, (int(now_ms), 1), start_in_ms=next(starts))
    ]
    _, traffic = play(scheduler, 0.0, 1.0, 2.0)
    # One alone takes 6 ms; when it ends, both others are there.
    assert traffic.started_at_ms.tolist() == [0.0, 12.0, 6.0]


def test_a_batch_without_any_inputs_is_waited_for_while_it_may_be_of_use() -> None:
    scheduler = Scripted((whole(),))
    scheduler.on[Arrivals] = lambda event, now_ms: [
        run_batch(scheduler, 1, (0, 1), latest_in_ms=3.0, expires_in_ms=5.0)
    ]
    _, traffic = play(scheduler, 0.0, network=NetworkModel(data_ms_per_item=4.0))
    assert traffic.started_at_ms.tolist() == [4.0]
    [(_, done, _)] = scheduler.of_type(Done)
    assert isinstance(done, Done)
    assert (done.status, done.transfer_ms) == ("ok", 4.0)


def test_a_batch_without_its_inputs_comes_back_while_its_budget_lasts() -> None:
    scheduler = Scripted((whole(),))

    def arrivals(event: Heard, now_ms: float) -> Sequence[Send]:
        return [
            run_batch(
                scheduler, len(scheduler.of_type(Arrivals)), (0, 1), latest_in_ms=3.0, expires_in_ms=3.0
            )
        ]

    def done(event: Heard, now_ms: float) -> Sequence[Send]:
        message = event.message
        assert isinstance(message, Done)
        back = Returned(message.batch_id, MODEL, message.missing[0].runs, "late")
        return [Send(PeerId("frontend-0/00000000"), back)]

    scheduler.on = {Arrivals: arrivals, Done: done}
    _, traffic = play(scheduler, 0.0, network=NetworkModel(data_ms_per_item=6.0))
    part = Part(FrontendId("frontend-0"), (SeqRun(0, 1),))
    gone_ms = 3.0 + LATE_TOLERANCE_MS
    assert gone_ms == 4.0

    def expired(batch_id: int) -> Done:
        return Done(BatchId(batch_id), slice_id(), MODEL, "expired", 0, (part,), gone_ms, 0.0, 0.0)

    assert scheduler.log == [
        (0.0, Arrivals(MODEL, 0, 1, 20.0), 0.0),
        (4.0, expired(1), 0.0),
        (4.0, Arrivals(MODEL, AGAIN_FROM, 1, 16.0), 0.0),
        (8.0, expired(2), 0.0),
        (8.0, Arrivals(MODEL, AGAIN_FROM + 1, 1, 12.0), 0.0),
        (12.0, expired(3), 0.0),
        (12.0, Arrivals(MODEL, AGAIN_FROM + 2, 1, 8.0), 0.0),
        (16.0, expired(4), 0.0),
        (16.0, Arrivals(MODEL, AGAIN_FROM + 3, 1, 4.0), 0.0),
        (20.0, expired(5), 0.0),
    ]
    assert np.isnan(traffic.finished_at_ms).all()


def test_a_request_whose_batches_never_run_is_announced_no_more_than_17_times() -> None:
    scheduler = Scripted((whole(),))
    scheduler.on = {
        Arrivals: lambda event, now_ms: [
            run_batch(
                scheduler, len(scheduler.of_type(Arrivals)), (0, 1), latest_in_ms=0.0, expires_in_ms=0.0
            )
        ],
        Done: lambda event, now_ms: [
            Send(
                PeerId("frontend-0/00000000"),
                Returned(event.message.batch_id, MODEL, (SeqRun(0, 1),), "late"),  # type: ignore[union-attr]
            )
        ],
    }
    play(scheduler, 0.0, network=NetworkModel(data_ms_per_item=LATE_TOLERANCE_MS + 0.1))
    assert len(scheduler.of_type(Arrivals)) == 1 + 15 + 1
    assert scheduler.log[-1][0] < SPEC.slo_ms, "it had time"


def test_a_batch_is_given_back_when_the_device_was_busy_until_all_its_deadlines_were_lost() -> None:
    scheduler = Scripted((whole(),))
    scheduler.on[Arrivals] = lambda event, now_ms: [
        run_batch(scheduler, int(now_ms) + 1, (int(now_ms), 1), latest_in_ms=2.0, expires_in_ms=3.0)
    ]
    _, traffic = play(scheduler, 0.0, 1.0, 2.0)
    assert traffic.started_at_ms[:1].tolist() == [0.0]
    assert np.isnan(traffic.started_at_ms[1])  # free at 6, of no use after 5
    assert (
        traffic.started_at_ms[2] == 6.0
    )  # late for its first request at 4, of use until 6, by the worker's tolerance
    statuses = [(at_ms, message.status) for at_ms, message, _ in scheduler.of_type(Done)]  # type: ignore[union-attr]
    assert statuses == [(5.0, "expired"), (6.0, "ok"), (12.0, "ok")]


def test_a_preempted_batch_frees_its_slice_and_leaves_no_answer() -> None:
    scheduler = Scripted((whole(),), wakes=[2.0])
    scheduler.on[Arrivals] = one_each(scheduler)
    scheduler.on_tick = lambda now_ms: [
        Send(scheduler.workers[slice_id()], PreemptBatch(BatchId(1), slice_id()))
    ]
    world, traffic = play(scheduler, 0.0, 1.0)
    assert np.isnan(traffic.finished_at_ms[0])
    assert traffic.started_at_ms[1] == 2.0
    assert [(batch.batch_size, batch.finished_at_ms) for batch in world.batches] == [(0, 2.0), (1, 8.0)]
    assert [message.status for _, message, _ in scheduler.of_type(Done)] == ["preempted", "ok"]  # type: ignore[union-attr]


def test_a_batch_that_still_waits_is_preempted_without_a_trace() -> None:
    scheduler = Scripted((whole(),), wakes=[2.0])
    scheduler.on[Arrivals] = one_each(scheduler)
    scheduler.on_tick = lambda now_ms: [
        Send(scheduler.workers[slice_id()], PreemptBatch(BatchId(2), slice_id()))
    ]
    world, traffic = play(scheduler, 0.0, 1.0)
    assert len(world.batches) == 1
    assert np.isnan(traffic.finished_at_ms[1])


def test_a_batch_that_ends_at_the_moment_of_its_preemption_has_ended() -> None:
    """As with the emulated executor. Batch 1 runs from 0 to 6."""
    scheduler = Scripted((whole(),))
    scheduler.on[Arrivals] = one_each(scheduler)
    node = SimulatedNode(NODE, (GpuInfo(0, "generic", "emulated"),), (DeviceModel({MODEL: PROFILE}),))
    traffic = ModelTraffic(MODEL, 20.0, np.array([0.0]))
    world = FastWorld(scheduler, SimulatedHardware((node,), Network(NetworkModel(), 1), 1), [traffic])

    def preempt(batch_id: BatchId, now_ms: float) -> None:
        world._slices[slice_id()].preempt(batch_id, now_ms)

    world.schedule(6.0, preempt, BatchId(1))  # before the batch's end in the order of events
    world.run()
    assert [message.status for _, message, _ in scheduler.of_type(Done)] == ["ok"]  # type: ignore[union-attr]
    assert world.late_preemptions == 1


class _Doubling:
    """Every neighbour that runs doubles the time."""

    covers_unlimited_slices = False

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:
        return 2.0 ** len(neighbours)


def test_neighbours_that_run_at_the_start_slow_a_batch_down() -> None:
    scheduler = Scripted((whole(0, gpu=0, share_percent=50), whole(1, gpu=0, share_percent=50)))
    places = iter([0, 1, 0])
    scheduler.on[Arrivals] = lambda event, now_ms: [
        run_batch(scheduler, int(now_ms) + 1, (len(scheduler.of_type(Arrivals)) - 1, 1), k=next(places))
    ]
    device = DeviceModel({MODEL: PROFILE}, _Doubling())
    _, traffic = play(scheduler, 0.0, 1.0, 50.0, device=device)
    assert traffic.finished_at_ms.tolist() == [6.0, 13.0, 56.0]


def test_frontends_take_requests_in_turn_and_number_them_densely() -> None:
    scheduler = Scripted((whole(),))
    heard: list[tuple[PeerId, int]] = []

    def arrivals(event: Heard, now_ms: float) -> Sequence[Send]:
        message = event.message
        assert isinstance(message, Arrivals)
        heard.append((event.peer, message.first_seq))
        name = event.peer.partition("/")[0]
        return [run_batch(scheduler, len(heard), (message.first_seq, 1), frontend=name)]

    scheduler.on[Arrivals] = arrivals
    _, traffic = play(scheduler, 0.0, 10.0, 20.0, frontends=2)
    assert heard == [("frontend-0/00000000", 0), ("frontend-1/00000000", 0), ("frontend-0/00000000", 1)]
    assert traffic.finished_at_ms.tolist() == [6.0, 16.0, 26.0]


def test_requests_of_one_moment_are_one_run() -> None:
    scheduler = Scripted((whole(),))
    scheduler.on[Arrivals] = one_each(scheduler)
    _, traffic = play(scheduler, 0.0, 5.0, 5.0, 5.0, 9.0)
    runs = [(message.first_seq, message.count) for _, message, _ in scheduler.of_type(Arrivals)]  # type: ignore[union-attr]
    assert runs == [(0, 1), (1, 3), (4, 1)]
    assert traffic.finished_at_ms.tolist() == [6.0, 14.0, 14.0, 14.0, 20.0]


def test_at_one_moment_arrivals_come_first_and_the_scheduler_s_timer_last() -> None:
    scheduler = Scripted((whole(),), wakes=[6.0])
    ticked: list[int] = []

    def tick(now_ms: float) -> Sequence[Send]:
        ticked.append(len(scheduler.log))
        return ()

    scheduler.on_tick = tick
    scheduler.on[Arrivals] = one_each(scheduler)
    play(scheduler, 0.0, 6.0)
    kinds = [(at_ms, type(message)) for at_ms, message, _ in scheduler.log]
    assert kinds == [(0.0, Arrivals), (6.0, Arrivals), (6.0, Done), (12.0, Done)]
    assert ticked == [3]


def test_dropped_requests_are_counted_and_never_run() -> None:
    scheduler = Scripted((whole(),))
    scheduler.on[Arrivals] = lambda event, now_ms: [
        Send(event.peer, Dropped(MODEL, (SeqRun(0, 1),), "Overloaded", "because"))
    ]
    world, traffic = play(scheduler, 0.0)
    assert world.dropped == {MODEL: 1}
    assert np.isnan(traffic.finished_at_ms).all()


def test_a_scheduler_that_never_gets_past_a_moment_is_found_out() -> None:
    scheduler = Scripted((whole(),), wakes=[5.0] * 20_000)
    with pytest.raises(AssertionError, match=r"does not get past 5\.0 ms"):
        play(scheduler, 0.0)


def test_a_scheduler_that_wakes_for_ever_does_not_keep_the_run_alive() -> None:
    scheduler = Scripted((whole(),), wakes=[1000.0 * k for k in range(1, 10_000)])
    play(scheduler, 0.0)
    assert 9_000 < len(scheduler.wakes) < 10_000


def test_a_world_without_requests_ends() -> None:
    world, _ = play(Scripted((whole(),)))
    assert world.batches == []
