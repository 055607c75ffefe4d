"""gRPC calls on loopback whose clients keep their message back, send a part of it, or send too much."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from fabric.client import Client
from fabric.clock import MonotonicClock
from roles.config.gateway import GatewayConfig
from roles.gateway.http.limits import BodyBudget, HttpLimits
from roles.gateway.repository import Repository
from roles.gateway.rpc import service as rpc_service
from roles.gateway.rpc.messages import SERVICE, message_class
from roles.gateway.rpc.server import RpcServer
from roles.gateway.service import Service
from roles.gateway.tokens import Tokens

TOKEN = "a-token-of-some-length"
WITH_TOKEN = [("authorization", f"Bearer {TOKEN}")]
ASKED = message_class("ModelInferRequest")(model_name="m", model_version="9").SerializeToString()
UNARY = ("ModelInfer", "ModelReady", "ModelMetadata", "ServerMetadata", "RepositoryIndex", "ModelStatistics")
WAIT_S = 60


class Calls:
    """To one server. A message is given as its bytes; without one the call stays open."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._channel = channel
        self.address = address

    def open(self, method: str, *messages: bytes, is_whole: bool = False, **options: Any) -> Any:
        async def sent() -> AsyncIterator[bytes]:
            for one in messages:
                yield one
            if not is_whole:
                await asyncio.Event().wait()

        return self._channel.stream_unary(f"/{SERVICE}/{method}")(sent(), **options)

    async def ask(self, method: str, message: bytes = b"", **options: Any) -> bytes:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        answer: bytes = await call(message, timeout=WAIT_S, **options)
        return answer


async def refused(call: Awaitable[Any]) -> tuple[str, str]:
    """gRPC's status and our code."""
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    trailing = dict(caught.value.trailing_metadata())
    return caught.value.code().name, str(trailing.get("tenuto-code", ""))


async def until_under_way(server: RpcServer, calls: int) -> None:
    """No call asks when: one that comes while the other one is answered takes its room."""
    async with asyncio.timeout(WAIT_S):
        while server.under_way != calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def on_server(
    home: Path,
    test: Callable[[RpcServer, Calls, Calls], Awaitable[None]],
    *,
    calls_max: int = 64,
    is_open: bool = False,
) -> None:
    """The test has two connections: what is over the limit waits in its client where it is on the same one."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[tuple[RpcServer, Calls, Calls]]:
        file = home / "tokens"
        file.write_text(TOKEN, encoding="utf-8")
        file.chmod(0o600)
        client = Client(["tcp://127.0.0.1:9"])
        config = GatewayConfig(
            http=None, grpc="127.0.0.1:0", connections_max=calls_max, request_bytes_max=1 << 20
        )
        server = RpcServer(
            Service(client, MonotonicClock()),
            Repository({}, home, home, is_open=False),
            Tokens(None if is_open else file),
            config,
            BodyBudget(8 << 20),
        )
        try:
            address = await server.open()
            own = [("grpc.use_local_subchannel_pool", 1)]
            async with (
                grpc.aio.insecure_channel(address, own) as one,
                grpc.aio.insecure_channel(address, own) as other,
            ):
                yield server, Calls(one, address), Calls(other, address)
        finally:
            await server.close()

    async def run() -> None:
        async with serving() as (server, calls, others):
            await test(server, calls, others)

    asyncio.run(run())


@pytest.mark.parametrize("method", UNARY)
def test_without_a_token_a_call_ends_before_its_message_comes(method: str, tmp_path: Path) -> None:
    async def test(_: RpcServer, calls: Calls, __: Calls) -> None:
        assert await refused(calls.open(method)) == ("UNAUTHENTICATED", "Unauthorised")

    on_server(tmp_path, test)


def test_health_is_told_without_a_message_and_without_room(tmp_path: Path) -> None:
    async def test(server: RpcServer, calls: Calls, others: Calls) -> None:
        held = others.open("ModelInfer", metadata=WITH_TOKEN)
        await until_under_way(server, 1)
        assert (await refused(calls.ask("ModelInfer", ASKED, metadata=WITH_TOKEN)))[1] == "Overloaded"
        for method, answer in (("ServerLive", b"\x08\x01"), ("ServerReady", b"")):
            async with asyncio.timeout(WAIT_S):
                assert await calls.open(method) == answer
            assert await calls.ask(method) == answer
        held.cancel()

    on_server(tmp_path, test, calls_max=1)


def test_one_call_too_many_is_overloaded_until_another_one_ends(tmp_path: Path) -> None:
    async def test(server: RpcServer, calls: Calls, others: Calls) -> None:
        held = [others.open("ModelInfer") for _ in range(3)]
        stream = others.open("ModelStreamInfer")
        await until_under_way(server, 4)
        for method in ("ModelInfer", "ModelReady", "ModelStreamInfer"):
            assert await refused(calls.ask(method, ASKED)) == ("UNAVAILABLE", "Overloaded")
        stream.cancel()
        await until_under_way(server, 3)
        assert (await refused(calls.ask("ModelInfer", ASKED)))[1] == "ModelNotFound"
        for one in held:
            one.cancel()

    on_server(tmp_path, test, calls_max=4, is_open=True)


def test_a_message_that_does_not_come_ends_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_service, "IDLE_MS", 300.0)
    monkeypatch.setattr(HttpLimits, "body_limit_ms", lambda *_: 300.0)

    async def test(_: RpcServer, calls: Calls, __: Calls) -> None:
        for method in UNARY:
            assert await refused(calls.open(method, metadata=WITH_TOKEN)) == ("DEADLINE_EXCEEDED", "TooSlow")

    on_server(tmp_path, test, calls_max=1)


def test_no_message_and_two_and_too_large_a_one(tmp_path: Path) -> None:
    async def test(_: RpcServer, calls: Calls, __: Calls) -> None:
        none = calls.open("ModelInfer", is_whole=True, metadata=WITH_TOKEN)
        assert await refused(none) == ("INVALID_ARGUMENT", "InvalidInput")
        large = calls.ask("ModelInfer", bytes(3 << 20), metadata=WITH_TOKEN)
        assert (await refused(large))[0] == "RESOURCE_EXHAUSTED"
        # The first one is answered, as by any server of unary calls.
        two = calls.open("ModelInfer", ASKED, ASKED, is_whole=True, metadata=WITH_TOKEN)
        assert await refused(two) == ("NOT_FOUND", "ModelNotFound")

    on_server(tmp_path, test)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2 (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def call_by_hand(stream: int, **fields: bytes) -> bytes:
    """The head of a call, as HPACK without its tables: gRPC's own client sends no value that is no text."""
    own = {":method": b"POST", ":scheme": b"http", ":authority": b"x", "te": b"trailers"}
    own |= {":path": f"/{SERVICE}/ModelInfer".encode(), "content-type": b"application/grpc"}
    heads = {**own, **{key.replace("path", ":path"): value for key, value in fields.items()}}
    parts = [b"\0%c%b%c%b" % (len(key), key.encode(), len(value), value) for key, value in heads.items()]
    return frame(1, 4, stream, b"".join(parts))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
NO_PATH = PREFACE + call_by_hand(1, path=f"/{SERVICE}/".encode() + b"\xff")


def test_a_path_that_is_no_text_ends_nobodys_call_and_new_ones_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends gRPC's own server, before anybody looks at a token: another one takes its place."""

    async def test(server: RpcServer, friend: Calls, other: Calls) -> None:
        survived: list[bool] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: survived.append(server.has_survived(context.get("exception")))
        )
        keeping = asyncio.ensure_future(server.keep_open())
        may_go_on = asyncio.Event()

        async def sent() -> AsyncIterator[bytes]:
            await may_go_on.wait()
            yield ASKED

        held = other._channel.stream_unary(f"/{SERVICE}/ModelInfer")(sent(), metadata=WITH_TOKEN)
        await until_under_way(server, 1)
        host, port = friend.address.rsplit(":", 1)
        for count in (1, 2, 3):
            async with asyncio.timeout(WAIT_S):
                writer = (await asyncio.open_connection(host, int(port)))[1]
                writer.write(NO_PATH)
                while server.unreadable < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                writer.close()
                while not await is_live(friend):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        assert server.under_way == 1
        may_go_on.set()
        assert await refused(held) == ("NOT_FOUND", "ModelNotFound")
        assert all(survived)
        assert not keeping.done()
        await server.close()
        async with asyncio.timeout(WAIT_S):
            await keeping

    on_server(tmp_path, test)
    assert "codec can't decode" not in caplog.text


async def is_live(calls: Calls) -> bool:
    try:
        return await calls.ask("ServerLive") == b"\x08\x01"
    except grpc.aio.AioRpcError:
        return False


def test_what_a_stranger_says_that_is_no_text_is_counted_and_in_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A token may be in it, and is, where somebody has mistyped one."""
    wrong = f"Bearer {TOKEN}\xe9".encode("latin-1")
    stream_path = f"/{SERVICE}/ModelStreamInfer".encode()
    calls = (
        call_by_hand(1, authorization=wrong),
        call_by_hand(3, authorization=wrong, path=stream_path),
        call_by_hand(5, other=wrong, more=wrong),
    )

    async def test(server: RpcServer, friend: Calls, _: Calls) -> None:
        host, port = friend.address.rsplit(":", 1)
        writer = (await asyncio.open_connection(host, int(port)))[1]
        writer.write(PREFACE + b"".join(calls))
        async with asyncio.timeout(WAIT_S):
            while server.unreadable < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        writer.close()
        assert await refused(friend.open("ModelInfer")) == ("UNAUTHENTICATED", "Unauthorised")

    with caplog.at_level("DEBUG"):
        on_server(tmp_path, test)
    assert TOKEN not in caplog.text
    assert "Invalid encoding" not in caplog.text
    assert not logging.getLogger("grpc._cython.cygrpc").filters
