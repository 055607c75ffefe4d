"""Which scheduler is the active one: schedulers, agents and workers about leases and epochs (docs/operate/availability.md)."""

from __future__ import annotations

from fabric.ids import Incarnation, NodeId
from fabric.messages.base import Addresses, Message


class LeaseAsked(Message, frozen=True, tag=44):
    """Scheduler -> agent: grant me that epoch, or hold the lease of it longer. `number` counts what it asked.

    `in_place_of`: the epoch whose holder gave its lease up to the asker (`TakeOver`); 0: nobody did.
    """

    scheduler_id: str
    incarnation: Incarnation
    epoch: int
    number: int
    in_place_of: int = 0


class LeaseReport(Message, frozen=True, tag=45):
    """Agent -> scheduler: the highest epoch that was granted here, to whom, and whether another may have a higher one.

    `number`: of the `LeaseAsked` that it answers; 0: none. The lease is the asker's if `holder_id`, `incarnation` and
    `epoch` are. The first report of an agent is its `NodeHello`, which has the same fields.
    """

    node_id: NodeId
    epoch: int
    holder_id: str
    incarnation: Incarnation
    is_free: bool
    number: int = 0


class SchedulerHello(Message, frozen=True, tag=46):
    """Scheduler -> scheduler: the first message, and said again when `is_electable` changes; the active one answers with a `PlanCopy`.

    `is_electable`: the agents are connected to it, all of them or a majority for a while.
    """

    scheduler_id: str
    incarnation: Incarnation
    is_electable: bool = False


class PlanCopy(Message, frozen=True, tag=47):
    """Active scheduler -> standby: the plan, to go on from. The one with the highest epoch, then `number`, holds.

    `digest`: of the configuration that it is a plan of. `document`: JSON, as in the plan file.
    """

    epoch: int
    number: int
    digest: str
    document: str


class TakeOver(Message, frozen=True, tag=92):
    """Active scheduler -> standby: I end; have the agents grant you an epoch in the place of mine. Until they have I serve on."""

    epoch: int


class EpochGranted(Message, frozen=True, tag=55):
    """Agent -> worker: take commands of that epoch and no other; introduce yourself at `scheduler_addresses`."""

    epoch: int
    scheduler_addresses: Addresses
