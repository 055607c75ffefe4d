"""Which single change would have mended the last minute, as a simulation of it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fabric.errors import FabricError
from fabric.ids import ModelId
from policies.slo import BAD_RATE_ALLOWED
from roles.observability.diagnosis import Evidence, Played, is_mended
from roles.observability.last_minute import Minute

DISCIPLINES: Final = ("tenuto", "eager", "deferred")
SLO_STEPS_MS: Final = (5.0, 10.0, 20.0)
SHARE_STEP_PERCENT: Final = 10.0
GPU_STEPS: Final = (1, 2, 4)
_TRIES_MAX: Final = len(DISCIPLINES) + 1 + len(SLO_STEPS_MS) + len(GPU_STEPS)


def _nobody(done: float) -> None:
    """For those who do not watch."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, with what it would make of the model's bad rate, and of the worst other model's."""

    change: str
    bad_rate: float
    worst_other: float
    is_enough: bool


def suspects_played(minute: Minute, model_id: ModelId, planned_rps: dict[ModelId, float]) -> Played:
    """The minute as planned, and without each suspect."""
    others = [other for other in minute.arrivals if other != model_id]
    as_planned = minute.bad_rate(model_id)
    if as_planned is None or as_planned < BAD_RATE_ALLOWED:
        return Played(as_planned)
    return Played(
        as_planned,
        minute.smooth([model_id]).bad_rate(model_id),
        minute.without(others).bad_rate(model_id) if others else None,
        minute.smooth(others, planned_rps).bad_rate(model_id) if others else None,
    )


def remedies(minute: Minute, evidence: Evidence, on_step: Callable[[float], None] = _nobody) -> list[Remedy]:
    """Changes that help, the smallest that is enough of each kind; those that are enough come first, in order of what they cost.

    `on_step` hears which part of them has been tried.

    `minute`: as live as it can be made, so that it shows what is to be mended.
    """
    model_id = evidence.model_id
    before = minute.bad_rate(model_id)
    if before is None or before < BAD_RATE_ALLOWED:
        return []
    found: list[Remedy] = []
    tried = 0
    for tries in (_disciplines(minute), _shares(minute, model_id), _slos(minute, evidence), _gpus(minute)):
        best: Remedy | None = None
        for change, changed in tries:
            tried += 1
            on_step(tried / _TRIES_MAX)
            remedy = _tried(change, changed, model_id, before)
            if remedy is None:
                continue
            if best is None or remedy.bad_rate < best.bad_rate:
                best = remedy
            if remedy.is_enough:
                best = remedy
                break
        if best is not None and (best.is_enough or best.bad_rate < 0.8 * before):
            found.append(best)
    return sorted(found, key=lambda remedy: not remedy.is_enough)


Tries = Iterator[tuple[str, Minute]]


def _disciplines(minute: Minute) -> Tries:
    for name in DISCIPLINES:
        if name != minute.config.batching.name:
            yield f"batching: {name}", minute.with_discipline(name)


def _shares(minute: Minute, model_id: ModelId) -> Tries:
    changed = minute.with_share(model_id, SHARE_STEP_PERCENT)
    if changed is not None:
        yield f"share +{SHARE_STEP_PERCENT:.0f} %", changed


def _slos(minute: Minute, evidence: Evidence) -> Tries:
    for step_ms in SLO_STEPS_MS:
        if step_ms <= evidence.slo_ms:
            yield f"SLO +{step_ms:g} ms", minute.with_slo(evidence.model_id, evidence.slo_ms + step_ms)


def _gpus(minute: Minute) -> Tries:
    for more in GPU_STEPS:
        yield f"{more} GPU{'s' * (more > 1)} more", minute.with_gpus(more)


def _tried(change: str, minute: Minute, model_id: ModelId, before: float) -> Remedy | None:
    try:
        models = minute.played().models
    except FabricError:
        return None
    bad_rate = models[model_id].bad_rate
    others: Sequence[float] = [one.bad_rate for name, one in models.items() if name != model_id]
    return Remedy(
        change,
        bad_rate,
        max(others, default=0.0),
        is_mended(bad_rate, before) and bad_rate < 2 * BAD_RATE_ALLOWED,
    )
