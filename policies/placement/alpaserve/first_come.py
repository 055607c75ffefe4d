"""AlpaServe's own simulation (section 4.2): batches of one, first come first served, by which it scores a selection.

A request goes to the group that has it done soonest, and is refused as it comes where no group has it done in time. Run times are
known, so nothing else can happen to it: one pass over the arrivals is the whole simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW_GROUPS = 16  # up to which a plain loop is faster


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
    stages = [len(next(iter(group.values()), ())) for group in groups]
    soonest = (_Few if len(groups) <= FEW_GROUPS else _Many)(groups, stages, len(slos_ms))
    served = [[0] * len(slos_ms) for _ in groups]
    refused = [0] * len(slos_ms)
    busy_ms = [0.0] * len(groups)
    for at_ms, model in arrived:
        number = soonest.serve(model, at_ms, at_ms + slos_ms[model])
        if number is None:
            refused[model] += 1
        else:
            served[number][model] += 1
            busy_ms[number] += sum(groups[number][model]) / stages[number]
    return Played(tuple(map(tuple, served)), tuple(refused), tuple(busy_ms))


class _Few:
    """When the stages of each group are free; a plain loop over the groups."""

    def __init__(
        self, groups: Sequence[Mapping[int, Sequence[float]]], stages: Sequence[int], models: int
    ) -> None:
        self._hosts: list[list[tuple[int, Sequence[float]]]] = [
            [(number, group[model]) for number, group in enumerate(groups) if model in group]
            for model in range(models)
        ]
        self._free_at_ms = [[0.0] * count for count in stages]

    def serve(self, model: int, at_ms: float, until_ms: float) -> int | None:
        """Run a request on the group that has it done soonest, the first of equals; None: no group has it done in time."""
        free_at_ms = self._free_at_ms
        best: tuple[float, int, list[float]] | None = None
        for number, stages_ms in self._hosts[model]:
            ends_at_ms = at_ms
            ends: list[float] = []
            for stage_ms, stage_free_at_ms in zip(stages_ms, free_at_ms[number], strict=True):
                ends_at_ms = (stage_free_at_ms if stage_free_at_ms > ends_at_ms else ends_at_ms) + stage_ms
                ends.append(ends_at_ms)
            if best is None or ends_at_ms < best[0]:
                best = ends_at_ms, number, ends
        if best is None or best[0] > until_ms:
            return None
        _, number, free_at_ms[number] = best
        return number


class _Many:
    """The same for many groups: an array by stage, so that a request costs a step for each stage and not for each group."""

    def __init__(
        self, groups: Sequence[Mapping[int, Sequence[float]]], stages: Sequence[int], models: int
    ) -> None:
        depth = max(stages)
        self._hosts: list[NDArray[np.intp]] = []
        self._stages_ms: list[list[NDArray[np.float64]]] = []
        for model in range(models):
            own = [number for number, group in enumerate(groups) if model in group]
            padded = [[*groups[number][model], *[0.0] * (depth - stages[number])] for number in own]
            self._hosts.append(np.array(own, dtype=np.intp))
            self._stages_ms.append(list(np.array(padded).T))
        self._free_at_ms = [np.zeros(len(groups)) for _ in range(depth)]

    def serve(self, model: int, at_ms: float, until_ms: float) -> int | None:
        """As `_Few`."""
        hosts = self._hosts[model]
        if not len(hosts):
            return None
        ends: list[NDArray[np.float64]] = []
        before: float | NDArray[np.float64] = at_ms
        for free_at_ms, stage_ms in zip(self._free_at_ms, self._stages_ms[model], strict=True):
            before = np.maximum(free_at_ms[hosts], before) + stage_ms
            ends.append(before)
        soonest = int(ends[-1].argmin())
        if ends[-1][soonest] > until_ms:
            return None
        number = int(hosts[soonest])
        for free_at_ms, end_at_ms in zip(self._free_at_ms, ends, strict=True):
            free_at_ms[number] = end_at_ms[soonest]
        return number
