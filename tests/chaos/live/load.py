"""Open-loop load through the SDK, as a process of its own: it says of each request what became of it, and how late.

    python -m tests.chaos.live.load '{"clients": [{"addresses": [...], "frontend": "frontend-0", "via": "relay"}], "models": {"m0": 150}, ...}'

It ends when its stdin closes, after the last answer, and prints one JSON document. Moments are those of the host's monotonic
clock, so that the driver can tell which faults a request met.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from fabric.client import Client, ClientOptions
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, RequestError

LAG_EVERY_S = 0.01
LATE_KEPT = 1_000


@dataclass
class Fates:
    """What became of everything."""

    counts: Counter[str] = field(default_factory=Counter)
    late: list[dict[str, Any]] = field(default_factory=list)
    """Requests that were answered after their deadline: who, when asked, by how much, and as what."""
    lag_ms: float = 0.0
    """The most that this process's own loop was late lately."""


async def play(told: dict[str, Any], fates: Fates, stop: asyncio.Event) -> None:
    """Ask until told to stop."""
    clock = MonotonicClock()
    asked: set[asyncio.Task[None]] = set()
    draws = random.Random(told["seed"])
    key = told.get("key_file")
    options = ClientOptions(connect_timeout_ms=30_000.0, key_file=None if key is None else Path(key))

    async def ask(client: Client, place: dict[str, Any], model: str, budget_ms: float, size: int) -> None:
        asked_at_ms = clock.now_ms()
        lag_ms = fates.lag_ms
        try:
            await client.infer(model, {"input": np.zeros(size, np.float32)}, budget_ms)
            fate = "answer"
        except (RequestError, FabricError) as error:
            fate = getattr(error, "code", type(error).__name__)
        fates.counts[fate] += 1
        ended_at_ms = clock.now_ms()
        await asyncio.sleep(0)  # after a standstill of this process, `watch_lag` comes after us
        late_ms = ended_at_ms - asked_at_ms - budget_ms - max(lag_ms, fates.lag_ms)
        if late_ms > 0 and len(fates.late) < LATE_KEPT:
            one = {
                "frontend": place["frontend"],
                "via": place["via"],
                "asked_at_ms": asked_at_ms,
                "ended_at_ms": ended_at_ms,
            }
            fates.late.append(one | {"late_ms": late_ms, "fate": fate})

    async def watch_lag() -> None:
        while True:
            began_ms = clock.now_ms()
            await asyncio.sleep(LAG_EVERY_S)
            behind_ms = clock.now_ms() - began_ms - 1e3 * LAG_EVERY_S
            fates.lag_ms = max(behind_ms, 0.98 * fates.lag_ms)

    async def one_client(place: dict[str, Any]) -> None:
        client = Client(place["addresses"], options)
        while not stop.is_set():
            try:
                await client.open()
                break
            except FabricError:
                await asyncio.sleep(0.1)
        due_s = asyncio.get_running_loop().time()
        while not stop.is_set():
            model, budget_ms = draws.choice(list(told["models"].items()))
            size = draws.choice((4, 4, 4, 40_000))
            task = asyncio.create_task(ask(client, place, model, budget_ms, size))
            asked.add(task)
            task.add_done_callback(asked.discard)
            due_s = max(due_s + draws.expovariate(told["rate_rps"]), asyncio.get_running_loop().time() - 0.5)
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
        await asyncio.sleep(0)
        if asked:
            await asyncio.wait(set(asked), timeout=10.0)
        client.close()

    lag = asyncio.create_task(watch_lag())
    await asyncio.gather(*map(one_client, told["clients"]))
    fates.counts["unanswered"] += len(asked)
    lag.cancel()


async def main() -> None:
    """Until stdin closes."""
    told = json.loads(sys.argv[1])
    fates, stop = Fates(), asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    await play(told, fates, stop)
    click.echo(json.dumps({"counts": fates.counts, "late": fates.late, "lag_ms": fates.lag_ms}))


if __name__ == "__main__":
    asyncio.run(main())
