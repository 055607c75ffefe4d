"""A workload in virtual time with a placement that follows it, as a live cluster's does (docs/dynamic-placement.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roles.config.cluster import ClusterConfig
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import Replanning, SimulatedRun, simulate
from roles.workload.arrivals import Workload
from roles.workload.outcomes import Window


def simulate_replanning(
    config: ClusterConfig,
    document: Mapping[str, Any],
    base_dir: str,
    workload: Workload,
    window: Window,
    *,
    is_full: bool = False,
) -> SimulatedRun:
    """As `simulate`; `config` was read from `document`, whose paths are relative to `base_dir`. Raises the same."""
    placement = config.place()
    settings = settings_from(config, placement)
    controller = controller_settings(config, document, base_dir, placement, settings)
    return simulate(config, workload, window, settings, Replanning(controller), is_full=is_full)
