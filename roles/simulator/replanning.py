"""A workload in virtual time with a placement that follows it, as a live cluster's does (docs/operate/dynamic-placement.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fabric.errors import ConfigError
from roles.config.cluster import ClusterConfig
from roles.config.shards import shard_document
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import Replanning, SimulatedRun, merged_runs, simulate
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
    if config.shards > 1:
        if is_full:
            raise ConfigError("--replan with --full plays one shard: cluster.shards must be 1")
        runs = []
        for shard in range(config.shards):
            own = config.of_shard(shard)
            part = workload.of([model.model_id for model in own.models])
            own_document = shard_document(document, config, shard)
            runs.append(simulate_replanning(own, own_document, base_dir, part, window))
        return merged_runs(config, window, runs)
    placement = config.place()
    settings = settings_from(config, placement)
    controller = controller_settings(config, document, base_dir, placement, settings)
    return simulate(config, workload, window, settings, Replanning(controller), is_full=is_full)
