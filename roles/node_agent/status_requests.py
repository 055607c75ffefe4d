"""Who asked the agent how it is, and waits for what the workers say of themselves.

Workers listen to nobody but their agent, so what their loops measured is told by it: as counters of its own
status, each with the worker's name before it. A worker that says nothing in time is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from fabric.ids import PeerId

ANSWER_MS = 200.0  # less than what any asker waits; a healthy worker takes a turn of its loop
ASKERS_MAX = 64
COUNTERS_MAX: Final = 32_768  # of all workers: half of what a message may list
COUNTERS_EACH_MAX: Final = 256  # of one; ours have about fifty
COUNTER_CHARS_MAX: Final = (
    256  # of one, with the worker's name: all of them are 9 MB, and a status may have 16
)


@dataclass(slots=True)
class _Inquiry:
    asker: PeerId
    answer_at_ms: float
    awaited: set[str]
    counters: dict[str, float] = field(default_factory=dict)


class StatusRequests:
    """Open questions, oldest first."""

    def __init__(self) -> None:
        self._open: list[_Inquiry] = []

    @property
    def wake_at_ms(self) -> float | None:
        """When the oldest question is answered with what is known by then."""
        return self._open[0].answer_at_ms if self._open else None

    def ask(self, asker: PeerId, worker_ids: Iterable[str], now_ms: float) -> bool:
        """Wait for these; False: too many are asking already, and nothing is waited for."""
        if len(self._open) >= ASKERS_MAX:
            return False
        self._open.append(_Inquiry(asker, now_ms + ANSWER_MS, set(worker_ids)))
        return True

    def heard(self, worker_id: str, counters: Mapping[str, float]) -> None:
        """A worker has said how it is."""
        for inquiry in self._open:
            if worker_id in inquiry.awaited:
                inquiry.awaited.remove(worker_id)
                told = {f"{worker_id}/{name}": value for name, value in counters.items()}
                kept = ((name, value) for name, value in told.items() if len(name) <= COUNTER_CHARS_MAX)
                room = min(COUNTERS_EACH_MAX, COUNTERS_MAX - len(inquiry.counters))
                inquiry.counters.update(islice(kept, room))

    def settled(self, now_ms: float) -> Sequence[tuple[PeerId, Mapping[str, float]]]:
        """Whom to answer now, with the workers' counters; they are forgotten."""
        done = [one for one in self._open if not one.awaited or one.answer_at_ms <= now_ms]
        self._open = [one for one in self._open if one not in done]
        return [(one.asker, one.counters) for one in done]
