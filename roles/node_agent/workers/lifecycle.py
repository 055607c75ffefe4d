"""The life of a worker process, as its agent sees it, as a table, and what the agent remembers of one.

```
 WAITING ──START──▶ STARTING ──GREETED──▶ LOADING ──SETTLED──▶ SERVING
    ▲                  │   │                │  │                  │
    │                  │   └────OVERDUE─────┼──┘                  │ END
    │                END          │       END                     ▼
    │                  ▼          │         └───────────────▶ STOPPING
    │             TERMINATING ◀───┼──────────OVERDUE──────────────┘  ◀──BROKE── LOADING, SERVING
    │                  └─OVERDUE─▶▼
    └──────EXITED────────────── KILLED ──OVERDUE──▶ ABANDONED
```

UPROOTED leads from STARTING, LOADING and SERVING straight to KILLED, and so does OVERDUE from SERVING: silence.

Every state but SERVING and ABANDONED has a time limit, so no child can hold its agent up. EXITED leads from
every state that has a process to WAITING (it is still wanted) or out of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from fabric.ids import ModelId, PeerId, SliceId
from fabric.messages import SliceSpec
from roles.runtime.restarts import Restarts


class WorkerState(Enum):
    """Where a worker process is in its life."""

    WAITING = auto()  # no process: the next start is due at the limit
    STARTING = auto()  # spawned, has not said hello
    LOADING = auto()  # told what to host
    SERVING = auto()  # every slice is ready or has failed
    STOPPING = auto()  # asked to end by `Stop`
    TERMINATING = auto()  # sent SIGTERM
    KILLED = auto()  # sent SIGKILL
    ABANDONED = auto()  # did not even die of SIGKILL in time: stuck in the kernel


class WorkerTransition(Enum):
    """What moves a worker on."""

    START = auto()
    GREETED = auto()
    SETTLED = auto()
    BROKE = auto()
    UPROOTED = auto()
    END = auto()
    OVERDUE = auto()
    EXITED = auto()


NEXT: Final[Mapping[tuple[WorkerState, WorkerTransition], WorkerState]] = {
    (WorkerState.WAITING, WorkerTransition.START): WorkerState.STARTING,
    (WorkerState.STARTING, WorkerTransition.GREETED): WorkerState.LOADING,
    (WorkerState.STARTING, WorkerTransition.END): WorkerState.TERMINATING,  # it cannot hear a message yet
    (WorkerState.STARTING, WorkerTransition.OVERDUE): WorkerState.KILLED,
    (WorkerState.LOADING, WorkerTransition.SETTLED): WorkerState.SERVING,
    (WorkerState.LOADING, WorkerTransition.END): WorkerState.STOPPING,
    (WorkerState.LOADING, WorkerTransition.OVERDUE): WorkerState.KILLED,
    (WorkerState.SERVING, WorkerTransition.END): WorkerState.STOPPING,
    (WorkerState.SERVING, WorkerTransition.OVERDUE): WorkerState.KILLED,  # it does not answer
    # Its device broke and it says so: it ends by itself, and is made to if it does not.
    (WorkerState.LOADING, WorkerTransition.BROKE): WorkerState.TERMINATING,
    (WorkerState.SERVING, WorkerTransition.BROKE): WorkerState.TERMINATING,
    # Its GPU's MPS daemon is gone: what it computes from here on it computes without its share.
    (WorkerState.STARTING, WorkerTransition.UPROOTED): WorkerState.KILLED,
    (WorkerState.LOADING, WorkerTransition.UPROOTED): WorkerState.KILLED,
    (WorkerState.SERVING, WorkerTransition.UPROOTED): WorkerState.KILLED,
    (WorkerState.STOPPING, WorkerTransition.OVERDUE): WorkerState.TERMINATING,
    (WorkerState.TERMINATING, WorkerTransition.OVERDUE): WorkerState.KILLED,
    (WorkerState.KILLED, WorkerTransition.OVERDUE): WorkerState.ABANDONED,
    **{
        (state, WorkerTransition.EXITED): WorkerState.WAITING
        for state in WorkerState
        if state is not WorkerState.WAITING
    },
}

ENDING: Final = frozenset(
    {WorkerState.STOPPING, WorkerState.TERMINATING, WorkerState.KILLED, WorkerState.ABANDONED}
)
"""On its way out: nothing it says counts any more."""

PROCESSLESS: Final = frozenset({WorkerState.WAITING, WorkerState.ABANDONED})
"""States that a stopping agent need not wait for."""


@dataclass(slots=True)
class Worker:
    """One worker process over all its starts. `slices` are the wanted ones; none: it is to end."""

    worker_id: str
    slices: dict[SliceId, SliceSpec]
    restarts: Restarts
    hello_limit_ms: float
    """From its start to its first word: twice as long after each start that took longer, until it serves."""
    state: WorkerState = WorkerState.WAITING
    limit_at_ms: float | None = None
    holding: frozenset[SliceId] = frozenset()
    """Everything the process was started with, wanted or not."""
    peer: PeerId | None = None
    end_reason: str = ""
    is_mps: bool = False
    is_uprooted: bool = False
    """It was ended for want of its MPS daemon, which is no failure of its own."""
    unready_since_ms: float | None = None
    """The start of a process that has never had everything loaded; None: it has."""
    loading: dict[SliceId, ModelId] = field(default_factory=dict)
    """What its process was loading for each slice when it was last heard of, the newest last."""
    given_time: Counter[tuple[SliceId, ModelId]] = field(default_factory=Counter)
    """How often what its process has begun to load, before everything was there, was given the time of a load."""
    tell_at_ms: float | None = None
    """When it has to be told again what to host: it may not have heard it."""
    is_a_models_doing: bool = False
    """Its end counts for the model (`suspects`), not for the worker."""

    @property
    def gpu(self) -> int | None:
        """The real GPU it is on; None: an emulated one, or none."""
        return next((spec.gpu for spec in self.slices.values() if spec.device == "cuda"), None)

    @property
    def is_pipeline(self) -> bool:
        """Whether it has several GPUs, and so is no client of MPS: a process can be one of one daemon only, and these GPUs are not shared."""
        return any(spec.following for spec in self.slices.values())

    def hosts(self, slice_id: SliceId, model_id: ModelId) -> bool:
        """Whether that model should be on that slice."""
        spec = self.slices.get(slice_id)
        return spec is not None and any(one.model_id == model_id for one in spec.models)

    @property
    def is_ending(self) -> bool:
        """Nothing it says counts any more."""
        return self.state in ENDING
