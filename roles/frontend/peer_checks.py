"""What a frontend's peers may say: its core sees nothing that has not been checked here.

Clients are told apart by their names, and whoever says what is not for a client to say is cut off after a while. How the
frontend is, is for the operator to ask: counters tell what others do (where there are keys, only the operator's may bear that name). The
scheduler is the one that the frontend connected to. Outputs come by a socket that does not tell who sent them: they
count where they name the batch and the slice that a request was granted to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fabric.errors import RemoteProtocolError
from fabric.ids import OPERATOR, PeerId, role_id_of
from fabric.messages import (
    AnyMessage,
    BatchFailed,
    CancelRequest,
    Directory,
    Dropped,
    FiguresAsked,
    Grant,
    Infer,
    InputsReturned,
    ModelsAsked,
    Outputs,
    Ping,
    RecordsAsked,
    Returned,
    StatusAsked,
)
from roles.frontend.requests import Pending, Request, RequestState
from roles.runtime.core import SCHEDULER
from roles.runtime.peer_checks import NOT_OWNER, Offences, PeerChecks, Rule, Verdict, anybody

A_WORKER: Final = PeerId("")
"""Whichever it was."""


class FrontendPeerChecks:
    """Looks at the core's own table of pending requests."""

    def __init__(self, pending: Pending) -> None:
        self.offences = Offences()
        self._pending = pending
        asking = (Infer, CancelRequest, ModelsAsked, Ping)
        clients: dict[type, Rule] = {
            **dict.fromkeys(asking, anybody),
            StatusAsked: _operator_only,
            RecordsAsked: _operator_only,
            FiguresAsked: _operator_only,
        }
        self._clients = PeerChecks(clients, self.offences)
        serving = (Directory, Grant, Dropped, Returned)
        self._scheduler = PeerChecks(dict.fromkeys(serving, anybody), self.offences, frozenset({SCHEDULER}))
        ending = (Outputs, BatchFailed, InputsReturned)
        self._workers = PeerChecks(dict.fromkeys(ending, anybody), self.offences, frozenset({A_WORKER}))

    def client(self, peer: PeerId, message: AnyMessage, now_ms: float) -> Verdict | None:
        """None if the core may look at what a client says."""
        return self._clients.check(peer, message, now_ms)

    def scheduler(self, message: AnyMessage, now_ms: float) -> Verdict | None:
        """None if the core may look at what the scheduler says."""
        return self._scheduler.check(SCHEDULER, message, now_ms)

    def worker(self, message: AnyMessage, now_ms: float) -> Verdict | None:
        """None if the core may look at what somebody says who has outputs, or none."""
        return self._workers.check(A_WORKER, message, now_ms)

    def granted(self, message: Outputs | BatchFailed, now_ms: float) -> Iterator[tuple[int, Request]]:
        """Place and request of each seq that was granted to that batch, one by one: an answered one is not pending.

        Others have been answered already, were granted to another batch since, or are not that batch's.
        """
        for row, seq in enumerate(message.seqs):
            request = self._pending.with_seq(message.model_id, seq)
            if request is None:
                self.offences.counters["late_results"] += 1
                continue
            is_former = seq == request.former_seq
            place = request.former_place if is_former else request.place
            if place is None or (not is_former and request.stage is not RequestState.GRANTED):
                self.offences.counters["late_results"] += 1
            elif place.is_of(message):
                yield row, request
            elif any(stopped.is_of(message) for stopped in request.stopped):
                self.offences.counters["late_results"] += 1
            else:
                what = (
                    f"request {seq} of model {message.model_id} was not granted to batch {message.batch_id}"
                )
                self._note(f"{what} on {message.slice_id}", now_ms)

    def _note(self, text: str, now_ms: float) -> None:
        error = RemoteProtocolError(text, NOT_OWNER)
        self.offences.note(A_WORKER, error, now_ms, may_cut_off=False)


def _operator_only(peer: PeerId, message: StatusAsked | RecordsAsked | FiguresAsked) -> None:
    del message
    if role_id_of(peer) != OPERATOR:
        raise RemoteProtocolError("it is not the operator", NOT_OWNER)
