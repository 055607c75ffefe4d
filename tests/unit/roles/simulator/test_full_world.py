"""The simulation with every real core, where two things fall on one moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fabric.ids import ModelId
from roles.config.read_config import parse_config
from roles.gpu_worker.events import Abort
from roles.scheduler.build import scheduler_core
from roles.scheduler.settings import settings_from
from roles.simulator.full_world import FullWorld
from roles.simulator.simulation import hardware_of
from roles.simulator.traffic import ModelTraffic


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_batch_that_its_stop_does_not_reach_is_counted_once(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at that very moment, or has begun to go through a pipeline."""
    model = {"name": "m", "slo_ms": 100, "profile": {"table": {1: 19}, "stages": {2: [10, 10]}}}
    sliced = {"gpu": 0, "following": list(range(1, gpus)), "models": [{"model": "m", "batch": 1}]}
    document = {
        "models": [model],
        "cluster": {"gpus": 2},
        "batching": "eager",
        "placement": {"given": {"slices": [sliced]}},
    }
    config = parse_config(document, Path())
    core = scheduler_core(settings_from(config), config.batching)
    traffic = ModelTraffic(ModelId("m"), 100.0, np.array([0.0]))
    world = FullWorld([core], hardware_of(config, 1), [traffic])
    (agent,) = world._agents
    hear_device = agent.hear_device
    stopped = []

    def hear_after_a_stop() -> None:
        for running in list(agent.devices._running):
            stopped.append(running)
            (worker,) = agent.workers.values()
            worker._perform(Abort(running.job.slice_id, running.job.batch_id))
        hear_device()

    monkeypatch.setattr(agent, "hear_device", hear_after_a_stop)
    world.run()
    assert stopped
    assert [batch.batch_size for batch in world.batches] == [1]
