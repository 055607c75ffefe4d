"""Which rates the plan is for, and which it follows: declared ones are a floor, measured ones drift (gpulet)."""

from __future__ import annotations

from collections.abc import Mapping

from fabric.ids import ModelId
from roles.scheduler.measured_rates import MeasuredRates, has_drifted, with_headroom
from roles.scheduler.planning.desired_state import Desired


class PlannedRates:
    """Of each model in r/s: what was placed for, which has room in it, and the rate that this followed."""

    def __init__(self, declared_rps: Mapping[ModelId, float], loads: MeasuredRates) -> None:
        self._loads = loads
        self._placed_rps = dict(declared_rps)
        self._followed_rps = dict(declared_rps)

    def placed_rps(self, model_id: ModelId) -> float | None:
        """What the plan has room for; None where no rate is known."""
        return self._placed_rps.get(model_id)

    def forget(self, model_id: ModelId) -> None:
        """It is served no more."""
        self._placed_rps.pop(model_id, None)
        self._followed_rps.pop(model_id, None)

    def drifted(self, desired: Desired) -> list[ModelId]:
        """Models whose rate is not what was planned for. What is declared is planned for in any case."""
        found = []
        for model_id in desired.model_ids:
            rate_rps = self._effective_rps(model_id, desired)
            if rate_rps is not None and has_drifted(rate_rps, self._followed_rps.get(model_id, 0.0)):
                found.append(model_id)
        return found

    def target(self, desired: Desired, present: Desired) -> tuple[dict[ModelId, float], dict[ModelId, float]]:
        """What to place for, and the rates that this follows. Those that have not drifted stay as they are."""
        place_rps: dict[ModelId, float] = {}
        follow_rps: dict[ModelId, float] = {}
        for model_id in desired.model_ids:
            rate_rps, declared_rps = (
                self._effective_rps(model_id, desired),
                desired.declared_rps.get(model_id),
            )
            if rate_rps is None:
                continue
            former_rps = self._followed_rps.get(model_id)
            is_same = declared_rps == present.declared_rps.get(model_id)
            if is_same and former_rps is not None and not has_drifted(rate_rps, former_rps):
                place_rps[model_id], follow_rps[model_id] = self._placed_rps[model_id], former_rps
            elif declared_rps is not None and not has_drifted(rate_rps, declared_rps):
                place_rps[model_id] = follow_rps[model_id] = declared_rps
            else:
                place_rps[model_id], follow_rps[model_id] = with_headroom(rate_rps), rate_rps
        return place_rps, follow_rps

    def settle(self, placed_rps: Mapping[str, float], follow_rps: Mapping[ModelId, float]) -> None:
        """A plan for these was made."""
        self._placed_rps = {ModelId(name): rate_rps for name, rate_rps in placed_rps.items()}
        self._followed_rps = {**self._placed_rps, **follow_rps}

    def _effective_rps(self, model_id: ModelId, desired: Desired) -> float | None:
        declared_rps, measured_rps = desired.declared_rps.get(model_id), self._loads.rate_rps(model_id)
        known = [rate_rps for rate_rps in (declared_rps, measured_rps) if rate_rps is not None]
        return max(known) if known else None
