from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from fabric.client import Client
from fabric.clock import MonotonicClock
from fabric.errors import PeerLost
from fabric.messages import ModelInfo
from roles.gateway.service import Service


def test_a_client_that_does_not_wait_for_the_models_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loop's handler hears of ends the gateway."""
    heard: list[dict[str, Any]] = []

    async def silent(client: Client) -> tuple[ModelInfo, ...]:
        await asyncio.sleep(0)
        raise PeerLost("it does not list its models")

    monkeypatch.setattr(Client, "models", silent)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        service = Service(Client(["tcp://127.0.0.1:9"]), MonotonicClock())
        asking = asyncio.ensure_future(service.models())
        await asyncio.sleep(0)  # the listing is begun
        asking.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        with pytest.raises(PeerLost):
            await service.models()
        service.close()

    asyncio.run(run())
    gc.collect()
    assert heard == []
