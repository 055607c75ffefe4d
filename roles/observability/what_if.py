"""The last minute simulated twice, beside each other: by what was measured in it, and with another SLO, rate or number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fabric.errors import FabricError
from fabric.ids import ModelId
from policies.slo import BAD_RATE_ALLOWED
from roles.observability.last_minute import Minute
from roles.observability.units import shown_ms
from roles.workload.outcomes import ModelOutcome, Outcome

DOUBTFUL: Final = 0.05
"""A bad rate that is that much higher than the simulation says."""
PLAYED_MIN_MS: Final = 1_000.0
"""A shorter span says nothing of rates."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be tried, all of it at once. `slos_ms` and `rates` (factors) by model; `gpus` so many more of the first node."""

    slos_ms: Mapping[ModelId, float] = field(default_factory=dict)
    rates: Mapping[ModelId, float] = field(default_factory=dict)
    gpus: int = 0

    @property
    def text(self) -> str:
        """For people."""
        parts = [f"an SLO of {shown_ms(slo_ms)} for {model_id}" for model_id, slo_ms in self.slos_ms.items()]
        parts += [f"{factor:g} times the requests of {model_id}" for model_id, factor in self.rates.items()]
        parts += [f"{self.gpus} GPU{'s' * (self.gpus != 1)} more"] * (self.gpus > 0)
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Two simulations: `today` by the medians that were measured, `then` with the change. `gpus`: how many there are, and would be."""

    text: str
    span_ms: float
    today: Outcome
    then: Outcome
    gpus: tuple[int, int]
    lived: Mapping[ModelId, float]
    """What was really bad of each model in the minute."""

    @property
    def doubt(self) -> str:
        """Where the simulation does not show what happened, its answer is of a healthier cluster; empty: it does."""
        far = {
            model_id: bad_rate
            for model_id, bad_rate in self.lived.items()
            if bad_rate - self.today.models[model_id].bad_rate > DOUBTFUL
        }
        if not far:
            return ""
        worst = max(far, key=lambda model_id: far[model_id])
        return (
            f"In truth {far[worst]:.0%} of {worst} were late or refused: something is wrong that no simulation shows"
            f" (tenuto why {worst})."
        )

    @property
    def sentence(self) -> str:
        """What it comes to."""
        before, after = (_missed(outcome) for outcome in (self.today, self.then))
        kept = sorted(before - after)
        lost = sorted(after - before)
        if not before and not after:
            today = "" if self.doubt else ", as they do today"
            return f"With {self.text} all models keep their SLOs{today}."
        parts = [f"{', '.join(kept)} would keep {'its SLO' if len(kept) == 1 else 'their SLOs'}"] * bool(kept)
        parts += [f"{', '.join(lost)} would miss {'its SLO' if len(lost) == 1 else 'their SLOs'}"] * bool(
            lost
        )
        parts += [f"{', '.join(sorted(before & after))} would still miss"] * bool(before & after)
        return f"With {self.text}: {'; '.join(parts)}."

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "change": self.text,
            "sentence": self.sentence,
            "doubt": self.doubt,
            "span_s": self.span_ms / 1e3,
            "requests": self.today.offered,
            "gpus": {"today": self.gpus[0], "then": self.gpus[1]},
            "models": {
                model_id: {
                    "today": _plain(self.today.models[model_id], self.span_ms),
                    "then": _plain(self.then.models[model_id], self.span_ms),
                }
                for model_id in self.today.models
            },
        }


def what_if(minute: Minute, change: Change, lived: Mapping[ModelId, float]) -> WhatIf:
    """Play it twice; `lived`: what was bad of each model. Raises FabricError for a change that cannot be, and where nothing came."""
    if not any(at_ms.size for at_ms in minute.arrivals.values()) or minute.span_ms < PLAYED_MIN_MS:
        raise FabricError("too few requests came in the last minute to play it again")
    changed = minute
    for model_id, factor in change.rates.items():
        changed = changed.with_rate(model_id, factor)
    for model_id, slo_ms in change.slos_ms.items():
        changed = changed.with_slo(model_id, slo_ms)
    if change.gpus:
        changed = changed.with_gpus(change.gpus)
    count = len(minute.gpus)
    gpus = (count, count + change.gpus)
    today = minute.played()
    known = {model_id: bad_rate for model_id, bad_rate in lived.items() if model_id in today.models}
    return WhatIf(change.text, minute.span_ms, today, changed.played(), gpus, known)


def _missed(outcome: Outcome) -> set[str]:
    return {str(model_id) for model_id, one in outcome.models.items() if one.bad_rate >= BAD_RATE_ALLOWED}


def _plain(one: ModelOutcome, span_ms: float) -> dict[str, Any]:
    return {
        "rate_rps": 1e3 * one.offered / span_ms,
        "goodput_rps": 1e3 * one.good / span_ms,
        "bad_rate": one.bad_rate,
        "late": one.late,
        "dropped": one.dropped,
        "p50_ms": one.p50_ms,
        "p99_ms": one.p99_ms,
        "batch_mean": one.batch_mean,
    }
