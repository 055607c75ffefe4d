"""What a node agent's peers may say: its core sees nothing that has not been checked here.

Schedulers are those that the agent connected to. Workers introduce themselves under their own identity, worker id
and boot nonce, and speak of the slices that their process was started with. Everybody may ask how the agent is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fabric.errors import RemoteProtocolError
from fabric.ids import PeerId, scheduler_id
from fabric.messages import (
    AnyMessage,
    DesiredSlices,
    Directory,
    LeaseAsked,
    Loading,
    Pong,
    SliceFailed,
    SliceReady,
    StatusAsked,
    StatusListed,
    WorkerHello,
)
from roles.node_agent.events import Orphan
from roles.node_agent.lease import LeaseGrants
from roles.node_agent.workers.processes import Workers
from roles.runtime.core import SCHEDULER
from roles.runtime.epochs import GRANTED_LEAP_MAX, SCHEDULERS_MAX
from roles.runtime.peer_checks import (
    NOT_OWNER,
    OUT_OF_RANGE,
    WRONG_IDENTITY,
    Offences,
    PeerChecks,
    Rule,
    Verdict,
    anybody,
    require_identity,
)


class AgentPeerChecks:
    """Looks at the core's own tables."""

    def __init__(
        self,
        workers: Workers,
        orphans: Mapping[str, Orphan],
        schedulers: Collection[PeerId],
        lease: LeaseGrants,
    ) -> None:
        self.offences = Offences()
        self._workers = workers
        self._orphans = orphans
        self._schedulers = schedulers
        self._lease = lease
        rules: dict[type, Rule] = {
            WorkerHello: self._worker_hello,
            SliceReady: self._slice_news,
            SliceFailed: self._slice_news,
            Loading: self._loading,
            Pong: self._worker_only,
            StatusListed: self._worker_only,
            StatusAsked: anybody,
        }
        self._others = PeerChecks(rules, self.offences)
        wanting: dict[type, Rule] = {
            DesiredSlices: anybody,
            Directory: anybody,
            LeaseAsked: self._lease_asked,
        }
        self._scheduler = PeerChecks(
            wanting,
            self.offences,
            frozenset({SCHEDULER, *map(PeerId, map(scheduler_id, range(SCHEDULERS_MAX)))}),
        )

    def check(self, peer: PeerId, message: AnyMessage, now_ms: float) -> Verdict | None:
        """None if the core may look at what a peer says."""
        is_scheduler = peer == SCHEDULER or peer in self._schedulers
        checks = self._scheduler if is_scheduler else self._others
        return checks.check(peer, message, now_ms)

    def _lease_asked(self, peer: PeerId, asked: LeaseAsked) -> None:
        if peer not in (SCHEDULER, asked.scheduler_id):
            raise RemoteProtocolError(f"it says that it is {asked.scheduler_id}", WRONG_IDENTITY)
        granted = self._lease.epoch
        if granted and asked.epoch > granted + GRANTED_LEAP_MAX:
            what = f"it asks for epoch {asked.epoch}, far above {granted}, which was granted here last"
            raise RemoteProtocolError(what, OUT_OF_RANGE)

    def _worker_hello(self, peer: PeerId, hello: WorkerHello) -> None:
        require_identity(peer, hello.worker_id, hello.incarnation)
        orphan = self._orphans.get(hello.worker_id)
        if orphan is not None and (hello.incarnation, hello.pid) != (orphan.incarnation, orphan.pid):
            raise RemoteProtocolError(
                f"it is not the {hello.worker_id} that a former agent left", WRONG_IDENTITY
            )
        worker = self._workers.named(hello.worker_id)
        if worker is not None and worker.peer is not None and worker.peer != peer:
            raise RemoteProtocolError(f"{hello.worker_id} is another process", WRONG_IDENTITY)

    def _slice_news(self, peer: PeerId, news: SliceReady | SliceFailed) -> None:
        worker = self._workers.at(peer)
        if worker is None or news.slice_id not in worker.holding:
            raise RemoteProtocolError(f"{news.slice_id} is not its slice", NOT_OWNER)
        require_identity(peer, worker.worker_id, news.incarnation)

    def _loading(self, peer: PeerId, loading: Loading) -> None:
        worker = self._workers.at(peer)
        if worker is None or loading.slice_id not in worker.holding:
            raise RemoteProtocolError(f"{loading.slice_id} is not its slice", NOT_OWNER)

    def _worker_only(self, peer: PeerId, message: StatusListed | Pong) -> None:
        del message
        if self._workers.at(peer) is None:
            raise RemoteProtocolError("it is no worker of this agent", NOT_OWNER)
