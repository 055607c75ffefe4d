"""One slice of a worker: its life as a table, its replicas, its batches."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import LeftOut, ModelSpec, ReplicaInfo, SliceSpec
from roles.gpu_worker.batches import BatchQueue

EMULATED: Final = "emulated"
# Interference and a busy host make a run take several times its l(b), a first one in a new shape some seconds. iGniter's
# largest slowdown is 4, an SLO is a few l(b): nobody waits for what comes so late.
HUNG_AFTER_TIMES: Final = 20.0
HUNG_AFTER_MS: Final = 2_000.0


class HostedState(enum.Enum):
    """Where a slice is in its life."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class HostedTransition(enum.Enum):
    """What moves a slice on."""

    LOADED = enum.auto()
    BROKEN = enum.auto()
    UNWANTED = enum.auto()


NEXT: Final[Mapping[tuple[HostedState, HostedTransition], HostedState]] = {
    (HostedState.LOADING, HostedTransition.LOADED): HostedState.READY,
    (HostedState.LOADING, HostedTransition.BROKEN): HostedState.FAILED,
    (HostedState.LOADING, HostedTransition.UNWANTED): HostedState.STOPPING,
    (HostedState.READY, HostedTransition.BROKEN): HostedState.FAILED,
    (HostedState.READY, HostedTransition.UNWANTED): HostedState.STOPPING,
    (HostedState.STOPPING, HostedTransition.LOADED): HostedState.STOPPING,
    (HostedState.STOPPING, HostedTransition.BROKEN): HostedState.STOPPING,
    (HostedState.STOPPING, HostedTransition.UNWANTED): HostedState.STOPPING,
    (HostedState.FAILED, HostedTransition.BROKEN): HostedState.FAILED,
    (HostedState.FAILED, HostedTransition.UNWANTED): HostedState.STOPPING,
}


class SideLoad(Struct, frozen=True):
    """A model that is being loaded beside what its slice serves, until it has taken too long."""

    model: ModelSpec
    number: int
    until_ms: float


@dataclass(slots=True)
class HostedSlice:
    """A slice in one of these states. `spec`: what it should be; its models may change while it serves."""

    spec: SliceSpec
    state: HostedState = HostedState.LOADING
    has_loaded: bool = False
    """The executor's load has ended, one way or the other."""
    reason: str = ""
    replicas: dict[ModelId, ReplicaInfo] = field(default_factory=dict)
    """What is loaded, wanted or not."""
    left_out: tuple[LeftOut, ...] = ()
    """Models it should host and does not."""
    tried: dict[ModelId, ModelSpec] = field(default_factory=dict)
    """Models that are loaded or left out, as they were specified then."""
    loading: ModelId | None = None
    """What the device was loading when it was last heard of, until all is loaded."""
    side_load: SideLoad | None = None
    is_letting_go: bool = False
    """Whether a replica waits for its last batches, to be unloaded."""
    announced: tuple[tuple[ReplicaInfo, ...], tuple[LeftOut, ...]] = ((), ())
    """What the scheduler was told last that it hosts, and leaves out."""
    queue: BatchQueue = field(default_factory=BatchQueue)
    introduced_at_ms: float = -math.inf
    """When the scheduler was told last."""
    is_listed: bool = False
    """Its last directory shows that it has understood."""
    alarm_at_ms: float | None = None
    """When its queue next needs a look."""
    batches: int = 0
    requests: int = 0

    def go_on(self, transition: HostedTransition) -> None:
        """Go on in its life."""
        self.state = NEXT[self.state, transition]

    @property
    def offered(self) -> tuple[ReplicaInfo, ...]:
        """The replicas that batches may be granted for, in the order of the specification."""
        unwanted = self.unwanted()
        return tuple(
            self.replicas[model.model_id]
            for model in self.spec.models
            if model.model_id in self.replicas and model.model_id not in unwanted
        )

    def unwanted(self) -> list[ModelId]:
        """Models that were tried and should not be here any more, or otherwise than they are."""
        wanted = {model.model_id: model for model in self.spec.models}
        return [model_id for model_id, model in self.tried.items() if wanted.get(model_id) != model]

    def may_become(self, spec: SliceSpec) -> bool:
        """Whether it can be that without an end: nothing but its models differs."""
        lives = self.state in (HostedState.LOADING, HostedState.READY)
        return lives and self.spec.is_same_but_models(spec)

    def shrink(self, model_id: ModelId, batch_size_max: int) -> bool:
        """Batches of a model larger than that are not worth granting any more; False: nor were they before.

        A pipeline's stages say it one by one, each of what it has memory for.
        """
        one = self.replicas[model_id]
        if batch_size_max >= one.batch_size_max:
            return False
        exec_ms = one.exec_ms[:batch_size_max]
        reason = "the device had no memory for a larger one"
        self.replicas[model_id] = replace(
            one,
            batch_size_max=batch_size_max,
            exec_ms=exec_ms,
            interval_ms=one.interval_ms[:batch_size_max],
            reason=reason,
        )
        return True

    def run_limit_ms(self, model_id: ModelId, batch_size: int) -> float:
        """A run that takes longer has hung: as the model's configuration says, or many times its l(b)."""
        said_ms = self.tried[model_id].run_limit_ms
        return said_ms or max(HUNG_AFTER_TIMES * self.exec_ms(model_id, batch_size), HUNG_AFTER_MS)

    def is_idempotent(self, model_id: ModelId) -> bool:
        """Whether a request may run more than once. Of one that is wanted no more the last batches may be under way."""
        return self.tried[model_id].is_idempotent

    def exec_ms(self, model_id: ModelId, batch_size: int) -> float:
        """l(b) of a model that is loaded here; a batch over its largest, granted before it shrank, runs in pieces."""
        times = self.replicas[model_id].exec_ms
        if not times:
            return 0.0
        whole, rest = divmod(batch_size, len(times))
        return whole * times[-1] + (times[rest - 1] if rest else 0.0)

    def hosts(self, model_id: ModelId) -> bool:
        """Whether batches of the model may be granted."""
        return model_id in self.replicas and self.tried[model_id] in self.spec.models
