from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import Overloaded, PeerLost
from roles.gateway.repository import Repository
from roles.runtime.running_cluster import active_schedulers


def test_a_change_goes_on_when_its_client_goes_and_there_is_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def slow(run_dir: Path) -> Any:
        began.set()
        assert may_end.wait(60)
        return active_schedulers(run_dir)

    monkeypatch.setattr("roles.gateway.repository.active_schedulers", slow)
    own = Repository({"m": {"name": "m"}}, tmp_path, tmp_path, is_open=True)

    async def run() -> None:
        loading = asyncio.ensure_future(own.load("m", (), {}))
        await asyncio.to_thread(began.wait, 60)
        loading.cancel()
        await asyncio.wait([loading])
        with pytest.raises(Overloaded):
            await own.load("m", (), {})
        may_end.set()
        while own._is_busy:  # noqa: ASYNC110  its thread tells nobody else
            await asyncio.sleep(0.001)
        with pytest.raises(PeerLost):  # there is no cluster
            await own.load("m", (), {})

    asyncio.run(run())


def test_the_gateways_end_does_not_wait_for_a_model_that_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def slow(run_dir: Path) -> Any:
        began.set()
        assert may_end.wait(60)
        return active_schedulers(run_dir)

    monkeypatch.setattr("roles.gateway.repository.active_schedulers", slow)
    own = Repository({"m": {"name": "m"}}, tmp_path, tmp_path, is_open=True)

    async def run() -> None:
        loading = asyncio.ensure_future(own.load("m", (), {}))
        await asyncio.to_thread(began.wait, 60)
        loading.cancel()
        await asyncio.wait([loading])

    asyncio.run(run())  # shuts the threads of the loop down, and waits for them
    assert not may_end.is_set()
    (thread,) = [one for one in threading.enumerate() if one.name == "model-change"]
    may_end.set()
    thread.join(60)
    assert not thread.is_alive(), "and its answer goes nowhere, without a word"
