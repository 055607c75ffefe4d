"""The life of a worker process, as its agent sees it, as a table.

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

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


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
