"""Inferences at both doors: of models that the gateway does not know as they are now, and how they are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fabric.errors import NoReplica
from fabric.ids import ModelId
from tests.unit.roles.gateway.doors import Doors, StandIn, asked, at_doors, model

DOORS = ("http", "grpc", "stream")
BATCH = np.zeros((2, 3), np.float32)
ONE = np.zeros(3, np.float32)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("former", "outputs"),
    [
        (None, []),
        (model(shape=(2, 3)), []),
        (model(shape=(4,)), []),
        (model(shape=(5, 2, 3)), []),
        (model(dtype="int64"), ["x"]),
    ],
)
def test_a_good_request_is_served_however_lately_its_model_came(
    former: Any, outputs: list[str], door: str, tmp_path: Path
) -> None:
    """What the gateway knows of models is up to a second old: it may know none, or one of other shapes."""

    async def test(doors: Doors) -> None:
        await doors.service.models()
        await asyncio.sleep(0.15)
        doors.client.served = {ModelId("m"): model()}
        assert await doors.infer(door)("m", BATCH, outputs) == ("", (2, 3))
        assert await doors.infer(door)("m", ONE, outputs) == ("", (3,))
        assert doors.counted("m") == (2, 0)

    at_doors(tmp_path, StandIn(*([] if former is None else [former])), test)


@pytest.mark.parametrize("door", DOORS)
def test_a_model_that_came_right_after_the_last_look_is_served(door: str, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        doors.client.served = {ModelId("m"): model()}
        assert await doors.infer(door)("m", BATCH) == ("", (2, 3))

    at_doors(tmp_path, StandIn(), test)


def test_a_plain_request_takes_names_and_types_of_a_model_that_came_lately(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        doors.client.served = {ModelId("m"): model(dtype="int64")}
        status, told = await doors.http_post("/v1/models/m:predict", b'{"inputs": [1, 2, 3]}')
        assert (status, told.get("outputs")) == (200, {"x": [1, 2, 3]})

    at_doors(tmp_path, StandIn(), test)


def test_an_output_that_the_model_lately_got_may_be_asked_for(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        former = model()
        doors.client.served = {ModelId("m"): type(former)(ModelId("m"), 1e4, former.inputs, (), replicas=1)}
        await doors.service.models()
        assert doors.service.model("m") is not None
        for door in DOORS:
            assert (await doors.infer(door)("m", ONE, ["x"]))[0] == ""
            assert (await doors.infer(door)("m", ONE, ["y"]))[0] == "InvalidInput"
        assert doors.counted("m") == (3, 3)

    at_doors(tmp_path, StandIn(), test)


@pytest.mark.parametrize("door", DOORS)
def test_wrong_requests_do_not_make_frontends_list_their_models_on_and_on(door: str, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        began_ms, before = doors.service.clock.now_ms(), doors.client.listings
        for _ in range(40):
            assert (await doors.infer(door)("m", np.zeros(5, np.float32)))[0] == "InvalidInput"
            assert (await doors.infer(door)("nobody", ONE))[0] == "ModelNotFound"
        passed_ms = doors.service.clock.now_ms() - began_ms
        assert doors.client.listings - before <= passed_ms / 100 + 1

    at_doors(tmp_path, StandIn(model()), test)


async def _lost(doors: Doors, door: str) -> None:
    asking = asyncio.ensure_future(doors.infer(door)("never", ONE))
    while not doors.client.asked:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait([asking])
    while not doors.service.statistics.failures:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def _asked(name: str, array: Any, outputs: list[str], doors: Doors, door: str) -> None:
    await doors.infer(door)(name, array, outputs)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "array", "outputs", "code"),
    [
        ("m", ONE, ["nothing"], "InvalidInput"),
        ("any", ONE, ["nothing"], "InvalidInput"),
        ("m", np.zeros(5, np.float32), [], "InvalidInput"),
        ("m", np.zeros((0, 3), np.float32), [], "InvalidInput"),
        ("m", np.zeros((300, 3), np.float32), [], "TooLarge"),
        ("busy", ONE, [], "Overloaded"),
        ("nobody", ONE, [], "ModelNotFound"),
    ],
)
def test_an_inference_is_a_success_where_its_answer_has_outputs_and_one_failure_elsewhere(
    name: str, array: Any, outputs: list[str], code: str, door: str, tmp_path: Path
) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        assert (await doors.infer(door)(name, array, outputs))[0] == code
        assert dict(doors.service.statistics.failures) == {code: 1}
        assert doors.counted(name) == (0, int(name != "nobody"))
        assert doors.service.under_way == 0

    at_doors(tmp_path, StandIn(model(), model("any", None), model("busy", None)), test)


@pytest.mark.parametrize("door", DOORS)
def test_an_inference_whose_client_goes_is_one_failure(door: str, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        await _lost(doors, door)
        assert dict(doors.service.statistics.failures) == {"Cancelled": 1}
        assert doors.counted("never") == (0, 1)
        assert doors.service.under_way == 0

    at_doors(tmp_path, StandIn(model("never", None)), test)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"inputs": 3}'])
@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v1/models/m:predict"])
def test_a_body_that_is_wrong_is_one_failure(path: str, body: bytes, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        assert (await doors.http_post(path, body))[0] == 400
        assert doors.counted("m") == (0, 1)

    at_doors(tmp_path, StandIn(model()), test)


def test_a_message_that_is_wrong_is_one_failure(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        wrong = asked("m")
        wrong.inputs[0].datatype = "NOTHING"
        call: Callable[..., Any] = doors.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(wrong.SerializeToString())
        assert doors.counted("m") == (0, 1)

    at_doors(tmp_path, StandIn(model()), test)


def test_a_load_is_over_when_the_model_is_ready_and_an_unload_when_it_is_gone(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        service = doors.service
        loading = asyncio.ensure_future(service.until_ready("m", 10_000))
        await asyncio.sleep(0.25)
        doors.client.served = {ModelId("m"): model(replicas=0)}
        await asyncio.sleep(0.25)
        assert not loading.done()
        with pytest.raises(NoReplica):
            await service.until_ready("m", 150)
        doors.client.served = {ModelId("m"): model()}
        await loading
        assert service.model("m") is not None
        unloading = asyncio.ensure_future(service.until_gone("m", 10_000))
        await asyncio.sleep(0.25)
        assert not unloading.done()
        doors.client.served = {}
        await unloading
        assert service.model("m") is None

    at_doors(tmp_path, StandIn(), test)
