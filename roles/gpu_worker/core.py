"""The worker's decisions: load slices, put batches together, run them one at a time, answer for each.

Three links lead here. The *agent* says what to host and when to stop. The *scheduler* grants batches. Frontends
push inputs, and outputs go straight back to them. Everything that is asked ends in exactly one `Done` to the
scheduler, and every live request of it in one row of `Outputs`, in one `BatchFailed`, or in `Done.missing`. `missing`
never ran; what of it came is also given back to its frontend by `InputsReturned`, as the scheduler may be gone. Of what the device still has when the process ends nobody knows that: its frontends see the slice go.

A worker that may outlive its agent serves on when that is gone, and says hello with what it hosts until the next
agent of this host adopts it by telling it what to host, or its time is over. Who hosts nothing ends at once.

A run that takes many times what was promised has hung, and with it the device's thread: the process says which model it was
and ends, to be started again. A model that cannot be loaded, or that the agent leaves out, leaves only itself out.

A slice's life is the table in `slices.py`; all slices of a process share its incarnation. How models come and go while
their slice serves is in `model_changes.py`, how a batch starts and ends in `running_batches.py`, how an agent is found in `adoption.py`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from fabric.heartbeats import HeartbeatTiming
from fabric.ids import BatchId, Epoch, ModelId, SliceId
from fabric.messages import (
    AnyMessage,
    Directory,
    EpochGranted,
    FrontendInfo,
    Host,
    Inputs,
    Loading,
    Ping,
    Pong,
    PreemptBatch,
    RunBatch,
    SliceFailed,
    SliceReport,
    SliceSpec,
    StatusAsked,
    StatusListed,
    Stop,
)
from roles.gpu_worker.adoption import HELLO_FOR_MS, LAST_GRACE_MS, Adoption
from roles.gpu_worker.answers import (
    answer_failure,
    answer_rows,
    done_of,
    release,
    return_inputs,
    unlaunched,
)
from roles.gpu_worker.batches import Batch, granted
from roles.gpu_worker.early_inputs import EarlyInputs
from roles.gpu_worker.events import (
    Abort,
    AgentGone,
    AgentUntold,
    BatchRan,
    End,
    InputsCame,
    JoinScheduler,
    KnowFrontends,
    LoadSlice,
    NoRoom,
    SchedulerAnswers,
    UnloadSlice,
    WatchAgent,
    WorkerAction,
    WorkerEvent,
)
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    LeftFirstStage,
    LoadBegins,
    Loaded,
    LoadFailed,
    ModelLoaded,
    RunAborted,
    RunExpired,
    RunFailed,
    Shrunk,
    Warming,
)
from roles.gpu_worker.model_changes import ModelChanges
from roles.gpu_worker.peer_checks import AGENT, WorkerPeerChecks
from roles.gpu_worker.registration import Registration, WorkerIdentity
from roles.gpu_worker.running_batches import WARMING_MS, Runs
from roles.gpu_worker.slices import HostedSlice, HostedState, HostedTransition
from roles.runtime.core import SCHEDULER, Heard, Lost, Send, Tick
from roles.runtime.exit_codes import EXIT_FAILURE, EXIT_HUNG
from roles.runtime.peer_checks import Offences
from roles.runtime.process_events import StopAsked
from roles.runtime.time_limits import is_looked_at_late

NO_MODEL: Final = ModelId("")

SIGNAL_GRACE_MS: Final = 1_500.0  # the same, after a signal; an agent kills 2 s after it sent one
_ENDS: Final = "its worker ends"
_NO_ROOM: Final = "its worker has no room for more inputs"
TELL_AGAIN_MS: Final = 100.0  # an agent that may not have heard: its queue was full, or its connection broke
GRANTED_MAX: Final = 1_024  # batches waiting for one slice; a sane scheduler grants one or two ahead
COUNTED: Final = (
    "adopted",
    "batch_sizes_shrunk",
    "batches_expired",
    "batches_failed",
    "batches_for_another_incarnation",
    "batches_preempted",
    "batches_ran",
    "batches_refused",
    "batches_repeated",
    "epochs_refused",
    "inputs_for_another_incarnation",
    "inputs_late",
    "inputs_over_memory",
    "inputs_over_pool",
    "inputs_repeated",
    "inputs_unfit",
    "inputs_without_batch",
    "messages_refused",
    "orphaned_to_the_end",
    "outputs_refused",
    "outputs_unsendable",
    "requests_invalid",
    "requests_ran",
    "runs_apart",
    "runs_hung",
)
"""In a worker's status from its start, so that whoever watches one sees its first step too."""


class WorkerCore:
    """One worker process. Starts with a `Tick`."""

    def __init__(self, identity: WorkerIdentity, outlive_ms: float = 0.0) -> None:
        self.counters = Counter(dict.fromkeys(COUNTED, 0))
        self._checks = WorkerPeerChecks()
        self._identity = identity
        self._slices: dict[SliceId, HostedSlice] = {}
        self._registration = Registration(identity, self._slices)
        self._changes = ModelChanges(self._registration, self._slices)
        self._early = EarlyInputs()
        self._runs = Runs(self.counters)
        self._alarms: list[tuple[float, SliceId]] = []  # lazily deleted: valid where it is the slice's own
        self._wanted: dict[SliceId, SliceSpec] = {}
        self._scheduler_addresses: tuple[str, ...] = ()
        self._frontends: tuple[FrontendInfo, ...] = ()
        """Where outputs go."""
        self._heartbeats = HeartbeatTiming()
        self._adoption = Adoption(identity, outlive_ms)
        self._tell_agent_at_ms: float | None = None
        """When it has to hear again how the slices are."""
        self._stop_by_ms: float | None = None
        self._has_ended = False

    @property
    def offences(self) -> Offences:
        """Of its peers."""
        return self._checks.offences

    def handle(self, event: WorkerEvent, now_ms: float) -> Sequence[WorkerAction]:
        """Take one event that happened by `now_ms`."""
        if self._has_ended:
            return []
        match event:
            case Heard(peer=peer, message=message, late_ms=late_ms):
                if self._checks.check(peer, message, now_ms) is not None:
                    return []
                if peer == AGENT:
                    return self._heard_agent(message, late_ms, now_ms)
                if event.epoch != self._registration.epoch:
                    return self._refuse_epoch(message)
                return self._heard_scheduler(message, late_ms, now_ms)
            case InputsCame():
                return self._take_inputs(event, now_ms)
            case NoRoom(inputs):
                return self._no_room(inputs)
            case LeftFirstStage(slice_id, batch_id):
                return self._leave_first_stage(self._slices[slice_id], batch_id, now_ms)
            case BatchRan():
                return self._finish(event, now_ms)
            case RunFailed():
                return self._fail(event, now_ms)
            case RunExpired():
                return self._expired(event, now_ms)
            case Shrunk():
                return self._shrunk(event, now_ms)
            case LoadBegins(slice_id, model_id):
                self._slices[slice_id].loading = model_id
                return [Send(AGENT, Loading(slice_id, model_id))]
            case Loaded():
                return self._loaded(event, now_ms)
            case LoadFailed():
                return self._load_failed(event)
            case ModelLoaded():
                return self._changes.loaded(event, now_ms)
            case Warming(slice_id, model_id, is_over):
                self._runs.warming = None if is_over else (slice_id, model_id)
                return []
            case DeviceBroken():
                return self._break(event.reason, now_ms, guilty=self._runs.warming)
            case RunAborted():
                return self._aborted(event, now_ms)
            case StopAsked():
                return self._stop(now_ms + SIGNAL_GRACE_MS, now_ms)
            case AgentGone():
                return self._agent_gone(now_ms)
            case AgentUntold():
                self._tell_agent_at_ms = now_ms + TELL_AGAIN_MS
                return []
            case SchedulerAnswers():
                return [*self._registration.scheduler_answers(now_ms)]
            case Lost():
                # Granted batches run on. Only the scheduler is watched by its silence.
                self._registration.scheduler_gone()
                return []
            case Tick():
                return self._tick(now_ms)

    @property
    def wake_at_ms(self) -> float | None:
        """The next moment at which something starts, expires or gives up."""
        if self._has_ended:
            return None
        while self._alarms and not self._is_alarm(*self._alarms[0]):
            heapq.heappop(self._alarms)
        wake_at_ms = self._alarms[0][0] if self._alarms else None
        for at_ms in (
            self._adoption.hello_at_ms,
            self._registration.wake_at_ms,
            self._adoption.orphan_until_ms,
            self._tell_agent_at_ms,
            self._stop_by_ms,
            self._early.wake_at_ms,
            self._changes.due_at_ms,
        ):
            if at_ms is not None and (wake_at_ms is None or at_ms < wake_at_ms):
                wake_at_ms = at_ms
        return wake_at_ms

    # ------------------------------------------------ agent

    def _heard_agent(self, message: AnyMessage, late_ms: float, now_ms: float) -> list[WorkerAction]:
        match message:
            case Host():
                return self._host(message, now_ms)
            case EpochGranted(epoch, addresses):
                return self._take_epoch(Epoch(epoch), addresses, now_ms)
            case Stop(grace_ms=grace_ms):
                return self._stop(now_ms - late_ms + grace_ms, now_ms)
            case StatusAsked():
                return [Send(AGENT, self._status())]
            case Ping(number=number):
                return [Send(AGENT, Pong(number))]
            case _:
                raise AssertionError("checked before")

    def _host(self, host: Host, now_ms: float) -> list[WorkerAction]:
        """Host these slices and no others; one that is here already, but for its models, serves on."""
        if self._stop_by_ms is not None:
            return []
        self._registration.node_id = host.node_id
        actions = self._follow_agent(host.agent_pid)
        self._heartbeats = HeartbeatTiming(host.heartbeat_interval_ms, host.heartbeat_patience_ms)
        actions += self._take_epoch(Epoch(host.epoch), host.scheduler_addresses, now_ms)
        self._wanted = {spec.slice_id: spec for spec in host.slices}
        self._changes.left_out = host.left_out
        for slice_ in list(self._slices.values()):
            wanted = self._wanted.get(slice_.spec.slice_id)
            if wanted == slice_.spec:
                continue
            if wanted is not None and slice_.may_become(wanted):
                slice_.spec = wanted
                actions += self._changes.adapt(slice_, now_ms)
            else:
                slice_.go_on(HostedTransition.UNWANTED)
                actions += self._forget_if_drained(slice_)
        new = [spec for slice_id, spec in self._wanted.items() if slice_id not in self._slices]
        return actions + [action for spec in new for action in self._load(spec)]

    def _take_epoch(self, epoch: Epoch, addresses: tuple[str, ...], now_ms: float) -> list[WorkerAction]:
        """Commands of that epoch count, from the scheduler at these addresses; it may not know anything of us."""
        if self._stop_by_ms is not None:
            return []
        is_another, self._registration.epoch = epoch != self._registration.epoch, epoch
        # What the former one granted, and what it told us of that, came by different ways: the latter comes no more.
        actions = self._return_early(math.inf, "its scheduler was replaced") if is_another else []
        if addresses and addresses != self._scheduler_addresses:
            self._scheduler_addresses = addresses
            self._registration.scheduler_gone()
            return [*actions, JoinScheduler(addresses, self._heartbeats)]
        return [*actions, *self._registration.epoch_changed(now_ms)] if is_another else actions

    def _refuse_epoch(self, message: AnyMessage) -> list[WorkerAction]:
        """Of a scheduler that is the active one no more, or not yet for our agent. What it granted goes back."""
        self.counters["epochs_refused"] += 1
        return [Send(SCHEDULER, unlaunched(message))] if isinstance(message, RunBatch) else []

    def _follow_agent(self, agent_pid: int) -> list[WorkerAction]:
        """Whoever says what to host is the agent; a new one hears how the slices are."""
        was_orphan = self._adoption.adopted()
        actions: list[WorkerAction] = [WatchAgent(agent_pid)] if self._adoption.may_outlive else []
        if not was_orphan:
            return actions
        self.counters["adopted"] += 1
        return actions + self._tell_agent()

    def _tell_agent(self) -> list[WorkerAction]:
        """How each slice is, as it was told before, or may not have been."""
        actions: list[WorkerAction] = []
        for slice_id, slice_ in self._slices.items():
            if slice_.state is HostedState.READY:
                actions.append(Send(AGENT, self._registration.slice_ready(slice_)))
            elif slice_.state is HostedState.FAILED:
                actions.append(Send(AGENT, self._unloadable(slice_)))
            if slice_.loading is not None:
                actions.append(Send(AGENT, Loading(slice_id, slice_.loading)))
        return actions

    def _agent_gone(self, now_ms: float) -> list[WorkerAction]:
        if self._stop_by_ms is not None:
            return []
        if not self._wanted:
            return [self._end(1, "its agent is gone, and it hosts nothing")]
        self._adoption.orphaned(now_ms)
        return self._hello(now_ms)

    def _load(self, spec: SliceSpec) -> list[WorkerAction]:
        left_out = {one.model_id: one for one in self._changes.left_out if one.slice_id == spec.slice_id}
        tried = {model.model_id: model for model in spec.models}
        self._slices[spec.slice_id] = HostedSlice(spec, left_out=tuple(left_out.values()), tried=tried)
        return [
            LoadSlice(replace(spec, models=tuple(one for one in spec.models if one.model_id not in left_out)))
        ]

    def _stop(self, stop_by_ms: float, now_ms: float) -> list[WorkerAction]:
        """Give back what has not started, let the rest finish."""
        self._adoption.stop()
        self._stop_by_ms = stop_by_ms
        actions: list[WorkerAction] = []
        for slice_ in self._slices.values():
            slice_.go_on(HostedTransition.UNWANTED)
            for batch in slice_.queue.take_waiting():
                actions += self._runs.end_unlaunched(batch)
            actions += self._runs.recall(slice_)
        return actions + self._end_if_stopped(now_ms)

    def _loaded(self, event: Loaded, now_ms: float) -> list[WorkerAction]:
        slice_ = self._slices[event.slice_id]
        if slice_.left_out and not event.replicas:
            reason = "; ".join(f"{one.model_id}: {one.reason}" for one in slice_.left_out)
            return self._load_failed(LoadFailed(event.slice_id, reason))
        slice_.has_loaded = True
        slice_.loading = None
        slice_.replicas = {replica.model_id: replica for replica in event.replicas}
        slice_.left_out += event.left_out
        slice_.go_on(HostedTransition.LOADED)
        if slice_.state is HostedState.STOPPING:
            return self._forget_if_drained(slice_)
        to_agent = Send(AGENT, self._registration.slice_ready(slice_))
        return [to_agent, *self._registration.loaded(slice_, now_ms), *self._changes.adapt(slice_, now_ms)]

    def _shrunk(self, event: Shrunk, now_ms: float) -> list[WorkerAction]:
        slice_ = self._slices[
            event.slice_id
        ]  # its batch has not ended, so neither slice nor model is forgotten
        if not slice_.shrink(event.model_id, event.batch_size_max):
            return []
        self.counters["batch_sizes_shrunk"] += 1
        if slice_.state is not HostedState.READY:
            return []
        return [*self._registration.changed(slice_, now_ms)]

    def _load_failed(self, event: LoadFailed) -> list[WorkerAction]:
        slice_ = self._slices[event.slice_id]
        slice_.has_loaded = True
        slice_.loading = None
        slice_.go_on(HostedTransition.BROKEN)
        slice_.reason = event.reason
        return [Send(AGENT, self._unloadable(slice_)), *self._forget_if_drained(slice_)]

    def _unloadable(self, slice_: HostedSlice) -> SliceFailed:
        slice_id, incarnation = slice_.spec.slice_id, self._identity.incarnation
        return SliceFailed(slice_id, incarnation, slice_.reason, is_unloadable=True)

    def _break(
        self,
        reason: str,
        now_ms: float,
        exit_code: int = EXIT_FAILURE,
        guilty: tuple[SliceId, ModelId] | None = None,
    ) -> list[WorkerAction]:
        """The device is gone: answer for everything, tell the agent, end. `guilty`: whose doing it was, where that is known."""
        actions = self._return_early(math.inf, _ENDS)
        for slice_ in self._slices.values():
            slice_.go_on(HostedTransition.BROKEN)
            slice_.reason = reason
            loading = slice_.loading
            for batch in slice_.queue.started:
                loading = None  # what loads beside a batch need not be what broke the device
                is_innocent = guilty is not None and guilty != (slice_.spec.slice_id, batch.run.model_id)
                actions += self._runs.end_broken(slice_, batch, reason, is_innocent=is_innocent)
            for batch in slice_.queue.take_waiting():
                actions += self._runs.end_unlaunched(batch)
            actions += self._runs.end_with_process(slice_, now_ms)
            slice_id = slice_.spec.slice_id
            model_id = guilty[1] if guilty is not None and guilty[0] == slice_id else loading
            failed = SliceFailed(slice_id, self._identity.incarnation, reason, model_id or NO_MODEL)
            actions.append(Send(AGENT, failed))
        return [*actions, self._end(exit_code, reason)]

    # ------------------------------------------------ scheduler

    def _heard_scheduler(self, message: AnyMessage, late_ms: float, now_ms: float) -> list[WorkerAction]:
        match message:
            case RunBatch():
                return self._grant(message, late_ms, now_ms)
            case PreemptBatch():
                return self._preempt(message, now_ms)
            case Directory():
                known = KnowFrontends(self._who_gets_outputs(message))
                return [known, *self._registration.heard(message, now_ms)]
            case _:
                raise AssertionError("checked before")

    def _who_gets_outputs(self, directory: Directory) -> tuple[FrontendInfo, ...]:
        """Who is listed; and who was, while something of it is here: if only its way to the scheduler broke, it still waits for that."""
        listed = {info.frontend_id for info in directory.frontends}
        batches = (batch for slice_ in self._slices.values() for batch in slice_.queue)
        owed = {part.frontend_id for batch in batches for part in batch.run.parts} | self._early.senders
        owed -= listed
        kept = (info for info in self._frontends if info.frontend_id in owed)
        self._frontends = (*directory.frontends, *kept)
        return self._frontends

    # ------------------------------------------------ batches

    def _grant(self, run: RunBatch, late_ms: float, now_ms: float) -> list[WorkerAction]:
        if run.incarnation != self._identity.incarnation:
            self.counters["batches_for_another_incarnation"] += 1
            return []
        slice_ = self._slices.get(run.slice_id)
        if slice_ is not None and slice_.queue.find(run.batch_id) is not None:
            self.counters["batches_repeated"] += 1
            return []
        if slice_ is None or not self._accepts(slice_, run):
            self.counters["batches_refused"] += 1
            return [Send(SCHEDULER, unlaunched(run))]
        batch = granted(run, late_ms, now_ms)
        actions: list[WorkerAction] = []
        for early in self._early.take(run):
            actions += self._runs.fit(batch, early.inputs, early.payload, now_ms)
        slice_.queue.add(batch)
        return actions + self._advance(slice_, now_ms)

    def _preempt(self, preempt: PreemptBatch, now_ms: float) -> list[WorkerAction]:
        """Its requests are granted again already, so nothing of it is `missing`."""
        slice_ = self._slices.get(preempt.slice_id)
        batch = slice_.queue.find(preempt.batch_id) if slice_ is not None else None
        if slice_ is None or batch is None:
            return []  # it has ended: its Done is on the way
        if batch in slice_.queue.started or batch is slice_.queue.ahead:
            batch.is_preempted = True
            return [Abort(preempt.slice_id, preempt.batch_id)]
        slice_.queue.remove(batch)
        return self._runs.end_preempted(batch) + self._advance(slice_, now_ms)

    def _accepts(self, slice_: HostedSlice, run: RunBatch) -> bool:
        return (
            slice_.state is HostedState.READY
            and slice_.hosts(run.model_id)
            and len(slice_.queue) < GRANTED_MAX
        )

    def _take_inputs(self, event: InputsCame, now_ms: float) -> list[WorkerAction]:
        inputs = event.inputs
        if inputs.incarnation != self._identity.incarnation:
            self.counters["inputs_for_another_incarnation"] += 1
            return release(event.payload)
        slice_ = self._slices.get(inputs.slice_id)
        if slice_ is None:  # of a slice of another worker nobody here knows what runs
            self.counters["inputs_unfit"] += 1
            return release(event.payload)
        batch = slice_.queue.find(inputs.batch_id)
        if self._early.has(inputs) or (batch is not None and batch.has(inputs)):
            self.counters["inputs_repeated"] += 1
            return release(event.payload)
        if batch is None:
            if self._early.put(inputs, event.payload, event.size_bytes, now_ms):
                return []
            self.counters["inputs_over_pool"] += 1
            return [*release(event.payload), *return_inputs(inputs, _NO_ROOM)]
        if batch in slice_.queue.started and batch.wants(inputs):
            self.counters["inputs_late"] += 1  # it went without them: they are in `missing`
            return [*release(event.payload), *return_inputs(inputs, "its batch had begun without it")]
        actions = self._runs.fit(batch, inputs, event.payload, now_ms)
        # Without all inputs a batch starts by its alarm, which may be due: what comes at the very same moment is in it.
        may_change = batch.is_complete or slice_.queue.ahead is not None
        after = self._advance(slice_, now_ms) if may_change else self._look_ahead(slice_, now_ms)
        return actions + after

    def _no_room(self, inputs: Inputs) -> list[WorkerAction]:
        """The worker has them not at all: neither in the batch nor early."""
        slice_ = self._slices.get(inputs.slice_id)
        if slice_ is None or inputs.incarnation != self._identity.incarnation or self._early.has(inputs):
            return []
        batch = slice_.queue.find(inputs.batch_id)
        return [] if batch is not None and not batch.wants(inputs) else return_inputs(inputs, _NO_ROOM)

    def _return_early(self, until_ms: float, reason: str) -> list[WorkerAction]:
        """Inputs that wait until then for their batch are not run. What its batch left in the pool is no part of it."""
        actions: list[WorkerAction] = []
        for part in self._early.take_expired(until_ms):
            inputs = part.inputs
            slice_ = self._slices.get(inputs.slice_id)
            actions += release(part.payload)
            if slice_ is None or slice_.queue.find(inputs.batch_id) is not None:
                self.counters["inputs_unfit"] += 1
                continue
            self.counters["inputs_without_batch"] += 1
            actions += return_inputs(inputs, reason)
        return actions

    def _advance(self, slice_: HostedSlice, now_ms: float) -> list[WorkerAction]:
        """End what cannot run, start and hand over what may, and look ahead."""
        for running in slice_.queue.started:
            if running.overdue_at_ms > now_ms:
                continue
            if not is_looked_at_late(running.overdue_at_ms, now_ms):
                return self._hung(slice_, running, now_ms)
            self._runs.expect(slice_, running, now_ms)
        return self._runs.launch(slice_, now_ms) + self._look_ahead(slice_, now_ms)

    def _hung(self, slice_: HostedSlice, batch: Batch, now_ms: float) -> list[WorkerAction]:
        """Nothing runs on this device any more: as if it were broken, but the agent hears whose doing it is."""
        model_id = batch.run.model_id
        limit_ms = slice_.run_limit_ms(model_id, len(batch.rows))
        what = f"a batch of {len(batch.rows)} did not end within {limit_ms:.0f} ms"
        warming = None if slice_.queue.has_left_first_stage(batch) else self._runs.warming
        guilty = warming or (slice_.spec.slice_id, model_id)
        if warming is not None:
            limit_ms += WARMING_MS
            what = f"a run that warms it up kept a batch of {model_id!r} from ending within {limit_ms:.0f} ms"
        self.counters["runs_hung"] += 1
        return self._break(f"model {guilty[1]!r} hung: {what}", now_ms, EXIT_HUNG, guilty)

    def _look_ahead(self, slice_: HostedSlice, now_ms: float) -> list[WorkerAction]:
        """Set the slice's alarm, and let go what nobody wants any more."""
        actions: list[WorkerAction] = []
        alarm_at_ms = slice_.queue.wake_at_ms
        if alarm_at_ms is not None and alarm_at_ms != slice_.alarm_at_ms:
            heapq.heappush(self._alarms, (alarm_at_ms, slice_.spec.slice_id))
        slice_.alarm_at_ms = alarm_at_ms
        if slice_.is_letting_go:
            actions += self._changes.adapt(slice_, now_ms)
        return actions + self._forget_if_drained(slice_)

    def _leave_first_stage(self, slice_: HostedSlice, batch_id: BatchId, now_ms: float) -> list[WorkerAction]:
        """The next batch of a pipeline can start."""
        if not slice_.queue.leave_first_stage(batch_id):
            return []
        return self._runs.launch(slice_, now_ms) + self._look_ahead(slice_, now_ms)

    def _finish(self, event: BatchRan, now_ms: float) -> list[WorkerAction]:
        slice_ = self._slices[event.slice_id]
        batch = slice_.queue.started_as(event.batch_id, now_ms)
        if not batch.failure:
            batch.started_at_ms = event.began_at_ms
            if slice_.spec.is_pipeline:
                batch.between_ms = max(0.0, now_ms - batch.started_at_ms - event.exec_ms)
        replica = slice_.replicas.get(batch.run.model_id)
        answers, ran = answer_rows(batch, event, () if replica is None else replica.heads)
        self.counters["requests_ran"] += ran
        self.counters["requests_invalid"] += len(event.rejected)
        slice_.requests += ran
        self.counters["batches_ran"] += 1
        slice_.batches += 1
        if batch.failure:
            batch.ran += ran
            batch.exec_ms += event.exec_ms
            self._runs.go_on(slice_, batch, now_ms)
            return [*answers, *release(event.outputs), *self._run_apart(slice_, batch, now_ms)]
        slice_.queue.end(batch)
        # Before the answers: the device has nothing to do meanwhile.
        actions = self._runs.launch(slice_, now_ms)
        actions += [*answers, *release(event.outputs, *batch.payloads())]
        actions.append(Send(SCHEDULER, done_of(batch, "ok", ran, event.exec_ms)))
        return actions + self._look_ahead(slice_, now_ms) + self._end_if_stopped(now_ms)

    def _fail(self, event: RunFailed, now_ms: float) -> list[WorkerAction]:
        slice_ = self._slices[event.slice_id]
        batch = slice_.queue.started_as(event.batch_id, now_ms)
        self._runs.go_on(slice_, batch, now_ms)
        if batch.is_preempted:  # its requests are granted again: nobody waits for an answer of this one
            return self._run_apart(slice_, batch, now_ms)
        if len(batch.rows) > 1 and slice_.is_idempotent(batch.run.model_id):
            batch.halve(event.reason)
            return self._run_apart(slice_, batch, now_ms)
        return answer_failure(batch, "Internal", event.reason) + self._run_apart(slice_, batch, now_ms)

    def _expired(self, event: RunExpired, now_ms: float) -> list[WorkerAction]:
        slice_ = self._slices[event.slice_id]
        batch = slice_.queue.started_as(event.batch_id, now_ms)
        actions = self._runs.end_expired(slice_, batch, event.reason)
        return actions + self._advance(slice_, now_ms) + self._end_if_stopped(now_ms)

    def _run_apart(self, slice_: HostedSlice, batch: Batch, now_ms: float) -> list[WorkerAction]:
        actions = self._runs.run_apart(slice_, batch, now_ms)
        if batch in slice_.queue.started:
            return actions + self._look_ahead(slice_, now_ms)
        return actions + self._advance(slice_, now_ms) + self._end_if_stopped(now_ms)

    def _aborted(self, event: RunAborted, now_ms: float) -> list[WorkerAction]:
        slice_ = self._slices[event.slice_id]
        batch = slice_.queue.find(event.batch_id)
        assert batch is not None, "an executor speaks of what it was given and has not ended"
        is_stopping = self._stop_by_ms is not None
        actions = self._runs.not_begun(slice_, batch, now_ms, is_stopping=is_stopping)
        return actions + self._advance(slice_, now_ms) + self._end_if_stopped(now_ms)

    # ------------------------------------------------ time

    def _tick(self, now_ms: float) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        orphan_until_ms, hello_at_ms = self._adoption.orphan_until_ms, self._adoption.hello_at_ms
        if orphan_until_ms is not None and orphan_until_ms <= now_ms:
            self.counters["orphaned_to_the_end"] += 1
            return self._stop(now_ms + LAST_GRACE_MS, now_ms)
        if hello_at_ms is not None and hello_at_ms <= now_ms:
            actions += self._hello(now_ms)
        if self._tell_agent_at_ms is not None and self._tell_agent_at_ms <= now_ms:
            self._tell_agent_at_ms = None
            if self._adoption.hello_at_ms is None:  # else the agent is told once it has answered
                actions += self._tell_agent()
        repeat_at_ms = self._registration.wake_at_ms
        if repeat_at_ms is not None and repeat_at_ms <= now_ms:
            actions += self._registration.repeat(now_ms)
        if self._changes.due_at_ms is not None and self._changes.due_at_ms <= now_ms:
            actions += self._changes.give_up_overdue(now_ms)
        actions += self._return_early(now_ms, "its batch did not come to the worker")
        while self._alarms and self._alarms[0][0] <= now_ms:
            alarm = heapq.heappop(self._alarms)
            if self._is_alarm(*alarm):
                slice_ = self._slices[alarm[1]]
                slice_.alarm_at_ms = None
                actions += self._advance(slice_, now_ms)
        return actions + self._end_if_stopped(now_ms)

    def _is_alarm(self, at_ms: float, slice_id: SliceId) -> bool:
        slice_ = self._slices.get(slice_id)
        return slice_ is not None and slice_.alarm_at_ms == at_ms

    def _hello(self, now_ms: float) -> list[WorkerAction]:
        """Ask what to host."""
        hello = self._adoption.hello(self._wanted.values(), now_ms)
        if hello is None:
            return [self._end(1, f"the agent has not answered for {HELLO_FOR_MS / 1e3:.0f} s")]
        return [Send(AGENT, hello)]

    # ------------------------------------------------ ends

    def _forget_if_drained(self, slice_: HostedSlice) -> list[WorkerAction]:
        """A slice nobody wants leaves once it has nothing more to do."""
        if slice_.state is not HostedState.STOPPING or self._stop_by_ms is not None:
            return []
        if len(slice_.queue) or not slice_.has_loaded:
            return []
        slice_id = slice_.spec.slice_id
        del self._slices[slice_id]
        self._changes.look_ahead()
        again = self._wanted.get(slice_id)
        return [UnloadSlice(slice_id), *(self._load(again) if again is not None else ())]

    def _end_if_stopped(self, now_ms: float) -> list[WorkerAction]:
        if self._stop_by_ms is None or self._has_ended:
            return []
        if not any(len(slice_.queue) for slice_ in self._slices.values()):
            return [*self._return_early(math.inf, _ENDS), self._end(0, "stopped")]
        if now_ms < self._stop_by_ms:
            return []
        actions = self._return_early(math.inf, _ENDS)
        for slice_ in self._slices.values():
            actions += self._runs.end_with_process(slice_, now_ms)
        return [*actions, self._end(0, "stopped with batches running: the grace is over")]

    def _end(self, exit_code: int, reason: str) -> End:
        self._has_ended = True
        return End(exit_code, reason)

    def _status(self) -> StatusListed:
        slices = tuple(
            SliceReport(
                slice_id=slice_id,
                state=slice_.state.value,
                reason=slice_.reason,
                models=tuple(model.model_id for model in slice_.spec.models),
                batches=slice_.batches,
                requests=slice_.requests,
                left_out=slice_.left_out,
            )
            for slice_id, slice_ in self._slices.items()
        )
        counters = {name: float(value) for name, value in {**self.counters, **self.offences.counters}.items()}
        return StatusListed(self._identity.worker_id, self._identity.pid, slices, (), counters)
