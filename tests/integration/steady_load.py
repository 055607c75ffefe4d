"""Requests at a steady pace for as long as a block lasts, each with its fate, while something else happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from fabric.client import Client, ClientOptions
from fabric.errors import RequestError
from fabric.heartbeats import HeartbeatTiming

# A frontend that a busy host keeps off its cores for seconds is not gone.
PATIENT = ClientOptions(connect_timeout_ms=30_000.0, heartbeats=HeartbeatTiming(200.0, 20_000.0))


@dataclass(slots=True)
class Fates:
    """Of each model's requests in order: when they were answered, `ok` or the code of the refusal."""

    of: dict[str, list[str]] = field(default_factory=dict)
    took_ms: dict[str, list[float]] = field(default_factory=dict)

    def refused(self, model: str) -> list[str]:
        """The codes of those that were refused."""
        return [fate for fate in self.of[model] if fate != "ok"]


@contextmanager
def steady_load(addresses: Sequence[str], rates_rps: dict[str, float]) -> Iterator[Fates]:
    """Ask each model so often; leaving the block waits for the last answers."""
    fates = Fates({model: [] for model in rates_rps}, {model: [] for model in rates_rps})
    stop = threading.Event()
    problem: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(_ask_all(addresses, rates_rps, fates, stop))
        except BaseException as error:  # noqa: BLE001  handed to the test's own thread
            problem.append(error)

    thread = threading.Thread(target=run, name="load")
    thread.start()
    try:
        yield fates
    finally:
        stop.set()
        thread.join(60)
    assert not problem, problem


async def _ask_all(
    addresses: Sequence[str], rates_rps: dict[str, float], fates: Fates, stop: threading.Event
) -> None:
    async with Client(addresses, PATIENT) as client:
        asked: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        async def ask(model: str) -> None:
            began_s = loop.time()
            try:
                await client.infer(model, {"input": np.zeros(4, np.float32)})
                fate = "ok"
            except RequestError as error:
                fate = error.code
            fates.of[model].append(fate)
            fates.took_ms[model].append(1e3 * (loop.time() - began_s))

        async def play(model: str, rate_rps: float) -> None:
            due_s = loop.time()
            while not stop.is_set():
                task = asyncio.create_task(ask(model))
                asked.add(task)
                task.add_done_callback(asked.discard)
                due_s = max(due_s + 1 / rate_rps, loop.time() - 0.5)  # a host that stood still is not flooded
                await asyncio.sleep(max(0.0, due_s - loop.time()))

        await asyncio.gather(*(play(model, rate_rps) for model, rate_rps in rates_rps.items()))
        await asyncio.wait_for(asyncio.gather(*asked), timeout=50)
