"""Usher's placement as the thesis completes it (section 5.2), for three metrics of compute.

Models are put in groups of balanced requirements; one group after another gets the configuration (degree and
batch size of each model) that serves most when its replicas are placed by Usher's rule on what is left. The
metric is the achieved occupancy (`usher`, section 5.2.2), its time-weighted mean (`wao-usher`, 5.3.1) or the
time-weighted SM utilisation (`wsm-usher`, 5.3.2); the MPS share of a replica is its Creq (section 5.2.2).

Points that paper and thesis leave open, and how they are settled: ties of the matching go by name; computed
groups are placed by descending Σ min(rate, GPUs · throughput), as the thesis' implementation happens to do,
given ones as given; each type of GPU is planned by itself, with the models for which it is the cheapest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.policy_options import Choice, Free, Schema, suggestion
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Unplaced,
)
from policies.placement.common.demands import (
    Metric,
    ResourceDemand,
    profiled_demands,
    rate_of,
    why_unservable,
    within_slo,
)
from policies.placement.common.gpu_kinds import GpuClass, gpu_classes
from policies.placement.common.request_checks import in_order, joined, rated, require_gpus, require_prices
from policies.placement.usher.configurations import (
    ModelOptions,
    ReplicaOption,
    options_of,
    smallest_degree,
    usher_batches,
)
from policies.placement.usher.explain import group_decision, shortfall, type_decision
from policies.placement.usher.grouping import Group, balanced_groups, given_groups
from policies.placement.usher.interleaving import Room
from policies.placement.usher.search import FoundConfiguration, best_configuration
from policies.registry import Registered

OPTIONS: Schema = {
    "groups": Free(),
    "group_order": Choice(("goodput", "given"), is_default_given=False),
    "c_min": Choice(("thesis", "cap")),
    "cluster": Choice(("fixed", "growing")),
}


class Usher:
    """Usher with the given metric. Options: see `OPTIONS`.

    `groups` lists model names in lists of at most four, every model once; `group_order` is `given` for given
    groups unless it says otherwise. `c_min`: a model whose rate needs more GPUs than there are is not served
    (`thesis`) or may take all (`cap`). `cluster: growing` meets all rates with the fewest GPUs of those listed.
    """

    def __init__(self, name: str, metric: Metric, options: Mapping[str, Any]) -> None:
        self._name = name
        self._metric = metric
        self._groups = (
            None
            if (given := options.get("groups")) is None
            else given_groups(given, f"placement.{name}.groups")
        )
        default_order = "goodput" if self._groups is None else "given"
        self._is_ordered = options.get("group_order", default_order) == "goodput"
        self._is_capped = options["c_min"] == "cap"
        self._is_growing = options["cluster"] == "growing"

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  nothing is kept: the rule alone decides
    ) -> Placement:
        """Place; what the replicas of a model cannot carry is unplaced as a part of its rate.

        Raises ConfigError for no GPU, or a choice between types of GPU without prices.
        """
        require_gpus(gpus)
        planned, unrated = rated(models)
        if self._groups is not None:
            named = {model_id for group in self._groups for model_id in group}
            unrated += [
                Unplaced(
                    model.model_id, model.rate_rps, f"it is in no group of placement.{self._name}.groups"
                )
                for model in planned
                if model.model_id not in named
            ]
            planned = [model for model in planned if model.model_id in named]
        homes, reasons, decisions = self._homes(planned, gpu_classes(gpus), profiles)
        slices: list[PlannedSlice] = []
        served: dict[ModelId, float] = {}
        for home in homes:
            for group in self._ordered_groups(home):
                found = self._place_group(home, group)
                decisions.append(group_decision(group, home.gpus.slot.gpu_type, found))
                for candidate, option, places in zip(
                    (home.candidates[model_id] for model_id in group),
                    found.tried.options,
                    found.hosts,
                    strict=True,
                ):
                    model_id = candidate.model.model_id
                    served[model_id] = min(candidate.rate_rps, len(places) * option.demand.throughput_rps)
                    slices += _slices(candidate, option, places, home.gpus, served[model_id])
                    reasons[model_id] = shortfall(option, len(places))
        slices.sort(key=lambda planned: planned.gpu)
        short = [
            Unplaced(model.model_id, missing, reasons[model.model_id])
            for model in planned
            if (missing := rate_of(model) - served.get(model.model_id, 0.0)) > 1e-9 * rate_of(model)
        ]
        unplaced = in_order([*short, *unrated], models)
        return Placement(tuple(slices), unplaced, (), sum(served.values()), tuple(decisions))

    def check_names(self, models: Sequence[PlacedModelInput], gpus: int) -> None:  # noqa: ARG002  groups name none
        """Raise ConfigError for `groups` that leave out a model of one GPU, or name one that does not exist."""
        model_ids = [model.model_id for model in models]
        where = f"placement.{self._name}.groups"
        named = [model_id for group in self._groups or () for model_id in group]
        for model_id in named:
            if model_id not in model_ids:
                raise ConfigError(f"{where}: there is no model {model_id!r}{suggestion(model_id, model_ids)}")
        for model in models if self._groups is not None else ():
            # Pipelines and models in ranks have their GPUs before these are placed.
            if model.gpus <= 1 and model.model_id not in named:
                raise ConfigError(f"{where}: model {model.model_id} is in no group")

    def _homes(
        self, models: Sequence[PlacedModelInput], classes: Sequence[GpuClass], profiles: Profiles
    ) -> tuple[list[_Home], dict[ModelId, str], list[Decision]]:
        """Each class of GPUs with its models: the class where the model's c_min GPUs cost least."""
        homes = [_Home(gpus, Room.empty(len(gpus.gpus))) for gpus in classes]
        reasons: dict[ModelId, str] = {}
        decisions: list[Decision] = []
        for model in models:
            offers: list[tuple[float, int, _Home, ModelOptions]] = []
            why_not: list[str] = []
            for home in homes:
                reason = why_unservable(model, home.gpus.slot, profiles, self._metric)
                profiled = profiled_demands(model, home.gpus.slot, profiles, self._metric)
                in_time = usher_batches(within_slo(model, profiled))
                demands = _of_known_shares(model, home.gpus.slot, profiles, in_time)
                if reason is None and not in_time:
                    reason = "Usher's batch sizes of 4 to 128 all take longer than its SLO"
                elif reason is None and not demands:
                    reason = "its batches want smaller shares than the smallest one profiled"
                if reason is not None:
                    why_not.append(reason)
                    continue
                gpu_count = len(home.gpus.gpus)
                needed = smallest_degree(model, demands)
                options = options_of(model, demands, gpu_count, is_capped=self._is_capped)
                if not options:
                    why_not.append(
                        f"its rate needs {needed} GPUs at its largest batch within the SLO, there are {gpu_count}"
                    )
                    continue
                home.balance[model.model_id] = _balance(profiled)
                cost = min(needed, gpu_count) * (home.gpus.slot.price_per_hour or 0.0)
                offers.append((cost, needed, home, ModelOptions(model, options)))
            if not offers:
                reasons[model.model_id] = joined(why_not)
                continue
            is_choice = len({offered.gpus.slot.gpu_type for _, _, offered, _ in offers}) > 1
            if is_choice:
                slots = [offered.gpus.slot for _, _, offered, _ in offers]
                require_prices(slots, f"{model.model_id} goes to the cheapest of several types")
            _, _, home, candidate = min(offers, key=lambda offer: offer[:2])  # the first of equals
            home.candidates[model.model_id] = candidate
            if is_choice:
                costs = {offered.gpus.slot.gpu_type: cost for cost, _, offered, _ in offers}
                decisions.append(type_decision(model, home.gpus.slot.gpu_type, costs))
        return [home for home in homes if home.candidates], reasons, decisions

    def _ordered_groups(self, home: _Home) -> list[Group]:
        """The groups of a class of GPUs: given ones less what is not placed here, or computed ones."""
        if self._groups is None:
            groups = balanced_groups({model_id: home.balance[model_id] for model_id in home.candidates})
        else:
            kept = (tuple(m for m in group if m in home.candidates) for group in self._groups)
            groups = [group for group in kept if group]
        # The order of the input inside a group: it settles ties between configurations.
        places = {model_id: place for place, model_id in enumerate(home.candidates)}
        groups = [tuple(sorted(group, key=places.__getitem__)) for group in groups]
        if self._is_ordered:
            groups.sort(key=lambda group: (-_achievable_rps(home, group), min(group)))
        elif self._groups is None:
            groups.sort(key=lambda group: min(places[model_id] for model_id in group))
        return groups

    def _place_group(self, home: _Home, group: Group) -> FoundConfiguration:
        candidates = [home.candidates[model_id] for model_id in group]
        found = best_configuration(candidates, home.room, is_growing=self._is_growing)
        home.room = found.room
        return found


@dataclass(slots=True)
class _Home:
    """A class of GPUs, what is left of them, and the models that are placed there.

    `balance` is a model's mean Creq - Mreq over all profiled batches, whatever their run time.
    """

    gpus: GpuClass
    room: Room
    candidates: dict[ModelId, ModelOptions] = field(default_factory=dict)
    balance: dict[ModelId, int] = field(default_factory=dict)


def _of_known_shares(
    model: PlacedModelInput, gpu: GpuSlot, profiles: Profiles, demands: Sequence[ResourceDemand]
) -> tuple[ResourceDemand, ...]:
    """Those whose Creq, which is their share, the profile knows."""
    profile = profiles.get((model.model_id, gpu.gpu_type))
    least_percent = 0.0 if profile is None else profile.share_percent_min
    return tuple(one for one in demands if not 0 < one.compute_percent < least_percent)


def _balance(profiled: Sequence[ResourceDemand]) -> int:
    return round(sum(d.compute_units - d.memory_units for d in profiled) / len(profiled))


def _achievable_rps(home: _Home, group: Group) -> float:
    """What the group could serve if every model of it had all the GPUs."""
    gpu_count = len(home.gpus.gpus)
    total = 0.0
    for model_id in group:
        candidate = home.candidates[model_id]
        fastest = max(option.demand.throughput_rps for option in candidate.options)
        total += min(candidate.rate_rps, gpu_count * fastest)
    return total


def _slices(
    candidate: ModelOptions, option: ReplicaOption, places: Sequence[int], gpus: GpuClass, served_rps: float
) -> list[PlannedSlice]:
    """One slice per replica. All have the same batch, so the router's shares of the load are equal."""
    demand = option.demand
    return [
        PlannedSlice(
            gpus.gpus[place].index,
            demand.compute_percent or None,
            (
                PlannedModel(
                    candidate.model.model_id,
                    demand.batch,
                    served_rps / len(places),
                    predicted_ms=demand.exec_ms,
                ),
            ),
        )
        for place in places
    ]


USHER: Final = Registered(OPTIONS, partial(Usher, "usher", "achieved_occupancy_percent"))
WAO_USHER: Final = Registered(OPTIONS, partial(Usher, "wao-usher", "weighted_occupancy_percent"))
WSM_USHER: Final = Registered(OPTIONS, partial(Usher, "wsm-usher", "weighted_sm_percent"))
