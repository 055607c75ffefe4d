"""A gRPC stream whose client does what it should not, on a service that has no frontend."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fabric.client import Client, InferResult
from fabric.clock import Clock, MonotonicClock
from fabric.errors import InvalidInput, Overloaded
from fabric.messages import Ledger
from roles.gateway.http.limits import BodyBudget, HttpLimits
from roles.gateway.http.messages import Request
from roles.gateway.http.reader import HttpReader
from roles.gateway.repository import Repository
from roles.gateway.rpc.held import Held
from roles.gateway.rpc.messages import message_class
from roles.gateway.rpc.service import IDLE_MS, RpcService
from roles.gateway.rpc.stream import STREAM_MAX
from roles.gateway.service import Answered, Service
from roles.gateway.tokens import Tokens

Asked = message_class("ModelInferRequest")
Response = message_class("ModelInferResponse")


BUDGET = BodyBudget(1 << 20)


def held(budget: BodyBudget = BUDGET, **fields: Any) -> Held:
    """As gRPC hands it on."""
    raw = Asked(**fields).SerializeToString()
    return RpcService._read(service(budget), Asked.FromString, raw)


class NoContext:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def add_done_callback(self, callback: Any) -> None:
        pass

    def time_remaining(self) -> float | None:
        return None


def service(
    budget: BodyBudget = BUDGET,
    clock: Clock | None = None,
    tokens: Tokens | None = None,
    request_bytes_max: int = 1 << 20,
) -> RpcService:
    own = Service(Client(["tcp://127.0.0.1:9"]), clock or MonotonicClock())
    repository = Repository({}, Path(), Path(), is_open=False)
    return RpcService(own, repository, tokens or Tokens(None), budget, 8, request_bytes_max)


def test_who_does_not_read_answers_is_not_read_from() -> None:
    taken = 0

    async def asked() -> AsyncIterator[Held]:
        nonlocal taken
        for number in range(20 * STREAM_MAX):
            taken += 1
            yield held(model_name="m", model_version="9", id=str(number))

    async def run() -> None:
        stream = service()._stream(asked(), NoContext())
        await anext(stream)
        for _ in range(100 * STREAM_MAX):
            await asyncio.sleep(0)
        assert taken <= STREAM_MAX + 1
        answers = [answer async for answer in stream]
        assert len(answers) == 20 * STREAM_MAX - 1
        assert all(answer.error_message.startswith("ModelNotFound: ") for answer in answers)

    asyncio.run(run())


def test_every_request_of_a_stream_is_answered_even_where_we_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Any) -> Any:
        raise ValueError(request.id)

    monkeypatch.setattr("roles.gateway.rpc.service.read_infer", broken)

    async def asked() -> AsyncIterator[Held]:
        for number in range(2 * STREAM_MAX):
            yield held(model_name="m", id=str(number))

    async def run() -> None:
        async with asyncio.timeout(30):
            answers = [answer async for answer in service()._stream(asked(), NoContext())]
        assert {answer.infer_response.id for answer in answers} == {str(at) for at in range(2 * STREAM_MAX)}
        assert {answer.error_message.partition(":")[0] for answer in answers} == {"Internal"}

    asyncio.run(run())


def test_a_stream_that_breaks_off_ends() -> None:
    async def asked() -> AsyncIterator[Held]:
        yield held(model_name="m", model_version="9")
        raise OSError("the connection is gone")

    async def run() -> None:
        async with asyncio.timeout(30):
            with pytest.raises(OSError, match="gone"):
                async for _ in service()._stream(asked(), NoContext()):
                    pass

    asyncio.run(run())


def test_a_token_that_is_revoked_asks_no_more_on_an_open_stream(tmp_path: Path) -> None:
    file = tmp_path / "tokens"

    def write(token: str, at_s: int) -> None:
        file.write_text(token, encoding="utf-8")
        file.chmod(0o600)
        os.utime(file, (at_s, at_s))

    write("a" * 16, 1)
    tokens = Tokens(file)
    goes_on = asyncio.Event()

    async def asked() -> AsyncIterator[Held]:
        yield held(model_name="m", model_version="9", id="before")
        await goes_on.wait()
        write("b" * 16, 2)
        tokens.refresh()
        yield held(model_name="m", model_version="9", id="after")

    async def run() -> None:
        context = NoContext(("authorization", "Bearer " + "a" * 16))
        async with asyncio.timeout(30):
            stream = service(tokens=tokens)._stream(asked(), context)
            answers = [await anext(stream)]
            goes_on.set()
            answers += [answer async for answer in stream]
        assert [(one.infer_response.id, one.error_message.partition(":")[0]) for one in answers] == [
            ("before", "ModelNotFound"),
            ("after", "Unauthorised"),
        ]

    asyncio.run(run())


def test_messages_share_the_budget_of_all_bodies_and_give_it_back() -> None:
    budget = BodyBudget(100)
    first = held(budget, model_name="m", id="x" * 60)
    assert budget.used > 60
    second = held(budget, model_name="m", id="x" * 60)
    with pytest.raises(Overloaded):
        assert second.message
    assert second.request_id == ""
    assert first.message.model_name == "m"
    del first
    assert budget.used == 0
    assert held(budget, model_name="m", id="x" * 60).message.id == "x" * 60


def test_what_is_no_message_holds_nothing_of_the_budget_and_is_refused() -> None:
    budget = BodyBudget(100)
    for _ in range(10):
        none = RpcService._read(service(budget), Asked.FromString, b"\xff" * 60)
        with pytest.raises(InvalidInput, match="cannot be read"):
            assert none.message
        assert none.request_id == ""
        assert budget.used == 0


@pytest.mark.parametrize("before", [b"", b"\x0b\x0c", b"\x08\x01\x09" + bytes(8) + b"\x0d" + bytes(4)])
def test_a_message_of_many_empty_fields_is_refused_before_it_is_read(before: bytes) -> None:
    """Of 64 MiB of them the parser makes objects of 2.5 GiB."""

    def parse(raw: bytes) -> Any:
        raise AssertionError("it was read")

    budget = BodyBudget(1 << 20)
    many = RpcService._read(service(budget), parse, before + b"\x2a\x00" * 20_000)
    with pytest.raises(InvalidInput, match="over 16384 fields"):
        assert many.message
    assert budget.used == 0


def test_a_request_with_as_many_tensors_as_it_may_have_is_read() -> None:
    asked = Asked(model_name="m", id="1")
    for at in range(4_096):
        asked.inputs.add(name=str(at), datatype="FP32", shape=[1])
        asked.outputs.add(name=str(at))
        asked.raw_input_contents.append(bytes(4))
    raw = asked.SerializeToString()
    assert RpcService._read(service(), Asked.FromString, raw).message == asked


def test_a_stream_over_the_budget_is_told_so_and_goes_on() -> None:
    budget = BodyBudget(30)

    async def asked() -> AsyncIterator[Held]:
        yield held(budget, model_name="m", model_version="9", id="x" * 60)
        yield held(budget, model_name="m", model_version="9", id="1")

    async def run() -> None:
        async with asyncio.timeout(30):
            answers = [answer async for answer in service(budget)._stream(asked(), NoContext())]
        assert sorted(answer.error_message.partition(":")[0] for answer in answers) == [
            "ModelNotFound",
            "Overloaded",
        ]
        assert budget.used == 0

    asyncio.run(run())


IDLE_S = IDLE_MS / 1e3


class HastyLoop(asyncio.SelectorEventLoop):
    """In which time goes by at once where nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def hasty(timeout: float | None = None) -> Any:
            self._passed_s += timeout or 0.0
            return select(0)

        self._selector.select = hasty  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._passed_s


class LoopClock:
    def now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1e3


class AbortedError(Exception):
    pass


class Context(NoContext):
    async def abort(self, status: Any, reason: str, trailing: Any) -> None:
        raise AbortedError(status.name, reason, trailing)


def hasty(run: Any) -> None:
    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        runner.run(run())


@pytest.mark.parametrize("silent_s", [0.1, 0.9 * IDLE_S, 1.1 * IDLE_S])
@pytest.mark.parametrize("before", [0, 1, STREAM_MAX + 1])
def test_a_silent_stream_ends_once_it_is_silent_for_too_long(silent_s: float, before: int) -> None:
    async def asked() -> AsyncIterator[Held]:
        for at in range(before):
            await asyncio.sleep(0.9 * IDLE_S)
            yield held(model_name="m", model_version="9", id=str(at))
        await asyncio.sleep(silent_s)

    ends = (
        pytest.raises(AbortedError, match=r"DEADLINE_EXCEEDED.*nothing was asked on this stream for 300 s")
        if silent_s > IDLE_S
        else contextlib.nullcontext()
    )

    async def run() -> None:
        answered = 0
        with ends:
            async for _ in service(clock=LoopClock())._stream(asked(), Context()):
                answered += 1
        assert answered == before
        assert asyncio.get_running_loop().time() <= (0.9 * before + 1.01) * IDLE_S

    hasty(run)


def test_a_stream_that_waits_for_an_answer_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(*_: Any) -> Any:
        await asyncio.sleep(3 * IDLE_S)
        raise InvalidInput("at last")

    async def asked() -> AsyncIterator[Held]:
        yield held(model_name="m", id="1")
        await asyncio.sleep(3.5 * IDLE_S)

    async def run() -> None:
        own = service(clock=LoopClock())
        monkeypatch.setattr(own, "_inferred", slow)
        answers = [answer.error_message async for answer in own._stream(asked(), Context())]
        assert answers == ["InvalidInput: at last"]

    hasty(run)


OUTPUT_BYTES = 10 * 16_384


def answering(own: RpcService, monkeypatch: pytest.MonkeyPatch) -> int:
    """Its inferences have outputs. How many bytes of the budget an answer takes."""

    async def answered(request: Any, *_: Any) -> Any:
        return request, SimpleNamespace(is_stacked=False), Answered([InferResult({}, Ledger(batch_size=1))])

    def written(request: Any, _: Any) -> Any:
        return Response(id=request.id, raw_output_contents=[bytes(OUTPUT_BYTES)])

    monkeypatch.setattr(own, "_answered", answered)
    monkeypatch.setattr("roles.gateway.rpc.service.write_infer", written)
    return OUTPUT_BYTES


@pytest.mark.parametrize("has_ended_its_side", [False, True])
@pytest.mark.parametrize("part", [0.9, 1.1])
def test_a_stream_whose_client_does_not_read_an_answer_ends_and_keeps_no_other_one(
    part: float, monkeypatch: pytest.MonkeyPatch, *, has_ended_its_side: bool
) -> None:
    """After HTTP's 30 s and a second for each 16 KiB. Some wait for their inferences meanwhile, and one for room."""
    budget = BodyBudget(1 << 30)
    own = service(budget, LoopClock())
    size = answering(own, monkeypatch)
    limit_s = 40.0

    async def asked() -> AsyncIterator[Held]:
        for at in range(STREAM_MAX + 1):
            yield held(budget, model_name="m", id=str(at))
        if not has_ended_its_side:
            await asyncio.sleep(IDLE_S)

    async def run() -> None:
        stream: Any = own._stream(asked(), Context())
        await anext(stream)
        await asyncio.sleep(part * limit_s)
        kept = 1 if part > 1 else STREAM_MAX
        assert kept * size <= budget.used < (kept + 1) * size
        if part > 1:
            with pytest.raises(AbortedError, match=r"DEADLINE_EXCEEDED.*was not read for 40 s.*TooSlow"):
                await anext(stream)
        else:
            for _ in range(STREAM_MAX):
                await anext(stream)
            await stream.aclose()
        await asyncio.sleep(0)
        assert budget.used == 0

    hasty(run)


def test_answers_have_their_bytes_of_the_budget_until_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(6 * OUTPUT_BYTES)
    own = service(budget, LoopClock())
    size = answering(own, monkeypatch)

    async def asked() -> AsyncIterator[Held]:
        for at in range(6):
            if at == 4:  # when those before are read
                await asyncio.sleep(2.0)
            yield held(budget, model_name="m", id=str(at))

    async def run() -> None:
        told = {}
        async for answer in own._stream(asked(), Context()):
            told[answer.infer_response.id] = answer.error_message.partition(":")[0]
            await asyncio.sleep(0.1)
            assert budget.used < 3 * size
        assert told == {"0": "", "1": "", "2": "Overloaded", "3": "Overloaded", "4": "", "5": ""}
        assert budget.used == 0

    hasty(run)


class Call(Context):
    """Of one message, until its `ends` are called."""

    def __init__(self, budget: BodyBudget) -> None:
        super().__init__()
        self._budget = budget
        self.ends: list[Any] = []

    def add_done_callback(self, callback: Any) -> None:
        self.ends.append(callback)

    async def read(self) -> Held:
        return held(self._budget, model_name="m")

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass


def test_the_answer_of_a_call_has_its_bytes_of_the_budget_until_the_call_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = BodyBudget(3 * OUTPUT_BYTES)
    own = service(budget, LoopClock())
    size = answering(own, monkeypatch)

    async def run() -> None:
        call, other = Call(budget), Call(budget)
        await own._unary(own._infer, None, call)
        assert size <= budget.used < 2 * size
        with pytest.raises(AbortedError, match=r"UNAVAILABLE.*bodies and answers of others"):
            await own._unary(own._infer, None, other)
        for end in (*call.ends, *other.ends):
            end(None)
        assert budget.used == 0

    hasty(run)


@pytest.mark.parametrize("is_stream", [False, True])
def test_clients_that_stop_reading_for_ever_leave_room_for_the_bodies_of_others(
    monkeypatch: pytest.MonkeyPatch, *, is_stream: bool
) -> None:
    """gRPC ends no call while an answer is on its way: four of them would take all there is, for as long as their clients like."""
    budget = BodyBudget(4 * OUTPUT_BYTES + OUTPUT_BYTES // 2)
    own = service(budget, LoopClock())
    answering(own, monkeypatch)

    async def asked() -> AsyncIterator[Held]:
        yield held(budget, model_name="m")
        await asyncio.sleep(IDLE_S)

    async def run() -> None:
        streams: list[Any] = [own._stream(asked(), Context()) for _ in range(4)]
        calls = [Call(budget) for _ in range(4)]
        refused = 0
        for stream, call in zip(streams, calls, strict=True):
            if is_stream:
                refused += (await anext(stream)).error_message.startswith("Overloaded: ")
                continue
            try:
                await own._unary(own._infer, None, call)
            except AbortedError:
                refused += 1
        assert refused == 2
        await asyncio.sleep(100.0)  # by HTTP such an answer has 40 s
        reader = HttpReader(HttpLimits(), budget, lambda _: None, 0.0)
        body = bytes(2 * OUTPUT_BYTES)
        (request,) = reader.feed(
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body, 0.0
        )
        assert isinstance(request, Request)
        budget.give_back(len(request.body))
        for stream, call in zip(streams, calls, strict=True):
            await stream.aclose()
            for end in call.ends:
                end(None)
        assert budget.used == 0

    hasty(run)


# HTTP's 10 s and a second for each 16 KiB of the largest message.
@pytest.mark.parametrize(("request_bytes_max", "limit_s"), [(1 << 20, 300), (64 << 20, 4_106)])
@pytest.mark.parametrize("part", [0.9, 1.1])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_message_may_take_as_long_as_by_http(
    request_bytes_max: int, limit_s: float, part: float, *, is_stream: bool
) -> None:
    """Of a message that is on its way nothing is seen, so a silent client has that time too."""

    class Late(Context):
        async def read(self) -> Held:
            await asyncio.sleep(part * limit_s)
            return held(model_name="m", model_version="9")

    async def run() -> None:
        own = service(clock=LoopClock(), request_bytes_max=request_bytes_max)
        context = Late()

        async def messages() -> AsyncIterator[Held]:
            yield await context.read()

        try:
            if is_stream:
                told = [answer.error_message async for answer in own._stream(messages(), context)]
            else:
                await own._unary(own._infer, None, context)
        except AbortedError as error:
            told = [str(error)]
        assert ("TooSlow" if part > 1 else "ModelNotFound") in told[0]
        assert asyncio.get_running_loop().time() <= 1.01 * limit_s

    hasty(run)


GONE = r"UNAVAILABLE.*the gateway ends: open another stream.*PeerLost"


@pytest.mark.parametrize("before", [0, 1, STREAM_MAX + 1])
@pytest.mark.parametrize("under_way", [0, 1, STREAM_MAX, STREAM_MAX + 1])
def test_a_gateway_that_ends_answers_what_a_stream_asked_and_ends_it_then(
    before: int, under_way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `under_way` one may have been read, and have waited for room. What comes after that is refused, and told to."""
    own = service(clock=LoopClock())
    late = asyncio.Event()

    async def inferred(reading: Callable[[], Awaitable[Held]], *_: Any) -> Any:
        request = await reading()
        await asyncio.sleep(0.0 if request.message.id == "before" else 1.0)
        raise InvalidInput("it was asked")

    monkeypatch.setattr(own, "_inferred", inferred)

    async def asked() -> AsyncIterator[Held]:
        for _ in range(before):
            yield held(model_name="m", id="before")
        await asyncio.sleep(1.0)
        for _ in range(under_way):
            yield held(model_name="m", id="under way")
        await late.wait()
        if under_way:
            yield held(model_name="m", id="late")
        await asyncio.sleep(IDLE_S)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1.5, own.drain)
        loop.call_later(1.6, late.set)
        told: dict[str, list[str]] = {"before": [], "under way": [], "late": []}

        async def listen() -> None:
            async for answer in own._stream(asked(), Context()):
                told[answer.infer_response.id].append(answer.error_message.partition(":")[0])

        with pytest.raises(AbortedError, match=GONE):
            await listen()
        assert told["before"] == ["InvalidInput"] * before
        assert told["under way"] == ["InvalidInput"] * under_way
        assert told["late"] == ["PeerLost"] * (under_way > 0)
        assert loop.time() < 4

    hasty(run)


@pytest.mark.parametrize("drains_after_s", [0.0, 0.5, 1.5])
def test_a_stream_whose_client_has_ended_it_ends_well_though_the_gateway_ends(
    drains_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = service(clock=LoopClock())

    async def inferred(*_: Any) -> Any:
        await asyncio.sleep(1.0)
        raise InvalidInput("it was asked")

    monkeypatch.setattr(own, "_inferred", inferred)

    async def asked() -> AsyncIterator[Held]:
        yield held(model_name="m", id="1")

    async def run() -> None:
        asyncio.get_running_loop().call_later(drains_after_s, own.drain)
        assert len([answer async for answer in own._stream(asked(), Context())]) == 1

    hasty(run)


@pytest.mark.parametrize("left_s", [None, 5.0, 60.0])
def test_what_a_stream_asks_has_the_time_since_it_was_read_and_no_longer_than_the_call(
    left_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for room until others are answered too."""

    class Limited(Context):
        def time_remaining(self) -> float | None:
            return None if left_s is None else left_s - asyncio.get_running_loop().time()

    own = service(clock=LoopClock())
    budgets: list[float] = []

    async def answered(inference: Any, rows: Any, budget_ms: float) -> Any:
        del inference, rows
        budgets.append(budget_ms)
        await asyncio.sleep(2.0)
        raise InvalidInput("it was asked")

    monkeypatch.setattr(own, "_asked", answered)

    async def asked() -> AsyncIterator[Held]:
        for _ in range(STREAM_MAX + 1):
            request = Asked(model_name="m")
            request.parameters["deadline_ms"].double_param = 10_000
            yield RpcService._read(own, Asked.FromString, request.SerializeToString())

    async def run() -> None:
        async for _ in own._stream(asked(), Limited()):
            pass
        first_ms = min(10_000.0, 1e3 * (left_s or 60.0))
        assert budgets[:-1] == pytest.approx([first_ms] * STREAM_MAX)
        assert budgets[-1] == pytest.approx(first_ms - 2_000)

    hasty(run)
