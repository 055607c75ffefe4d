"""What the core of an application hears and answers. A *task* is one request of one stage, for one model."""

from __future__ import annotations

from dataclasses import dataclass

from fabric.ids import ModelId


@dataclass(slots=True, frozen=True)
class Entered:
    """A request of the application has come. `number` is new."""

    number: int
    deadline_at_ms: float


@dataclass(slots=True, frozen=True)
class Followed:
    """The answer to `Follow`: so many tasks of that stage follow."""

    number: int
    stage: str
    count: int


@dataclass(slots=True, frozen=True)
class TaskAnswered:
    """A model answered. `waited_ms` until it ran for `run_ms`."""

    task: int
    waited_ms: float
    run_ms: float


@dataclass(slots=True, frozen=True)
class TaskDropped:
    """The scheduler gave a task up."""

    task: int


ApplicationEvent = Entered | Followed | TaskAnswered | TaskDropped


@dataclass(slots=True, frozen=True)
class Follow:
    """Say how many tasks of that stage follow (`Followed`): its inputs, or the outputs they are made from, are there.

    `after`: the task whose outputs they are made from; None: those of all of the predecessors, or the request's own.
    """

    number: int
    stage: str
    after: int | None


@dataclass(slots=True, frozen=True)
class Ask:
    """Announce a task to the scheduler, as a request with that deadline."""

    task: int
    number: int
    stage: str
    model_id: ModelId
    due_at_ms: float


@dataclass(slots=True, frozen=True)
class Cancel:
    """A task is of no use any more."""

    task: int
    model_id: ModelId


@dataclass(slots=True, frozen=True)
class Ended:
    """The request of the application is done: all is answered, in time or late, or it was given up."""

    number: int
    is_answered: bool


ApplicationAction = Follow | Ask | Cancel | Ended
