"""The shape every core has: events in, actions out, the time passed in.

A core holds no clock, socket, lock, thread or logger. `wake_at_ms` is its only timer. Payload stays in the
shell; a core knows it by its handle. The driver (`roles/runtime/loop/driver.py`) runs a core on the real clock, the
simulator (`roles/simulator/fast_world.py`) runs the very same object on a virtual one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NewType, Protocol, TypeVar

from msgspec import Struct

from fabric.ids import Epoch, PeerId
from fabric.link import NO_EPOCH
from fabric.messages import AnyMessage

EventT_contra = TypeVar("EventT_contra", contravariant=True)
ActionT_co = TypeVar("ActionT_co", covariant=True)

Handle = NewType("Handle", int)
"""Stands for tensors that a shell keeps: dense, never reused within a process."""

NO_PAYLOAD = Handle(0)

SCHEDULER_ID: Final = "scheduler-0"
"""The role id, which its run file and its plan file bear."""
SCHEDULER: Final = PeerId("scheduler")
"""The scheduler's name on the links that lead to it, whatever its incarnation. Nobody else can have it."""

PLANNER: Final = PeerId("planner")
"""Where a scheduler core sends its `PlanAsked`, and who answers: the shell's or the simulator's."""
REHEARSER: Final = PeerId("rehearser")
"""The same for its `RehearsalAsked`."""
ELECTION: Final = PeerId("election")
"""Who tells a scheduler core, with an `EpochGranted`, that its epoch is another now: the replica that has it."""


class Core(Protocol[EventT_contra, ActionT_co]):
    """Decides. The same events at the same moments give the same actions, always."""

    def handle(self, event: EventT_contra, now_ms: float) -> Sequence[ActionT_co]:
        """Take one event that happened by `now_ms`; answer what to do, in order."""
        ...

    @property
    def wake_at_ms(self) -> float | None:
        """The next moment worth a `Tick`; None: sleep until something happens."""
        ...


class Tick(Struct, frozen=True, gc=False):
    """The moment a core asked for has come (or passed)."""


class Heard(Struct, frozen=True, gc=False):
    """A message came in. `late_ms` is already behind it (see `fabric.link.Received`)."""

    peer: PeerId
    message: AnyMessage
    late_ms: float = 0.0
    payload: Handle = NO_PAYLOAD
    epoch: Epoch = NO_EPOCH
    """Of the message's header: a scheduler's commands count only with the epoch that their receiver goes by."""


class Lost(Struct, frozen=True, gc=False):
    """A peer is gone: unroutable, or silent for too long."""

    peer: PeerId
    reason: str


class Send(Struct, frozen=True, gc=False):
    """Send a message. What a full queue means for it is the shell's rule per channel (docs/wire.md)."""

    peer: PeerId
    message: AnyMessage
