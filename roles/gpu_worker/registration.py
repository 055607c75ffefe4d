"""What the scheduler was told of our slices, and when it has to be told again.

`SliceReady` can be refused (there is no connection yet), or lost with a connection, or forgotten by a scheduler
that restarts. So it is said whenever the scheduler answers after a doubt, and every second until a directory
lists the slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from fabric.ids import Incarnation, NodeId, SliceId
from fabric.link import NO_EPOCH
from fabric.messages import Directory, SliceReady
from roles.gpu_worker.slices import HostedSlice, HostedState
from roles.runtime.core import SCHEDULER, Send

REPEAT_AFTER_MS: Final = 1_000.0


class WorkerIdentity(Struct, frozen=True):
    """Who this process is; `addresses` are those of its payload socket."""

    worker_id: str
    incarnation: Incarnation
    pid: int
    addresses: tuple[str, ...]


class Registration:
    """Of the core's own `slices`, which are ready, to the scheduler."""

    def __init__(self, identity: WorkerIdentity, slices: Mapping[SliceId, HostedSlice]) -> None:
        self.node_id = NodeId("")
        self.epoch = NO_EPOCH
        """The agent's: commands of any other are refused."""
        self.wake_at_ms: float | None = None
        """When something has to be said again; None: the scheduler knows it all, or is away."""
        self._identity = identity
        self._slices = slices
        self._is_scheduler_there = False

    def scheduler_answers(self, now_ms: float) -> list[Send]:
        """It may not know anything of us."""
        self._is_scheduler_there = True
        return self._introduce(self._ready_slices(), now_ms)

    def scheduler_gone(self) -> None:
        """Its return will make us say everything again."""
        self._is_scheduler_there = False
        self.wake_at_ms = None

    def epoch_changed(self, now_ms: float) -> list[Send]:
        """The scheduler there is another, behind the same address, or has begun anew."""
        return self._introduce(self._ready_slices(), now_ms) if self._is_scheduler_there else []

    def loaded(self, slice_: HostedSlice, now_ms: float) -> list[Send]:
        """A slice has become ready."""
        return self._introduce([slice_], now_ms) if self._is_scheduler_there else []

    def changed(self, slice_: HostedSlice, now_ms: float) -> list[Send]:
        """What a ready slice can do has changed."""
        return self._introduce([slice_], now_ms) if self._is_scheduler_there else []

    def heard(self, directory: Directory, now_ms: float) -> list[Send]:
        """The answer; a scheduler that does not list us has restarted, or never heard of us."""
        listed = {(info.slice_id, info.incarnation) for info in directory.slices}
        for slice_id, slice_ in self._slices.items():
            slice_.is_listed = (slice_id, self._identity.incarnation) in listed
        return self.repeat(now_ms)

    def repeat(self, now_ms: float) -> list[Send]:
        """Say again what may have been lost."""
        return self._introduce(
            [
                slice_
                for slice_ in self._ready_slices()
                if not slice_.is_listed and now_ms >= slice_.introduced_at_ms + REPEAT_AFTER_MS
            ],
            now_ms,
        )

    def slice_ready(self, slice_: HostedSlice) -> SliceReady:
        """For the agent as for the scheduler."""
        return SliceReady(
            slice_id=slice_.spec.slice_id,
            incarnation=self._identity.incarnation,
            node_id=self.node_id,
            gpu=slice_.spec.gpu,
            addresses=self._identity.addresses,
            replicas=slice_.offered,
            left_out=slice_.left_out,
            epoch=self.epoch,
        )

    def _introduce(self, slices: Iterable[HostedSlice], now_ms: float) -> list[Send]:
        messages = []
        for slice_ in slices:
            slice_.introduced_at_ms = now_ms
            slice_.is_listed = False
            ready = self.slice_ready(slice_)
            slice_.announced = ready.replicas, ready.left_out
            messages.append(Send(SCHEDULER, ready))
        said_at_ms = [slice_.introduced_at_ms for slice_ in self._ready_slices() if not slice_.is_listed]
        self.wake_at_ms = min(said_at_ms) + REPEAT_AFTER_MS if said_at_ms else None
        return messages

    def _ready_slices(self) -> list[HostedSlice]:
        return [slice_ for slice_ in self._slices.values() if slice_.state is HostedState.READY]
