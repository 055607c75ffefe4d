"""What a worker's peers may say: its core sees nothing that has not been checked here.

Agent and scheduler are those that the worker connected to. Inputs come by a socket that does not tell who sent them;
whether they are a part of a batch is asked when they are put into it (`Batch.wants`).
"""

from __future__ import annotations

from typing import Final

from fabric.ids import PeerId
from fabric.messages import (
    AnyMessage,
    Directory,
    EpochGranted,
    Host,
    Inputs,
    Ping,
    PreemptBatch,
    RunBatch,
    StatusAsked,
    Stop,
)
from roles.runtime.core import SCHEDULER
from roles.runtime.peer_checks import Offences, PeerChecks, Verdict, anybody

AGENT: Final = PeerId("agent")
A_FRONTEND: Final = PeerId("")
"""Whichever it was."""

_SAYS: Final = {
    AGENT: (Host, EpochGranted, Stop, StatusAsked, Ping),
    SCHEDULER: (RunBatch, PreemptBatch, Directory),
    A_FRONTEND: (Inputs,),
}


class WorkerPeerChecks:
    """One check for each link."""

    def __init__(self) -> None:
        self.offences = Offences()
        self._of = {
            peer: PeerChecks(dict.fromkeys(types, anybody), self.offences, frozenset({peer}))
            for peer, types in _SAYS.items()
        }

    def check(self, peer: PeerId, message: AnyMessage, now_ms: float) -> Verdict | None:
        """None if the core may look at what comes by that link."""
        return self._of[peer].check(peer, message, now_ms)
