"""GPUs of several kinds among sub-clusters: each model needs a GPU in its own that can host it.

Models and GPUs are divided by load (`subclusters.py`), which knows nothing of kinds. Here GPUs of different kinds change
places, and where that is not enough a model moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fabric.ids import ModelId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Profiles, slice_memory_bytes
from policies.placement.common.gpu_kinds import gpu_classes

Cost = tuple[int, int]
"""Models that no GPU of their sub-cluster hosts, and GPUs that host nothing."""


class Hosting:
    """Which sub-cluster has which models and GPUs. `possible`: the kinds, by their first GPU, that could host each model alone."""

    def __init__(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        possible: Mapping[ModelId, Sequence[GpuSlot]],
        profiles: Profiles,
        of_model: Mapping[ModelId, int],
        of_gpu: Mapping[int, int],
    ) -> None:
        self._models = [model for model in models if model.model_id in of_model and possible[model.model_id]]
        self._kinds = gpu_classes(gpus)
        self._possible = possible
        self._profiles = profiles
        self.of_model = {model.model_id: of_model[model.model_id] for model in self._models}
        self.of_gpu = dict(of_gpu)
        self._count = Counter(self.of_model.values())
        self._hosted: list[list[frozenset[ModelId]]] = []
        self._has: list[Counter[int]] = []
        for place in range(1 + max(of_gpu.values())):
            self._hosted.append(self._hosted_by_kind(place))
            self._has.append(Counter())
        for number, kind in enumerate(self._kinds):
            for gpu in kind.gpus:
                self._has[of_gpu[gpu.index]][number] += 1

    def arranged(self) -> Cost:
        """Change places while that helps; what is left to be wished for then."""
        while self._swap() or self._move():
            pass
        return self._sum(range(len(self._has)))

    def hosted(self) -> dict[int, frozenset[ModelId]]:
        """The models of each GPU."""
        return {
            gpu.index: self._hosted[self.of_gpu[gpu.index]][number]
            for number, kind in enumerate(self._kinds)
            for gpu in kind.gpus
        }

    def _swap(self) -> bool:
        """The best exchange of two GPUs of different kinds."""
        everywhere = range(len(self._has))
        best: tuple[Cost, int, int, int, int] | None = None
        for one in everywhere:
            now = self._cost(one, self._has[one])
            if now == (0, 0):
                continue
            for other in everywhere:
                both = self._sum((one, other))
                for out in self._has[one] if other != one else ():
                    for into in self._has[other]:
                        if into == out:
                            continue
                        gains = self._less(
                            both,
                            self._cost(one, _exchanged(self._has[one], out, into)),
                            self._cost(other, _exchanged(self._has[other], into, out)),
                        )
                        if gains > (0, 0) and (best is None or gains > best[0]):
                            best = gains, one, other, out, into
        if best is None:
            return False
        _, one, other, out, into = best
        for kind, giver, taker in ((out, one, other), (into, other, one)):
            gpu = max(gpu.index for gpu in self._kinds[kind].gpus if self.of_gpu[gpu.index] == giver)
            self.of_gpu[gpu] = taker
        self._has[one] = _exchanged(self._has[one], out, into)
        self._has[other] = _exchanged(self._has[other], into, out)
        return True

    def _move(self) -> bool:
        """A model that no GPU of its sub-cluster hosts goes where one does, if nobody loses its place by that."""
        for model in self._models:
            home = self.of_model[model.model_id]
            if any(model.model_id in self._hosted[home][kind] for kind in self._has[home]):
                continue
            for other in range(len(self._has)):
                if other == home or not any(
                    self._kinds[kind].slot in self._possible[model.model_id] for kind in self._has[other]
                ):
                    continue
                before = self._sum((home, other))
                self._put(model.model_id, home, other)
                if self._sum((home, other)) < before:
                    return True
                self._put(model.model_id, other, home)
        return False

    def _put(self, model_id: ModelId, home: int, other: int) -> None:
        self.of_model[model_id] = other
        self._count[home] -= 1
        self._count[other] += 1
        for place in (home, other):
            self._hosted[place] = self._hosted_by_kind(place)

    def _hosted_by_kind(self, place: int) -> list[frozenset[ModelId]]:
        """In file order while memory lasts."""
        inside = [model for model in self._models if self.of_model[model.model_id] == place]
        found = []
        for kind in self._kinds:
            hosted: list[PlacedModelInput] = []
            for model in inside:
                if kind.slot in self._possible[model.model_id]:
                    needed = slice_memory_bytes([*hosted, model], kind.slot.gpu_type, self._profiles)
                    if needed <= kind.slot.memory_bytes:
                        hosted.append(model)
            found.append(frozenset(model.model_id for model in hosted))
        return found

    def _cost(self, place: int, has: Counter[int]) -> Cost:
        hosted = self._hosted[place]
        served = frozenset[ModelId]().union(*(hosted[kind] for kind in has))
        return self._count[place] - len(served), sum(count for kind, count in has.items() if not hosted[kind])

    def _sum(self, places: Iterable[int]) -> Cost:
        costs = [self._cost(place, self._has[place]) for place in places]
        return sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)

    @staticmethod
    def _less(before: Cost, *after: Cost) -> Cost:
        return before[0] - sum(cost[0] for cost in after), before[1] - sum(cost[1] for cost in after)


def _exchanged(has: Counter[int], out: int, into: int) -> Counter[int]:
    return +Counter({**has, out: has[out] - 1, into: has[into] + 1})
