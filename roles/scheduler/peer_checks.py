"""What a scheduler's peers may say: its core sees nothing that has not been checked here.

Who may speak of what goes by names and by what was said before:

- A frontend, an agent and a worker introduce themselves under their own identity: role id and boot nonce.
- A frontend speaks of its own requests, once it is listed.
- Whoever is not known here, because the scheduler is new or had lost it, is no offender when it speaks or pings as if it
  were: it is told the directory, and introduces itself again.
- An agent speaks of its node and the slices on it, and of nothing before its hello.
- A worker speaks of slices of its own node, and of the batches that it was given.
- Changes are an operator's, plans are the planner's.

News of what has ended meanwhile (a batch, a slice, an agent) passes: the core knows that it is none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, get_args

from fabric.errors import RemoteProtocolError
from fabric.ids import (
    AGENT_PREFIX,
    FRONTEND_NAME_BYTES_MAX,
    FRONTEND_PREFIX,
    OPERATOR,
    WORKER_PREFIX,
    NodeId,
    PeerId,
    is_worker_of,
    role_id_of,
    role_id_of_node,
)
from fabric.messages import (
    Arrivals,
    Done,
    EpochGranted,
    FrontendHello,
    Left,
    NodeHello,
    Ping,
    PlanMade,
    PlanRequest,
    Pong,
    RecordsAsked,
    RehearsalMade,
    ReplicaInfo,
    SliceChanged,
    SliceReady,
    SliceSpec,
    StatusAsked,
    Telemetry,
    Withdraw,
)
from roles.runtime.core import ELECTION, PLANNER, REHEARSER
from roles.runtime.peer_checks import (
    NOT_OWNER,
    OTHER_PLAN,
    OUT_OF_RANGE,
    TOO_MANY,
    WRONG_IDENTITY,
    Offences,
    PeerChecks,
    Rule,
    Verdict,
    anybody,
    refuse_type,
    require_identity,
)
from roles.scheduler.dispatch.batches import Batches
from roles.scheduler.fleet import Fleet, SliceRecord

FRONTENDS_MAX: Final = 1_024
UNLISTED: Final = "unlisted"
UNLISTED_EVERY_MS: Final = 1_000.0
UNLISTED_MAX: Final = 64  # frontends that are told in such a time: a directory may be megabytes
_ROUNDING: Final = 1.001  # of run times that were added up


class SchedulerPeerChecks(PeerChecks):
    """Looks at the core's own tables. `nodes`: those of the configuration; None: any."""

    def __init__(self, fleet: Fleet, batches: Batches, nodes: Collection[NodeId] | None) -> None:
        self._fleet = fleet
        self._flights = batches.flights
        self._nodes = nodes
        self._unlisted: set[PeerId] = set()
        self._unlisted_since_ms = 0.0
        rules: dict[type, Rule] = {
            Done: self._done,
            Arrivals: self._requests,
            Withdraw: self._requests,
            Left: self._requests,
            FrontendHello: self._frontend_hello,
            NodeHello: self._node_hello,
            SliceReady: self._slice_ready,
            SliceChanged: self._slice_changed,
            Telemetry: self._telemetry,
            Ping: self._heartbeat,
            Pong: self._heartbeat,
            StatusAsked: anybody,
            RecordsAsked: _change,
            RehearsalMade: _rehearsal_made,
            EpochGranted: _epoch_granted,
        }
        if nodes is not None:  # then there is a plan that can be changed
            rules |= dict.fromkeys(get_args(PlanRequest), _change)
            rules[PlanMade] = _plan_made
        super().__init__(rules, Offences(), frozenset({PLANNER, REHEARSER, ELECTION}))

    def forget(self, peer: PeerId) -> None:
        """It is lost."""
        self.offences.forget(peer)
        self._unlisted.discard(peer)

    def _refused(self, peer: PeerId, error: RemoteProtocolError, now_ms: float) -> Verdict:
        if error.reason != UNLISTED:
            return super()._refused(peer, error, now_ms)
        self.offences.counters["messages_unlisted"] += 1
        if now_ms - self._unlisted_since_ms >= UNLISTED_EVERY_MS:
            self._unlisted_since_ms = now_ms
            self._unlisted.clear()
        if peer in self._unlisted or len(self._unlisted) >= UNLISTED_MAX:
            return Verdict.IGNORE
        self._unlisted.add(peer)
        return Verdict.UNLISTED

    # ------------------------------------------------------------ rules

    def _done(self, peer: PeerId, done: Done) -> None:
        flight = self._flights.get(done.batch_id)
        if flight is None:
            self._require_known(peer)
            return
        record = flight.record
        if peer != record.worker or done.slice_id != record.spec.slice_id or done.model_id != flight.model_id:
            raise RemoteProtocolError(f"batch {done.batch_id} is not its own", NOT_OWNER)
        if done.ran > flight.batch_size:
            ran = f"{done.ran} of {flight.batch_size} requests ran of batch {done.batch_id}"
            raise RemoteProtocolError(ran, OUT_OF_RANGE)
        if done.missing and not all(part in flight.parts for part in done.missing):
            raise RemoteProtocolError(
                f"parts that batch {done.batch_id} does not have are missing", NOT_OWNER
            )

    def _heartbeat(self, peer: PeerId, heartbeat: Ping | Pong) -> None:
        del heartbeat
        role_id = role_id_of(peer)
        if role_id.startswith((FRONTEND_PREFIX, AGENT_PREFIX, WORKER_PREFIX)):
            self._require_known(peer)

    def _require_known(self, peer: PeerId) -> None:
        fleet = self._fleet
        if not (fleet.is_worker(peer) or peer in fleet.frontend_ids or peer in fleet.nodes.values()):
            raise RemoteProtocolError("it is not known here", UNLISTED)

    def _requests(self, peer: PeerId, message: Arrivals | Withdraw | Left) -> None:
        del message
        if peer not in self._fleet.frontend_ids:
            raise RemoteProtocolError("it is not listed", UNLISTED)

    def _frontend_hello(self, peer: PeerId, hello: FrontendHello) -> None:
        require_identity(peer, hello.frontend_id, hello.incarnation)
        size = len(hello.frontend_id.encode())
        if size > FRONTEND_NAME_BYTES_MAX:
            raise RemoteProtocolError(f"a frontend's name of {size} bytes", OUT_OF_RANGE)
        frontends = self._fleet.frontends
        if len(frontends) >= FRONTENDS_MAX and hello.frontend_id not in frontends:
            raise RemoteProtocolError(f"there are {len(frontends)} frontends already", TOO_MANY)

    def _node_hello(self, peer: PeerId, hello: NodeHello) -> None:
        require_identity(peer, role_id_of_node(hello.node_id), hello.incarnation)
        if self._nodes is not None and hello.node_id not in self._nodes:
            raise RemoteProtocolError(f"the configuration has no node {hello.node_id}", NOT_OWNER)

    def _slice_ready(self, peer: PeerId, ready: SliceReady) -> None:
        require_worker(peer, ready)
        record = self._fleet.slices.get(ready.slice_id)
        if record is None:
            return
        if ready.node_id != record.node_id:
            raise RemoteProtocolError(f"{ready.slice_id} is a slice of node {record.node_id}", NOT_OWNER)
        _check_replicas(ready.replicas, record)

    def _slice_changed(self, peer: PeerId, change: SliceChanged) -> None:
        self._agents_word(peer, change.node_id)
        record = self._fleet.slices.get(change.status.slice_id)
        if record is not None and record.node_id != change.node_id:
            slice_id = change.status.slice_id
            raise RemoteProtocolError(f"{slice_id} is a slice of node {record.node_id}", NOT_OWNER)

    def _telemetry(self, peer: PeerId, telemetry: Telemetry) -> None:
        self._agents_word(peer, telemetry.node_id)

    def _agents_word(self, peer: PeerId, node_id: NodeId) -> None:
        if role_id_of(peer) != role_id_of_node(node_id):
            raise RemoteProtocolError(f"it is not the agent of node {node_id}", NOT_OWNER)
        self._require_known(peer)


def require_worker(peer: PeerId, ready: SliceReady) -> None:
    """Raise RemoteProtocolError unless the peer is the worker that it says it is, of the node that it names."""
    role_id, _, nonce = peer.rpartition("/")
    if nonce != ready.incarnation or not is_worker_of(role_id, ready.node_id):
        whose = f"incarnation {ready.incarnation} of a worker of node {ready.node_id}"
        raise RemoteProtocolError(f"it says that it is {whose}", WRONG_IDENTITY)


def _check_replicas(replicas: tuple[ReplicaInfo, ...], record: SliceRecord) -> None:
    slice_id = record.spec.slice_id
    planned: Mapping[str, int] = {model.model_id: model.batch_size_max for model in record.spec.models}
    if len({replica.model_id for replica in replicas}) != len(replicas):
        raise RemoteProtocolError(f"{slice_id} hosts a model twice", OUT_OF_RANGE)
    if replicas and not any(replica.model_id in planned for replica in replicas):
        raise RemoteProtocolError(f"{slice_id} hosts nothing of what is planned there", OTHER_PLAN)
    for replica in replicas:
        size = replica.batch_size_max
        for times_ms in (replica.exec_ms, replica.interval_ms or replica.exec_ms):
            if len(times_ms) != size:
                what = f"{len(times_ms)} run times of model {replica.model_id} for batches up to {size}"
                raise RemoteProtocolError(what, OUT_OF_RANGE)
        if sorted(replica.exec_ms) != list(replica.exec_ms):  # a slice may have 500 models of 512 sizes
            # Where two requests run sooner than one, who can no longer finish alone waits for ever.
            what = f"run times of model {replica.model_id} that fall as batches grow: take a larger batch as slow as a smaller one"
            raise RemoteProtocolError(what, OUT_OF_RANGE)
        if replica.interval_ms and not _is_slowest_stage(replica, record.spec):
            what = (
                f"{slice_id} starts batches of model {replica.model_id} one behind another, at intervals that are not"
                f" its slowest stage's of {record.spec.stages}"
            )
            raise RemoteProtocolError(what, OUT_OF_RANGE)
        # A model that it is to let go it may still have; the core does not look at those.
        if size > planned.get(replica.model_id, size):
            what = (
                f"{slice_id} hosts model {replica.model_id} with batches up to {size}, which is not the plan"
            )
            raise RemoteProtocolError(what, OTHER_PLAN)


def _is_slowest_stage(replica: ReplicaInfo, spec: SliceSpec) -> bool:
    """A run takes as long as its stages together: no less than the slowest of them, and no more than as many such."""
    times_ms = zip(replica.exec_ms, replica.interval_ms, strict=True)
    return spec.is_pipeline and all(
        slowest_ms <= run_ms <= spec.stages * slowest_ms * _ROUNDING for run_ms, slowest_ms in times_ms
    )


def _change(peer: PeerId, change: PlanRequest) -> None:
    del change
    if role_id_of(peer) != OPERATOR:
        raise RemoteProtocolError("it is not an operator", NOT_OWNER)


def _rehearsal_made(peer: PeerId, made: RehearsalMade) -> None:
    if peer != REHEARSER:
        refuse_type(peer, made)


def _epoch_granted(peer: PeerId, granted: EpochGranted) -> None:
    if peer != ELECTION:
        refuse_type(peer, granted)


def _plan_made(peer: PeerId, made: PlanMade) -> None:
    if peer != PLANNER:
        refuse_type(peer, made)
