"""Asking for the list of models: one frontend first, another one too where that is lost or takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TypeAlias

from fabric.client.connection import Connection
from fabric.clock import Clock
from fabric.errors import PeerLost
from fabric.messages import ModelInfo, ModelsAsked

NotAsked: TypeAlias = "Callable[[Collection[Connection]], list[Connection]]"
"""Which frontends there are beside these, the next one first."""


async def list_models(not_asked: NotAsked, limit_ms: float, clock: Clock) -> tuple[ModelInfo, ...]:
    """What the first frontend that answers serves. Those that are left share the time that is left, so each of them is asked.

    Raises PeerLost when all are lost, or when the time is over.
    """
    loop = asyncio.get_running_loop()
    limit_at_ms = clock.now_ms() + limit_ms
    asked: dict[asyncio.Future[tuple[ModelInfo, ...]], Connection] = {}
    try:
        while True:
            left = not_asked(asked.values())
            if left:
                asked[_ask(left[0], loop)] = left[0]
            waiting = [future for future in asked if not future.done()]
            left_ms = limit_at_ms - clock.now_ms()
            if waiting and left_ms > 0.0:
                share_s = left_ms / max(1, len(left)) / 1e3
                await asyncio.wait(waiting, timeout=share_s, return_when=asyncio.FIRST_COMPLETED)
            for future in asked:
                if future.done() and future.exception() is None:
                    return future.result()
            if left_ms <= 0.0 or (not waiting and len(left) <= 1):
                raise _silence(asked)
    finally:
        for future, connection in asked.items():
            connection.listings.remove(future)
            if not future.cancel():
                future.exception()  # seen, so that asyncio does not complain


def _ask(connection: Connection, loop: asyncio.AbstractEventLoop) -> asyncio.Future[tuple[ModelInfo, ...]]:
    future: asyncio.Future[tuple[ModelInfo, ...]] = loop.create_future()
    connection.listings.append(future)
    connection.put(ModelsAsked())
    connection.expect()
    return future


def _silence(asked: dict[asyncio.Future[tuple[ModelInfo, ...]], Connection]) -> PeerLost:
    silent = [connection.address for future, connection in asked.items() if not future.done()]
    if not silent:
        reasons = [str(future.exception()) for future in asked]
        return PeerLost(reasons[-1] if reasons else "no frontend is connected")
    if len(silent) == 1:
        return PeerLost(f"{silent[0]} does not list its models")
    return PeerLost(f"{silent[0]} and {len(silent) - 1} more do not list their models")
