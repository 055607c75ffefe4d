"""The client for threads, where no thread of its own can answer: in a forked process, and on that thread itself."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from fabric.client import BlockingClient, ClientOptions
from fabric.errors import PeerLost, WrongThread
from tests.integration.test_client import CLOCK, Frontend, frontend, within

__all__ = ["frontend"]

QUICK = ClientOptions(connect_timeout_ms=2_000, grace_ms=50)
INPUTS = {"x": [1.0]}


def said_in_fork(ask: Callable[[], str]) -> str:
    """What a forked process says within ten seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def child(there: Connection) -> None:
        began_ms = CLOCK.now_ms()
        said = ask()
        there.send(said if CLOCK.now_ms() - began_ms < 3_000.0 else f"late: {said}")

    process = context.Process(target=child, args=(there,), daemon=True)
    process.start()
    assert here.poll(10.0), "it says nothing"
    said: str = here.recv()
    process.join(10)
    return said


def asked(client: BlockingClient) -> str:
    try:
        return str(client.infer("echo", INPUTS, budget_ms=5_000).outputs["x"])
    except PeerLost as error:
        return str(error)


def test_a_fork_is_told_that_the_client_is_its_parents(frontend: Frontend) -> None:
    with BlockingClient(frontend.address, QUICK) as client:
        client.infer("echo", INPUTS)
        for ask in (client.models, lambda: client.submit("echo", INPUTS), lambda: client.run("echo", INPUTS)):

            def told(ask: Callable[[], object] = ask) -> str:
                with pytest.raises(PeerLost) as caught:
                    ask()
                return str(caught.value)

            assert "was forked from the one that opened the client" in said_in_fork(told)
        assert "was forked" in said_in_fork(lambda: asked(client))
        client.infer("echo", INPUTS)  # the parent's goes on


def test_a_fork_opens_and_closes_the_client_for_itself(frontend: Frontend) -> None:
    def talk() -> str:
        client.close()
        before = asked(client)
        with client:
            between = asked(client)
        return f"{before}, {between}, {asked(client)}"

    with BlockingClient(frontend.address, QUICK) as client:
        assert said_in_fork(talk) == "the client is not open, [1.], the client is not open"
        assert asked(client) == "[1.]"


def test_a_fork_while_another_thread_uses_the_client_does_not_hang(frontend: Frontend) -> None:
    def talk() -> str:
        before = asked(client)
        client.open()
        return f"{before}; {asked(client)}"

    with BlockingClient(frontend.address, QUICK) as client, client._lock:
        said = said_in_fork(talk)
    assert said.startswith("this process was forked")
    assert said.endswith("; [1.]")


AT_EXIT = """
import sys
from fabric.client import BlockingClient
def asked(address):
    client = BlockingClient(address)
    client.open()
    return [client.submit("never", {"x": [1.0]}) for _ in range(100)], client
kept = [asked(sys.argv[1]) for _ in range(4)]
kept[0] = kept[0][0]  # nobody has that client any more
kept[1][0][0].add_done_callback(lambda future: print(future.exception()))
"""


def test_a_program_may_end_with_clients_that_are_open_and_requests_pending(frontend: Frontend) -> None:
    """ZeroMQ ends the process where a socket is closed under the thread that uses it."""
    for _ in range(5):
        ended = subprocess.run(
            [sys.executable, "-c", AT_EXIT, frontend.address],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout == "the client was closed\n"


def test_what_a_program_asks_at_its_very_end_is_peer_lost_and_closing_is_nothing(frontend: Frontend) -> None:
    """What it has registered before it opened a client is called after the client's end."""
    script = """
import atexit, sys
from fabric.client import BlockingClient
from fabric.errors import PeerLost
client = BlockingClient(sys.argv[1])
def end():
    for ask in (client.models, lambda: client.infer("echo", {"x": [1.0]}), lambda: client.submit("echo", {"x": [1.0]})):
        try:
            ask()
        except PeerLost as error:
            print(error)
    client.close()
    client.close()
atexit.register(end)
client.open()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, frontend.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "the client is not open\n" * 3


def test_a_fork_may_end_while_its_parents_client_goes_on(frontend: Frontend) -> None:
    script = f"""
import os, sys
{AT_EXIT}
pid = os.fork()
if pid:
    status = os.waitpid(pid, 0)[1]
    kept[1][1].infer("echo", {{"x": [1.0]}})
    sys.exit(os.waitstatus_to_exitcode(status))
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, frontend.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def done_on_its_thread(client: BlockingClient, work: Callable[[], object]) -> object:
    """What comes of that work in a callback."""
    result: concurrent.futures.Future[object] = concurrent.futures.Future()

    def called(_: object) -> None:
        try:
            result.set_result(work())
        except Exception as error:  # noqa: BLE001  whatever it is
            result.set_exception(error)

    client.submit("late", INPUTS, budget_ms=10_000).add_done_callback(called)
    return result.result(10)


def test_waiting_on_its_own_thread_is_refused_at_once(frontend: Frontend) -> None:
    with BlockingClient(frontend.address, QUICK) as client:

        def wait() -> list[str]:
            refused = []
            for ask in (
                lambda: client.infer("echo", INPUTS),
                lambda: client.run("echo", INPUTS),
                client.models,
                client.open,
            ):
                with (
                    within(1_000),
                    pytest.raises(WrongThread, match="use `submit`, or another thread") as caught,
                ):
                    ask()
                refused.append(str(caught.value))
            return refused

        assert done_on_its_thread(client, wait)
        client.infer("echo", INPUTS)


def test_what_does_not_wait_may_be_asked_on_its_own_thread(frontend: Frontend) -> None:
    with BlockingClient(frontend.address, QUICK) as client:
        again = done_on_its_thread(client, lambda: client.submit("echo", INPUTS))
        assert isinstance(again, concurrent.futures.Future)
        assert list(again.result(5).outputs["x"]) == [1.0]


def test_a_callback_may_close_the_client(frontend: Frontend) -> None:
    client = BlockingClient(frontend.address, QUICK)
    client.open()
    thread = client._opened().thread
    pending = client.submit("never", INPUTS, budget_ms=60_000)
    with within(5_000):
        assert done_on_its_thread(client, client.close) is None
        with pytest.raises(PeerLost, match="was closed"):
            pending.result(5)
        thread.join(5)
    assert not thread.is_alive()
    client.open()
    client.infer("echo", INPUTS)
    client.close()


def test_of_openings_at_once_one_is_left(frontend: Frontend) -> None:
    client = BlockingClient(frontend.address, QUICK)
    before = threading.active_count()
    errors: list[BaseException] = []

    def open_it() -> None:
        try:
            client.open()
        except PeerLost as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all("was closed" in str(error) for error in errors)
    client.infer("echo", INPUTS)
    client.close()
    assert threading.active_count() <= before
