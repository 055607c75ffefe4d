"""What a refused request brought is gone when it is refused, not when the garbage collector next looks for cycles."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.errors import PeerLost
from fabric.ids import ModelId
from tests.unit.roles.gateway.doors import Doors, StandIn, at_doors, model

CALLS = 12
ARRAY = np.zeros(250_000, np.float32)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


Told = tuple[str, tuple[int, ...]]


async def busy(doors: Doors, door: str) -> Told:
    return await doors.infer(door)("busy", ARRAY)


async def unknown(doors: Doors, door: str) -> Told:
    return await doors.infer(door)("nobody", ARRAY)


async def wrong_shape(doors: Doors, door: str) -> Told:
    return await doors.infer(door)("m", ARRAY)


async def wrong_output(doors: Doors, door: str) -> Told:
    return await doors.infer(door)("m", ARRAY, ["nothing"])


async def wrong_output_in_the_end(doors: Doors, door: str) -> Told:
    """Of a model that does not say what it takes and gives."""
    return await doors.infer(door)("any", ARRAY, ["nothing"])


async def no_frontend(doors: Doors, door: str) -> Told:
    def lost(*_: Any) -> Any:
        raise PeerLost("nobody is there")

    doors.client.submit = lost  # type: ignore[method-assign,assignment]
    return await doors.infer(door)("m", ARRAY)


@pytest.mark.parametrize("door", ["http", "grpc", "stream"])
@pytest.mark.parametrize(
    "refused", [busy, unknown, wrong_shape, wrong_output, wrong_output_in_the_end, no_frontend]
)
def test_a_refused_request_leaves_nothing_behind(
    refused: Callable[[Doors, str], Awaitable[Told]], door: str, tmp_path: Path
) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(CALLS):
            assert (await refused(doors, door))[0]
        while doors.rpc.under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        left = tracemalloc.get_traced_memory()[0] - before
        assert doors.http.budget.used == 0
        assert left < 2.5 * ARRAY.nbytes, f"{left / ARRAY.nbytes:.1f} bodies"

    at_doors(tmp_path, StandIn(model(), model("busy", None), model("any", None)), test)


@pytest.mark.parametrize("body", [b"{" * 1_000_000, b'{"inputs": "' + b"x" * 1_000_000 + b'"}'])
@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v1/models/m:predict", "/v2/repository/index"])
def test_a_body_that_is_wrong_leaves_nothing_behind(path: str, body: bytes, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(CALLS):
            await doors.http_post(path, body)
        left = tracemalloc.get_traced_memory()[0] - before
        assert doors.http.budget.used == 0
        assert left < 2.5 * len(body), f"{left / len(body):.1f} bodies"

    at_doors(tmp_path, StandIn(model()), test)


def test_the_stand_in_serves_what_fits(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        for door in ("http", "grpc", "stream"):
            assert await doors.infer(door)("m", np.zeros(3, np.float32)) == ("", (3,))
        assert ModelId("m") in doors.client.served

    at_doors(tmp_path, StandIn(model()), test)
