"""Requests from a host, open loop, until stdin is closed; then the fate of each as JSON.

    python -m tests.integration.hosts_load KEY_FILE MODEL RATE_RPS BUDGET_MS ADDRESS...

Each request is one call of the SDK, which knows all addresses. A line `serving` comes with the first answer. `fates` counts them by
kind, `moments` has for each request when it was asked and answered (s, CLOCK_MONOTONIC, the same on all hosts of one machine).
"""

from __future__ import annotations

import asyncio
import collections
import json
import select
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from fabric.client import Client
from fabric.errors import FabricError, RequestError
from tests.integration.steady_load import PATIENT

BEHIND_MAX_S = 0.5  # a host that stood still is not flooded


async def main() -> None:
    """See the module."""
    key_file, model, rate_rps, budget_ms, *addresses = sys.argv[1:]
    moments: list[tuple[float, float, str]] = []
    asked: set[asyncio.Task[None]] = set()
    async with Client(addresses, replace(PATIENT, key_file=Path(key_file))) as client:

        async def ask(number: int) -> None:
            began_s = time.monotonic()
            try:
                inputs = {"input": np.full(4, number, np.float32)}
                await client.infer(model, inputs, budget_ms=float(budget_ms))
                fate = "ok"
            except RequestError as error:
                fate = f"{error.code}: {error}"[:160]
            except FabricError as error:
                fate = f"{type(error).__name__}: {error}"[:160]
            moments.append((began_s, time.monotonic(), fate))

        await ask(0)
        print("serving", flush=True)  # noqa: T201  to who started it
        due_s, number = time.monotonic(), 0
        while not select.select([0], [], [], 0)[0]:
            number += 1
            task = asyncio.create_task(ask(number))
            asked.add(task)
            task.add_done_callback(asked.discard)
            due_s = max(due_s + 1 / float(rate_rps), time.monotonic() - BEHIND_MAX_S)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await asyncio.gather(*asked)
    fates = collections.Counter(fate for _, _, fate in moments)
    print(json.dumps({"fates": fates, "asked": number + 1, "moments": moments}))  # noqa: T201  likewise


if __name__ == "__main__":
    asyncio.run(main())
