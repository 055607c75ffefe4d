"""Models over several GPUs in a living cluster: real processes, real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fabric.client import Client, InferResult
from fabric.clock import MonotonicClock
from fabric.errors import RequestError
from roles.benchmark.temporary_cluster import temporary_cluster
from tests.integration.proc import processes_naming

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


BERT = """
models:
 - name: cut
   slo_ms: 60000
   loader: {zoo: transformers, arch: bert, sequence_length: 8, stages: 3, config: CONFIG}
 - name: whole
   slo_ms: 60000
   loader: {zoo: transformers, arch: bert, sequence_length: 8, config: CONFIG}
cluster: {nodes: [{host: one, gpus: 4, device: cpu}]}
batching: eager
placement: exclusive
""".replace(
    "CONFIG",
    "{hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 2, intermediate_size: 64, vocab_size: 100}",
)


def tokens(seed: int) -> dict[str, NDArray[np.int64]]:
    ids = np.random.default_rng(seed).integers(0, 100, 8)
    mask = np.ones(8, np.int64)
    mask[seed % 8 + 1 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_a_transformer_on_three_devices_answers_as_it_does_whole_and_comes_back_when_a_stage_is_killed(
    tmp_path: Path,
) -> None:
    async def compared(client: Client) -> None:
        asked = [
            asyncio.gather(client.infer("cut", tokens(seed)), client.infer("whole", tokens(seed)))
            for seed in range(20)
        ]
        for cut, whole in await asyncio.gather(*asked):
            assert np.allclose(cut.outputs["logits"], whole.outputs["logits"], rtol=0, atol=1e-5)
            assert cut.ledger.gpu_ms > 0

    async def scenario(endpoints: Sequence[str]) -> None:
        async with Client(endpoints) as client:
            await compared(client)
            stages = processes_naming("roles.gpu_worker.stages", str(tmp_path))
            assert len(stages) == 2
            os.kill(stages[1], signal.SIGKILL)
            fates = await asyncio.gather(
                *(client.infer("cut", tokens(seed)) for seed in range(10)), return_exceptions=True
            )
            assert all(isinstance(one, InferResult | RequestError) for one in fates)
            while True:
                try:
                    await client.infer("cut", tokens(0))
                    break
                except RequestError:
                    await asyncio.sleep(0.1)
            await compared(client)
            again = processes_naming("roles.gpu_worker.stages", str(tmp_path))
            assert len(again) == 2
            assert not set(again) & set(stages), "all of it was started again"

    path = tmp_path / "cluster.yaml"
    path.write_text(BERT, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        asyncio.run(scenario(cluster.endpoints["client"]))
