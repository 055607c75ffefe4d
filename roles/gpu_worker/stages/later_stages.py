"""The processes of a pipeline's later stages, or of a gang's other ranks, as the worker's devices need them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from fabric.link import NamedTensor
from fabric.messages import AnyMessage

EXPIRES_MS_MAX: Final = 1e9  # of what never does


def meeting_of(worker_id: str, run_dir: Path) -> Path:
    """The file by which the ranks of that worker's gang find each other."""
    return run_dir / f"{worker_id}.ranks"


class StageSaid(Struct, frozen=True):
    """What a later stage says; `tensors`: of `Activations`."""

    message: AnyMessage
    tensors: Sequence[NamedTensor] = ()
    late_ms: float = 0.0


class StageGone(Struct, frozen=True):
    """The process of a later stage has ended."""

    stage: int
    reason: str


class LaterStages(Protocol):
    """The processes of a pipeline's later stages, from 1 on."""

    def start(self, stages: int, *, is_gang: bool = False) -> None:
        """Start those of a pipeline of so many stages, or a gang of so many ranks, the first one counted."""
        ...

    def send(self, stage: int, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """False: it takes no more. Raises LocalProtocolError for what cannot be sent."""
        ...

    def stop(self) -> None:
        """End them."""
        ...

    def filenos(self) -> Sequence[int]:
        """Readable when `take` may have something; none while nothing is started."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether `take` may give something of which no descriptor tells."""
        ...

    def take(self, limit: int, now_ms: float) -> Sequence[StageSaid | StageGone]:
        """What they say, without blocking."""
        ...
