"""A model that two ranks compute together, in a living cluster: real processes, sockets and process groups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from fabric.client import Client, InferResult
from fabric.errors import RequestError
from fabric.messages import LoaderSpec
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.gpu_worker.executors.loaders import load_model
from tests.integration.proc import processes_naming, until
from tests.models.ranks import BAD, WIDTH

pytestmark = pytest.mark.timeout(300)

RANKS = """
models:
 - {name: split, slo_ms: 60000, loader: {python: "tests.models.ranks:Fragile", ranks: 2}}
cluster: {nodes: [{host: one, gpus: 2, device: cpu}]}
batching: eager
placement: exclusive
"""


def test_two_ranks_answer_as_the_whole_does_and_come_back_together_when_one_is_lost(tmp_path: Path) -> None:
    inputs = np.random.default_rng(1).normal(size=(20, WIDTH)).astype(np.float32)
    model = load_model(LoaderSpec(python="tests.models.ranks:Parallel"), torch.device("cpu")).model
    with torch.inference_mode():
        expected = model.infer({"x": torch.from_numpy(inputs)})["y"].numpy()

    def ranks(cluster: TemporaryCluster) -> list[int]:
        found = processes_naming("roles.gpu_worker")
        return sorted(pid for pid, command in found.items() if str(cluster.run_dir) in command)

    async def compared(client: Client) -> None:
        answers = await asyncio.gather(*(client.infer("split", {"x": row}) for row in inputs))
        for answer, row in zip(answers, expected, strict=True):
            assert np.allclose(answer.outputs["y"], row, rtol=0, atol=1e-5)

    async def until_served(client: Client) -> None:
        for _ in range(1_000):
            with contextlib.suppress(RequestError):
                await client.infer("split", {"x": inputs[0]})
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it is not served again")

    async def scenario(cluster: TemporaryCluster) -> None:
        async with Client(cluster.endpoints["client"]) as client:
            await until_served(client)
            await compared(client)

            # What all ranks raise on is the answer of that request alone.
            before = ranks(cluster)
            with pytest.raises(RequestError, match="a bad input"):
                await client.infer("split", {"x": np.full(WIDTH, BAD, np.float32)})
            await compared(client)
            assert ranks(cluster) == before

            asked = [asyncio.create_task(client.infer("split", {"x": row})) for row in inputs]
            await asyncio.sleep(0)
            os.kill(before[-1], signal.SIGKILL)
            fates = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, InferResult | RequestError) for one in fates)
            await until_served(client)
            await compared(client)
            assert not set(ranks(cluster)) & set(before), "all of it was started again"

    path = tmp_path / "cluster.yaml"
    path.write_text(RANKS, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        asyncio.run(scenario(cluster))
    until(lambda: not ranks(cluster), what="the end of all ranks")
