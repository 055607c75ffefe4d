"""Rates of a configuration: own rates, or a total shared out by weights or by Zipf popularity.

A rate is a number, or steps [[from_s, requests per second], …] from the start of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fabric.errors import ConfigError
from roles.config.checks import MOMENT_S_MAX, RATE_RPS_MAX, finite

Steps = tuple[tuple[float, float], ...]


def model_rates(
    total: float | Steps | None,
    zipf: float | None,
    written: Sequence[tuple[float | Steps | None, float | None]],
) -> list[tuple[Steps, float | None]]:
    """Each model's steps, from_ms and requests per second, and its part of the total (None: its own rate).

    `written` has each model's own `rate_rps` and `weight`. Steps are empty where no rate is known. Raises
    ConfigError where a total is shared out in two ways, or in none.
    """
    weights = [weight for _, weight in written]
    if zipf is not None:
        finite(zipf, "popularity.zipf", at_most=100)
        _refuse(weights, "weight: popularity is given too; use one of the two")
    for place, (rate_rps, weight) in enumerate(written):
        if weight is not None:
            finite(weight, f"models[{place}].weight", at_most=RATE_RPS_MAX)
            if rate_rps is not None and total is None:
                raise ConfigError(
                    f"models[{place}].weight: this model has its own rate_rps; use one of the two"
                )
    if total is not None:
        _refuse([rate_rps for rate_rps, _ in written], "rate_rps: the file has a total rate_rps too; use one")
    shares = _shares(zipf, weights)
    if total is None:
        return [
            ((), share) if rate_rps is None else (rate_steps(rate_rps, f"models[{place}].rate_rps"), None)
            for place, ((rate_rps, _), share) in enumerate(zip(written, shares, strict=True))
        ]
    if shares == [None]:
        raise ConfigError("rate_rps: a total must be shared out: of one model write models[0].rate_rps")
    if all(share is None for share in shares):
        raise ConfigError(
            "rate_rps: a total must be shared out: give every model a weight, or write popularity: {zipf: 0.9}"
        )
    steps = rate_steps(total, "rate_rps")
    return [
        (tuple((from_ms, rate_rps * (share or 0.0)) for from_ms, rate_rps in steps), share)
        for share in shares
    ]


def _shares(zipf: float | None, weights: Sequence[float | None]) -> list[float | None]:
    """Each model's part, summing to 1; None for all where nothing shares."""
    if zipf is not None:
        raw = [float(place**-zipf) for place in range(1, len(weights) + 1)]
    elif all(weight is None for weight in weights):
        return [None] * len(weights)
    else:
        without = [place for place, weight in enumerate(weights) if weight is None]
        if without:
            raise ConfigError(f"models[{without[0]}].weight: is missing; other models have one")
        raw = [weight or 0.0 for weight in weights]
    whole = math.fsum(raw)
    if whole <= 0:
        raise ConfigError("models[0].weight: all weights are 0; at least one must be over 0")
    return [part / whole for part in raw]


def rate_steps(rate: float | Steps, where: str) -> Steps:
    """(from_ms, value) of a number, or of steps as written; they begin at 0. ConfigError where they do not ascend."""
    if not isinstance(rate, tuple):
        return ((0.0, finite(rate, where, at_most=RATE_RPS_MAX)),)
    if not rate:
        raise ConfigError(f"{where}: has no steps; write a number, or [[0, 100], [30, 200]]")
    for place, (from_s, rate_rps) in enumerate(rate):
        finite(from_s, f"{where}[{place}][0]", at_most=MOMENT_S_MAX)
        finite(rate_rps, f"{where}[{place}][1]", at_most=RATE_RPS_MAX)
    for place, ((before_s, _), (from_s, _)) in enumerate(itertools.pairwise(rate), start=1):
        if from_s <= before_s:
            raise ConfigError(
                f"{where}[{place}]: starts at {from_s:g} s, not after the step before it ({before_s:g} s)"
            )
    steps = tuple((from_s * 1000, rate_rps) for from_s, rate_rps in rate)
    return steps if steps[0][0] == 0 else ((0.0, 0.0), *steps)


def _refuse(values: Sequence[object | None], reason: str) -> None:
    for place, value in enumerate(values):
        if value is not None:
            raise ConfigError(f"models[{place}].{reason}")
