"""Sends requests at the moments a plan says, whatever has become of the earlier ones.

Latency counts from the *intended* send time: a sender that falls behind makes requests look slower, never
faster, and its own lateness is reported beside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fabric.client import Client, InferResult
from fabric.clock import Clock
from fabric.errors import FabricError, RequestError
from fabric.link import Tensor

ANSWER_GRACE_MS = 10_000.0  # after the last send; the SDK's own deadline is earlier


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a plan: `at_ms` from the start of the run."""

    at_ms: float
    model: str
    inputs: Mapping[str, Tensor]
    budget_ms: float | None = None


@dataclass(slots=True)
class PlayedRequest:
    """What became of it. Exactly one of `result` and `error` is set."""

    planned: PlannedRequest
    late_ms: float = 0.0
    latency_ms: float = 0.0
    result: InferResult | None = None
    error: FabricError | None = None


async def play(
    client: Client,
    plan: Sequence[PlannedRequest],
    clock: Clock,
    on_done: Callable[[PlayedRequest], None],
) -> list[PlayedRequest]:
    """Play a plan in order of `at_ms`; returns when every request has its fate. `on_done` hears each at once."""
    began_ms = clock.now_ms()
    tasks: list[asyncio.Task[PlayedRequest]] = []
    for planned in plan:
        ahead_ms = began_ms + planned.at_ms - clock.now_ms()
        if ahead_ms > 0:
            await asyncio.sleep(ahead_ms / 1e3)
        tasks.append(asyncio.create_task(_send(client, planned, began_ms, clock, on_done)))
    done, late = await asyncio.wait(tasks, timeout=ANSWER_GRACE_MS / 1e3) if tasks else (set(), set())
    assert not late, "the SDK answers every request by its deadline"
    del done
    return [task.result() for task in tasks]


async def _send(
    client: Client,
    planned: PlannedRequest,
    began_ms: float,
    clock: Clock,
    on_done: Callable[[PlayedRequest], None],
) -> PlayedRequest:
    intended_at_ms = began_ms + planned.at_ms
    played = PlayedRequest(planned, late_ms=max(0.0, clock.now_ms() - intended_at_ms))
    try:
        played.result = await client.infer(planned.model, planned.inputs, budget_ms=planned.budget_ms)
    except RequestError as error:
        played.error = error
    played.latency_ms = clock.now_ms() - intended_at_ms
    on_done(played)
    return played
