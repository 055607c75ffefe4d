"""What is to be rehearsed: the last arrivals, who was to serve them, and how that may be done otherwise.

A question is plain values, so that another process can answer it. The answer is how many requests each variant lost,
by the block of time in which they arrived: all had the same arrivals, so their losses can be compared block by block.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from policies.batching.base import NEVER_MS, BatchModel, BatchSlice

BLOCK_MS = 125.0


class Variant(NamedTuple):
    """A way to hold and to drop. `hold_share` of the SLO is the longest hold; None: what is planned; inf: until frontrun.

    `target`: the batch size that drops protect; 0: the usual one (window drop), 1: none (simple drop); of no account where holds are planned.
    """

    name: str
    hold_share: float | None = None
    target: int = 0

    def timeout_ms(self, slo_ms: float) -> float:
        """The longest hold of a model with that SLO, where it is not planned."""
        assert self.hold_share is not None, "it is planned"
        return NEVER_MS if math.isinf(self.hold_share) else self.hold_share * slo_ms


PLANNED: Final = Variant("planned")
VARIANTS: Final = (
    PLANNED,
    Variant("deferred", math.inf),
    Variant("eager window", 0.0),
    Variant("eager simple", 0.0, 1),
    Variant("timeout 15 %", 0.15),
    Variant("timeout 30 %", 0.30),
)


class Arrival(Struct, frozen=True, gc=False):  # thousands are made in one turn of the scheduler's loop
    """A run of requests, so long after the beginning of the rehearsal; `model` is an index."""

    at_ms: float
    model: int
    count: int
    budget_ms: float
    span_ms: float


class RehearsedModel(Struct, frozen=True):
    """A model and what is known of it: its rate, what it loses, and what opening its batches cost beside what was expected.

    `is_over_share`: more was asked of it than its share, and the arrivals are what was taken on.
    """

    model: BatchModel
    rate_rps: float
    lost_share: float
    openings_ms: float
    expected_ms: float
    is_over_share: bool = False


class Question(Struct, frozen=True):
    """`variants` are indices of `VARIANTS`. `lost_share`: of all models together. Blocks are counted from `from_ms` on.

    `is_lowest_id`: which of the free slices is taken, as in `Tenuto`.
    """

    number: int
    models: tuple[RehearsedModel, ...]
    slices: tuple[BatchSlice, ...]
    lost_share: float
    arrivals: tuple[Arrival, ...]
    variants: tuple[int, ...]
    from_ms: float
    blocks: int
    is_lowest_id: bool = True


class Rehearsed(Struct, frozen=True):
    """The requests that each of the question's variants lost, by block; empty: it could not be rehearsed."""

    number: int
    lost: tuple[tuple[int, ...], ...] = ()


@runtime_checkable
class Rehearses(Protocol):
    """A discipline that asks for rehearsals, one at a time. Whoever drives it has them played and tells it the outcome."""

    @property
    def rehearsal_at_ms(self) -> float:
        """From when on it has something to ask; inf: nothing, or it waits for an answer."""
        ...

    def rehearsal(self, now_ms: float) -> Question | None:
        """What to rehearse now, if it is due and worth it."""
        ...

    def rehearsed(self, answer: Rehearsed, now_ms: float) -> None:
        """The outcome of the question of that number."""
        ...
