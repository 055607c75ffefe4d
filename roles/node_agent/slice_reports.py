"""What the scheduler was told of each slice, and what it is told next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from fabric.ids import Incarnation, NodeId, SliceId
from fabric.messages import SliceChanged, SliceReport, SliceSpec, SliceState, SliceStatus
from roles.node_agent.events import AgentAction
from roles.runtime.core import SCHEDULER, Send
from roles.runtime.process_events import Warn

NOT_BORN = Incarnation("")
REASON_CHARS_MAX = 600
REST_MS: Final = (
    60_000.0  # of a slice that was given up, before the first new try; twice as long before each further one
)
REST_LONGEST_MS: Final = 600_000.0


class _GivenUp(Struct):
    """A slice that failed under this specification, until it is wanted otherwise."""

    spec: SliceSpec
    times: int = 0
    tried_at_ms: float | None = None
    """The end of its rest; None: it is never tried again."""
    is_resting: bool = True
    was_ready: bool = False
    """Since it was tried again."""


class SliceReports:
    """Each slice's state as it was last reported. Changes go to `actions`, the core's own list."""

    def __init__(self, node_id: NodeId, actions: list[AgentAction]) -> None:
        self._node_id = node_id
        self._actions = actions
        self._status: dict[SliceId, SliceStatus] = {}
        self._given_up: dict[SliceId, _GivenUp] = {}

    def report(
        self, slice_id: SliceId, state: SliceState, reason: str = "", incarnation: Incarnation | None = None
    ) -> None:
        """Tell the scheduler, unless that is what it was told last."""
        if incarnation is None:
            former = self._status.get(slice_id)
            incarnation = NOT_BORN if former is None else former.incarnation
        status = SliceStatus(slice_id, incarnation, state, reason)
        if self._status.get(slice_id) == status:
            return
        self._status[slice_id] = status
        if state == SliceState.READY and slice_id in self._given_up:
            self._given_up[slice_id].was_ready = True
        self._tell(slice_id)

    def refuse(self, spec: SliceSpec, reason: str, incarnation: Incarnation | None = None) -> None:
        """Report it as failed, and do not start it again under this specification."""
        self._given_up[spec.slice_id] = _GivenUp(spec)
        self.report(spec.slice_id, SliceState.FAILED, reason[:REASON_CHARS_MAX], incarnation)

    def give_up(
        self, spec: SliceSpec, reason: str, now_ms: float, incarnation: Incarnation | None = None
    ) -> None:
        """Report it as failed, and let it rest before it is tried again: what it lacked may be there then.

        Twice as long each time, but for one that has lasted longer than its last rest.
        """
        given_up = self._given_up.setdefault(spec.slice_id, _GivenUp(spec))
        tried_at_ms = given_up.tried_at_ms
        if (
            given_up.was_ready
            and tried_at_ms is not None
            and now_ms >= tried_at_ms + _rest_ms(given_up.times)
        ):
            given_up.times = 0
        given_up.times += 1
        rest_ms = _rest_ms(given_up.times)
        given_up.tried_at_ms = now_ms + rest_ms
        given_up.is_resting, given_up.was_ready = True, False
        self._actions.append(
            Warn(f"slice_given_up slice={spec.slice_id} again_in_s={rest_ms / 1e3:g} reason={reason!r:.200}")
        )
        self.report(spec.slice_id, SliceState.FAILED, reason[:REASON_CHARS_MAX], incarnation)

    @property
    def wake_at_ms(self) -> float | None:
        """The end of the first rest."""
        resting = (
            one.tried_at_ms
            for one in self._given_up.values()
            if one.is_resting and one.tried_at_ms is not None
        )
        return min(resting, default=None)

    def try_again(self, now_ms: float) -> bool:
        """Whether there are slices that have rested enough: they are given up no more."""
        rested = [
            one
            for one in self._given_up.values()
            if one.is_resting and one.tried_at_ms is not None and one.tried_at_ms <= now_ms
        ]
        for one in rested:
            one.is_resting = False
        return bool(rested)

    def compare(self, wanted: Mapping[SliceId, SliceSpec]) -> None:
        """Those no longer wanted stop; those given up may be tried anew, or are told of once more."""
        for slice_id in [slice_id for slice_id in self._status if slice_id not in wanted]:
            self.report(slice_id, SliceState.STOPPED, "no longer wanted")
            del self._status[slice_id]
        for slice_id, given_up in list(self._given_up.items()):
            if wanted.get(slice_id) != given_up.spec:
                del self._given_up[slice_id]
            elif given_up.is_resting:
                # Whoever asks again may be a scheduler that was not there when it failed.
                self._tell(slice_id)

    def drain(self, reason: str) -> frozenset[SliceId]:
        """Nothing new is for here any more; the slices that have to finish what they have."""
        self._given_up.clear()
        serving = frozenset(slice_id for slice_id in self._status if self.is_ready(slice_id))
        for slice_id in self._status:
            state = SliceState.DRAINING if slice_id in serving else SliceState.STOPPED
            self.report(slice_id, state, reason)
        return serving

    def is_ready(self, slice_id: SliceId) -> bool:
        """Whether it was reported as ready."""
        return self._status[slice_id].state == SliceState.READY

    @property
    def given_up(self) -> frozenset[SliceId]:
        """Those that are not to be started."""
        return frozenset(slice_id for slice_id, one in self._given_up.items() if one.is_resting)

    def alive(self) -> tuple[SliceStatus, ...]:
        """For a scheduler that knows nothing of us."""
        return tuple(
            status
            for status in self._status.values()
            if status.state in (SliceState.STARTING, SliceState.READY, SliceState.DRAINING)
        )

    def listed(self, wanted: Mapping[SliceId, SliceSpec]) -> tuple[SliceReport, ...]:
        """For people."""
        models = {spec.slice_id: tuple(m.model_id for m in spec.models) for spec in wanted.values()}
        return tuple(
            SliceReport(status.slice_id, status.state, status.reason, models.get(status.slice_id, ()), 0, 0)
            for status in self._status.values()
        )

    def _tell(self, slice_id: SliceId) -> None:
        self._actions.append(Send(SCHEDULER, SliceChanged(self._node_id, self._status[slice_id])))


def _rest_ms(times: int) -> float:
    """After it was given up so many times in a row."""
    return min(REST_MS * 2.0 ** min(times - 1, 30), REST_LONGEST_MS)
