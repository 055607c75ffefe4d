"""What becomes of a message that its sender may not send: the part that the checks of all roles share.

Each role has one check (`roles/<role>/peer_checks.py`), which its core asks before it looks at a message: may this
peer say that, and does it own what it speaks of? The ranges of single fields are checked before, where messages are
decoded (`fabric/limits.py`). Behind the check a core may assert; before it nothing indexes, divides or recurses on
what a peer sent.

What fails is a `RemoteProtocolError`. It is counted by its reason and put down for the log, one line a second for
each peer. Who offends `OFFENCES_MAX` times within `WINDOW_MS` is cut off: nothing it says is looked at for
`CUT_OFF_MS`. A peer of ours never offends, except by what was on its way while something changed, so the limit is far
above that.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fabric.errors import RemoteProtocolError
from fabric.ids import Incarnation, PeerId, peer_id
from fabric.messages import AnyMessage

WRONG_TYPE: Final = "wrong_type"
"""Nobody like that peer says this."""
WRONG_IDENTITY: Final = "wrong_identity"
"""The message says that it is from somebody else."""
NOT_OWNER: Final = "not_owner"
"""It speaks of what is not the peer's."""
OUT_OF_RANGE: Final = "out_of_range"
"""Numbers or names that do not fit to what is known."""
TOO_MANY: Final = "too_many"
"""There is room for no more of these."""
OTHER_PLAN: Final = "other_plan"
"""It was right under a plan that is no more: counted as the others are, but nobody is cut off for it."""

CUT_OFF_REASON: Final = "it said too often what it may not say"
OFFENCES_MAX: Final = 64
WINDOW_MS: Final = 60_000.0
CUT_OFF_MS: Final = 60_000.0
OFFENDERS_MAX: Final = 1_024  # remembered at once; the oldest is forgotten first
LINE_EVERY_MS: Final = 1_000.0
TEXT_CHARS_MAX: Final = 300
LINES_A_SECOND: Final = 16  # of all peers: who changes its name with every message does not fill the log


class Verdict(enum.Enum):
    """What a core does with a message that is refused."""

    IGNORE = enum.auto()
    CUT_OFF = enum.auto()
    """Ignore it, and take its sender for lost: nothing that it says is heard from now on."""
    UNLISTED = enum.auto()
    """Ignore it, and show its sender the directory: that introduces itself (again) then."""


Rule = Callable[[PeerId, Any], None]
"""Raises RemoteProtocolError if that peer may not send that message."""


@dataclass(slots=True)
class _Offender:
    since_ms: float
    offences: int = 0
    untold: int = 0
    line_at_ms: float = 0.0


class Offences:
    """Counts them, and knows who is cut off. `counters` are for the role's status."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.lines: deque[str] = deque(maxlen=LINES_A_SECOND)
        """For the log, until somebody takes them."""
        self._offenders: dict[PeerId, _Offender] = {}
        self.cut_off: dict[PeerId, float] = {}
        """Until when each, in that order."""
        self._second_at_ms = 0.0
        self._lines_in_second = 0

    def __len__(self) -> int:
        """How many peers are remembered."""
        return len(self._offenders) + len(self.cut_off)

    def note(
        self, peer: PeerId, error: RemoteProtocolError, now_ms: float, *, may_cut_off: bool = True
    ) -> Verdict:
        """One offence. `may_cut_off` False: nobody knows who it was, or the role is of no use without that peer."""
        self.counters[f"offences_{error.reason}"] += 1
        offender = self._offender(peer, now_ms)
        offender.offences += 1
        offender.untold += 1
        is_cut_off = may_cut_off and error.reason != OTHER_PLAN and offender.offences >= OFFENCES_MAX
        if is_cut_off:
            self.counters["peers_cut_off"] += 1
            del self._offenders[peer]
            if len(self.cut_off) >= OFFENDERS_MAX:
                del self.cut_off[next(iter(self.cut_off))]
            self.cut_off[peer] = now_ms + CUT_OFF_MS
        self._say(peer, offender, error, now_ms, is_cut_off=is_cut_off)
        return Verdict.CUT_OFF if is_cut_off else Verdict.IGNORE

    def is_cut_off(self, peer: PeerId, now_ms: float) -> bool:
        """Whether what it says is not to be looked at; asked once for each of its messages, which it counts."""
        while (first := next(iter(self.cut_off), None)) is not None and self.cut_off[first] <= now_ms:
            del self.cut_off[first]
        if peer not in self.cut_off:
            return False
        self.counters["messages_ignored"] += 1
        return True

    def forget(self, peer: PeerId) -> None:
        """It is lost. One that is cut off stays so for its time, for it may be back at once."""
        self._offenders.pop(peer, None)

    def _offender(self, peer: PeerId, now_ms: float) -> _Offender:
        offender = self._offenders.get(peer)
        if offender is None:
            if len(self._offenders) >= OFFENDERS_MAX:
                del self._offenders[next(iter(self._offenders))]
            offender = self._offenders[peer] = _Offender(now_ms, line_at_ms=now_ms)
        elif now_ms - offender.since_ms > WINDOW_MS:
            offender.since_ms, offender.offences = now_ms, 0
        return offender

    def _say(
        self,
        peer: PeerId,
        offender: _Offender,
        error: RemoteProtocolError,
        now_ms: float,
        *,
        is_cut_off: bool,
    ) -> None:
        if now_ms < offender.line_at_ms and not is_cut_off:
            return
        if now_ms - self._second_at_ms >= LINE_EVERY_MS:
            self._second_at_ms, self._lines_in_second = now_ms, 0
        if self._lines_in_second >= LINES_A_SECOND:
            return
        self._lines_in_second += 1
        end = f" cut_off_s={CUT_OFF_MS / 1e3:.0f}" if is_cut_off else ""
        name = peer or "unknown"
        self.lines.append(
            f"message_refused peer={name} reason={error.reason} times={offender.untold} text={str(error)!r:.{TEXT_CHARS_MAX}}{end}"
        )
        offender.untold = 0
        offender.line_at_ms = now_ms + LINE_EVERY_MS


class PeerChecks:
    """One role's check: a rule for each type that a peer may send, refusing all others.

    `trusted` peers are those that the role itself has connected to, and those of whom nobody knows who they are. They
    are checked as others are, but never cut off.
    """

    def __init__(
        self, rules: Mapping[type, Rule], offences: Offences, trusted: frozenset[PeerId] = frozenset()
    ) -> None:
        self.offences = offences
        self._cut_off = offences.cut_off
        self._rules = rules
        self._trusted = trusted

    def check(self, peer: PeerId, message: AnyMessage, now_ms: float) -> Verdict | None:
        """What to do with what a peer says; None: the core may look at it."""
        if self._cut_off and self.offences.is_cut_off(peer, now_ms):
            return Verdict.IGNORE
        try:
            self._rules.get(type(message), refuse_type)(peer, message)
        except RemoteProtocolError as error:
            return self._refused(peer, error, now_ms)
        return None

    def _refused(self, peer: PeerId, error: RemoteProtocolError, now_ms: float) -> Verdict:
        return self.offences.note(peer, error, now_ms, may_cut_off=peer not in self._trusted)


def anybody(peer: PeerId, message: object) -> None:
    """The rule of what everybody may say."""
    del peer, message


def refuse_type(peer: PeerId, message: object) -> None:
    """The rule of what nobody may say here. Raises RemoteProtocolError."""
    raise RemoteProtocolError(
        f"{type(message).__name__} is not for {peer or 'somebody unknown'} to send", WRONG_TYPE
    )


def require_identity(peer: PeerId, role_id: str, incarnation: Incarnation) -> None:
    """Raise RemoteProtocolError unless the peer is that incarnation of that role."""
    if peer != peer_id(role_id, incarnation):
        raise RemoteProtocolError(f"it says that it is {role_id}/{incarnation}", WRONG_IDENTITY)
