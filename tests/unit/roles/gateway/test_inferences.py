"""Inferences at both doors: of models that the gateway does not know as they are now, and how they are counted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fabric.errors import NoReplica
from fabric.ids import ModelId
from roles.gateway.http.messages import Head, Reply, Request
from roles.gateway.rpc.messages import SERVICE, message_class
from roles.gateway.tokens import Tokens
from tests.unit.roles.gateway.doors import Doors, StandIn, asked, at_doors, heads_of, model

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
        doors.client.served = {ModelId("m"): model()}
        assert await doors.infer(door)("m", BATCH, outputs) == ("", (2, 3))
        assert await doors.infer(door)("m", ONE, outputs) == ("", (3,))
        assert doors.counted("m") == (2, 0)

    at_doors(tmp_path, StandIn(*([] if former is None else [former])), test)


def test_a_plain_request_takes_names_and_types_of_a_model_that_came_lately(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        doors.client.served = {ModelId("m"): model(dtype="int64")}
        status, told = await doors.http_post("/v1/models/m:predict", b'{"inputs": [1, 2, 3]}')
        assert (status, told.get("outputs")) == (200, {"x": [1, 2, 3]})

    at_doors(tmp_path, StandIn(), test)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("shape", [(3,), None])
def test_an_output_may_be_asked_for_once(shape: Any, door: str, tmp_path: Path) -> None:
    """As often as it is named it would be written out: of 53 kB that name one of 10 MB 4,096 times, 40 GB."""

    async def test(doors: Doors) -> None:
        await doors.service.models()
        assert await doors.infer(door)("m", ONE, ["x", "x"]) == ("InvalidInput", ())
        assert doors.client.asked == []
        assert (await doors.infer(door)("m", ONE, ["x"]))[0] == ""

    at_doors(tmp_path, StandIn(model(shape=shape)), test)


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
def test_a_model_with_heads_is_refused_in_the_frontends_own_words(door: str, tmp_path: Path) -> None:
    """It is in no listing, and there all the same."""

    async def test(doors: Doors) -> None:
        assert await doors.infer(door)("base", ONE) == ("InvalidInput", ())
        assert await doors.infer(door)("nix", ONE) == ("ModelNotFound", ())

    at_doors(tmp_path, StandIn(*heads_of("base", "a", "b")), test)


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_model_with_heads_is_as_ready_as_they_are_and_describes_none_of_them(
    replicas: int, tmp_path: Path
) -> None:
    async def test(doors: Doors) -> None:
        for name in ("base", "a"):
            assert (await doors.http_get(f"/v2/models/{name}/ready"))[0] == (200 if replicas else 503)
            ready = doors.channel.unary_unary(
                f"/{SERVICE}/ModelReady",
                message_class("ModelReadyRequest").SerializeToString,
                message_class("ModelReadyResponse").FromString,
            )
            assert (await ready(message_class("ModelReadyRequest")(name=name))).ready == bool(replicas)
        assert (await doors.http_get("/v2/models/nix/ready"))[0] == 404
        status, told = await doors.http_get("/v2/models/base")
        assert (status, told["error"]) == (404, "model 'base' is asked by its heads: a, b")
        index = (await doors.http_post("/v2/repository/index", b""))[1]
        state = "READY" if replicas else "UNAVAILABLE"
        assert {one["name"]: one["state"] for one in index} == dict.fromkeys(("a", "b", "base"), state)

    at_doors(tmp_path, StandIn(*heads_of("base", "a", "b", replicas=replicas)), test)


@pytest.mark.parametrize("door", DOORS)
def test_wrong_requests_do_not_make_frontends_list_their_models_on_and_on(door: str, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        began_ms, before = doors.service.clock.now_ms(), doors.client.listings
        for _ in range(2):
            wrong = [doors.infer(door)("m", np.zeros(5, np.float32)) for _ in range(20)]
            wrong += [doors.infer(door)("nobody", ONE) for _ in range(20)]
            codes = [code for code, _ in await asyncio.gather(*wrong)]
            assert codes == 20 * ["InvalidInput"] + 20 * ["ModelNotFound"]
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


def failures(doors: Doors) -> dict[str, int]:
    return dict(doors.service.statistics.failures)


@pytest.mark.parametrize("door", DOORS)
def test_a_body_for_which_there_is_no_room_is_one_failure(door: str, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        assert doors.http.budget.take(doors.http.limits.bodies_bytes_max)
        assert (await doors.infer(door)("m", ONE))[0] == "Overloaded"
        assert failures(doors) == {"Overloaded": 1}

    at_doors(tmp_path, StandIn(model()), test)


@pytest.mark.parametrize("door", DOORS)
def test_an_answer_for_which_there_is_no_room_is_one_failure(door: str, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        large = np.full(250_000, 1 / 3, np.float32)  # its answer by HTTP is JSON, and larger
        submit, budget = doors.client.submit, doors.http.budget

        def submit_while_others_come(*asked: Any) -> Any:
            assert budget.take(doors.http.limits.bodies_bytes_max - budget.used)
            return submit(*asked)

        doors.client.submit = submit_while_others_come  # type: ignore[method-assign,assignment]
        assert (await doors.infer(door)("any", large))[0] == "Overloaded"
        assert failures(doors) == {"Overloaded": 1}
        assert doors.counted("any") == (0, 1)

    at_doors(tmp_path, StandIn(model("any", None)), test)


def test_an_inference_that_is_answered_holds_its_body_no_more(tmp_path: Path) -> None:
    """Its answer may wait to be compressed, and the body is not counted then."""

    async def test(doors: Doors) -> None:
        await doors.service.models()
        body = json.dumps({"inputs": [1, 2, 3]}).encode()
        own = sys.getrefcount(body)
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        head = Head("POST", "/v1/models/m:predict", "", {})
        request = Request(head, body, doors.service.clock.now_ms())
        under_way = doors.http.handler.start(request, answered.set_result)
        del request
        assert sys.getrefcount(body) > own
        assert (await answered).status == 200
        assert under_way is not None
        assert sys.getrefcount(body) == own

    at_doors(tmp_path, StandIn(model()), test)


INFER = "POST /v2/models/m/{}infer HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "code", "count"),
    [
        (INFER.format("", 1 << 40), "TooLarge", 1),
        (INFER.format("versions/7/", 2), "ModelNotFound", 1),
        (INFER.format("", 2).replace("POST", "PUT"), "MethodNotAllowed", 0),
        (INFER.format("", 2).replace("models", "muddles"), "NotFound", 0),
        (INFER.format("", 1 << 40).replace("m/infer", "m"), "MethodNotAllowed", 0),
    ],
)
def test_an_inference_that_is_refused_by_its_head_is_one_failure(
    head: str, code: str, count: int, tmp_path: Path
) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        assert (await doors.http_raw(head.encode()))[1]["code"] == code
        assert failures(doors) == ({code: 1} if count else {})
        assert doors.counted("m") == (0, count)

    at_doors(tmp_path, StandIn(model()), test)


def test_a_call_for_which_there_is_no_room_is_one_failure(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        doors.rpc._service._calls_max = 0
        assert (await doors.infer("grpc")("m", ONE))[0] == "Overloaded"
        assert failures(doors) == {"Overloaded": 1}

    at_doors(tmp_path, StandIn(model()), test)


def lists(path: Path, token: str) -> Tokens:
    """The file of tokens has that one."""
    path.write_text(token)
    path.chmod(0o600)
    os.utime(path, (ord(token[0]),) * 2)  # a file that was changed within the same tick looks as it was
    return Tokens(path)


def test_who_is_not_let_in_is_one_failure_and_of_no_model(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        await doors.service.models()
        assert (await doors.infer("http")("m", ONE))[0] == "Unauthorised"
        assert (await doors.infer("grpc")("m", ONE))[0] == "Unauthorised"
        assert (await doors.http_post("/v2/repository/index", b""))[0] == 401
        assert failures(doors) == {"Unauthorised": 2}
        assert doors.counted("m") == (0, 0)

    at_doors(tmp_path, StandIn(model()), test, lists(tmp_path / "tokens", "a" * 16))


def test_a_request_of_a_stream_whose_token_was_revoked_or_whose_gateway_ends_is_one_failure(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens"
    tokens = lists(path, "a" * 16)

    async def test(doors: Doors) -> None:
        await doors.service.models()
        asking: asyncio.Queue[Any] = asyncio.Queue()

        async def requests() -> AsyncIterator[Any]:
            while True:
                yield await asking.get()

        call = doors.stream(requests(), metadata=(("authorization", f"Bearer {'a' * 16}"),))

        async def told(name: str) -> str:
            asking.put_nowait(asked(name))
            answer = await call.read()
            return str(answer.error_message.partition(":")[0])

        assert await told("m") == ""
        lists(path, "b" * 16)
        tokens.refresh()
        assert await told("m") == "Unauthorised"
        lists(path, "a" * 16)
        tokens.refresh()
        asking.put_nowait(asked("never"))
        while doors.service.under_way != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        doors.rpc._service.drain()
        assert await told("m") == "PeerLost"
        assert failures(doors) == {"Unauthorised": 1, "PeerLost": 1}
        assert doors.counted("m") == (1, 0)
        call.cancel()

    at_doors(tmp_path, StandIn(model(), model("never", None)), test, tokens)


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
