"""A model in a living cluster beside the same model whole, in this process: the same answer to each row."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import numpy as np
import torch

from fabric.client import Client, InferResult
from fabric.errors import RequestError
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.loaders.registry import load_model

ROWS = 20


class ServedRows:
    """`name` is the model's in the cluster, `whole` the class of the same model whole, whose rows are `width` numbers."""

    def __init__(self, name: str, whole: str, width: int) -> None:
        self.inputs = np.random.default_rng(1).normal(size=(ROWS, width)).astype(np.float32)
        self._name = name
        model = load_model(LoaderSpec(python=whole), torch.device("cpu")).model
        with torch.inference_mode():
            self._expected = model.infer({"x": torch.from_numpy(self.inputs)})["y"].numpy()

    async def compared(self, client: Client) -> None:
        """Serve all rows at once, as soon as one is served at all; each answer is what the whole model says."""
        await self._until_served(client)
        answers = await asyncio.gather(*self._asked(client))
        for answer, row in zip(answers, self._expected, strict=True):
            assert np.allclose(answer.outputs["y"], row, rtol=0, atol=1e-5)

    async def survive(self, client: Client, victim: int, processes: Callable[[], list[int]]) -> None:
        """Kill the `victim`, one of the model's `processes`, under load: each request has its end, and all are new after it."""
        before = processes()
        asked = self._asked(client)
        await asyncio.sleep(0)
        os.kill(before[victim], signal.SIGKILL)
        fates = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, InferResult | RequestError) for one in fates)
        await self.compared(client)
        assert len(processes()) == len(before)
        assert not set(processes()) & set(before), "all of it was started again"

    def _asked(self, client: Client) -> list[asyncio.Task[InferResult]]:
        return [asyncio.create_task(client.infer(self._name, {"x": row})) for row in self.inputs]

    async def _until_served(self, client: Client) -> None:
        for _ in range(1_000):
            with contextlib.suppress(RequestError):
                await client.infer(self._name, {"x": self.inputs[0]})
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it is not served")
