"""AlpaServe's own simulation (section 4.2): batches of one, first come first served, by which it scores a selection.

A request goes to the group that has it done soonest, and is refused as it comes where no group has it done in time. Run times are
known, so nothing else can happen to it: one pass over the arrivals is the whole simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Played:
    """What came of the arrivals. `served[group][model]` and `refused[model]` are counts, `busy_ms` is a GPU's of each group."""

    served: tuple[tuple[int, ...], ...]
    refused: tuple[int, ...]
    busy_ms: tuple[float, ...]

    @property
    def attained(self) -> float:
        """The part of all requests that was in time."""
        good = sum(map(sum, self.served))
        return good / max(1, good + sum(self.refused))


def arrivals(
    rates_rps: Sequence[float], gaps: Sequence[Iterator[float]], count: int
) -> list[tuple[float, int]]:
    """About so many requests of all models, each by its rate and its gaps (in mean gaps): (moment in ms, model), ascending."""
    until_ms = 1000.0 * count / sum(rates_rps)
    models = enumerate(zip(rates_rps, gaps, strict=True))
    return list(
        heapq.merge(*(_own(place, 1000.0 / rate_rps, own, until_ms) for place, (rate_rps, own) in models))
    )


def _own(place: int, mean_ms: float, gaps: Iterator[float], until_ms: float) -> list[tuple[float, int]]:
    """The first one comes after a gap, too."""
    at_ms = 0.0
    found: list[tuple[float, int]] = []
    for gap in gaps:
        at_ms += mean_ms * gap
        if at_ms >= until_ms:
            break
        found.append((at_ms, place))
    return found


def play(
    arrived: Sequence[tuple[float, int]],
    slos_ms: Sequence[float],
    groups: Sequence[Mapping[int, Sequence[float]]],
) -> Played:
    """Serve the arrivals. `groups[g][model]` are the times of that model's stages there, in ms; absent: g does not host it."""
    hosts: list[list[tuple[int, Sequence[float]]]] = [
        [(number, group[model]) for number, group in enumerate(groups) if model in group]
        for model in range(len(slos_ms))
    ]
    stages = [len(next(iter(group.values()), ())) for group in groups]
    free_at_ms = [[0.0] * count for count in stages]
    served = [[0] * len(slos_ms) for _ in groups]
    refused = [0] * len(slos_ms)
    busy_ms = [0.0] * len(groups)
    for at_ms, model in arrived:
        best: tuple[float, int, list[float], float] | None = None
        for number, stages_ms in hosts[model]:
            ends_at_ms, work_ms = at_ms, 0.0
            ends: list[float] = []
            for stage_ms, stage_free_at_ms in zip(stages_ms, free_at_ms[number], strict=True):
                ends_at_ms = (stage_free_at_ms if stage_free_at_ms > ends_at_ms else ends_at_ms) + stage_ms
                ends.append(ends_at_ms)
                work_ms += stage_ms
            if best is None or ends_at_ms < best[0]:
                best = ends_at_ms, number, ends, work_ms
        if best is None or best[0] > at_ms + slos_ms[model]:
            refused[model] += 1
            continue
        _, number, free_at_ms[number], work_ms = best
        served[number][model] += 1
        busy_ms[number] += work_ms / stages[number]
    return Played(tuple(map(tuple, served)), tuple(refused), tuple(busy_ms))
