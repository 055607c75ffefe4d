"""An operator's request to a running scheduler or `tenuto up`, and its answer."""

from __future__ import annotations

import secrets
import select
from collections.abc import Callable, Sequence
from typing import Final

from fabric.clock import Clock, MonotonicClock
from fabric.curve import guarded
from fabric.errors import PeerLost, Unauthorised
from fabric.ids import OPERATOR, new_incarnation, peer_id
from fabric.keys import Keyring
from fabric.messages import (
    Changed,
    Ping,
    PlanChange,
    PlanRequest,
    Pong,
    RoleDrainDryRun,
    RoleRequest,
    SectionAsked,
)
from fabric.sockets import DealerLink
from roles.runtime.core import SCHEDULER
from roles.runtime.time_limits import is_looked_at_late

# Who answers pings is at work: a plan may have a day (`time_limit_s`), each of its moves 300 s for each model of a slice.
ANSWER_LIMIT_MS = 172_800_000.0
AT_ONCE_LIMIT_MS: Final = 6_000.0
"""For an answer that waits for nothing: who does not know a question drops it, and answers pings as before. Longer than the silence
of one who is gone (5 s), which is told as that."""
SILENCE_MAX_MS = 5_000.0  # a scheduler that says nothing at all for so long is not there
PING_EVERY_MS = 500.0
_TURN_MS: Final = 10.0
NOT_KNOWN = "whether the change was made is not known"
_UNKNOWN = f"; {NOT_KNOWN}: look at `tenuto status`"


class NotAnswered(PeerLost):
    """Who was asked is there, and has not answered within the time limit."""


def new_request_no() -> int:
    """A number that nobody else uses."""
    return secrets.randbits(48)


def ask_change(
    addresses: Sequence[str],
    request: PlanRequest | RoleRequest,
    *,
    limit_ms: float | None = None,
    silence_ms: float = SILENCE_MAX_MS,
    keyring: Keyring | None = None,
    clock: Clock | None = None,
    is_given_up: Callable[[], bool] = lambda: False,
) -> Changed:
    """Ask a scheduler, or `tenuto up`, for a change and wait until it is over, or ask a question.

    `limit_ms`: by default 6 s for an answer that waits for nothing, else two days. `keyring`: the operator's, where the scheduler is
    reached by TCP. `is_given_up`: nobody waits for the answer any more. Raises PeerLost when that is so, or it is or becomes unreachable, NotAnswered when it
    is there and `limit_ms` is over, Unauthorised where the key does not permit it.
    """
    clock = clock or MonotonicClock()
    is_at_once = isinstance(request, SectionAsked | RoleDrainDryRun)
    is_question = is_at_once or (isinstance(request, PlanChange) and request.dry_run)
    if limit_ms is None:
        limit_ms = AT_ONCE_LIMIT_MS if is_at_once else ANSWER_LIMIT_MS
    unknown = "" if is_question else _UNKNOWN
    own = peer_id(OPERATOR, new_incarnation())
    link = DealerLink.connect(own, SCHEDULER, addresses, guard=guarded(keyring))
    try:
        waiting = select.poll()  # which takes no descriptor: there may be none left
        waiting.register(link.fileno(), select.POLLIN)
        now_ms = heard_at_ms = ping_at_ms = clock.now_ms()
        until_ms = now_ms + limit_ms
        pings = 0
        is_asked = False
        while True:
            turn_at_ms, now_ms = now_ms, clock.now_ms()
            if is_looked_at_late(turn_at_ms + _TURN_MS, now_ms):  # what came meanwhile is not read yet
                heard_at_ms += now_ms - turn_at_ms
                until_ms += now_ms - turn_at_ms
            if now_ms >= until_ms:
                break
            if is_given_up():
                raise PeerLost(f"nobody waits for the answer any more{unknown if is_asked else ''}")
            is_asked = is_asked or link.send(SCHEDULER, request)
            if link.refusal:
                raise Unauthorised(link.refusal)
            if now_ms >= ping_at_ms:
                ping_at_ms, pings = now_ms + PING_EVERY_MS, pings + 1
                link.send(SCHEDULER, Ping(pings))
            for received in link.receive(16):
                heard_at_ms = now_ms
                match received.message:
                    case Changed(request_no=number) as answer if number == request.request_no:
                        return answer
                    case Pong():
                        pass
            if link.take_lost() or now_ms - heard_at_ms > silence_ms:
                raise PeerLost(f"nobody answers at {addresses[0]}{unknown if is_asked else ''}")
            if not link.has_more:
                waiting.poll(_TURN_MS)
    finally:
        link.close()
    raise NotAnswered(f"no answer within {limit_ms / 1e3:g} s{unknown}")
