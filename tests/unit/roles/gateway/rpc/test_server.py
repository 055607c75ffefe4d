"""How many connections gRPC's server takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from fabric.client import Client
from fabric.clock import MonotonicClock
from roles.config.gateway import GatewayConfig
from roles.gateway.http.limits import BodyBudget
from roles.gateway.repository import Repository
from roles.gateway.rpc.server import RpcServer
from roles.gateway.service import Service
from roles.gateway.tokens import Tokens
from tests.unit.roles.gateway.doors import StandIn


def test_connections_without_calls_have_a_limit_too(tmp_path: Path) -> None:
    """One that ends makes room for the next."""

    async def run() -> None:
        config = GatewayConfig(http=None, grpc="127.0.0.1:0", connections_max=2)
        service = Service(cast(Client, StandIn()), MonotonicClock())
        repository = Repository({}, tmp_path, tmp_path, is_open=False)
        server = RpcServer(service, repository, Tokens(None), config, BodyBudget(1 << 20))
        host, _, port = (await server.open()).rpartition(":")
        writers = []

        async def is_taken() -> bool:
            reader, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            return await reader.read(1) != b""  # of HTTP/2 a server speaks first

        try:
            assert [await is_taken() for _ in range(5)] == [True] * 4 + [False]
            writers[0].close()
            while not await is_taken():  # noqa: ASYNC110  its end is seen by nobody else
                await asyncio.sleep(0)
            assert not await is_taken()
        finally:
            for writer in writers:
                writer.close()
            await server.close()

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await run()

    asyncio.run(bounded())
