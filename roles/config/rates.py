"""Rates of a configuration: own rates, or a total shared out by weights or by Zipf popularity.

A rate is a number, or steps [[from_s, requests per second], …] from the start of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from fabric.errors import ConfigError
from roles.config.checks import MOMENT_S_MAX, RATE_RPS_MAX, finite

Steps = tuple[tuple[float, float], ...]
Written = tuple[float | Steps | None, float | None]
"""The `rate_rps` and the `weight` of one who sends, as they are written."""


def shared_rates(
    total: float | Steps | None,
    zipf: float | None,
    models: Sequence[Written],
    applications: Sequence[Written] = (),
    silent: Collection[int] = (),
) -> list[tuple[Steps, float | None]]:
    """The steps, from_ms and requests per second, of each model and then of each application, and its part of the total (None: its own rate).

    `silent`: places of the models that need no weight, as stages ask them. Steps are empty where no rate is known. Raises
    ConfigError where a total is shared out in two ways, or in none.
    """
    written = {f"models[{place}]": one for place, one in enumerate(models)}
    written |= {f"applications[{place}]": one for place, one in enumerate(applications)}
    rates = {path: rate_rps for path, (rate_rps, _) in written.items()}
    weights = {path: weight for path, (_, weight) in written.items()}
    if zipf is not None:
        finite(zipf, "popularity.zipf", at_most=100)
        _refuse(weights, "weight: popularity is given too; use one of the two")
        if total is not None and applications:
            raise ConfigError(
                "popularity: shares the total out among models; beside applications give these and models a weight"
            )
    for path, weight in weights.items():
        if weight is not None:
            finite(weight, f"{path}.weight", at_most=RATE_RPS_MAX)
            if rates[path] is not None and total is None:
                kind = path.partition("s[")[0]
                raise ConfigError(f"{path}.weight: this {kind} has its own rate_rps; use one of the two")
    if total is not None:
        _refuse(rates, "rate_rps: the file has a total rate_rps too; use one")
    of_models = list(written)[: len(models)]
    if zipf is not None:
        _refuse(
            {path: rates[path] for path in of_models}, "rate_rps: popularity is given too; use one of the two"
        )
    if total is None or zipf is not None:  # an application's part is one of the total
        weights = {path: weights[path] for path in of_models}
    shares = _shares(zipf, weights, {f"models[{place}]" for place in silent})
    if total is None:
        return [
            ((), shares.get(path)) if rate_rps is None else (rate_steps(rate_rps, f"{path}.rate_rps"), None)
            for path, rate_rps in rates.items()
        ]
    if not shares and len(written) == 1:
        raise ConfigError("rate_rps: a total must be shared out: of one model write models[0].rate_rps")
    if not shares:
        everybody = "model and application" if applications else "model"
        raise ConfigError(
            f"rate_rps: a total must be shared out: give every {everybody} a weight, or write popularity: {{zipf: 0.9}}"
        )
    steps = rate_steps(total, "rate_rps")
    return [
        ((), None)
        if path not in shares
        else (tuple((from_ms, rate_rps * shares[path]) for from_ms, rate_rps in steps), shares[path])
        for path in written
    ]


def _shares(
    zipf: float | None, weights: Mapping[str, float | None], silent: Collection[str]
) -> dict[str, float]:
    """Each one's part, summing to 1, without those that have none; empty where nothing shares."""
    if zipf is not None:
        raw = {path: float(place**-zipf) for place, path in enumerate(weights, start=1)}
    else:
        raw = {path: weight for path, weight in weights.items() if weight is not None}
        without = [path for path in weights if path not in raw and path not in silent]
        if raw and without:
            raise ConfigError(f"{without[0]}.weight: is missing; others have one")
    whole = math.fsum(raw.values())
    if raw and whole <= 0:
        raise ConfigError("models[0].weight: all weights are 0; at least one must be over 0")
    return {path: part / whole for path, part in raw.items()}


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


def _refuse(values: Mapping[str, object | None], reason: str) -> None:
    for path, value in values.items():
        if value is not None:
            raise ConfigError(f"{path}.{reason}")
