"""Models over several GPUs in a living cluster: real processes, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fabric.client import Client, InferResult
from fabric.clock import MonotonicClock
from fabric.errors import RequestError
from fabric.messages import LoaderSpec
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.gpu_worker.executors.loaders import load_model
from tests.integration.proc import processes_naming, until
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
    inputs = np.random.default_rng(1).normal(size=(20, WIDTH)).astype(np.float32)
    model = load_model(LoaderSpec(python="tests.models.chain:Chain"), torch.device("cpu")).model
    with torch.inference_mode():
        expected = model.infer({"x": torch.from_numpy(inputs)})["y"].numpy()

    async def compared(client: Client) -> None:
        answers = await asyncio.gather(*(client.infer("cut", {"x": row}) for row in inputs))
        for answer, row in zip(answers, expected, strict=True):
            assert np.allclose(answer.outputs["y"], row, rtol=0, atol=1e-5)

    async def until_served(client: Client) -> None:
        for _ in range(1_000):
            with contextlib.suppress(RequestError):
                await client.infer("cut", {"x": inputs[0]})
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it is not served again")

    def stages(cluster: TemporaryCluster) -> list[int]:
        found = processes_naming("roles.gpu_worker.stages")
        return sorted(pid for pid, command in found.items() if str(cluster.run_dir) in command)

    async def scenario(cluster: TemporaryCluster) -> None:
        async with Client(cluster.endpoints["client"]) as client:
            await until_served(client)
            await compared(client)
            before = stages(cluster)
            assert len(before) == 2
            asked = [asyncio.create_task(client.infer("cut", {"x": row})) for row in inputs]
            await asyncio.sleep(0)
            os.kill(before[1], signal.SIGKILL)
            fates = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, InferResult | RequestError) for one in fates)
            await until_served(client)
            await compared(client)
            assert len(stages(cluster)) == 2
            assert not set(stages(cluster)) & set(before), "all of it was started again"

    path = tmp_path / "cluster.yaml"
    path.write_text(CUT, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        asyncio.run(scenario(cluster))
    until(lambda: not stages(cluster), what="the end of all stages")
