"""Operator <-> any role: its status. Operator <-> scheduler: changes of what is served (docs/operate/dynamic-placement.md)."""

from __future__ import annotations

import msgspec

from fabric.ids import Incarnation, ModelId, NodeId, SliceId
from fabric.messages.base import Listed, Message, Value
from fabric.messages.gpus import GpuRef, GpuReport
from fabric.messages.models import LeftOut, ModelInfo


class SliceReport(Value, frozen=True):
    """One slice as the scheduler sees it. `state`: a `SliceState`; a worker says how far it is with the slice."""

    slice_id: SliceId
    state: str
    reason: str
    models: Listed[ModelId]
    batches: int
    requests: int
    left_out: Listed[LeftOut] = ()
    share_percent: float | None = None
    """Of its GPU; None: all of it, or a worker says so, which does not know."""


class ModelWarning(Value, frozen=True):
    """A model is served, but not as one should expect from its configuration."""

    model_id: ModelId
    reason: str


class UnplacedInfo(Value, frozen=True):
    """A model, or that part of its rate, that found no place."""

    model_id: ModelId
    rate_rps: float | None
    reason: str


class ModelAdvice(Value, frozen=True):
    """Measured and planned rate; `gpus`: what the model lacks, or (negative) leaves idle, in GPUs' worth."""

    model_id: ModelId
    rate_rps: float
    planned_rps: float | None
    gpus: float = 0.0


class PlanReport(Value, frozen=True):
    """What the controller does: `state` steady | planning | moving, and why; `gpus_advised` of `gpus` in all.

    `lately`: what it did last, oldest first. `drained`: GPUs that an operator took out of use.
    """

    state: str
    reason: str
    gpus: int
    gpus_advised: int
    models: Listed[ModelAdvice]
    moves_done: int
    moves_failed: int
    unplaced: Listed[UnplacedInfo] = ()
    lately: Listed[str] = ()
    drained: Listed[GpuRef] = ()


class StandbyReport(Value, frozen=True):
    """Another scheduler that the active one is connected with. `has_plan`: the present plan was sent to it.

    `is_electable`: the agents are connected to it, all of them or a majority for a while, as it says.
    """

    scheduler_id: str
    incarnation: Incarnation
    has_plan: bool
    is_electable: bool = False


class SchedulerStanding(Value, frozen=True):
    """Whether a scheduler is the active one: `state` standby | candidate | active, and the `epoch` of its lease.

    `agents_granted` of the shard's `agents` hold its lease now; `takeovers`: how often it became active; `active`: the one that
    the agents say holds their leases, as far as this one knows.
    """

    state: str
    epoch: int
    agents_granted: int
    agents: int
    takeovers: int
    standbys: Listed[StandbyReport] = ()
    shard: int = 0
    shards: int = 1
    active: str = ""


class StatusAsked(Message, frozen=True, tag=60):
    """Operator -> any role's control socket."""


class StatusListed(Message, frozen=True, tag=61):
    """The answer: identity, what the role knows, and counters by name (`bytes_in`, `bytes_out`, `requests_dropped`, …)."""

    role_id: str
    pid: int
    slices: Listed[SliceReport]
    models: Listed[ModelInfo]
    counters: dict[str, float]
    gpus: Listed[GpuReport] = ()
    plan: PlanReport | None = None
    standing: SchedulerStanding | None = None
    warnings: Listed[ModelWarning] = ()
    queued: dict[str, float] = msgspec.field(default_factory=dict)
    """By model: requests that wait for a batch; of a scheduler only."""


class ModelsAdd(Message, frozen=True, tag=62):
    """Operator -> scheduler: serve these too. `document`: a JSON list of sections as in the file's `models`."""

    request_no: int
    document: str
    dry_run: bool = False


class ModelsRemove(Message, frozen=True, tag=63):
    """Operator -> scheduler: serve these no more. `when_left`: once every frontend has `Left` them for another shard.

    `term`: they have it here now; in another one they were moved back meanwhile, and stay.
    """

    request_no: int
    model_ids: Listed[ModelId]
    when_left: bool = False
    term: int | None = None
    dry_run: bool = False


class ModelSet(Message, frozen=True, tag=64):
    """Operator -> scheduler: another SLO, declared rate or (a higher) term; None leaves it as it is.

    `is_forced`: also where the model is served, and has no place any more with that SLO.
    """

    request_no: int
    model_id: ModelId
    slo_ms: float | None = None
    rate_rps: float | None = None
    term: int | None = None
    dry_run: bool = False
    is_forced: bool = False


class DrainAsked(Message, frozen=True, tag=65):
    """Operator -> scheduler: plan without that node, or that GPU of it. `is_back`: plan with it again."""

    request_no: int
    node_id: NodeId
    gpu: int | None = None
    is_back: bool = False
    dry_run: bool = False


class SectionAsked(Message, frozen=True, tag=69):
    """Operator -> scheduler: the model's section of the configuration, as it is now, with the rate that is planned for."""

    request_no: int
    model_id: ModelId


PlanChange = ModelsAdd | ModelsRemove | ModelSet | DrainAsked
"""What an operator may ask for while everything serves. With `dry_run` it is planned, answered as if it were done, and not done."""
PlanRequest = PlanChange | SectionAsked
"""All that he may ask the active scheduler besides how it is; each is answered with a `Changed`."""


class RoleDrain(Message, frozen=True, tag=67):
    """Operator -> `tenuto up`: end that role when it has finished, and keep it down. `is_back`: start it again."""

    request_no: int
    role_id: str
    is_back: bool = False


class RoleDrainDryRun(Message, frozen=True, tag=86):
    """Operator -> `tenuto up`: what would a `RoleDrain` be answered? It is not done.

    A message of its own: a field of `RoleDrain` would be skipped by an older peer, which would do what it was only asked about.
    """

    request_no: int
    role_id: str
    is_back: bool = False


class RestartRoles(Message, frozen=True, tag=68):
    """Operator -> `tenuto up`: restart every role, one at a time."""

    request_no: int


RoleChange = RoleDrain | RestartRoles
"""What an operator may have done with the processes."""
RoleRequest = RoleChange | RoleDrainDryRun
"""All that he may ask `tenuto up` besides how it is; each is answered with a `Changed`."""


class Changed(Message, frozen=True, tag=66):
    """Scheduler -> operator: what became of the request. `status`: ok | partial | failed | refused.

    refused: nothing was changed (NotActive: it may have been, see what the next scheduler serves), `code` says why
    (UnknownModel, NameTaken, InvalidConfig, UnknownGpu, Busy, NotActive); partial: `unplaced` found no place; failed: rolled
    back. The numbers are of slices; `changed` ones serve on with other models. `document`: the section that was asked for, JSON.
    """

    request_no: int
    status: str
    code: str = ""
    reason: str = ""
    started: int = 0
    ended: int = 0
    kept: int = 0
    unplaced: Listed[UnplacedInfo] = ()
    changed: int = 0
    document: str = ""
