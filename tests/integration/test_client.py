"""The SDK against a small frontend: a router on a thread that answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from fabric.client import BlockingClient, Client, ClientOptions, InferResult, ask_status
from fabric.clock import MonotonicClock
from fabric.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    Overloaded,
    PeerLost,
    TooLarge,
    Unauthorised,
    WrongThread,
)
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import ModelId
from fabric.learned_margin import STEP_MS
from fabric.link import NamedTensor, Received
from fabric.messages import (
    Answer,
    CancelRequest,
    Infer,
    Ledger,
    ModelInfo,
    ModelsAsked,
    ModelsListed,
    Ping,
    Pong,
    Refusal,
    StatusAsked,
    StatusListed,
)
from fabric.shared_memory import memory_address
from fabric.sockets import LinkOptions, RouterLink

CLOCK = MonotonicClock()
QUICK = ClientOptions(connect_timeout_ms=200, grace_ms=50)
IMAGE = np.random.default_rng(1).random((3, 224, 224), np.float32)


class Frontend:
    """Answers `echo` (and `noisy`, among other things) with its inputs and `missing` with ModelNotFound; never answers `never`."""

    def __init__(self, address: str = "tcp://127.0.0.1:0", memory: str = "") -> None:
        self._memory = memory
        self.link = RouterLink.bind([address], LinkOptions(is_sharing=bool(memory)))
        self.address = self.link.addresses[0]
        self.seen: list[Received] = []
        self.is_mute = threading.Event()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._is_ending.set()
        self._thread.join(5)

    def has_seen(self, kind: type) -> bool:
        return any(isinstance(received.message, kind) for received in self.seen)

    def _run(self) -> None:
        while not self._is_ending.is_set():
            for received in self.link.receive(64):
                self.seen.append(received)
                if not self.is_mute.is_set():
                    self._reply(received)
            if not self.link.has_more:
                select.select([self.link.fileno()], [], [], 0.01)
        self.link.close()

    def _reply(self, received: Received) -> None:
        peer = received.peer
        match received.message:
            case Ping(number):
                self.link.send(peer, Pong(number, self._memory))
            case Infer(number, "echo"):
                self.link.send(peer, Answer(number, Ledger(gpu_ms=1, total_ms=0.01)), received.tensors)
            case Infer(number, "large"):
                self.link.send(peer, Answer(number, Ledger()), [NamedTensor("y", IMAGE)])
            case Infer(number, "late"):
                self._is_ending.wait(1.05)
                self.link.send(peer, Answer(number, Ledger(total_ms=1_050)), received.tensors)
            case Infer(number, "refused while granted"):
                refused = Refusal(number, "DeadlineExceeded", "too late", False, may_be_read=True)
                self.link.send(peer, refused)
            case Infer(number, "answered, and granted to another"):
                self.link.send(peer, Answer(number, Ledger(), may_be_read=True))
            case Infer(number, "missing"):
                self.link.send(peer, Refusal(number, "ModelNotFound", "no model 'missing'", False))
            case Infer(number, "busy"):
                self.link.send(peer, Refusal(number, "Overloaded", "too much is asked", True, 120.0))
            case Infer(number, "noisy"):
                self.link.send(peer, StatusAsked())
                self.link.send(peer, Answer(77, Ledger()), [NamedTensor("x", np.zeros(1))])
                self.link.send(peer, Refusal(78, "FromTheFuture", "", False))
                self.link.send(peer, Answer(number, Ledger()), received.tensors)
            case CancelRequest(number):
                self.link.send(peer, Refusal(number, "Cancelled", "as asked", False))
            case ModelsAsked():
                self.link.send(peer, ModelsListed((ModelInfo(ModelId("echo"), 25.0),)))
            case StatusAsked():
                self.link.send(peer, StatusListed("frontend-0", 1, (), (), {"bytes_in": 5.0}))
            case _:
                pass


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    running = Frontend()
    yield running
    running.end()


@contextmanager
def within(limit_ms: float) -> Iterator[None]:
    """Generous: bounds a wait on a busy machine too, the figures belong to the benchmarks."""
    began_ms = CLOCK.now_ms()
    yield
    assert CLOCK.now_ms() - began_ms < limit_ms


async def seen(frontend: Frontend, kind: type) -> None:
    async with asyncio.timeout(5):
        while not frontend.has_seen(kind):  # noqa: ASYNC110  seen on another thread
            await asyncio.sleep(0.005)


def test_an_answer_brings_outputs_and_ledger(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            result = await client.infer("echo", {"input": IMAGE, "file": b"\x89PNG"}, budget_ms=1_000)
            np.testing.assert_array_equal(result.outputs["input"], IMAGE)
            np.testing.assert_array_equal(result.outputs["file"], np.frombuffer(b"\x89PNG", np.uint8))
            assert result.ledger.gpu_ms == 1
            assert result.ledger.total_ms > 0.01
            assert result.ledger.network_ms == pytest.approx(result.ledger.total_ms - 0.01)

    asyncio.run(run())
    sent = next(received.message for received in frontend.seen if isinstance(received.message, Infer))
    assert sent == Infer(1, ModelId("echo"), 1_000.0)


def test_a_client_says_how_long_the_way_has_been(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            for _ in range(3):
                result = await client.infer("echo", {"input": IMAGE}, budget_ms=1_000)
                assert result.ledger.network_ms > 0

    asyncio.run(run())
    asked = [received.message for received in frontend.seen if isinstance(received.message, Infer)]
    assert asked[0].way_ms == 0
    assert 0 < asked[1].way_ms < 1_000


def test_an_answer_that_came_too_late_widens_what_the_client_says_of_its_way(frontend: Frontend) -> None:
    async def run() -> list[float]:
        async with Client(frontend.address) as client:
            models = ("echo", "late", "echo")
            results = [await client.infer(model, {"input": IMAGE}, budget_ms=1_000) for model in models]
            return [result.ledger.network_ms for result in results]

    ways_ms = asyncio.run(run())
    asked = [received.message for received in frontend.seen if isinstance(received.message, Infer)]
    # The mean of both ways, and a step of the margin for the 50 ms that the second answer was late.
    assert asked[2].way_ms == pytest.approx((ways_ms[0] + ways_ms[1]) / 2 + STEP_MS)


def test_two_hundred_requests_at_once_get_an_answer_each(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            values = [np.array([i]) for i in range(200)]
            results = await asyncio.gather(*(client.infer("echo", {"x": value}) for value in values))
            assert [int(result.outputs["x"][0]) for result in results] == list(range(200))

    asyncio.run(run())


def test_a_refusal_is_raised_as_its_type(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            with pytest.raises(ModelNotFound, match="no model 'missing'"):
                await client.infer("missing", {"x": np.zeros(1)})

    asyncio.run(run())


def test_a_refusal_may_say_when_to_come_again(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            with pytest.raises(Overloaded) as raised:
                await client.infer("busy", {"x": np.zeros(1)}, priority=4)
            assert raised.value.retryable
            assert raised.value.retry_after_ms == 120.0
            with pytest.raises(InvalidInput, match="must be a whole number from 0 to 9"):
                client.submit("busy", {"x": np.zeros(1)}, priority=10)

    asyncio.run(run())
    asked = [received.message for received in frontend.seen if isinstance(received.message, Infer)]
    assert [one.priority for one in asked] == [4]


def test_models_are_listed(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            assert [model.model_id for model in await client.models()] == ["echo"]

    asyncio.run(run())


def test_a_cancelled_future_tells_the_frontend(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            future = client.submit("never", {"x": np.zeros(1)})
            future.cancel()
            await seen(frontend, CancelRequest)
            assert (await client.infer("echo", {"x": np.ones(1)})).outputs["x"] == 1

    asyncio.run(run())


def test_a_cancelled_task_tells_the_frontend(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.infer("never", {"x": np.zeros(1)}), 0.02)
            await seen(frontend, CancelRequest)

    asyncio.run(run())


def test_a_frontend_that_does_not_answer_in_time_is_not_waited_for(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address, QUICK) as client:
            with within(1_000), pytest.raises(DeadlineExceeded):
                await client.infer("never", {"x": np.zeros(1)}, budget_ms=20)
            await seen(frontend, CancelRequest)

    asyncio.run(run())


def test_what_this_side_can_tell_is_raised_at_once(frontend: Frontend) -> None:
    async def run() -> None:
        options = ClientOptions(pending_max=2, payload_bytes_max=1_000)
        async with Client(frontend.address, options) as client:
            wrong: list[Any] = [
                np.zeros(3),
                [("x", [1])],
                None,
                {1: [1]},
                {"x": [object()]},
                {"x": [[1], [2, 3]]},
                {"x": "text"},
                {"n" * 600: [1]},
            ]
            for inputs in wrong:
                with pytest.raises(InvalidInput):
                    client.submit("echo", inputs)
            budgets: list[Any] = [float("nan"), float("inf"), -1.0, 0, "50", [50], np.zeros(2)]
            for budget_ms in budgets:
                with pytest.raises(InvalidInput, match="must be a number of ms, over 0"):
                    client.submit("echo", {"x": [1]}, budget_ms)
            priorities: list[Any] = [-1, 10, 3.0, 3.5, "3", np.zeros(2)]
            for priority in priorities:
                with pytest.raises(InvalidInput, match="must be a whole number from 0 to 9"):
                    client.submit("echo", {"x": [1]}, priority=priority)
            models: list[Any] = [None, 3, b"echo"]
            for model in models:
                with pytest.raises(InvalidInput, match="must be a name"):
                    client.submit(model, {"x": [1]})
            with pytest.raises(TooLarge):
                client.submit("echo", {"x": np.zeros(1_001, np.uint8)})
            futures = [client.submit("never", {"x": [1]}) for _ in range(2)]
            with pytest.raises(Overloaded):
                client.submit("echo", {"x": [1]})
            for future in futures:
                future.cancel()
            await asyncio.sleep(0)
            numpys: Any = np.int8(3)
            assert await client.infer("echo", {"x": np.float32(2)}, np.float64(500), numpys) is not None

    asyncio.run(run())


@pytest.mark.parametrize("heartbeats", [HeartbeatTiming(), HeartbeatTiming(30.0, 75.0)])
def test_a_frontend_gone_silent_is_noticed_within_a_second_or_so(
    frontend: Frontend, heartbeats: HeartbeatTiming
) -> None:
    async def run() -> None:
        async with Client(frontend.address, ClientOptions(heartbeats=heartbeats)) as client:
            pending = [client.submit("never", {"x": [1]}) for _ in range(3)]
            await seen(frontend, Infer)
            frontend.is_mute.set()
            with within(4_000):
                results = await asyncio.gather(*pending, return_exceptions=True)
            assert [type(result) for result in results] == [PeerLost] * 3
            frontend.is_mute.clear()
            async with asyncio.timeout(10):
                while True:  # and when it speaks again the client finds back by itself
                    try:
                        await client.infer("echo", {"x": [1]}, budget_ms=100)
                        break
                    except (PeerLost, DeadlineExceeded):
                        await asyncio.sleep(0.02)

    asyncio.run(run())


def test_a_frontend_that_ended_is_noticed(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            future = client.submit("never", {"x": [1]})
            await seen(frontend, Infer)
            await asyncio.to_thread(frontend.end)
            with within(4_000), pytest.raises(PeerLost):
                await future
            with pytest.raises(PeerLost):
                client.submit("echo", {"x": [1]})
            with pytest.raises(PeerLost):
                await client.models()

    asyncio.run(run())


def test_nobody_there_is_said_within_the_connect_timeout() -> None:
    async def run() -> None:
        with within(4_000), pytest.raises(PeerLost, match="no frontend answers"):
            async with Client("tcp://127.0.0.1:9", QUICK):
                pass

    asyncio.run(run())
    with (
        within(4_000),
        pytest.raises(PeerLost, match="no frontend answers"),
        BlockingClient("tcp://127.0.0.1:9", QUICK),
    ):
        pass


def test_no_address_at_all_is_a_config_error() -> None:
    nothing: list[Any] = [[], (), [None], [5555]]
    for addresses in nothing:
        with pytest.raises(ConfigError, match="no addresses of frontends"):
            Client(addresses)


def test_an_address_that_is_none_is_a_config_error() -> None:
    async def run() -> None:
        async with Client("localhost"):
            pass

    with pytest.raises(ConfigError, match="localhost"):
        asyncio.run(run())
    with pytest.raises(ConfigError, match="localhost"):
        ask_status("localhost")


def test_closing_gives_up_what_is_pending(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            future = client.submit("never", {"x": [1]})
        with pytest.raises(PeerLost, match="closed"):
            await future
        client.close()
        with pytest.raises(PeerLost, match="not open"):
            client.submit("echo", {"x": [1]})

    asyncio.run(run())


def test_unexpected_messages_are_passed_over(frontend: Frontend) -> None:
    async def run() -> None:
        async with Client(frontend.address) as client:
            assert await client.infer("noisy", {"x": [1]})

    asyncio.run(run())


def test_the_blocking_client_does_the_same_from_any_thread(frontend: Frontend) -> None:
    with BlockingClient(frontend.address, ClientOptions(grace_ms=50)) as client:
        assert [model.model_id for model in client.models()] == ["echo"]
        np.testing.assert_array_equal(client.infer("echo", {"x": IMAGE}).outputs["x"], IMAGE)
        with pytest.raises(ModelNotFound):
            client.infer("missing", {"x": [1]})
        with pytest.raises(DeadlineExceeded):
            client.infer("never", {"x": [1]}, budget_ms=10)
        with pytest.raises(InvalidInput):
            client.infer("echo", {"x": [1]}, budget_ms=float("nan"))
        got: list[int] = []

        def ask(number: int) -> None:
            got.append(int(client.infer("echo", {"x": [number]}).outputs["x"][0]))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(got) == list(range(8))


def test_a_blocking_future_can_be_cancelled(frontend: Frontend) -> None:
    with BlockingClient(frontend.address) as client:
        future = client.submit("never", {"x": [1]})
        asyncio.run(seen(frontend, Infer))
        assert future.cancel()
        asyncio.run(seen(frontend, CancelRequest))


def test_closing_a_blocking_client_gives_up_what_is_pending(frontend: Frontend) -> None:
    with BlockingClient(frontend.address) as client:
        future = client.submit("never", {"x": [1]})
        asyncio.run(seen(frontend, Infer))
    with pytest.raises(PeerLost):
        future.result(5)
    client.close()
    with pytest.raises(PeerLost):
        client.infer("echo", {"x": [1]})


def test_a_blocking_client_that_cannot_be_opened_leaves_nothing(frontend: Frontend) -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = held()
    for _ in range(3):
        with pytest.raises(ConfigError):
            BlockingClient([]).open()
    assert held() == before
    client = BlockingClient(frontend.address)
    client.open()
    opened_once = held()
    client.open()
    assert held() == opened_once, "the former connection is closed"
    client.close()


def test_what_is_asked_while_a_blocking_client_is_closed_is_lost(frontend: Frontend) -> None:
    """Between the look whether it is open and the start of the work: by whichever thread."""
    client = BlockingClient(frontend.address)
    client.open()
    session = client._opened()
    work = session.client.infer("echo", {"x": IMAGE})
    client.close()
    with pytest.raises(PeerLost, match="was closed"):
        client._start(session, work)
    with pytest.raises(PeerLost, match="not open"):
        client.infer("echo", {"x": IMAGE})


def test_an_opening_that_is_cancelled_leaves_the_client_closed(frontend: Frontend) -> None:
    async def talk() -> None:
        client = Client([frontend.address, "tcp://127.0.0.1:9"])
        opening = asyncio.ensure_future(client.open())
        while not client._usable:  # noqa: ASYNC110  it says so to those whom it waits with
            await asyncio.sleep(0.001)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening
        assert not client._is_open
        with pytest.raises(PeerLost):
            await client.infer("echo", {"x": IMAGE})

    asyncio.run(talk())


def test_an_opening_that_another_replaced_leaves_that_one_open(frontend: Frontend) -> None:
    """The one that lost waited for its whole time, and closed the one that had won then."""

    async def talk() -> None:
        client = Client(frontend.address)
        with within(2_000):
            first, second = await asyncio.gather(client.open(), client.open(), return_exceptions=True)
        assert isinstance(first, PeerLost)
        assert "opened anew" in str(first)
        assert second is None
        await client.infer("echo", {"x": IMAGE})
        client.close()

    asyncio.run(talk())


def test_closing_ends_an_opening_at_once(frontend: Frontend) -> None:
    async def talk() -> None:
        frontend.is_mute.set()
        client = Client(frontend.address)
        opening = asyncio.ensure_future(client.open())
        await asyncio.sleep(0.01)
        client.close()
        with within(2_000), pytest.raises(PeerLost, match="was closed"):
            await opening

    asyncio.run(talk())


def test_an_opening_is_cancelled_while_another_has_replaced_it(frontend: Frontend) -> None:
    async def talk() -> None:
        client = Client(frontend.address)
        opening = asyncio.ensure_future(client.open())
        await asyncio.sleep(0)
        again = asyncio.ensure_future(client.open())
        await asyncio.sleep(0)
        opening.cancel()
        await again
        assert opening.done()
        await client.infer("echo", {"x": IMAGE})
        client.close()

    asyncio.run(talk())


def test_a_client_closed_between_a_greeting_and_its_opening_stays_closed(frontend: Frontend) -> None:
    async def talk() -> None:
        client = Client(frontend.address)
        opening = asyncio.ensure_future(client.open())
        while not client._usable:  # noqa: ASYNC110  it says so to those whom it waits with
            await asyncio.sleep(0.001)
        client.close()
        with contextlib.suppress(PeerLost):
            await opening
        assert not client._is_open
        assert opening.exception() is None or "was closed" in str(opening.exception())

    asyncio.run(talk())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("what", ["submit", "models", "open"])
def test_a_client_whose_loop_has_ended_closes_all_the_same(
    frontend: Frontend, what: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A callback of a pending future cannot be called any more: asking for that raises, and nothing else was closed."""
    client = Client(frontend.address)
    loop = new_loop()

    async def talk() -> None:
        if what != "open":
            await client.open()
        if what == "submit":
            client.submit("never", {"x": IMAGE}).add_done_callback(print)
            return
        frontend.is_mute.set()
        waiting.append(asyncio.ensure_future(client.models() if what == "models" else client.open()))
        await asyncio.sleep(0.01)

    waiting: list[asyncio.Future[Any]] = []
    loop.run_until_complete(talk())
    loop.close()
    connections = client._connections
    assert connections
    client.close()
    assert not client._pending
    assert not any(one._is_open for one in connections)
    assert not client._is_open
    frontend.is_mute.clear()

    async def again() -> None:
        async with client:
            await client.infer("echo", {"x": IMAGE})

    asyncio.run(again())
    for one in waiting:
        one._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_limit_of_what_is_sent_is_none_of_what_is_answered(frontend: Frontend) -> None:
    with BlockingClient(frontend.address, ClientOptions(payload_bytes_max=1_000)) as client:
        np.testing.assert_array_equal(client.infer("large", {"x": [1.0]}).outputs["y"], IMAGE)
        with pytest.raises(TooLarge):
            client.infer("echo", {"x": IMAGE})


def test_a_request_that_could_not_be_put_together_is_not_waited_for(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> None:
        async with Client(frontend.address) as client:

            def fail(*_: object) -> None:
                raise MemoryError

            monkeypatch.setattr(client._connections[0], "put", fail)
            with pytest.raises(MemoryError):
                client.submit("echo", {"x": IMAGE})
            assert not client._pending
            assert not client._connections[0].awaited

    asyncio.run(talk())


@pytest.mark.parametrize("heartbeats", [HeartbeatTiming(1_400.0, 1_500.0), HeartbeatTiming(0.0, 1_500.0)])
def test_heartbeats_that_judge_too_soon_are_refused(heartbeats: HeartbeatTiming) -> None:
    with pytest.raises(ConfigError, match="must be at least twice interval_ms"):
        BlockingClient("tcp://127.0.0.1:9", ClientOptions(heartbeats=heartbeats)).open()


@pytest.mark.parametrize("bytes_max", [0, (256 << 20) + 1])
def test_more_bytes_than_a_frontend_lets_come_are_refused_as_a_limit(bytes_max: int) -> None:
    """One request of so many would end the connection, with all that others have in flight there."""
    with pytest.raises(
        ConfigError, match=r"payload_bytes_max is .*; it must be over 0 and at most 268,435,456"
    ):
        Client("tcp://127.0.0.1:9", ClientOptions(payload_bytes_max=bytes_max))


def test_any_role_can_be_asked_for_its_status(frontend: Frontend) -> None:
    listed = ask_status(frontend.address)
    assert (listed.role_id, listed.counters) == ("frontend-0", {"bytes_in": 5.0})


def test_a_role_that_does_not_answer_is_said_to_be_lost(frontend: Frontend) -> None:
    frontend.is_mute.set()
    with within(4_000), pytest.raises(PeerLost):
        ask_status(frontend.address, timeout_ms=100)


def test_a_client_is_asked_on_the_loop_that_opened_it_and_nowhere_else(frontend: Frontend) -> None:
    async def use() -> None:
        async with Client(frontend.address, QUICK) as client:

            async def elsewhere() -> InferResult:
                return await client.infer("echo", {"x": IMAGE}, budget_ms=5_000)

            for ask in (
                lambda: client.submit("echo", {"x": IMAGE}),
                lambda: asyncio.run(elsewhere()),
                lambda: asyncio.run(client.models()),
                lambda: asyncio.run(client.open()),
            ):
                with pytest.raises(
                    WrongThread, match="on the asyncio loop, thread and process that opened it"
                ):
                    await asyncio.to_thread(ask)
            assert not client._pending
            assert (await elsewhere()).outputs

    asyncio.run(use())


def test_a_request_that_cannot_be_sent_is_refused_alone(frontend: Frontend) -> None:
    """Its header was over the limit: the client was of no use any more, and said nothing."""
    tiny = np.zeros(1, np.uint8)
    inputs = {f"{number:x<500}": tiny for number in range(4_000)}
    with BlockingClient(frontend.address, QUICK) as client:
        for _ in range(2):
            with pytest.raises(InvalidInput, match="header of Infer"):
                client.infer("echo", inputs)
            assert client.infer("echo", {"x": IMAGE}).outputs["x"].shape == IMAGE.shape


def test_a_client_opened_again_is_connected_only_if_somebody_is_there(frontend: Frontend) -> None:
    async def again() -> None:
        client = Client(frontend.address, QUICK)
        await client.open()
        await client.infer("echo", {"x": IMAGE})
        client.close()
        await client.open()
        await client.infer("echo", {"x": IMAGE})
        client.close()
        frontend.end()
        with pytest.raises(PeerLost, match="no frontend answers"):
            await client.open()
        with pytest.raises(PeerLost):
            await client.infer("echo", {"x": IMAGE})

    asyncio.run(again())


@pytest.mark.skipif(not memory_address(), reason="this system has no memory to share")
def test_a_client_opened_again_shares_memory_that_is_there(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/client"
    frontend = Frontend(address, memory_address())

    async def again() -> None:
        client = Client(address, QUICK)
        for _ in range(2):
            await client.open()
            result = await client.infer("echo", {"x": IMAGE})
            np.testing.assert_array_equal(result.outputs["x"], IMAGE)
            client.close()

    try:
        asyncio.run(again())
        assert frontend.link.counters["shared_bytes_in"] == 2 * IMAGE.nbytes
        assert frontend.link.counters["garbage_in"] == 0
    finally:
        frontend.end()


@pytest.mark.skipif(not memory_address(), reason="this system has no memory to share")
@pytest.mark.parametrize(
    "model", ["cancelled", "expired", "refused while granted", "answered, and granted to another"]
)
def test_inputs_of_a_request_that_has_ended_are_nobody_elses_while_a_worker_may_read_them(
    tmp_path: Path, model: str
) -> None:
    """It may be in a batch with others, whose model raises for all of them at bytes that it does not take."""
    address = f"ipc://{tmp_path}/client"
    frontend = Frontend(address, memory_address())

    async def run() -> None:
        async with Client(address, QUICK) as client:
            ended = client.submit(model, {"x": IMAGE}, budget_ms=20 if model == "expired" else 5_000)
            await seen(frontend, Infer)
            if model == "cancelled":
                ended.cancel()
            with contextlib.suppress(asyncio.CancelledError, DeadlineExceeded):
                await ended
            for _ in range(3):
                await client.infer("echo", {"x": -IMAGE})
            lent = next(one for one in frontend.seen if isinstance(one.message, Infer))
            np.testing.assert_array_equal(lent.tensors[0].array, IMAGE)

    try:
        asyncio.run(run())
        assert frontend.link.counters["shared_bytes_in"] == 4 * IMAGE.nbytes
    finally:
        frontend.end()


@pytest.mark.skipif(not memory_address(), reason="this system has no memory to share")
def test_inputs_that_a_lost_frontend_may_have_granted_are_nobody_elses_though_another_has_answered(
    tmp_path: Path,
) -> None:
    frontends = [Frontend(f"ipc://{tmp_path}/{number}", memory_address()) for number in range(2)]

    async def run() -> None:
        async with Client([one.address for one in frontends], QUICK) as client:
            for one in frontends:
                one.is_mute.set()
            asked = client.submit("echo", {"x": IMAGE})
            while not any(one.has_seen(Infer) for one in frontends):  # noqa: ASYNC110  seen on another thread
                await asyncio.sleep(0.001)
            lost, other = sorted(frontends, key=lambda one: not one.has_seen(Infer))
            other.is_mute.clear()
            lost.end()
            await asked
            for _ in range(3):
                await client.infer("echo", {"x": -IMAGE})
            lent = next(one for one in lost.seen if isinstance(one.message, Infer))
            np.testing.assert_array_equal(lent.tensors[0].array, IMAGE)

    try:
        asyncio.run(run())
    finally:
        for one in frontends:
            one.end()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a proxy does whose server is gone."""
    del reader
    writer.close()


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a host does that hangs."""
    try:
        await reader.read()
    finally:
        writer.close()


def timers_of(loop: asyncio.AbstractEventLoop) -> int:
    """How many are pending."""
    return sum(not handle.cancelled() for handle in loop._scheduled)  # type: ignore[attr-defined]


@pytest.mark.parametrize("server", [hang_up, say_nothing])
def test_who_is_not_there_is_asked_by_one_timer_however_long_it_takes(server: Any) -> None:
    """Each refusal and each silence doubled the timers: after seconds the SDK did nothing else, and answers waited."""

    async def play() -> int:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        options = ClientOptions(connect_timeout_ms=60_000, heartbeats=HeartbeatTiming(20.0, 40.0))
        async with listening:
            client = Client(address, options)
            opening = asyncio.create_task(client.open())
            most = 0
            for _ in range(100):
                await asyncio.sleep(0.02)
                most = max(most, timers_of(asyncio.get_running_loop()))
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, PeerLost, Unauthorised):
                await opening
            client.close()
        return most

    assert asyncio.run(play()) <= 3  # its own, that of `open`, and ours
