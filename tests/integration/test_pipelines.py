"""Models over several GPUs in a living cluster: real processes, real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fabric.client import Client
from fabric.clock import MonotonicClock
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from tests.integration.proc import processes_naming, until
from tests.integration.served_rows import ServedRows
from tests.models.chain import WIDTH

pytestmark = pytest.mark.timeout(300)

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
        inputs = {"input": np.ones(4, np.float32)}
        async with Client(endpoints) as client:
            for _ in range(10):  # a host that starves this test may hold up a try, never make it faster
                began_ms = clock.now_ms()
                answers = await asyncio.gather(*(client.infer("cut", inputs) for _ in range(10)))
                took_ms = clock.now_ms() - began_ms
                run_ms = [one.ledger.gpu_ms for one in answers]
                assert run_ms == pytest.approx([120.0] * 10)
                assert took_ms >= 10 * 60.0, "the slowest stage sets the pace"
                if took_ms < 0.8 * sum(run_ms):
                    return
        raise AssertionError("one batch after the other")

    path = tmp_path / "cluster.yaml"
    path.write_text(EMULATED, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        asyncio.run(scenario(cluster.endpoints["client"]))


CUT = """
models:
 - {name: cut, slo_ms: 60000, loader: {python: "tests.models.chain:Chain", stages: 3}}
cluster: {nodes: [{host: one, gpus: 3, device: cpu}]}
batching: eager
placement: exclusive
"""


def test_a_model_on_three_devices_answers_as_it_does_whole_and_comes_back_when_a_stage_is_killed(
    tmp_path: Path,
) -> None:
    rows = ServedRows("cut", "tests.models.chain:Chain", WIDTH)

    def stages() -> list[int]:
        found = processes_naming("roles.gpu_worker.stages")
        return sorted(pid for pid, command in found.items() if str(cluster.run_dir) in command)

    async def scenario(cluster: TemporaryCluster) -> None:
        async with Client(cluster.endpoints["client"]) as client:
            await rows.compared(client)
            told = stages()
            assert len(told) == 2
            for pid in told:  # as who ends a cluster by a signal to all of its processes
                os.kill(pid, signal.SIGTERM)
            await rows.compared(client)
            assert stages() == told
            await rows.survive(client, 1, stages)

    path = tmp_path / "cluster.yaml"
    path.write_text(CUT, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        asyncio.run(scenario(cluster))
    until(lambda: not stages(), what="the end of all stages")
