"""What the core of an application hears and answers. A *task* is one request of one stage, for one model."""

from __future__ import annotations

from msgspec import Struct

from fabric.ids import ModelId
from roles.applications.trip import Trip


class Entered(Struct, frozen=True):
    """A request of the application has come. `number` is new. `deadline_at_ms`: when its answer should leave; `TimeUp` may come later."""

    number: int
    deadline_at_ms: float


class Followed(Struct, frozen=True):
    """The answer to `Follow`: so many tasks follow."""

    follow: int
    count: int


class FollowFailed(Struct, frozen=True):
    """The other answer to `Follow`: the inputs of its stage cannot be made."""

    follow: int
    code: str
    reason: str


class TaskAnswered(Struct, frozen=True):
    """A model answered. `waited_ms` until it ran for `run_ms`."""

    task: int
    waited_ms: float
    run_ms: float


class TaskDropped(Struct, frozen=True):
    """The task has ended without outputs: `code` is a request error's wire code."""

    task: int
    code: str
    reason: str = ""
    retry_after_ms: float | None = None


class Abandoned(Struct, frozen=True):
    """Nobody waits for that request any more."""

    number: int


class TimeUp(Struct, frozen=True):
    """Its answer must leave now. It has one only if what is open is all optional."""

    number: int


ApplicationEvent = Entered | Followed | FollowFailed | TaskAnswered | TaskDropped | Abandoned | TimeUp


class Follow(Struct, frozen=True):
    """Make the inputs of that stage's tasks, and say how many there are (`Followed`).

    `follow` is its number. `after`: by stage before it, the tasks whose outputs they are made from, in order; none for a stage that
    starts with the request.
    """

    follow: int
    number: int
    stage: str
    after: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Ask(Struct, frozen=True):
    """Announce a task to the scheduler, as a request with that deadline. Its inputs are the next ones of that `follow`."""

    task: int
    number: int
    stage: str
    model_id: ModelId
    due_at_ms: float
    follow: int


class Cancel(Struct, frozen=True):
    """A task is of no use any more."""

    task: int
    model_id: ModelId


class Ended(Struct, frozen=True):
    """The request is done: all that it needs is answered, in time or late, or it was given up.

    `code`, `reason`: of one that was given up. `trip`: what became of it stage by stage.
    """

    number: int
    is_answered: bool
    trip: Trip
    code: str = ""
    reason: str = ""
    retry_after_ms: float | None = None


ApplicationAction = Follow | Ask | Cancel | Ended
