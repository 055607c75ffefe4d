"""Which model on which slice of which GPU: placement policies behind one interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fabric.errors import ConfigError
from fabric.policy_options import checked_options, shown, suggestion
from policies.placement.common.base import PlacementPolicy
from policies.placement.common.third_party import third_party_names, third_party_policy
from policies.registry import Registry

DEFAULT = "symphony"

PLACEMENTS: Registry[PlacementPolicy] = Registry(
    {
        "symphony": "policies.placement.symphony.policy:REGISTERED",
        "exclusive": "policies.placement.exclusive:REGISTERED",
        "gpulet": "policies.placement.gpulet.policy:REGISTERED",
        "igniter": "policies.placement.igniter.policy:REGISTERED",
        "ffd": "policies.placement.igniter.ffd:REGISTERED",
        "gslice": "policies.placement.igniter.gslice:REGISTERED",
        "gpulets": "policies.placement.igniter.gpulets:REGISTERED",
        "alpaserve": "policies.placement.alpaserve.policy:REGISTERED",
        "given": "policies.placement.given:REGISTERED",
        "usher": "policies.placement.usher.policy:USHER",
        "wao-usher": "policies.placement.usher.policy:WAO_USHER",
        "wsm-usher": "policies.placement.usher.policy:WSM_USHER",
        "ao-milp": "policies.placement.milp.policy:AO_MILP",
        "wsm-milp": "policies.placement.milp.policy:WSM_MILP",
        "tenuto": "policies.placement.tenuto.policy:REGISTERED",
    }
)


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
