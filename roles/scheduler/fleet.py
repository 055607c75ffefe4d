"""What the scheduler knows of the cluster: nodes, slices, frontends, and who may be told what.

It knows from hellos and reports only; nothing here decides. A slice that is not ready is not scheduled
on; a slice of another incarnation is another slice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from msgspec.structs import replace

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.limits import ago_ms
from fabric.messages import (
    DesiredSlices,
    Directory,
    FrontendHello,
    FrontendInfo,
    GpuInfo,
    GpuRef,
    GpuReport,
    GpuSample,
    GpuSharing,
    HeadInfo,
    HeadSpec,
    Left,
    LeftOut,
    ModelInfo,
    ModelSpec,
    NodeHello,
    Part,
    ReplicaHint,
    ReplicaInfo,
    SliceInfo,
    SliceReady,
    SliceReport,
    SliceSpec,
    SliceState,
    SliceStatus,
)
from policies.batching.base import HostedModel, RequestRun
from policies.placement.common.base import WHOLE_PERCENT
from roles.scheduler.absences import Absences
from roles.scheduler.dispatch.corrections import SpeedCorrection
from roles.scheduler.dispatch.start_times import StartTimes

BATCHES_PER_SLICE = 2
LEFT_OUT_CHARS_MAX = 1_000  # of a report: the reasons of many models would not fit


@dataclass(slots=True, eq=False, weakref_slot=True)
class Hosting:
    """What a slice hosts, as its worker said; one object for all slices that host the same at the same speed.

    4096 slices with 500 models each would otherwise hold a thousand million run times.
    """

    replicas: tuple[ReplicaInfo, ...] = ()
    exec_ms: Mapping[ModelId, Sequence[float]] = field(default_factory=dict)
    """l(b) at index b - 1."""


_HOSTS_NOTHING = Hosting()


@dataclass(slots=True, eq=False)
class Flight:
    """A batch between its dispatch and its `Done`."""

    batch_id: BatchId
    record: SliceRecord
    model_id: ModelId
    parts: tuple[Part, ...]
    batch_size: int
    exec_ms: float
    sent_at_ms: float
    runs: Sequence[RequestRun]
    waited_ms: float = 0.0
    reason: str = ""
    """Why it left then."""
    start_at_ms: float = 0.0
    """When it should start, as was thought when it was sent."""
    occupied_ms: float = 0.0
    """How long its slice starts nothing else."""


@dataclass(slots=True, eq=False)
class SliceRecord:
    """One slice of the plan and what became of it: all that is known of it, for whoever needs it."""

    spec: SliceSpec
    node_id: NodeId
    order: int
    hints: tuple[ReplicaHint, ...] = ()
    """What the plan says of its models."""
    state: SliceState = SliceState.STARTING
    reason: str = ""
    incarnation: Incarnation = field(default=Incarnation(""))
    worker: PeerId | None = None
    addresses: tuple[str, ...] = ()
    hosting: Hosting = _HOSTS_NOTHING
    left_out: tuple[LeftOut, ...] = ()
    """Models that its worker, when it was last ready, could not host."""
    leaving: frozenset[ModelId] = frozenset()
    """Models that it hosts still, and of which it gets no more batches."""
    batches: int = 0
    requests: int = 0
    is_draining: bool = False
    """It gets no more batches: the plan has no place for it."""
    leaves: Incarnation | None = None
    """The worker that is about to end, as its agent said, which may be before that worker says that it is ready."""
    is_fenced: bool = False
    """It gets no batches: its worker takes commands of a former epoch, for all that is known."""
    speeds: dict[ModelId, SpeedCorrection] = field(default_factory=dict)
    """Of the models whose measured run times left their worker's tables."""
    hosted: tuple[HostedModel, ...] = ()
    """Its models as the discipline was last told of them."""
    flights: list[Flight] = field(default_factory=list, repr=False)
    """Its batches that have not ended, in the order of their dispatch."""
    heard_at_ms: float = -math.inf
    """When its worker last said something of it."""
    is_late: bool = False
    """One of its batches should have ended for long, and nothing was heard since: it gets no others."""

    @property
    def is_ready(self) -> bool:
        """Whether batches can go there."""
        return self.state == SliceState.READY

    @property
    def is_leaving(self) -> bool:
        """It gets no more batches: its worker is about to end."""
        return self.leaves == self.incarnation

    @property
    def takes_batches(self) -> bool:
        """Whether it is ready, and will be."""
        return self.is_ready and not (self.is_draining or self.is_leaving or self.is_fenced)

    @property
    def batches_max(self) -> int:
        """How many it may hold: one waits, and one runs, on a pipeline one on each of its GPUs."""
        return BATCHES_PER_SLICE - 1 + self.spec.stages

    @property
    def targets(self) -> Mapping[ModelId, tuple[int | None, float]]:
        """Target batch and weight of the models to which the plan gives either."""
        return {
            hint.model_id: (hint.batch, hint.weight)
            for hint in self.hints
            if hint.batch is not None or hint.weight != 1.0
        }

    @property
    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """The models it hosts."""
        return self.hosting.replicas

    @property
    def served(self) -> list[ModelId]:
        """The models of which it gets batches, one for each of its replicas."""
        hosted = self.replicas if self.takes_batches else ()
        return [one.model_id for one in hosted if one.model_id not in self.leaving]

    def exec_ms(self, model_id: ModelId, batch_size: int) -> float | None:
        """l(b) as its worker said last; None: it runs no such batch, or not any more."""
        table = self.hosting.exec_ms.get(model_id, ())
        return table[batch_size - 1] if 0 < batch_size <= len(table) else None


@dataclass(slots=True)
class NodeRecord:
    """What a node's agent said of itself and its GPUs."""

    gpus: tuple[GpuInfo, ...]
    is_outlived: bool = False
    """The loss of this agent is not the loss of its workers."""
    slice_ids: frozenset[SliceId] = frozenset()
    """Those it had when it introduced itself, also of a plan that is not the one here."""
    samples: Mapping[int, GpuSample] = field(default_factory=dict)
    sharing: Mapping[int, GpuSharing] = field(default_factory=dict)
    sampled_at_ms: float | None = None


class Fleet:
    """The cluster as far as it is known. `version` counts changes that others must hear of."""

    def __init__(
        self,
        slices: Iterable[SliceRecord],
        slo_ms: dict[ModelId, float],
        nodes: Iterable[NodeId] = (),
        terms: Mapping[ModelId, int] | None = None,
        heads: Mapping[ModelId, tuple[HeadSpec, ...]] | None = None,
    ) -> None:
        self._heads = dict(heads or {})
        """Of the models that have any: what clients ask instead of them."""
        self.terms: dict[ModelId, int] = dict(terms or {})
        """Of models that were moved here from another shard."""
        self._left: dict[ModelId, set[PeerId]] = {}
        """Frontends that announce a model to another shard."""
        self.version = 0
        self.now_ms = 0.0
        """Of the event that is handled just now."""
        self.starts = StartTimes()
        self.absences = Absences()
        self.slices = {record.spec.slice_id: record for record in slices}
        self._hosts: Counter[ModelId] = Counter()
        """How many slices should host each model,"""
        self._hosts_running_once: Counter[ModelId] = Counter()
        """and as one that must not run a request twice."""
        self._runs_once: set[ModelId] = set()
        """Where none should host it just now, it is as it was."""
        self._hosted_by: dict[PeerId, dict[SliceId, SliceRecord]] = {}
        """The slices of each worker that hosts any."""
        self._planned_nodes = frozenset((*nodes, *(record.node_id for record in self.slices.values())))
        self.frontends: dict[FrontendId, tuple[PeerId, FrontendInfo]] = {}
        self.frontend_ids: dict[PeerId, FrontendId] = {}
        """Of the living incarnations only."""
        self.nodes: dict[NodeId, PeerId] = {}
        self.devices: dict[NodeId, NodeRecord] = {}
        """Kept when the agent of a planned node is lost: its age says so."""
        self._slo_ms = slo_ms
        for record in self.slices.values():
            self._note_models(record, +1)
        self.replicas = dict.fromkeys(slo_ms, 0)
        """Slices that get batches of each model."""
        self._replicas_of_unserved: Counter[ModelId] = Counter()
        """The same of models that they host and that are not served."""
        self._hostings: WeakValueDictionary[tuple[ReplicaInfo, ...], Hosting] = WeakValueDictionary()

    def desired_on(self, node_ids: Iterable[NodeId]) -> dict[NodeId, DesiredSlices]:
        """What should exist on each of these nodes."""
        specs: dict[NodeId, list[SliceSpec]] = {node_id: [] for node_id in node_ids}
        for record in self.slices.values():
            if record.node_id in specs:
                specs[record.node_id].append(record.spec)
        return {node_id: DesiredSlices(self.version, tuple(those)) for node_id, those in specs.items()}

    def add_slice(self, record: SliceRecord) -> None:
        """Another slice that should exist."""
        self.slices[record.spec.slice_id] = record
        self._note_models(record, +1)
        self.slice_starts(record)

    def respecify(self, record: SliceRecord, models: tuple[ModelSpec, ...]) -> None:
        """A slice should host these models from now on. Replicas of others are as good as gone."""
        self._count(record, -1)
        self._note_models(record, -1)
        record.spec = replace(record.spec, models=models)
        self._note_models(record, +1)
        names = {model.model_id for model in models}
        record.leaving &= names
        record.left_out = tuple(out for out in record.left_out if out.model_id in names)
        if record.is_ready:
            record.reason = _reason_of(record.left_out)
            stay = tuple(one for one in record.replicas if one.model_id in names)
            if stay != record.replicas:
                record.hosting = self._hosting(stay)
                self.version += 1
        self._count(record, +1)

    def forget_slice(self, record: SliceRecord) -> None:
        """It should not exist any more."""
        self._count(record, -1)
        self._note_models(record, -1)
        self._put_worker(record, None)
        del self.slices[record.spec.slice_id]
        self.starts.forget(record.spec.slice_id)
        self.absences.end(record.spec.slice_id, self.now_ms)
        self.version += 1

    def granted_percent(self) -> Mapping[GpuRef, float]:
        """Of each GPU with slices the sum of their shares, 100 for one without a limit; a pipeline's is on its first GPU."""
        granted: dict[GpuRef, float] = defaultdict(float)
        for record in self.slices.values():
            granted[GpuRef(record.node_id, record.spec.gpu)] += record.spec.share_percent or WHOLE_PERCENT
        return granted

    def slo_ms(self, model_id: ModelId) -> float:
        """Of a model that is served."""
        return self._slo_ms[model_id]

    @property
    def slos_ms(self) -> Mapping[ModelId, float]:
        """Of all models that are served."""
        return self._slo_ms

    def heads(self, model_id: ModelId) -> tuple[HeadSpec, ...]:
        """What clients ask instead of a model that is served; empty: itself."""
        return self._heads.get(model_id, ())

    def put_model(self, model_id: ModelId, slo_ms: float, heads: tuple[HeadSpec, ...] = ()) -> None:
        """A model is served from now on, or has another SLO; without `heads` they are as before."""
        self._slo_ms[model_id] = slo_ms
        if heads:
            self._heads[model_id] = heads
        if model_id not in self.replicas:
            self.replicas[model_id] = self._replicas_of_unserved.pop(model_id, 0)
            if self._hosts_running_once[model_id]:
                self._runs_once.add(model_id)
        self.version += 1

    def put_term(self, model_id: ModelId, term: int) -> bool:
        """Frontends go by the highest; False: it has that one."""
        if self.terms.get(model_id, 0) == term:
            return False
        self.terms[model_id] = term
        self.version += 1
        return True

    def forget_model(self, model_id: ModelId) -> None:
        """A model is not served any more, whatever still hosts it."""
        del self._slo_ms[model_id]
        if replicas := self.replicas.pop(model_id):
            self._replicas_of_unserved[model_id] = replicas
        self.terms.pop(model_id, None)
        self._heads.pop(model_id, None)
        self._left.pop(model_id, None)
        self.starts.forget_model(model_id)
        self._runs_once.discard(model_id)
        self.version += 1

    def is_served(self, model_id: ModelId) -> bool:
        """Whether some slice gets batches of the model."""
        return self.replicas[model_id] > 0

    def frontend_joined(self, peer: PeerId, hello: FrontendHello) -> PeerId | None:
        """A frontend is there; where it is the next incarnation of one: the former."""
        info = FrontendInfo(hello.frontend_id, hello.incarnation, hello.addresses)
        self._forget_left(peer)
        former = self.frontends.get(hello.frontend_id)
        if former is not None:
            del self.frontend_ids[former[0]]
            self._forget_left(former[0])
        self.frontend_ids[peer] = hello.frontend_id
        self.frontends[hello.frontend_id] = (peer, info)
        self.version += 1
        return former[0] if former is not None and former[0] != peer else None

    def frontend_lost(self, peer: PeerId) -> FrontendId | None:
        """Forget the frontend behind a peer; None when it was not one, or a newer incarnation took over."""
        frontend_id = self.frontend_ids.pop(peer, None)
        if frontend_id is not None:
            del self.frontends[frontend_id]
            self._forget_left(peer)
            self.version += 1
        return frontend_id

    def frontend_left(self, peer: PeerId, left: Left) -> None:
        """A listed frontend announces no more of a model here, or does so again."""
        if left.is_back:
            self._left.get(left.model_id, set()).discard(peer)
        elif left.model_id in self.replicas:
            self._left.setdefault(left.model_id, set()).add(peer)

    def frontends_at(self, model_id: ModelId) -> tuple[FrontendId, ...]:
        """Frontends that may announce requests of the model here."""
        left = self._left.get(model_id, set())
        return tuple(one for peer, one in self.frontend_ids.items() if peer not in left)

    def is_left(self, model_id: ModelId) -> bool:
        """Whether frontends announce it to another shard, and none announces it here."""
        return bool(self._left.get(model_id)) and not self.frontends_at(model_id)

    def _forget_left(self, peer: PeerId) -> None:
        for peers in self._left.values():
            peers.discard(peer)

    def slice_ready(self, peer: PeerId, message: SliceReady) -> SliceRecord | None:
        """A slice is warm, or hosts its models otherwise than it said; None: it is not planned, or that is no news."""
        record = self.slices.get(message.slice_id)
        if record is None:
            return None
        names = {model.model_id for model in record.spec.models}  # others it has not let go yet
        replicas = tuple(one for one in message.replicas if one.model_id in names)
        left_out = tuple(out for out in message.left_out if out.model_id in names)
        if record.is_ready:
            said = record.replicas, record.left_out
            is_as_before = record.incarnation == message.incarnation and said == (replicas, left_out)
            if is_as_before and not record.is_fenced:
                return None
            # The next incarnation was quicker than the news of the last one's end, batches got smaller, or models changed.
            self._count(record, -1)
        self.starts.end(record.spec.slice_id, self.replicas, self.now_ms)
        record.is_fenced = False
        # Of what is new, and of another process, the worker says itself how fast it is.
        same = set(record.replicas) & set(replicas) if record.incarnation == message.incarnation else ()
        same_ids = {replica.model_id for replica in same}
        record.speeds = {one: speed for one, speed in record.speeds.items() if one in same_ids}
        record.left_out = left_out
        record.state = SliceState.READY
        record.reason = _reason_of(record.left_out)
        record.incarnation = message.incarnation
        self._put_worker(record, peer)
        if not record.is_leaving:
            self.absences.end(record.spec.slice_id, self.now_ms)
        record.addresses = message.addresses
        record.hosting = self._hosting(replicas)
        self._count(record, +1)
        self.version += 1
        return record

    def slice_down(self, record: SliceRecord, state: SliceState, reason: str) -> bool:
        """A slice is not ready (any more); True when it was."""
        was_ready = record.is_ready
        if was_ready:
            self._goes_away(record, reason)
        self.absences.explain(record.spec.slice_id, reason)
        self._count(record, -1)
        record.state, record.reason = state, reason
        self._put_worker(record, None)
        if state != SliceState.LOST:
            self.starts.cancel(record.spec.slice_id)
        elif was_ready and record.node_id in self.nodes:  # its agent starts it again
            self.slice_starts(record)
        self.version += 1
        return was_ready

    def slice_starts(self, record: SliceRecord) -> None:
        """A process for it is being started, also where it had failed."""
        if record.state == SliceState.FAILED:
            record.state, record.reason = SliceState.STARTING, ""
        models = (model.model_id for model in record.spec.models)
        self.starts.begin(record.spec.slice_id, models, self.now_ms)

    def slice_is_there(self, record: SliceRecord) -> None:
        """Its agent says that it is ready; its worker has not said so yet."""
        models = (model.model_id for model in record.spec.models)
        self.starts.there(record.spec.slice_id, models, self.now_ms)

    def fence(self, record: SliceRecord) -> None:
        """An epoch has begun: a ready slice gets no batches until its worker says that it takes commands of that one."""
        if record.takes_batches:
            self._count(record, -1)
            record.reason = (
                "its worker takes commands of a former epoch: its agent has not granted the next one"
            )
            self._goes_away(record, record.reason)
            self.slice_is_there(record)
        record.is_fenced = True
        self.version += 1

    def slice_drains(self, record: SliceRecord) -> None:
        """It gets no more batches and will end."""
        self._count(record, -1)
        record.is_draining = True
        self.version += 1

    def models_leave(self, record: SliceRecord, models: frozenset[ModelId]) -> None:
        """It gets no more batches of these."""
        self._count(record, -1)
        record.leaving |= models
        self._count(record, +1)
        self.version += 1

    def slice_leaves(self, record: SliceRecord, reason: str) -> None:
        """A ready slice will end when what it has is done."""
        self._count(record, -1)
        record.leaves, record.reason = record.incarnation, reason
        self._goes_away(record, reason)
        self.version += 1

    def slice_will_leave(self, record: SliceRecord, status: SliceStatus) -> None:
        """What its agent says of a slice that is not ready: whether it will end, should its worker say that it is."""
        record.leaves = status.incarnation if status.state == SliceState.DRAINING else None

    def slice_stays(self, record: SliceRecord) -> None:
        """It will not end after all: another agent than the one that said so has its worker."""
        record.leaves, record.reason = None, _reason_of(record.left_out)
        if not record.is_fenced:
            self.absences.end(record.spec.slice_id, self.now_ms)
        self._count(record, +1)
        self.version += 1

    def node_joined(self, peer: PeerId, hello: NodeHello) -> None:
        """A node's agent (or its next incarnation) is there."""
        self.nodes[hello.node_id] = peer
        self.devices[hello.node_id] = NodeRecord(
            hello.gpus, hello.workers_outlive_agent, frozenset(status.slice_id for status in hello.slices)
        )

    def node_lost(self, node_id: NodeId) -> list[SliceRecord]:
        """Its agent is gone; the ready slices that are gone with it."""
        del self.nodes[node_id]
        for record in self.slices.values():
            if record.node_id == node_id and self.starts.cancel(record.spec.slice_id):
                self.version += 1
        # Where workers outlive their agent, each is lost by its own silence, if it is.
        gone = [] if self.devices[node_id].is_outlived else self.slices_on(node_id)
        if node_id not in self._planned_nodes:
            del self.devices[node_id]
        return gone

    def slices_of(self, peer: PeerId) -> list[SliceRecord]:
        """Ready slices that a worker process hosts."""
        return list(self._hosted_by.get(peer, {}).values())

    def is_worker(self, peer: PeerId) -> bool:
        """Whether it hosts a slice that is ready."""
        return peer in self._hosted_by

    def slices_on(self, node_id: NodeId) -> list[SliceRecord]:
        """Ready slices of a node."""
        return [r for r in self.slices.values() if r.node_id == node_id and r.is_ready]

    def peers_to_tell(self) -> list[PeerId]:
        """Everyone who gets the directory: frontends, and workers with a ready slice.

        One of which a slice is fenced is not told: until a directory lists its slices, it repeats what ends that, should it be lost.
        """
        records = self.slices.values()
        fenced = {record.worker for record in records if record.is_fenced}
        workers = dict.fromkeys(
            record.worker for record in records if record.worker is not None and record.worker not in fenced
        )
        return [peer for peer, _ in self.frontends.values()] + list(workers)

    def models(self) -> tuple[ModelInfo, ...]:
        """Every model, with the signature of its first ready replica."""
        first: dict[ModelId, ReplicaInfo] = {}
        for record in self.slices.values():
            if record.is_ready:
                for replica in record.replicas:
                    first.setdefault(replica.model_id, replica)
        infos = []
        for model_id, slo_ms in self._slo_ms.items():
            is_idempotent = model_id not in self._runs_once
            if model_id in first:
                known = first[model_id]
                count = self.replicas[model_id]
                infos.append(
                    ModelInfo(
                        model_id,
                        slo_ms,
                        known.inputs,
                        known.outputs,
                        known.image,
                        count,
                        is_idempotent,
                        self._coming_in_ms(model_id),
                        self.terms.get(model_id, 0),
                        self._head_infos(model_id, known),
                    )
                )
            else:
                coming_in_ms = self._coming_in_ms(model_id)
                infos.append(
                    ModelInfo(
                        model_id,
                        slo_ms,
                        is_idempotent=is_idempotent,
                        coming_in_ms=coming_in_ms,
                        term=self.terms.get(model_id, 0),
                        heads=self._head_infos(model_id),
                    )
                )
        return tuple(infos)

    def _head_infos(self, model_id: ModelId, replica: ReplicaInfo | None = None) -> tuple[HeadInfo, ...]:
        """As clients ask them. A real device has told what each one gives; on an emulated one all give the same."""
        heads = self.heads(model_id)
        if not heads:
            return ()
        outputs = {} if replica is None else {one.model_id: one.outputs for one in replica.heads}
        otherwise = () if replica is None else replica.outputs
        model_slo_ms = self._slo_ms[model_id]
        return tuple(
            HeadInfo(
                head.model_id,
                model_slo_ms if head.slo_ms is None else head.slo_ms,
                outputs.get(head.model_id, otherwise),
            )
            for head in heads
        )

    def directory(self) -> Directory:
        """The news for everyone."""
        return Directory(
            version=self.version,
            models=self.models(),
            slices=tuple(
                SliceInfo(slice_id, record.incarnation, record.node_id, record.addresses)
                for slice_id, record in self.slices.items()
                if record.is_ready
            ),
            frontends=tuple(info for _, info in self.frontends.values()),
        )

    def reports(self) -> Sequence[SliceReport]:
        """Each slice, for people."""
        return [
            SliceReport(
                slice_id,
                record.state,
                record.reason,
                tuple(model.model_id for model in record.spec.models),
                record.batches,
                record.requests,
                record.left_out if record.is_ready else (),
                record.spec.share_percent,
            )
            for slice_id, record in self.slices.items()
        ]

    def gpu_reports(self, now_ms: float) -> tuple[GpuReport, ...]:
        """Each GPU, for people."""
        return tuple(
            GpuReport(
                node_id,
                info,
                record.sharing.get(info.gpu),
                record.samples.get(info.gpu),
                None if record.sampled_at_ms is None else ago_ms(now_ms, record.sampled_at_ms),
            )
            for node_id, record in self.devices.items()
            for info in record.gpus
        )

    def _hosting(self, replicas: tuple[ReplicaInfo, ...]) -> Hosting:
        known = self._hostings.get(replicas)
        if known is None:
            known = Hosting(replicas, {one.model_id: one.exec_ms for one in replicas})
            self._hostings[replicas] = known
        return known

    def _put_worker(self, record: SliceRecord, worker: PeerId | None) -> None:
        """Whose slice it is from now on."""
        if record.worker is not None:
            hosted = self._hosted_by[record.worker]
            del hosted[record.spec.slice_id]
            if not hosted:
                del self._hosted_by[record.worker]
        if worker is not None:
            self._hosted_by.setdefault(worker, {})[record.spec.slice_id] = record
        record.worker = worker

    def _note_models(self, record: SliceRecord, step: int) -> None:
        """Around whatever changes what a slice should host: off before, on again behind it."""
        for model in record.spec.models:
            model_id = model.model_id
            self._hosts[model_id] += step
            self._hosts_running_once[model_id] += 0 if model.is_idempotent else step
            if self._hosts_running_once[model_id]:
                self._runs_once.add(model_id)
            elif self._hosts[model_id] or model_id not in self._slo_ms:
                self._runs_once.discard(model_id)
            if not self._hosts[model_id]:
                del self._hosts[model_id], self._hosts_running_once[model_id]

    def _coming_in_ms(self, model_id: ModelId) -> float | None:
        if self.replicas[model_id]:
            return None
        return self.starts.coming_in_ms(model_id, self.now_ms)

    def _goes_away(self, record: SliceRecord, reason: str) -> None:
        models = tuple(model.model_id for model in record.spec.models)
        self.absences.begin(record.spec.slice_id, models, reason, self.now_ms)

    def _count(self, record: SliceRecord, step: int) -> None:
        """Around whatever changes what it serves: off before, on again behind it."""
        for model_id in record.served:
            if model_id in self.replicas:
                self.replicas[model_id] += step
            else:
                self._replicas_of_unserved[model_id] += step
                if not self._replicas_of_unserved[model_id]:
                    del self._replicas_of_unserved[model_id]


def _reason_of(left_out: Iterable[LeftOut]) -> str:
    """Why a ready slice hosts less than it should."""
    return "; ".join(f"without {one.model_id}: {one.reason}" for one in left_out)[:LEFT_OUT_CHARS_MAX]
