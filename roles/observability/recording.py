"""Live arrivals, joined to a trace that the simulator plays: what frontends counted in bins of 5 ms, asked for again and again.

A frontend remembers a minute. Bins have numbers on its clock, so answers that overlap are joined without a gap or a double. The
requests of a bin are spread evenly over it: a trace is exact to within 5 ms.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from fabric.ids import ModelId
from fabric.messages import RequestsRemembered
from roles.observability.remembered import zero_of_clock_ms

ARRIVALS_MAX: Final = 20_000_000
"""Of one recording, some 30 bytes each on the disk."""


@dataclass(slots=True)
class Recording:
    """From `from_ms` until `until_ms` on the asker's clock. `missed_s`: what nobody remembered any more when it was asked for."""

    from_ms: float
    until_ms: float
    missed_s: float = 0.0
    is_full: bool = False
    removed: set[ModelId] = field(default_factory=set)
    """Models that were served once and not later: what came for them between two times of asking, nobody remembers."""
    renewed: set[ModelId] = field(default_factory=set)
    """Models whose SLO changed: frontends count anew from then on, and nobody remembers what came since they were asked."""
    ended: set[str] = field(default_factory=set)
    """Frontends whose process ended, whether another one followed or not: likewise."""
    _slo_ms: dict[ModelId, float] = field(default_factory=dict)
    _incarnations: dict[str, str] = field(default_factory=dict)
    _asked_at_ms: float | None = None
    _asked_before_ms: float | None = None
    _zero_ms: dict[str, float] = field(default_factory=dict)
    _next_bin: dict[tuple[str, ModelId], int] = field(default_factory=dict)
    _moments: dict[ModelId, list[float]] = field(default_factory=dict)
    _count: int = 0

    @property
    def counts(self) -> dict[ModelId, int]:
        """Requests of each model so far."""
        return {model_id: len(its) for model_id, its in sorted(self._moments.items())}

    def asks(self, slo_ms: Mapping[ModelId, float], incarnations: Mapping[str, str], now_ms: float) -> None:
        """Every frontend (by role id, its incarnation) will be asked for every model that is served (by id, its SLO)."""
        self.removed |= self._slo_ms.keys() - slo_ms.keys()
        self.renewed |= {one for one, ms in slo_ms.items() if self._slo_ms.get(one, ms) != ms}
        self.ended |= {one for one, its in self._incarnations.items() if incarnations.get(one) != its}
        self._slo_ms |= slo_ms
        self._incarnations |= incarnations
        self._asked_before_ms, self._asked_at_ms = self._asked_at_ms, now_ms

    def note(self, frontend: str, model_id: ModelId, told: RequestsRemembered, now_ms: float) -> None:
        """A frontend's answer, which came just now. The last bin is not over, and left for the next answer."""
        if not told.arrivals or not told.bin_ms:
            return
        bin_ms = told.bin_ms
        zero_ms = self._zero_ms.setdefault(frontend, zero_of_clock_ms(told, now_ms))
        oldest = told.newest_bin + 1 - len(told.arrivals)
        # One that is told of for the first time had nothing to forget before all were asked the last time.
        since_ms = self.from_ms if self._asked_before_ms is None else self._asked_before_ms
        first, due = (int(-((zero_ms - ms) // bin_ms)) for ms in (self.from_ms, since_ms))
        wanted = self._next_bin.get((frontend, model_id), first)
        self.missed_s += max(0, oldest - self._next_bin.get((frontend, model_id), due)) * bin_ms / 1e3
        self._next_bin[frontend, model_id] = max(wanted, told.newest_bin)
        for number in range(max(wanted, oldest), told.newest_bin):
            count = told.arrivals[number - oldest]
            if count:
                self._add(model_id, zero_ms + number * bin_ms, count, bin_ms)

    def _add(self, model_id: ModelId, at_ms: float, count: int, bin_ms: float) -> None:
        if self._count + count > ARRIVALS_MAX:
            self.is_full = True
            return
        moments = self._moments.setdefault(model_id, [])
        spread = (at_ms + (place + 0.5) / count * bin_ms - self.from_ms for place in range(count))
        inside = [moment for moment in spread if 0 <= moment < self.until_ms - self.from_ms]
        moments += inside
        self._count += len(inside)

    def lines(self) -> Iterator[str]:
        """The trace: CSV with `at_ms,model`, ascending."""
        yield "at_ms,model\n"
        rows = [
            [(moment, model_id) for moment in sorted(its)] for model_id, its in sorted(self._moments.items())
        ]
        for moment, model_id in heapq.merge(*rows):
            yield f"{moment:.3f},{model_id}\n"
