"""Which rates the plan is for, and which it follows: declared ones are a floor, measured ones drift (gpulet)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from fabric.ids import ModelId
from roles.scheduler.measured_rates import HISTORY_LOOKS, MeasuredRates, has_drifted, with_headroom
from roles.scheduler.planning.desired_state import Desired, PlannedRate

SILENT_RPS: Final = 1.0 / HISTORY_LOOKS
"""What counts as measured of a model that nobody asks for, one request in 30 s: policies give no place to a model without a rate."""


class PlannedRates:
    """Of each model in r/s: what was placed for, which has room in it, and the rate that this followed.

    A rate is the highest reading of 30 s. Until there are so many the followed one is among them: a former scheduler measured it, and
    what serves was placed for it.
    `kept`: what that one wrote down; the declared rates of models that it says nothing of.
    """

    def __init__(
        self, kept: Mapping[ModelId, PlannedRate], declared_rps: Mapping[ModelId, float], loads: MeasuredRates
    ) -> None:
        self._loads = loads
        declared = {model_id: PlannedRate(rate_rps, rate_rps) for model_id, rate_rps in declared_rps.items()}
        self.planned: Mapping[ModelId, PlannedRate] = {**declared, **kept}

    def placed_rps(self, model_id: ModelId) -> float | None:
        """What the plan has room for; None where no rate is known."""
        rate = self.planned.get(model_id)
        return None if rate is None else rate.placed_rps

    def forget(self, model_id: ModelId) -> None:
        """It is served no more."""
        self.planned = {other: rate for other, rate in self.planned.items() if other != model_id}

    def drifted(self, desired: Desired) -> list[ModelId]:
        """Models whose rate is not what was planned for. What is declared is planned for in any case."""
        found = []
        for model_id in desired.model_ids:
            rate_rps = self._effective_rps(model_id, desired, desired)
            former = self.planned.get(model_id)
            former_rps = 0.0 if former is None else former.followed_rps
            if rate_rps is not None and has_drifted(rate_rps, former_rps):
                found.append(model_id)
        return found

    def target(self, desired: Desired, present: Desired) -> dict[ModelId, PlannedRate]:
        """What to place for, and the rates that this follows. Those that have not drifted stay as they are."""
        target: dict[ModelId, PlannedRate] = {}
        for model_id in desired.model_ids:
            rate_rps = self._effective_rps(model_id, desired, present)
            if rate_rps is None:
                continue
            declared_rps, former = desired.declared_rps.get(model_id), self.planned.get(model_id)
            is_same = declared_rps == present.declared_rps.get(model_id)
            if is_same and former is not None and not has_drifted(rate_rps, former.followed_rps):
                target[model_id] = former
            elif declared_rps is not None and not has_drifted(rate_rps, declared_rps):
                target[model_id] = PlannedRate(max(SILENT_RPS, declared_rps), declared_rps)
            else:
                target[model_id] = PlannedRate(with_headroom(rate_rps), rate_rps)
        return target

    def settle(self, placed_rps: Mapping[str, float], target: Mapping[ModelId, PlannedRate]) -> None:
        """A plan for these was made."""
        followed = {model_id: rate.followed_rps for model_id, rate in target.items()}
        self.planned = {
            ModelId(name): PlannedRate(rate_rps, followed.get(ModelId(name), rate_rps))
            for name, rate_rps in placed_rps.items()
        }

    def go_back(self, before: Mapping[ModelId, PlannedRate], but: Collection[ModelId]) -> None:
        """A plan was given up: it is as it was before it, but for these models."""
        self.planned = {
            **before,
            **{model_id: rate for model_id, rate in self.planned.items() if model_id in but},
        }

    def _effective_rps(self, model_id: ModelId, desired: Desired, present: Desired) -> float | None:
        declared_rps, measured_rps = desired.declared_rps.get(model_id), self._loads.rate_rps(model_id)
        if measured_rps is not None:
            measured_rps = max(SILENT_RPS, measured_rps)
        former, former_rps = self.planned.get(model_id), None
        if former is not None and not self._loads.has_history(model_id):
            declared_before_rps = present.declared_rps.get(model_id)
            former_rps = former.followed_rps if former.outlasts(declared_before_rps, declared_rps) else None
        known = [rate_rps for rate_rps in (declared_rps, measured_rps, former_rps) if rate_rps is not None]
        return max(known) if known else None
