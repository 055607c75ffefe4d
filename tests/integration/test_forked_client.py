"""The client for asyncio in a forked process: it can close it, or open it for itself, and its parent's goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from fabric.client import Client, ClientOptions
from fabric.errors import FabricError
from fabric.messages import CancelRequest
from tests.integration.test_blocking_client import said_in_fork
from tests.integration.test_client import Frontend

OPTIONS = ClientOptions(connect_timeout_ms=2_000, grace_ms=50)
CLOSED = "PeerLost: the client is not open"
PARENTS = "WrongThread: the client answers on the asyncio loop, thread and process that opened it"


@pytest.fixture(params=["ipc", "tcp"])
def frontend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    path: Path = tmp_path_factory.mktemp("f")
    running = Frontend(f"ipc://{path}/f" if request.param == "ipc" else "tcp://127.0.0.1:0")
    yield running
    running.end()


async def asked(client: Client) -> str:
    try:
        return str((await client.infer("echo", {"x": [1.0]}, budget_ms=5_000)).outputs["x"])
    except FabricError as error:
        return f"{type(error).__name__}: {error}".partition(": ask there")[0]


async def told(client: Client) -> str:
    asking: list[Callable[[], Awaitable[object]]] = [
        lambda: client.infer("echo", {"x": [1.0]}),
        lambda: client.run("echo", {"x": [1.0]}),
        client.models,
    ]
    said = []
    for ask in asking:
        try:
            await ask()
        except FabricError as error:
            said.append(f"{type(error).__name__}: {error}".partition(": ask there")[0])
    return ", ".join(said)


async def cancelled(client: Client) -> str:
    for pending in list(client._pending.values()):
        pending.cancel()
    return await asked(client)


async def closed(client: Client) -> str:
    client.close()
    client.close()
    return await asked(client)


async def opened(client: Client) -> str:
    async with client:
        between = await asked(client)
    return f"{between}, {await asked(client)}"


async def closed_and_opened(client: Client) -> str:
    client.close()
    await client.open()
    return await asked(client)


CASES = [
    (told, ", ".join([PARENTS] * 3)),
    (cancelled, PARENTS),
    (closed, CLOSED),
    (opened, f"[1.], {CLOSED}"),
    (closed_and_opened, "[1.]"),
]


@pytest.mark.parametrize(("work", "says"), CASES)
@pytest.mark.parametrize("is_within", [False, True], ids=["between runs", "while its loop runs"])
def test_what_a_fork_does_with_a_client_its_parent_does_not_notice(
    frontend: Frontend, work: Callable[[Client], Awaitable[str]], says: str, is_within: bool
) -> None:
    client = Client(frontend.address, OPTIONS)
    loop = asyncio.new_event_loop()
    trouble: list[object] = []
    loop.set_exception_handler(lambda _, context: trouble.append(context))

    def in_child() -> str:
        async def run() -> str:
            return await work(client)

        return asyncio.run(run())

    async def run() -> None:
        await client.open()
        pending = client.submit("late", {"x": [1.0]}, budget_ms=10_000)
        if is_within:
            assert said_in_fork(in_child) == says
        await pending

    try:
        loop.run_until_complete(run())
        if not is_within:
            assert said_in_fork(in_child) == says
        for _ in range(3):
            assert loop.run_until_complete(asked(client)) == "[1.]"
        client.close()
    finally:
        loop.close()
    assert not trouble
    assert not frontend.has_seen(CancelRequest)
