"""The ranks of a gang in lock step.

Every call of the model's `infer` is a *step*, which all ranks take with the same inputs. A rank that left one out, or took one more, would
meet the others in the wrong exchange, and sums would be of different batches without anybody noticing. So no step begins before
all ranks have ended the one before, and all in the same way: each of them returned, or each of them raised. Else the gang is broken, for good.

The first rank's device does its steps on its own thread, and waits there, never without a bound. The worker's loop sends the inputs, hears the
other ranks, and tells that one of them has failed while the first one waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from fabric.errors import FabricError
from fabric.ids import ModelId, SliceId
from fabric.link import NamedTensor
from roles.runtime.loop.mailbox import Mailbox

LOAD_WITHIN_MS: Final = 120_000.0  # as long as an agent gives a worker
FAILED_LOAD_MS: Final = (
    10_000.0  # the first rank may still read its weights, and then leaves the model out in peace
)
STEP_WITHIN_MS: Final = 2_000.0  # of the first rank's end of the step
FAILED_STEP_MS: Final = 1_000.0
OTHERS_WITHIN_S: Final = 1.0


class RankFailed(FabricError):
    """Another rank did not do what the first one did; says which and why."""


class Step(Struct, frozen=True):
    """The other ranks shall infer, too. `tensors`: a batch's inputs, which nobody changes."""

    slice_id: SliceId
    model_id: ModelId
    number: int
    tensors: Sequence[NamedTensor]


class LockStep:
    """What is known of the ranks; no clock, no thread. Reasons are empty where all is well."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._loaded: dict[int, str] = {}
        self._is_loading = True
        self._ended: dict[int, str] = {}
        self.number = 0
        """Of the newest step."""
        self.broken = ""
        """Why they are in lock step no more."""
        self.fails_at_ms: float | None = None
        """When the first rank has waited long enough for one that has failed."""
        self.fails_for = ""

    def loaded(self, rank: int, reason: str, now_ms: float) -> None:
        """What came of a rank's load."""
        self._loaded[rank] = reason
        if reason and self._is_loading:
            self._fail_at(now_ms + FAILED_LOAD_MS, rank, reason)

    def ended(self, rank: int, number: int, reason: str, now_ms: float) -> None:
        """How a rank has ended a step. One that raised is waited for in vain, unless the first one raises as well."""
        if number != self.number:
            return
        self._ended[rank] = reason
        if not rank and reason:
            self.fails_at_ms = None
        elif reason and not self._ended.get(0):
            self._fail_at(now_ms if 0 in self._ended else now_ms + FAILED_STEP_MS, rank, reason)

    def begin(self) -> int:
        """The next step, once `problem` has said that there is none."""
        self.number += 1
        self._ended = {}
        return self.number

    def end_load(self) -> None:
        """The first rank's load has ended, one way or the other."""
        self._is_loading, self.fails_at_ms = False, None

    @property
    def problems_of_load(self) -> list[str]:
        """Of the ranks that could not load the model."""
        return [self._named(rank, why) for rank, why in sorted(self._loaded.items()) if why]

    def has_settled(self) -> bool:
        """Whether the step, or the load, has ended everywhere, or one rank's failure says all."""
        if self.number == 0:
            return bool(self.problems_of_load) or self._missing(self._loaded) is None
        return bool(self.broken) or self._missing(self._ended) is None

    def problem(self) -> str:
        """Why no step can begin, when nobody waits any longer. What is missing now breaks the gang, except that a model is not loaded."""
        if self.number == 0:
            late, seconds = self._missing(self._loaded), LOAD_WITHIN_MS / 1000
            named = "" if late is None else self._named(late, f"it did not load within {seconds:.0f} s")
            return next(iter(self.problems_of_load), named)
        if not self.broken:
            self.broken = self._out_of_step()
        return self.broken

    def _out_of_step(self) -> str:
        own = self._ended[0]
        late = self._missing(self._ended)
        if late is not None:
            after = f", which raised {own}" if own else ""
            within = f"it did not end a batch within {STEP_WITHIN_MS / 1000:.0f} s of rank 0{after}"
            return self._named(late, within)
        for rank, why in sorted(self._ended.items()):
            if bool(why) != bool(own):
                return self._named(rank, why or f"it ran a batch on which rank 0 raised {own}")
        return ""

    def _fail_at(self, at_ms: float, rank: int, reason: str) -> None:
        if self.fails_at_ms is None:
            self.fails_at_ms, self.fails_for = at_ms, self._named(rank, reason)

    def _missing(self, heard: dict[int, str]) -> int | None:
        return next((rank for rank in range(1, self._ranks) if rank not in heard), None)

    def _named(self, rank: int, reason: str) -> str:
        return f"rank {rank} of {self._ranks}: {reason}"


class Gang(Mailbox[Step]):
    """The same between the worker's loop, which takes steps and tells what it hears, and the first rank's thread."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        super().__init__()
        self._now_ms = now_ms
        self._changed = threading.Condition()
        self._ranks = LockStep(1)

    # ------------------------------------------------------------ the worker's loop

    def start(self, ranks: int) -> None:
        """So many are started, the first one counted; 1: they have ended."""
        with self._changed:
            self._ranks = LockStep(ranks)
        self.forget()

    def loaded(self, rank: int, reason: str) -> None:
        """What came of a rank's load."""
        with self._changed:
            self._ranks.loaded(rank, reason, self._now_ms())
            self._changed.notify_all()

    def ended(self, rank: int, number: int, reason: str) -> None:
        """How a rank has ended a step."""
        with self._changed:
            self._ranks.ended(rank, number, reason, self._now_ms())
            self._changed.notify_all()

    @property
    def fails_at_ms(self) -> float | None:
        """When `failure` may have something to say."""
        return self._ranks.fails_at_ms

    def failure(self, now_ms: float) -> str:
        """Of a rank for which the first one waits in vain, told once; empty: of none."""
        with self._changed:
            at_ms = self._ranks.fails_at_ms
            if at_ms is None or now_ms < at_ms:
                return ""
            self._ranks.fails_at_ms = None
            return self._ranks.fails_for

    # ------------------------------------------------------------ the first rank's thread

    @property
    def broken(self) -> str:
        """Why nothing will ever run here again; empty: it will."""
        return self._ranks.broken

    def problems_of_load(self) -> list[str]:
        """The first rank could not load the model: those of the others, as far as they say soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._ranks.problems_of_load, OTHERS_WITHIN_S)
            self._ranks.end_load()
            return self._ranks.problems_of_load

    def begin(self, slice_id: SliceId, model_id: ModelId, tensors: Sequence[NamedTensor]) -> None:
        """Let all ranks take the next step, once they have ended the one before. Raises RankFailed."""
        with self._changed:
            self._settle()
            self._ranks.end_load()
            number = self._ranks.begin()
        self.post(Step(slice_id, model_id, number, tensors))

    def end(self, reason: str) -> None:
        """The first rank has ended the step. Raises RankFailed where it raised, and not all others did."""
        with self._changed:
            self._ranks.ended(0, self._ranks.number, reason, self._now_ms())
            if reason:
                self._settle()

    def _settle(self) -> None:
        within_ms = STEP_WITHIN_MS if self._ranks.number else LOAD_WITHIN_MS
        self._changed.wait_for(self._ranks.has_settled, within_ms / 1000)
        problem = self._ranks.problem()
        if problem:
            self._ranks.end_load()
            raise RankFailed(problem)
