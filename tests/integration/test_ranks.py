"""A model that two ranks compute together, in a living cluster: real processes, sockets and process groups."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fabric.client import Client
from fabric.errors import RequestError
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from tests.integration.proc import processes_naming, until
from tests.integration.served_rows import ServedRows
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
    rows = ServedRows("split", "tests.models.ranks:Parallel", WIDTH)

    def ranks() -> list[int]:
        found = processes_naming("roles.gpu_worker")
        return sorted(pid for pid, command in found.items() if str(cluster.run_dir) in command)

    async def scenario(cluster: TemporaryCluster) -> None:
        async with Client(cluster.endpoints["client"]) as client:
            await rows.compared(client)

            # What all ranks raise on is the answer of that request alone.
            before = ranks()
            with pytest.raises(RequestError, match="a bad input"):
                await client.infer("split", {"x": np.full(WIDTH, BAD, np.float32)})
            await rows.compared(client)
            assert ranks() == before

            await rows.survive(client, -1, ranks)

    path = tmp_path / "cluster.yaml"
    path.write_text(RANKS, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        asyncio.run(scenario(cluster))
    until(lambda: not ranks(), what="the end of all ranks")
