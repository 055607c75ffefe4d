"""What every message is made of: the two base structs, and lists whose length has a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, TypeVar

import msgspec

from fabric.ids import FrontendId

PRIORITY_MAX: Final = 9
"""Priorities go from 0, the least important, to this."""
ITEMS_MAX: Final = 65_536
"""In any tuple or dict of a message."""
ADDRESSES_MAX: Final = 16
"""Of one peer: a role has one per transport."""
REQUESTS_TOLD_MAX: Final = 4_096
"""Runs that one message speaks of. A batch has no more requests; of what waits there may be more: see `split_runs`."""
RUN_REQUESTS_MAX: Final = 65_536
"""Requests in one run, or in a batch."""
TOLD_REQUESTS_MAX: Final = 1 << 20
"""Requests in all runs that one message speaks of."""
PARTS_MAX: Final = 1_024
"""Of one batch: frontends that have requests in it."""
ItemT = TypeVar("ItemT")
Listed = Annotated[tuple[ItemT, ...], msgspec.Meta(max_length=ITEMS_MAX)]
"""Lists in what anybody may send us: their length is looked at before anything of them is decoded."""
Addresses = Annotated[tuple[str, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]


class Value(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message; never sent alone."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of everything that is sent."""


class SeqRun(Value, frozen=True):
    """Requests `first_seq` … `first_seq + count - 1` of one frontend and model."""

    first_seq: int
    count: int


Runs = Annotated[tuple[SeqRun, ...], msgspec.Meta(max_length=REQUESTS_TOLD_MAX)]


def split_runs(runs: tuple[SeqRun, ...]) -> Iterator[tuple[SeqRun, ...]]:
    """As many at a time as a message may hold: runs, requests in a run, and requests in all of them."""
    told: list[SeqRun] = []
    requests = 0
    for run in runs:
        for begin in range(0, run.count, RUN_REQUESTS_MAX):
            count = min(RUN_REQUESTS_MAX, run.count - begin)
            if len(told) == REQUESTS_TOLD_MAX or requests + count > TOLD_REQUESTS_MAX:
                yield tuple(told)
                told, requests = [], 0
            told.append(run if count == run.count else SeqRun(run.first_seq + begin, count))
            requests += count
    if told:
        yield tuple(told)


class Part(Value, frozen=True):
    """What one frontend has in a batch. Its place in `RunBatch.parts` is the part number."""

    frontend_id: FrontendId
    runs: Runs


Parts = Annotated[tuple[Part, ...], msgspec.Meta(max_length=PARTS_MAX)]
