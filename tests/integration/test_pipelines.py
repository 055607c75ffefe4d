"""Models over several GPUs in a living cluster: real processes, real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fabric.client import Client
from fabric.clock import MonotonicClock
from roles.benchmark.temporary_cluster import temporary_cluster

pytestmark = pytest.mark.timeout(180)

EMULATED = """
models:
 - {name: cut, slo_ms: 5000, profile: {table: {1: 90}, stages: {3: [30, 60, 30]}}}
cluster: {gpus: 3}
batching: eager
placement: {given: {slices: [{gpu: 0, following: [1, 2], models: [{model: cut}]}]}}
"""


def test_stages_of_emulated_gpus_run_different_batches_at_once(tmp_path: Path) -> None:
    async def scenario(endpoints: Sequence[str]) -> None:
        clock = MonotonicClock()
        async with Client(endpoints) as client:
            began_ms = clock.now_ms()
            inputs = {"input": np.ones(4, np.float32)}
            answers = await asyncio.gather(*(client.infer("cut", inputs) for _ in range(20)))
            took_ms = clock.now_ms() - began_ms
        run_ms = [one.ledger.gpu_ms for one in answers]
        assert run_ms == pytest.approx([120.0] * 20)
        # One every 60 ms instead of every 120; the rest is for a busy host.
        assert 20 * 60.0 <= took_ms < 0.8 * sum(run_ms)

    path = tmp_path / "cluster.yaml"
    path.write_text(EMULATED, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        asyncio.run(scenario(cluster.endpoints["client"]))
