"""FFD+ and FFD++: first fit decreasing with iGniter's start values, as iGniter section 5.1 compares with them.

FFD+ gives every workload r_lower for good and takes the first GPU with room: it knows no interference, and
what its neighbours then do to a workload is listed under the violations. FFD++ (figure 19) takes the first
GPU on which algorithm 2 finds shares for everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fabric.policy_options import Flag
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, Profiles
from policies.placement.igniter.cluster import place_by_kind
from policies.placement.igniter.packing import first_fit, first_growth
from policies.placement.igniter.plan import KindPlan
from policies.placement.igniter.policy import shared_plan
from policies.placement.igniter.workload import IgniterGpuKind
from policies.registry import Registered
from profiles.igniter.performance_model import IgniterProfile


class Ffd:
    """FFD+; with `has_growth` FFD++, which also looks at what a workload takes on a new GPU."""

    def __init__(self, *, has_growth: bool = False) -> None:
        self._has_growth = has_growth

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  it plans anew
    ) -> Placement:
        """Place; needs `IgniterProfile`s, and prices where there are several types of GPU."""
        return place_by_kind(models, gpus, profiles, self._plan)

    def _plan(
        self, models: Sequence[tuple[PlacedModelInput, IgniterProfile]], kind: IgniterGpuKind
    ) -> KindPlan:
        choose = first_growth if self._has_growth else first_fit
        return shared_plan(models, kind, choose, is_new_checked=self._has_growth)


REGISTERED: Final = Registered({"growth": Flag(False)}, lambda options: Ffd(has_growth=options["growth"]))
