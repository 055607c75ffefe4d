"""What an operator may ask a role: how it is, and what it remembers."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import TypeVar

from fabric.clock import MonotonicClock
from fabric.curve import guarded
from fabric.errors import PeerLost, Unauthorised
from fabric.ids import OPERATOR, PeerId, new_incarnation, peer_id
from fabric.keys import CLIENT, Keyring, kind_of
from fabric.messages import AnyMessage, StatusAsked, StatusListed
from fabric.sockets import DealerLink

AnswerT = TypeVar("AnswerT")


def ask_status(
    address: str | Sequence[str],
    timeout_ms: float = 2_000.0,
    *,
    server: PeerId = PeerId("frontend"),  # noqa: B008  a name
    keyring: Keyring | None = None,
) -> StatusListed:
    """Ask any role how it is; see `ask_role`."""
    return ask_role(address, StatusAsked(), StatusListed, timeout_ms, server=server, keyring=keyring)


def ask_role(
    address: str | Sequence[str],
    question: AnyMessage,
    answered_by: type[AnswerT],
    timeout_ms: float = 2_000.0,
    *,
    server: PeerId = PeerId("frontend"),  # noqa: B008  a name
    keyring: Keyring | None = None,
) -> AnswerT:
    """Ask a role something as the operator. `server`: which kind it is, where keys are asked for: "frontend" or "scheduler".

    Raises PeerLost if nobody answers in time, Unauthorised where the key does not permit it, ConfigError for a bad address.
    """
    clock = MonotonicClock()
    addresses = (address,) if isinstance(address, str) else tuple(address)
    if keyring is not None and kind_of(keyring.own.principal) == CLIENT:
        raise Unauthorised(f"{keyring.own.principal} may not ask how a role is; the operator's key may")
    own = OPERATOR if keyring is None else keyring.own.principal
    link = DealerLink.connect(peer_id(own, new_incarnation()), server, addresses, guard=guarded(keyring))
    until_ms = clock.now_ms() + timeout_ms
    is_asked = False
    try:
        waiting = select.poll()  # which takes no descriptor: there may be none left
        waiting.register(link.fileno(), select.POLLIN)
        while clock.now_ms() < until_ms:
            is_asked = is_asked or link.send(server, question)
            if link.refusal:
                raise Unauthorised(link.refusal)
            for received in link.receive(16):
                if isinstance(received.message, answered_by):
                    return received.message
            if link.take_lost():
                break
            if not link.has_more:
                waiting.poll(10.0)
        trouble = link.trouble
    finally:
        link.close()
    raise PeerLost(f"nobody answers at {addresses[0]}{trouble}")
