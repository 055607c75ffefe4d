"""Which model on which slice of which GPU: placement policies behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fabric.errors import ConfigError
from fabric.policy_options import Choice, Flag, Free, Number, Schema, checked_options, shown, suggestion
from policies.placement.alpaserve import OPTIONS as ALPASERVE_OPTIONS
from policies.placement.alpaserve import AlpaServe
from policies.placement.common.base import PlacementPolicy
from policies.placement.common.third_party import third_party_names, third_party_policy
from policies.placement.exclusive import Exclusive
from policies.placement.given import Given
from policies.placement.gpulet import GpuletPolicy
from policies.placement.igniter.ffd import Ffd
from policies.placement.igniter.gpulets import Gpulets
from policies.placement.igniter.gslice import Gslice
from policies.placement.igniter.policy import Igniter
from policies.placement.milp import OPTIONS as MILP_OPTIONS
from policies.placement.milp import Milp
from policies.placement.symphony.policy import Symphony
from policies.placement.tenuto import OPTIONS as TENUTO_OPTIONS
from policies.placement.tenuto import Tenuto
from policies.placement.usher import OPTIONS as USHER_OPTIONS
from policies.placement.usher import Usher

DEFAULT = "symphony"


@dataclass(frozen=True, slots=True)
class Registered:
    """A policy: the options it knows, and how it is made from checked ones."""

    options: Schema
    build: Callable[[Mapping[str, Any]], PlacementPolicy]


PLACEMENTS: Mapping[str, Registered] = {
    "symphony": Registered(
        {"subclusters": Number(1, minimum=1, maximum=65_536, is_minimum_allowed=True, is_whole=True)},
        lambda options: Symphony(options["subclusters"]),
    ),
    "exclusive": Registered({}, lambda _: Exclusive()),
    "gpulet": Registered(
        {"search": Choice(("elastic", "exhaustive", "whole")), "interference": Flag(True)},
        lambda options: GpuletPolicy(has_interference=options["interference"], search=options["search"]),
    ),
    "igniter": Registered(
        {"new_gpu": Choice(("checked", "paper"))},
        lambda options: Igniter(is_new_checked=options["new_gpu"] == "checked"),
    ),
    "ffd": Registered({"growth": Flag(False)}, lambda options: Ffd(has_growth=options["growth"])),
    "gslice": Registered(
        {"adjustments": Number(5, maximum=10_000, is_minimum_allowed=True, is_whole=True)},
        lambda options: Gslice(adjustments=options["adjustments"]),
    ),
    "gpulets": Registered({}, lambda _: Gpulets()),
    "alpaserve": Registered(ALPASERVE_OPTIONS, AlpaServe),
    "given": Registered({"slices": Free()}, Given),
    "usher": Registered(USHER_OPTIONS, partial(Usher, "usher", "achieved_occupancy_percent")),
    "wao-usher": Registered(USHER_OPTIONS, partial(Usher, "wao-usher", "weighted_occupancy_percent")),
    "wsm-usher": Registered(USHER_OPTIONS, partial(Usher, "wsm-usher", "weighted_sm_percent")),
    "ao-milp": Registered(MILP_OPTIONS, partial(Milp, "ao-milp", "achieved_occupancy_percent")),
    "wsm-milp": Registered(MILP_OPTIONS, partial(Milp, "wsm-milp", "weighted_sm_percent")),
    "tenuto": Registered(TENUTO_OPTIONS, lambda options: Tenuto(options, _rivals())),
}

_RIVALS = ("exclusive", "usher", "wsm-usher", "ao-milp", "wsm-milp")
"""Policies whose plans `tenuto` considers beside its own."""
# About what their 10 s bring: of 28 random programs on up to 16 GPUs all stages were proven, by 84 nodes at most.
_RIVAL_NODES_MAX = 1_000


def _rivals() -> dict[str, PlacementPolicy]:
    """They look at no clock, so that `tenuto` plans alike on every machine."""
    found = {name: placement_policy(name) for name in _RIVALS}
    return {
        name: policy.within_nodes(_RIVAL_NODES_MAX) if isinstance(policy, Milp) else policy
        for name, policy in found.items()
    }


def placement_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a policy with the defaults filled in; ConfigError where name or options are wrong.

    Those of another distribution's policy are its own to check.
    """
    registered = PLACEMENTS.get(name)
    if registered is None:
        if name not in third_party_names():
            known = [*PLACEMENTS, *third_party_names()]
            raise ConfigError(f"placement: there is no policy {shown(name)}{suggestion(name, known)}")
        return dict(given)
    return checked_options(registered.options, given, f"placement.{name}")


def placement_policy(name: str, options: Mapping[str, Any] | None = None) -> PlacementPolicy:
    """The policy of that name, ours or another distribution's; ConfigError where name or options are wrong."""
    checked = placement_options(name, options or {})
    policy = PLACEMENTS[name].build(checked) if name in PLACEMENTS else third_party_policy(name, checked)
    assert policy is not None, "its options were found under its name"
    return policy
