"""The same workload at other loads: what the pictures of goodput and busy GPUs against load are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roles.config.cluster import ClusterConfig
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import Workload
from roles.workload.outcomes import Outcome, Window

FACTORS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0)
DURATION_MS_MAX = 10_000.0  # a picture needs no third digit


@dataclass(slots=True, frozen=True)
class AtLoad:
    """What came of the workload at `factor` times its rates."""

    factor: float
    outcome: Outcome


def play_loads(
    config: ClusterConfig, workload: Workload, window: Window, on_step: Callable[[float], None]
) -> list[AtLoad]:
    """Play the workload at seven loads, in the first 10 s of the window; the placement stays.

    `on_step` hears which part is done, from 0 to 1.
    """
    settings = settings_from(config)
    short = Window(window.from_ms, min(window.until_ms, window.from_ms + DURATION_MS_MAX))
    played: list[AtLoad] = []
    for factor in FACTORS:
        run = simulate(config, workload.scaled(factor), short, settings)
        played.append(AtLoad(factor, run.outcome))
        on_step(len(played) / len(FACTORS))
    return played
