"""What the real cores need of a world on virtual time, and what it needs of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fabric.clock import VirtualClock
from fabric.ids import (
    BatchId,
    ModelId,
    PeerId,
)
from fabric.link import Received
from fabric.loopback import LoopbackLink
from fabric.messages import (
    Inputs,
    SliceSpec,
)
from roles.simulator.hardware import SimulatedHardware, SimulatedNode
from roles.simulator.virtual_links import VirtualLinks


@dataclass(slots=True)
class BatchTimes:
    """What is known of a batch's moments, from when it was sent."""

    model_id: ModelId
    size: int
    sent_at_ms: float
    started_at_ms: float = 0.0


class Surroundings(Protocol):
    """What the roles need of the world."""

    clock: VirtualClock
    hardware: SimulatedHardware
    control: VirtualLinks
    """Between the scheduler, frontends and agents."""
    work: VirtualLinks
    """From the scheduler to workers."""
    reports: VirtualLinks
    """From workers to the scheduler."""
    inputs: VirtualLinks
    outputs: VirtualLinks
    times_of_batch: dict[BatchId, BatchTimes]

    def connect(
        self,
        links: VirtualLinks,
        own: PeerId,
        hear: Callable[[Received], None],
        *,
        is_anonymous: bool = False,
    ) -> LoopbackLink:
        """A link, and who hears what comes by it."""
        ...

    def push(self, link: LoopbackLink, peer: PeerId, message: Inputs) -> None:
        """Send inputs, which take as long as all of their batch."""
        ...

    def after(self, wait_ms: float, callback: Callable[[], None]) -> None:
        """Call back when so much time has passed."""
        ...

    def answered(self, number: int, started_at_ms: float) -> None:
        """That request's outputs are with its frontend now. `started_at_ms`: of its batch; NaN: it had several."""
        ...

    def refused(self, number: int, code: str) -> None:
        """That request has its final answer, and no outputs."""
        ...

    def ran(
        self,
        node: SimulatedNode,
        spec: SliceSpec,
        batch_id: BatchId,
        size: int,
        spans: Sequence[tuple[float, float]],
    ) -> None:
        """A batch ended on that slice; 0: it was stopped. `spans`: when each stage of a pipeline had it."""
        ...


class VirtualRole(Protocol):
    """A core, and what does as it says. `wake_at_ms`: the core's timer."""

    wake_at_ms: float | None

    def tick(self) -> None:
        """Its moment has come."""
        ...


def unheard(one: Received) -> None:
    """A link by which nothing comes."""
    raise AssertionError(f"nothing is sent this way, but {one.message!r} came")
