from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from fabric.client import Client
from fabric.clock import MonotonicClock
from fabric.errors import InvalidInput, Overloaded, PeerLost
from fabric.ids import ModelId
from fabric.messages import Changed, ModelsAdd, ModelsRemove, PlanChange, StatusListed
from roles.gateway.failures import Refused
from roles.gateway.repository import Repository, load, unload
from roles.gateway.service import Service
from roles.runtime.running_cluster import ActiveScheduler, active_schedulers
from tests.unit.roles.gateway.doors import StandIn, heads_of, model


@dataclass
class SlowCluster:
    """A repository whose cluster does not answer before it may."""

    repository: Repository
    began: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def active_schedulers(self, run_dir: Path) -> Any:
        self.began.set()
        assert self.may_end.wait(60)
        return active_schedulers(run_dir)

    async def load_and_go(self) -> None:
        """A client asks for a model, and goes while that is under way."""
        loading = asyncio.ensure_future(self.repository.load("m", {}, {}))
        await asyncio.to_thread(self.began.wait, 60)
        loading.cancel()
        await asyncio.wait([loading])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SlowCluster:
    cluster = SlowCluster(Repository({"m": {"name": "m"}}, tmp_path, tmp_path, is_open=True))
    monkeypatch.setattr("roles.gateway.repository.active_schedulers", cluster.active_schedulers)
    return cluster


def test_a_change_goes_on_when_its_client_goes_and_there_is_one_at_a_time(slow: SlowCluster) -> None:
    async def run() -> None:
        await slow.load_and_go()
        with pytest.raises(Overloaded):
            await slow.repository.load("m", {}, {})
        slow.may_end.set()
        while slow.repository._is_busy:  # noqa: ASYNC110  its thread tells nobody else
            await asyncio.sleep(0.001)
        with pytest.raises(PeerLost):  # there is no cluster
            await slow.repository.load("m", {}, {})

    asyncio.run(run())


def test_the_gateways_end_does_not_wait_for_a_model_that_loads(slow: SlowCluster) -> None:
    async def run() -> None:
        await slow.load_and_go()

    asyncio.run(run())  # shuts the threads of the loop down, and waits for them
    assert not slow.may_end.is_set()
    (thread,) = [one for one in threading.enumerate() if one.name == "model-change"]
    slow.may_end.set()
    thread.join(60)
    assert not thread.is_alive(), "and its answer goes nowhere, without a word"


def test_at_the_gateways_end_its_thread_gives_a_change_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It asks by ZeroMQ, whose sockets must not be closed under it."""
    began = threading.Event()

    def ask_change(_: object, __: PlanChange, *, is_given_up: Callable[[], bool]) -> Changed:
        began.set()
        while not is_given_up():
            pass
        raise PeerLost("it is given up")

    status = StatusListed("scheduler-0", 7, (), (), {})
    schedulers = {0: ActiveScheduler(("ipc://there",), status)}
    monkeypatch.setattr("roles.gateway.repository.active_schedulers", lambda _: schedulers)
    monkeypatch.setattr("roles.gateway.repository.ask_change", ask_change)
    repository = Repository({"m": {"name": "m"}}, tmp_path, tmp_path, is_open=True)

    async def run() -> None:
        loading = asyncio.ensure_future(repository.load("m", {}, {}))
        await asyncio.to_thread(began.wait, 60)
        repository.close()
        assert not [one for one in threading.enumerate() if one.name == "model-change"]
        with pytest.raises(PeerLost):
            await loading

    asyncio.run(run())


class Ended(BaseException):
    """What no program expects."""


def test_a_change_that_cannot_begin_or_ends_in_no_usual_way_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = Repository({"m": {"name": "m"}}, tmp_path, tmp_path, is_open=True)

    def without_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def ended(_: Path) -> None:
        raise Ended

    async def load(raised: type[BaseException]) -> None:
        with pytest.raises(raised):
            await asyncio.wait_for(repository.load("m", {}, {}), 60)

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", without_threads)
            await load(RuntimeError)
        with monkeypatch.context() as patch:
            patch.setattr("roles.gateway.repository.active_schedulers", ended)
            await load(Ended)
        await load(PeerLost)  # there is no cluster

    asyncio.run(run())


def test_a_change_is_waited_for_as_long_as_the_scheduler_is_at_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plan has 50 s and more, a move 300 s for each model that a slice loads."""
    status = StatusListed("scheduler-0", 7, (), (), {})
    schedulers = {0: ActiveScheduler(("ipc://there",), status)}
    limits_ms: list[float | None] = []

    def ask_change(_: object, change: PlanChange, *, limit_ms: float | None = None, **__: object) -> Changed:
        limits_ms.append(limit_ms)
        return Changed(change.request_no, "ok")

    monkeypatch.setattr("roles.gateway.repository.active_schedulers", lambda _: schedulers)
    monkeypatch.setattr("roles.gateway.repository.ask_change", ask_change)
    repository = Repository({"m": {"name": "m"}}, tmp_path, tmp_path, is_open=True)
    asyncio.run(repository.load("m", {}, {}))
    asyncio.run(repository.unload("m", {ModelId("m"): model("m")}))
    assert limits_ms == [None, None], "its own default: two days, or 5 s of silence"


def test_a_model_with_heads_is_loaded_and_unloaded_by_its_name_though_frontends_list_its_heads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status = StatusListed("scheduler-0", 7, (), (), {})
    schedulers = {0: ActiveScheduler(("ipc://there",), status)}
    client = StandIn(model("other"))
    changes: list[PlanChange] = []

    def ask_change(_: object, change: PlanChange, **__: object) -> Changed:
        changes.append(change)
        served = heads_of("base", "a", "b") if isinstance(change, ModelsAdd) else []
        client.served = {one.model_id: one for one in (model("other"), *served)}
        return Changed(change.request_no, "ok")

    monkeypatch.setattr("roles.gateway.repository.active_schedulers", lambda _: schedulers)
    monkeypatch.setattr("roles.gateway.repository.ask_change", ask_change)
    service = Service(cast(Client, client), MonotonicClock())
    repository = Repository({"base": {"name": "base"}}, tmp_path, tmp_path, is_open=True)

    async def run() -> None:
        for parameters in ({}, {"config": None}):
            await load(service, repository, "base", parameters)
        with pytest.raises(Refused, match="unload it before"):
            await load(
                service,
                repository,
                "base",
                {"config": '{"slo_ms": 100, "profile": {"alpha_ms": 1, "beta_ms": 5}}'},
            )
        for change in (unload(service, repository, "a"), load(service, repository, "a", {})):
            with pytest.raises(Refused, match="'a' is a head of model 'base'"):
                await change
        await unload(service, repository, "base")
        assert not any(one.head_of for one in (await service.models()).values()), "it is known by then"
        await unload(service, repository, "base")

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [type(one) for one in changes] == [ModelsAdd, ModelsRemove]


def test_models_of_the_file_are_listed_where_they_may_be_loaded(tmp_path: Path) -> None:
    """Another file does not start a gateway again through which none may be."""
    for is_open in (True, False):
        assert Repository({"m": {}}, tmp_path, tmp_path, is_open=is_open).names == (("m",) if is_open else ())


@pytest.mark.parametrize(
    "config",
    [
        '{"name": "m", "slo_ms": 1, "profile": {"ref": "\\ud800.json"}}',
        '{"name": "m", "\\ud800": 1}',
        '{"name": "m", "slo_ms": NaN}',
        "[" * 100_000,
        "{",
        b"\xff",
        "\ud800",
    ],
)
def test_a_config_that_is_no_json_of_rfc_8259_is_refused(tmp_path: Path, config: str | bytes) -> None:
    repository = Repository({}, tmp_path, tmp_path, is_open=True)
    with pytest.raises(InvalidInput, match="config is not JSON"):
        asyncio.run(repository.load("m", {}, {"config": config}))
