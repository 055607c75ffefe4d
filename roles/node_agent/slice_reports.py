"""What the scheduler was told of each slice, and what it is told next."""

from __future__ import annotations

from collections.abc import Mapping

from fabric.ids import Incarnation, NodeId, SliceId
from fabric.messages import SliceChanged, SliceReport, SliceSpec, SliceState, SliceStatus
from roles.node_agent.events import AgentAction
from roles.runtime.core import SCHEDULER, Send

NOT_BORN = Incarnation("")
REASON_CHARS_MAX = 600


class SliceReports:
    """Each slice's state as it was last reported. Changes go to `actions`, the core's own list."""

    def __init__(self, node_id: NodeId, actions: list[AgentAction]) -> None:
        self._node_id = node_id
        self._actions = actions
        self._status: dict[SliceId, SliceStatus] = {}
        self._given_up: dict[SliceId, SliceSpec] = {}
        """Under the specification with which they failed."""

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
        self._tell(slice_id)

    def give_up(self, spec: SliceSpec, reason: str, incarnation: Incarnation | None = None) -> None:
        """Report it as failed, and do not start it again under this specification."""
        self._given_up[spec.slice_id] = spec
        self.report(spec.slice_id, SliceState.FAILED, reason[:REASON_CHARS_MAX], incarnation)

    def compare(self, wanted: Mapping[SliceId, SliceSpec]) -> None:
        """Those no longer wanted stop; those given up may be tried anew, or are told of once more."""
        for slice_id in [slice_id for slice_id in self._status if slice_id not in wanted]:
            self.report(slice_id, SliceState.STOPPED, "no longer wanted")
            del self._status[slice_id]
        for slice_id, spec in list(self._given_up.items()):
            if wanted.get(slice_id) != spec:
                del self._given_up[slice_id]
            else:
                # Whoever asks again may be a scheduler that was not there when it failed.
                self._tell(slice_id)

    def drain(self, reason: str) -> frozenset[SliceId]:
        """Nothing new is for here any more; the slices that have to finish what they have."""
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
        return frozenset(self._given_up)

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
