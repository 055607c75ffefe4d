"""AlpaServe (Li et al., OSDI 2023, section 4): models that fit are cut, too, so that a burst of one has several GPUs.

GPUs are divided into groups of one size, and a model in a group is cut into as many stages as the group has GPUs. Every GPU then
holds a part of many models instead of few whole ones, and a burst on one of them keeps the whole group busy. The price is what a
cut costs: stages add up to more than the whole, and the slowest holds up the others.

For each size of groups replicas are chosen greedily (its algorithm 1 with the faster heuristic of that section): play the requests,
then put the model of which most were refused on the least busy group that has memory for it, until none has. Of all selections on
the way, for all sizes (its algorithm 2), the one that has most requests in time wins. Not done here: tensor parallelism within
a group, and buckets of models of like run times with groups of their own.

Groups run batches of one, as planned: behind a large batch a small one waits in every stage, where no discipline expects it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final

from fabric.errors import ConfigError
from fabric.policy_options import Number, Schema
from policies.placement.alpaserve.first_come import Played, arrivals, play
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Rejected,
    Unplaced,
    cannot_host,
    in_gib,
    slice_memory_bytes,
)
from policies.placement.common.conditions import Conditions
from policies.placement.common.demands import rate_of
from policies.placement.common.gpu_kinds import gpu_classes
from policies.placement.common.request_checks import in_order, joined, rated, require_gpus
from policies.registry import Registered
from policies.slo import BAD_RATE_ALLOWED
from profiles.model import STAGES_MAX

OPTIONS: Schema = {
    "group_size": Number(None, minimum=1, maximum=STAGES_MAX, is_minimum_allowed=True, is_whole=True)
}

REQUESTS_MAX = 8_000  # played to score one selection
REQUESTS_MIN = 1_000
WORK_MAX = 600_000  # requests played for one size of groups: some seconds
ROUNDS_MAX = 300  # of choosing; where there is room for more replicas several are chosen in each


@dataclass(slots=True)
class _Group:
    """Equal GPUs of one host, and the models whose stages they carry, by place."""

    gpus: tuple[GpuSlot, ...]
    models: list[int] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class _Selection:
    """What each group hosts, by place of the group, and how the requests fared."""

    groups: tuple[tuple[tuple[GpuSlot, ...], tuple[int, ...]], ...]
    played: Played


class AlpaServe:
    """`group_size`: only groups of so many GPUs; else every size into which some model can be cut is tried."""

    def __init__(self, options: Mapping[str, Any], conditions: Conditions | None = None) -> None:
        self._options = options
        self._conditions = conditions or Conditions()

    def under(self, conditions: Conditions) -> AlpaServe:
        """The policy for these conditions: how bursty requests are, and what the network takes of an SLO."""
        return AlpaServe(self._options, conditions)

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  nothing is kept: the search alone decides
    ) -> Placement:
        """Place; ConfigError where there is no GPU, or no group of the size that is asked for."""
        require_gpus(gpus)
        planned, left = rated(models)
        sizes = self._sizes(planned, gpus, profiles)
        if not planned:
            return Placement((), tuple(left))
        searches = [
            _Search(planned, _groups(gpus, size, sizes), profiles, self._conditions) for size in sizes
        ]
        found = {size: search.best() for size, search in zip(sizes, searches, strict=True)}
        best = max(sizes, key=lambda size: (found[size].played.attained, -size))
        search = searches[sizes.index(best)]
        unplaced = in_order([*left, *search.unplaced(found[best])], models)
        return search.placement(found[best], unplaced, _decision(best, found))

    def _sizes(
        self, models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
    ) -> list[int]:
        """Sizes of groups worth trying: 1, and those into which some model can be cut, while some host has so many GPUs."""
        largest = max(len(own) for own in _by_host(gpus))
        asked = self._options.get("group_size")
        if asked is not None:
            if asked > largest:
                raise ConfigError(
                    f"placement.alpaserve.group_size is {asked}; a host has at most {largest} equal GPUs, "
                    "and a group is on one host"
                )
            return [int(asked)]
        names = {model.model_id for model in models}
        cuts = {
            count
            for (model_id, _), profile in profiles.items()
            if model_id in names
            for count in profile.cuts
        }
        return [1, *sorted(count for count in cuts if count <= largest)]


class _Search:
    """Greedy choice of what a number of groups hosts."""

    def __init__(
        self,
        models: Sequence[PlacedModelInput],
        groups: Sequence[_Group],
        profiles: Profiles,
        conditions: Conditions,
    ) -> None:
        self._models = models
        self._groups = groups
        self._profiles = profiles
        self._slos_ms = [model.slo_ms - conditions.delay_ms(1) for model in models]
        self._slots = max(1, sum(self._room(group) for group in groups))
        rounds = min(self._slots, ROUNDS_MAX)
        count = max(REQUESTS_MIN, min(REQUESTS_MAX, WORK_MAX // rounds))
        gaps = conditions.gaps or (lambda _: repeat(1.0))
        rates_rps = [rate_of(model) for model in models]
        self._arrived = arrivals(rates_rps, [gaps(model.model_id) for model in models], count)

    def best(self) -> _Selection:
        """The best of all selections on the way; of equals the last, which has most replicas."""
        best = now = self._selection()
        at_once = -(-self._slots // ROUNDS_MAX)
        while sum(self._add(now.played) for _ in range(at_once)):
            now = self._selection()
            if now.played.attained >= best.played.attained:
                best = now
        return best

    def placement(
        self, selection: _Selection, unplaced: tuple[Unplaced, ...], decision: Decision
    ) -> Placement:
        """The selection as a plan. What is placed of a model's rate is shared as its requests were."""
        played = selection.played
        served_of = [sum(group[place] for group in played.served) for place in range(len(self._models))]
        replicas = Counter(place for _, hosted in selection.groups for place in hosted)
        placed_rps = [
            rate_of(model) - self._missing_rps(place, played) for place, model in enumerate(self._models)
        ]
        slices: list[PlannedSlice] = []
        for (gpus, hosted), served in zip(selection.groups, played.served, strict=True):
            if not hosted:
                continue
            entries = tuple(
                PlannedModel(
                    self._models[place].model_id,
                    rate_rps=placed_rps[place]
                    * (served[place] / served_of[place] if served_of[place] else 1.0 / replicas[place]),
                    predicted_ms=sum(self._stages_ms(place, gpus)),
                    batch_max=1 if len(gpus) > 1 else None,  # see the module's docstring
                )
                for place in hosted
            )
            indices = tuple(gpu.index for gpu in gpus)
            slices.append(PlannedSlice(indices[0], None, entries, indices[1:]))
        slices.sort(key=lambda planned: planned.gpu)
        goodput_rps = sum(
            rate_of(model) * (1.0 - _refused_part(place, played)) for place, model in enumerate(self._models)
        )
        return Placement(tuple(slices), unplaced, (), goodput_rps, (decision,))

    def unplaced(self, selection: _Selection) -> list[Unplaced]:
        """Models that no group hosts, and the part of the others' rates for which groups are too few; with the reason."""
        hosted = {place for _, models in selection.groups for place in models}
        left = []
        for place, model in enumerate(self._models):
            if place not in hosted:
                left.append(Unplaced(model.model_id, model.rate_rps, self._why_not(place)))
            elif missing_rps := self._missing_rps(place, selection.played):
                reason = (
                    "so many of its requests would be late on the groups that host it, as bursty as they are"
                )
                left.append(Unplaced(model.model_id, missing_rps, reason))
        return left

    def _missing_rps(self, place: int, played: Played) -> float:
        """The part of a model's rate that was refused, where that is more than any placement may miss."""
        part = _refused_part(place, played)
        return 0.0 if part < BAD_RATE_ALLOWED else part * rate_of(self._models[place])

    def _why_not(self, place: int) -> str:
        reasons = [self._cannot(place, group.gpus) for group in self._groups]
        if None in reasons:
            return "other models have the memory, and serve more requests with it"
        return joined(reason for reason in reasons if reason is not None)

    def _selection(self) -> _Selection:
        groups = [
            {place: self._stages_ms(place, group.gpus) for place in group.models} for group in self._groups
        ]
        played = play(self._arrived, self._slos_ms, groups)
        return _Selection(tuple((group.gpus, tuple(group.models)) for group in self._groups), played)

    def _add(self, played: Played) -> bool:
        """Put the model of which most were refused on the least busy group that can take it; False: none can take any."""
        replicas = [0] * len(self._models)
        for group in self._groups:
            for place in group.models:
                replicas[place] += 1
        by_need = sorted(
            range(len(self._models)),
            key=lambda place: (-played.refused[place] / (1 + replicas[place]), replicas[place]),
        )
        by_use = sorted(
            range(len(self._groups)),
            key=lambda number: (played.busy_ms[number], len(self._groups[number].models)),
        )
        for place in by_need:
            for number in by_use:
                group = self._groups[number]
                if place not in group.models and self._fits(place, group):
                    group.models.append(place)
                    return True
        return False

    def _fits(self, place: int, group: _Group) -> bool:
        if self._cannot(place, group.gpus) is not None:
            return False
        return self._memory_bytes([*group.models, place], group.gpus) <= group.gpus[0].memory_bytes

    def _cannot(self, place: int, gpus: Sequence[GpuSlot]) -> str | None:
        """Why a group of these GPUs, though empty, cannot serve the model."""
        model, gpu, stages = self._models[place], gpus[0], len(gpus)
        reason = cannot_host(model, gpu, self._profiles, stages=stages)
        if reason is None and (model.model_id, gpu.gpu_type) not in self._profiles:
            reason = f"it has no profile for GPU type {gpu.gpu_type}"
        needed = self._memory_bytes([place], gpus)
        if reason is None and needed > gpu.memory_bytes:
            reason = (
                f"memory: a stage of {stages} needs {in_gib(needed)}, a GPU has {in_gib(gpu.memory_bytes)}"
            )
        return reason

    def _memory_bytes(self, places: Sequence[int], gpus: Sequence[GpuSlot]) -> int:
        models = [self._models[place] for place in places]
        return slice_memory_bytes(models, gpus[0].gpu_type, self._profiles, len(gpus))

    def _stages_ms(self, place: int, gpus: Sequence[GpuSlot]) -> tuple[float, ...]:
        profile = self._profiles[self._models[place].model_id, gpus[0].gpu_type]
        return tuple(table[0] for table in profile.stage_tables(len(gpus)))

    def _room(self, group: _Group) -> int:
        """How many replicas the group has memory for, at most."""
        needed = [
            self._memory_bytes([place], group.gpus)
            for place in range(len(self._models))
            if self._cannot(place, group.gpus) is None
        ]
        room, left = 0, group.gpus[0].memory_bytes
        for size in sorted(needed):
            left -= size
            room += left >= 0
        return room


def _refused_part(place: int, played: Played) -> float:
    """Of a model's requests; of one so rare that it had none, nothing."""
    offered = sum(group[place] for group in played.served) + played.refused[place]
    return played.refused[place] / max(1, offered)


def _by_host(gpus: Sequence[GpuSlot]) -> list[list[GpuSlot]]:
    """Equal GPUs of one host together."""
    found: list[list[GpuSlot]] = []
    for kind in gpu_classes(gpus):
        hosts: dict[str, list[GpuSlot]] = {}
        for gpu in kind.gpus:
            hosts.setdefault(gpu.node_id, []).append(gpu)
        found.extend(hosts.values())
    return found


def _groups(gpus: Sequence[GpuSlot], size: int, sizes: Sequence[int]) -> list[_Group]:
    """Groups of that size, and of what is left on each host the largest others of `sizes`."""
    groups: list[_Group] = []
    for own in _by_host(gpus):
        first = 0
        while first < len(own):
            left = len(own) - first
            fitting = [one for one in sizes if one <= min(size, left)]
            if not fitting:
                break
            take = max(fitting)
            groups.append(_Group(tuple(own[first : first + take])))
            first += take
    return groups


def _decision(best: int, found: Mapping[int, _Selection]) -> Decision:
    def metrics(size: int) -> dict[str, float]:
        selection = found[size]
        replicas = sum(len(hosted) for _, hosted in selection.groups)
        return {"in time %": 100 * selection.played.attained, "replicas": replicas}

    rejected = tuple(
        Rejected(f"groups of {size}", "fewer requests in time", metrics(size))
        for size in sorted(found, key=lambda size: -found[size].played.attained)
        if size != best
    )
    return Decision("groups of GPUs", f"of {best}", metrics(best), rejected)


REGISTERED: Final = Registered(OPTIONS, AlpaServe)
