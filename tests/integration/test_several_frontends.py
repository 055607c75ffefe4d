"""The SDK with several small frontends: requests are spread, and what a lost one had goes to another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from fabric.client import BlockingClient, Client, ClientOptions
from fabric.client.connection import FRONTEND
from fabric.client.retries import FAILURES_MAX, PAUSE_MS, RETRIES_AT_FIRST
from fabric.errors import DeadlineExceeded, Overloaded, PeerLost
from fabric.ids import Incarnation
from fabric.link import Received
from fabric.messages import Infer, ModelsAsked, Ping, Pong, Refusal, Unready
from tests.integration.proc import CLOCK
from tests.integration.test_client import Frontend, seen, within

QUICK = ClientOptions(connect_timeout_ms=2_000, grace_ms=50)


class Named(Frontend):
    """A frontend that says who it is and refuses `full`. `is_unready`: it wants nothing new; `is_deaf`, `lists_nothing`: it answers pings."""

    def __init__(self, incarnation: str, address: str = "tcp://127.0.0.1:0") -> None:
        self.incarnation = Incarnation(incarnation)
        self.is_unready = False
        self.is_deaf = False
        self.lists_nothing = False
        super().__init__(address)

    def _reply(self, received: Received) -> None:
        match received.message:
            case Ping(number):
                said = Unready(self.incarnation) if self.is_unready else Pong(number, "", self.incarnation)
                self.link.send(received.peer, said)
            case Infer() if self.is_deaf:
                pass
            case ModelsAsked() if self.lists_nothing:
                pass
            case Infer(number, "full"):
                if self.is_unready:  # said before anybody asks
                    self.link.send(received.peer, Unready(self.incarnation))
                self.link.send(received.peer, Refusal(number, "Overloaded", "full", retryable=True))
            case _:
                super()._reply(received)

    @property
    def asked(self) -> list[Infer]:
        return [received.message for received in self.seen if isinstance(received.message, Infer)]


async def had(frontend: Named, count: int) -> None:
    async with asyncio.timeout(5):
        while len(frontend.asked) < count:  # noqa: ASYNC110  seen on another thread
            await asyncio.sleep(0.001)


@pytest.fixture
def pair() -> Iterator[tuple[Named, Named]]:
    one, other = Named("1"), Named("2")
    yield one, other
    one.end()
    other.end()


def test_what_was_gathered_for_a_lost_frontend_has_not_run_there(pair: tuple[Named, Named]) -> None:
    """The first of a turn leaves at once, the others wait for its end: they go to another frontend as new ones, and only there."""

    async def run() -> None:
        one, other = pair
        async with Client([one.address, other.address]) as client:
            futures = [client.submit("echo", {"x": [1]}) for _ in range(8)]
            client._retries._saved = 1.0
            client._connections[0]._lose("was closed")
            await asyncio.gather(*futures)
            assert sorted(request.request_no for request in other.asked) == list(range(1, 9))
            (again,) = [request.request_no for request in other.asked if request.may_have_run]
            assert {request.request_no for request in one.asked} <= {again}, "it may not have read it"

    asyncio.run(run())


def test_requests_are_spread_over_all_frontends(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair]) as client:
            await asyncio.gather(*(client.infer("echo", {"x": [i]}) for i in range(40)))

    asyncio.run(run())
    assert [len(one.asked) for one in pair] == [20, 20]


def test_threads_may_give_several_too(pair: tuple[Named, Named]) -> None:
    with BlockingClient([one.address for one in pair]) as client:
        for i in range(4):
            client.infer("echo", {"x": [i]})
    assert [len(one.asked) for one in pair] == [2, 2]


def test_two_addresses_of_one_frontend_are_one_frontend() -> None:
    frontend = Named("1")
    try:
        port = frontend.address.rpartition(":")[2]

        async def run() -> None:
            async with Client([f"tcp://localhost:{port}", frontend.address]) as client:
                await asyncio.gather(*(client.infer("echo", {"x": [i]}) for i in range(10)))

        asyncio.run(run())
        peers = {received.peer for received in frontend.seen if isinstance(received.message, Infer)}
        assert len(peers) == 1
    finally:
        frontend.end()


def test_one_that_is_not_there_is_not_waited_for(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        with within(2_000):
            async with Client(["tcp://127.0.0.1:9", pair[0].address]) as client:
                await client.infer("echo", {"x": [1]})

    asyncio.run(run())


def test_what_a_lost_frontend_had_is_answered_by_another(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], QUICK) as client:
            pair[0].is_mute.set()  # it takes requests and says nothing
            futures = [client.submit("echo", {"x": np.array([i])}, budget_ms=5_000) for i in range(10)]
            await had(pair[0], 5)
            await asyncio.to_thread(pair[0].end)
            with within(1_500):  # the patience is two seconds: the closed connection said it
                results = await asyncio.gather(*futures)
            assert [int(result.outputs["x"][0]) for result in results] == list(range(10))

    asyncio.run(run())
    again = [message for message in pair[1].asked if message.may_have_run]
    assert len(again) == 5
    assert all(message.budget_ms == 5_000 for message in again), "what is left is the frontend's to reckon"


def test_what_never_left_has_not_run(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], QUICK) as client:
            pair[0].is_mute.set()
            pair[1].is_mute.set()
            future = client.submit("echo", {"x": np.array([1])}, budget_ms=5_000)
            awaited = client._pending[1]
            await asyncio.sleep(0.002)
            client.unsent(awaited.connection, 1)  # as if there had been no connection
            to = next(one for one in pair if one.address == awaited.connection.address)
            await seen(to, Infer)
            future.cancel()
            assert to.asked[0].spent_ms >= 2.0
            assert not to.asked[0].may_have_run

    asyncio.run(run())


def test_a_silent_frontend_is_lost_too(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], QUICK) as client:
            pair[0].is_mute.set()
            futures = [client.submit("echo", {"x": np.array([i])}, budget_ms=20_000) for i in range(4)]
            with within(10_000):
                await asyncio.gather(*futures)

    asyncio.run(run())


def test_no_more_than_the_retry_budget_is_sent_again(pair: tuple[Named, Named]) -> None:
    async def run() -> list[object]:
        async with Client([one.address for one in pair], QUICK) as client:
            pair[0].is_mute.set()
            futures = [client.submit("echo", {"x": np.array([i])}, budget_ms=5_000) for i in range(100)]
            await had(pair[0], 50)  # else some may never leave, and cost no retry
            await asyncio.to_thread(pair[0].end)
            return list(await asyncio.gather(*futures, return_exceptions=True))

    results = asyncio.run(run())
    again = sum(message.may_have_run for message in pair[1].asked)
    assert again == RETRIES_AT_FIRST + 10
    failed = [result for result in results if isinstance(result, BaseException)]
    assert len(failed) == 50 - again
    assert all(isinstance(one, PeerLost) and "too many" in str(one) for one in failed)


def test_overload_is_no_reason_to_ask_another(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair]) as client:
            for _ in range(6):
                with pytest.raises(Overloaded):
                    await client.infer("full", {"x": [1]})

    asyncio.run(run())
    assert [len(one.asked) for one in pair] == [3, 3]


def test_a_frontend_that_wants_nothing_new_is_asked_nothing_new(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair]) as client:
            pair[0].is_unready = True
            for _ in pair:  # one each: the answer comes behind the word that it wants nothing new
                with pytest.raises(Overloaded):
                    await client.infer("full", {"x": [1]})
            before = len(pair[0].asked)
            await asyncio.gather(*(client.infer("echo", {"x": [i]}) for i in range(10)))
            assert len(pair[0].asked) == before
            pair[0].is_unready = False
            async with asyncio.timeout(5):
                while len(pair[0].asked) == before:  # it is asked again by itself
                    await client.infer("echo", {"x": [1]})
                    await asyncio.sleep(0.02)

    asyncio.run(run())


def test_the_last_one_is_asked_though_it_wants_nothing_new() -> None:
    frontend = Named("1")
    frontend.is_unready = True
    try:

        async def run() -> None:
            async with Client(frontend.address) as client:
                await client.infer("echo", {"x": [1]})

        asyncio.run(run())
    finally:
        frontend.end()


def test_a_frontend_that_answers_pings_only_is_left_alone(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], QUICK) as client:
            pair[0].is_deaf = True
            while len(pair[0].asked) < FAILURES_MAX:
                with contextlib.suppress(DeadlineExceeded):
                    await client.infer("echo", {"x": [1]}, budget_ms=50)
            began_ms = CLOCK.now_ms()  # a bit after the last one was given up
            for _ in range(4):
                await client.infer("echo", {"x": [1]})
                if CLOCK.now_ms() - began_ms > PAUSE_MS / 2:
                    break  # a busy host: it may be tried again before long
                assert len(pair[0].asked) == FAILURES_MAX

    asyncio.run(run())


@pytest.mark.parametrize("lost", [0, 1])
def test_models_are_listed_though_one_frontend_is_silent(pair: tuple[Named, Named], lost: int) -> None:
    """Whichever of them is asked first."""

    async def run() -> None:
        async with Client([one.address for one in pair], QUICK) as client:
            pair[lost].is_mute.set()
            for _ in range(2):
                assert [model.model_id for model in await client.models()] == ["echo"]
            assert not any(one.listings for one in client._connections)

    asyncio.run(run())


def test_models_are_listed_though_one_frontend_ends_meanwhile(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], ClientOptions(connect_timeout_ms=60_000)) as client:
            pair[0].lists_nothing = pair[1].lists_nothing = True
            listing = asyncio.ensure_future(client.models())
            while not any(one.has_seen(ModelsAsked) for one in pair):  # noqa: ASYNC110  seen on another thread
                await asyncio.sleep(0.001)
            pair[0].lists_nothing = pair[1].lists_nothing = False
            await asyncio.to_thread(next(one for one in pair if one.has_seen(ModelsAsked)).end)
            with within(10_000):
                assert len(await listing) == 1

    asyncio.run(run())


def test_no_frontend_lists_its_models_in_time(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], ClientOptions(connect_timeout_ms=300)) as client:
            pair[0].lists_nothing = pair[1].lists_nothing = True
            with within(2_000), pytest.raises(PeerLost, match="1 more do not list their models"):
                await client.models()
            assert all(one.has_seen(ModelsAsked) for one in pair)
            assert not any(one.listings for one in client._connections)

    asyncio.run(run())


def test_a_listing_ends_with_its_client(pair: tuple[Named, Named]) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], QUICK) as client:
            pair[0].lists_nothing = pair[1].lists_nothing = True
            listing = asyncio.ensure_future(client.models())
            await asyncio.sleep(0)
            client.close()
            with within(1_000), pytest.raises(PeerLost, match="was closed"):
                await listing

    asyncio.run(run())


def test_a_listing_is_no_trial_of_a_frontend_that_leaves_requests_unanswered(
    pair: tuple[Named, Named],
) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], QUICK) as client:
            circuit = client._connections[0].circuit
            for _ in range(FAILURES_MAX):
                circuit.note_unanswered(CLOCK.now_ms() - 2 * PAUSE_MS)
            for _ in range(4):
                await client.models()
            assert not pair[0].has_seen(ModelsAsked), "the other one answers"
            await asyncio.gather(*(client.infer("echo", {"x": [i]}) for i in range(4)))
            assert pair[0].asked, "its trial is still there"

    asyncio.run(run())


def test_a_listing_that_could_not_leave_is_asked_of_another(
    pair: tuple[Named, Named], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with Client([one.address for one in pair], ClientOptions(connect_timeout_ms=60_000)) as client:
            first = client._connections[1 - client._turn % 2]
            monkeypatch.setattr(first, "put", lambda message: first._unsent(FRONTEND, message))
            with within(5_000):
                for _ in range(2):
                    assert len(await client.models()) == 1

    asyncio.run(run())
