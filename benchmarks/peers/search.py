"""The highest rate that is still good, and the best of several settings. Knows nothing of what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

SettingT = TypeVar("SettingT")


def highest_good_rps(
    is_good: Callable[[float], bool], bound_rps: float, precision: float, beat_rps: float = 0.0
) -> float:
    """Bisect between 0 and `bound_rps`, which nobody asks as it is taken for bad, until a step is within `precision` (a part of 1).

    With `beat_rps` a rate higher by `precision` is tried first, and where that is bad the answer is 0: most of
    many settings cost one run. A rate is asked about once. 0 too where no rate over `precision` of the bound is good.
    """
    low_rps = 0.0
    if beat_rps:
        low_rps = beat_rps * (1 + precision)
        if low_rps >= bound_rps or not is_good(low_rps):
            return 0.0
    return _bisected(is_good, low_rps, bound_rps, precision, bound_rps)


def highest_good_rps_near(
    guess_rps: float, is_good: Callable[[float], bool], bound_rps: float, precision: float
) -> float:
    """The same where the answer is known roughly: steps away from the guess, each twice the last, then bisects."""
    low_rps, high_rps = 0.0, bound_rps
    rate_rps, step_rps = min(guess_rps, bound_rps / (1 + precision)), 2 * precision * guess_rps
    was_good = answer = is_good(rate_rps)
    while True:
        low_rps, high_rps = (rate_rps, high_rps) if answer else (low_rps, rate_rps)
        if answer != was_good:
            break
        rate_rps += step_rps if was_good else -step_rps
        step_rps *= 2
        if not low_rps < rate_rps < high_rps:
            break
        answer = is_good(rate_rps)
    return _bisected(is_good, low_rps, high_rps, precision, bound_rps)


def _bisected(
    is_good: Callable[[float], bool], low_rps: float, high_rps: float, precision: float, bound_rps: float
) -> float:
    while high_rps - low_rps > precision * low_rps and high_rps > precision * bound_rps:
        middle_rps = (low_rps + high_rps) / 2
        if is_good(middle_rps):
            low_rps = middle_rps
        else:
            high_rps = middle_rps
    return low_rps


@dataclass(frozen=True, slots=True)
class Best(Generic[SettingT]):
    """What a search found: the best setting and its rate; 0 where no setting carried anything."""

    setting: SettingT
    rate_rps: float


def best_setting(settings: Iterable[SettingT], measure: Callable[[SettingT, float], float]) -> Best[SettingT]:
    """The setting with the highest rate; `measure` takes a setting and the rate to beat, 0 where it does not."""
    best: Best[SettingT] | None = None
    for setting in settings:
        rate_rps = measure(setting, best.rate_rps if best else 0.0)
        if best is None or rate_rps > best.rate_rps:
            best = Best(setting, rate_rps)
    assert best is not None, "there is at least one setting"
    return best
