"""The real cores of scheduler and frontends, each with a shell for virtual time: loopback links for sockets."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from fabric.ids import (
    Incarnation,
    ModelId,
    PeerId,
    SliceId,
    frontend_id,
    peer_id,
)
from fabric.link import Received
from fabric.messages import (
    Answer,
    Infer,
    Outputs,
    PlanAsked,
    Refusal,
    RehearsalAsked,
    RunBatch,
)
from roles.applications.served import ServedApplication
from roles.applications.tally import StageTally
from roles.frontend.core import FrontendCore
from roles.frontend.events import (
    Asked,
    Computed,
    DropSlice,
    FrontendAction,
    FrontendEvent,
    FrontendSettings,
    InputsMade,
    MadeInputs,
    MakeInputs,
    OpenSlice,
    PushInputs,
    Reply,
    ReplyWithAll,
    SchedulerSaid,
    Tell,
    TurnEnded,
    WorkerSaid,
)
from roles.frontend.return_margin import ReturnMargin, ReturnPath
from roles.runtime.core import NO_PAYLOAD, PLANNER, REHEARSER, Core, Handle, Heard, Lost, Send, Tick
from roles.scheduler.planning.make_plan import make_plan
from roles.scheduler.rehearsing.make_rehearsal import make_rehearsal
from roles.simulator.applications import GRACE_MS
from roles.simulator.fast_world import FIRST
from roles.simulator.gpu import requests_in
from roles.simulator.hardware import scheduler_peer
from roles.simulator.network import KnownReturn
from roles.simulator.surroundings import BatchTimes, Surroundings, unheard

CLIENT: Final = PeerId("client")
PENDING_MAX: Final = 1 << 40
_TICK: Final = Tick()


class VirtualScheduler:
    """A shard's scheduler that is simulated."""

    def __init__(self, world: Surroundings, core: Core[Heard | Lost | Tick, Send], shard: int = 0) -> None:
        self._world = world
        self._core = core
        self.wake_at_ms = core.wake_at_ms
        """The core's timer."""
        own = scheduler_peer(shard)
        self._control = world.connect(world.control, own, self._hear)
        self._work = world.connect(world.work, own, unheard)
        world.connect(world.reports, own, self._hear)

    def tick(self) -> None:
        """Its moment has come."""
        self._take(_TICK)

    def _hear(self, one: Received) -> None:
        self._take(Heard(one.peer, one.message, one.late_ms))

    def _take(self, event: Heard | Tick) -> None:
        now_ms = self._world.clock.now_ms()
        for action in self._core.handle(event, now_ms):
            message = action.message
            if isinstance(message, PlanAsked):
                self._plan(message)
                continue
            if isinstance(message, RehearsalAsked):
                self._rehearse(message)
                continue
            if isinstance(message, RunBatch):
                size = requests_in(message.parts)
                self._world.times_of_batch[message.batch_id] = BatchTimes(message.model_id, size, now_ms)
            link = self._work if self._world.work.is_there(action.peer) else self._control
            link.send(action.peer, message)
        self.wake_at_ms = self._core.wake_at_ms

    def _rehearse(self, asked: RehearsalAsked) -> None:
        """It takes no time."""
        self._world.after(0.0, lambda: self._take(Heard(REHEARSER, make_rehearsal(asked))))

    def _plan(self, asked: PlanAsked) -> None:
        plan_ms = self._world.hardware.plan_ms
        self._world.after(plan_ms, lambda: self._take(Heard(PLANNER, make_plan(asked))))


class VirtualFrontend:
    """A frontend; its clients are the world."""

    def __init__(
        self,
        world: Surroundings,
        number: int,
        shards: int = 1,
        applications: Sequence[ServedApplication] = (),
    ) -> None:
        self._world = world
        self._id = frontend_id(number)
        outputs = PeerId(f"{self._id}/outputs")
        model = world.hardware.network.model
        self._grace_ms = 0.0 if model.jitter_ms else GRACE_MS

        def make_margin() -> ReturnMargin:
            return ReturnPath() if model.jitter_ms else KnownReturn(model.result_ms + GRACE_MS)

        settings = FrontendSettings(
            self._id,
            FIRST,
            (outputs,),
            pending_max=PENDING_MAX,
            shards=shards,
            applications=tuple(applications),
            fan_outs_from_ms=0.0,
        )
        self._core = FrontendCore(settings, world.clock.now_ms(), make_margin)
        for tallies in self._core.stage_tallies.values():
            for tally in tallies.values():
                tally.fates = array("d")
        self.wake_at_ms = self._core.wake_at_ms
        """The core's timer."""
        self._link = world.connect(world.control, peer_id(self._id, FIRST), self._heard_scheduler)
        self._shard_of = {scheduler_peer(shard): shard for shard in range(shards)}
        self._inputs = world.connect(world.inputs, PeerId(self._id), unheard)
        world.connect(world.outputs, outputs, self._heard_worker, is_anonymous=True)
        self._slices: dict[SliceId, tuple[Incarnation, PeerId]] = {}
        self._computed: BatchTimes | None = None

    @property
    def stage_tallies(self) -> Mapping[ModelId, Mapping[str, StageTally]]:
        """By application."""
        return self._core.stage_tallies

    def tick(self) -> None:
        """Its moment has come."""
        self._take(_TICK)

    def ask(self, number: int, model_id: ModelId, slo_ms: float, priority: int | None) -> None:
        """A client's request, without tensors; `end_turn` follows."""
        infer = Infer(number, model_id, slo_ms + self._grace_ms, priority=priority)
        self._handle(Asked(CLIENT, infer, 0.0, Handle(number), (), 0))

    def end_turn(self) -> None:
        """All has been handed over that came at this moment."""
        if self._core.has_gathered:
            self._handle(TurnEnded())

    def _heard_scheduler(self, one: Received) -> None:
        self._take(SchedulerSaid(one.message, shard=self._shard_of[one.peer]))

    def _heard_worker(self, one: Received) -> None:
        if isinstance(one.message, Outputs):
            self._computed = self._world.times_of_batch[one.message.batch_id]
            self._take(Computed(one.message, NO_PAYLOAD, ()))
        else:
            self._take(WorkerSaid(one.message))

    def _take(self, event: FrontendEvent) -> None:
        self._handle(event)
        self.end_turn()

    def _handle(self, event: FrontendEvent) -> None:
        for action in self._core.handle(event, self._world.clock.now_ms()):
            self._perform(action)
        self.wake_at_ms = self._core.wake_at_ms

    def _perform(self, action: FrontendAction) -> None:
        match action:
            case Reply(message=Answer(request_no=number)):
                assert self._computed is not None, "an answer comes of outputs"
                self._world.answered(number, self._computed.started_at_ms)
            case ReplyWithAll(message=Answer(request_no=number)):
                self._world.answered(number, math.nan)
            case MakeInputs(job=job, count=count):
                assert count is not None, "all is drawn here"
                self._handle(InputsMade(job, [MadeInputs(NO_PAYLOAD, (), 0)] * count))
            case Reply(message=Refusal(request_no=number, code=code)):
                self._world.refused(number, code)
            case Tell(message, shard):
                self._link.send(scheduler_peer(shard), message)
            case OpenSlice(slice_id, incarnation, addresses):
                self._slices[slice_id] = incarnation, PeerId(addresses[0])
            case DropSlice(slice_id, incarnation):
                if self._slices.get(slice_id, (None,))[0] == incarnation:
                    del self._slices[slice_id]
            case PushInputs(message):
                _, peer = self._slices[message.slice_id]
                self._world.push(self._inputs, peer, message)
            case _:
                pass  # there is no payload to keep, and no picture to decode
