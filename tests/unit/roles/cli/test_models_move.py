"""`tenuto models move` says that a model was moved only where it can know that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from click.testing import CliRunner, Result

from fabric.errors import ConfigError, PeerLost
from fabric.ids import ModelId
from fabric.messages import (
    Changed,
    ModelInfo,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    PlanRequest,
    SchedulerStanding,
    SectionAsked,
    StatusListed,
    UnplacedInfo,
)
from roles.cli import models as models_module
from roles.cli.plan_changes import Cluster
from roles.runtime.running_cluster import ActiveScheduler
from tests.builders import model_info


class Shards:
    """Those that answer, of `count`. `listed`: what each lists. `partial`: the requests that leave a model without a place."""

    def __init__(
        self, listed: dict[int, list[ModelInfo]], count: int = 2, partial: type[PlanRequest] | None = None
    ) -> None:
        self.listed = listed
        self.count = count
        self.partial = partial
        self.asked: list[PlanRequest] = []

    @contextmanager
    def schedulers_of(self, cluster: Cluster) -> Iterator[tuple[Mapping[int, ActiveScheduler], None]]:
        del cluster
        yield {shard: ActiveScheduler((f"ipc://{shard}",), self._says(shard)) for shard in self.listed}, None

    def ask_change(self, addresses: tuple[str, ...], request: PlanRequest, *, keyring: None) -> Changed:
        del keyring
        self.asked.append(request)
        own = self.listed[int(addresses[0][-1])]
        match request:
            case SectionAsked():
                return Changed(request.request_no, "ok", document='{"name": "a"}')
            case ModelsAdd():
                own.append(model_info("a"))
            case ModelSet(term=int(term)):
                own[:] = [model_info("a", term=term)]
            case ModelsRemove():
                own.clear()
        if self.partial is not None and isinstance(request, self.partial):
            return Changed(
                request.request_no, "partial", unplaced=(UnplacedInfo(ModelId("a"), None, "full"),)
            )
        return Changed(request.request_no, "ok")

    def _says(self, shard: int) -> StatusListed:
        standing = SchedulerStanding("active", 16, 1, 1, 0, shard=shard, shards=self.count)
        return StatusListed(f"scheduler-{shard}", 1, (), tuple(self.listed[shard]), {}, standing=standing)


def moved(shards: Shards, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    monkeypatch.setattr(models_module, "schedulers_of", shards.schedulers_of)
    monkeypatch.setattr(models_module, "ask_change", shards.ask_change)
    return CliRunner().invoke(models_module.models, ["move", "a", "--to", "1", *words])


def move(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> BaseException | None:
    return moved(shards, monkeypatch).exception


def test_a_shard_that_does_not_answer_may_have_it_still(monkeypatch: pytest.MonkeyPatch) -> None:
    said = move(Shards({1: [model_info("a", term=1)]}), monkeypatch)
    assert isinstance(said, PeerLost)
    assert "shard 0 does not answer and may have it too" in str(said)


def test_what_the_old_shard_removed_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards({0: [model_info("a")], 1: [model_info("a", term=1)]})
    assert move(shards, monkeypatch) is None
    assert len(shards.asked) == 1


def test_a_shard_that_the_cluster_does_not_have_is_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    said = move(Shards({0: [model_info("a")]}, count=1), monkeypatch)
    assert isinstance(said, ConfigError)
    assert str(said) == "there is no shard 1: the cluster has one, 0"


def test_a_shard_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    said = move(Shards({0: [model_info("a")]}), monkeypatch)
    assert isinstance(said, PeerLost)
    assert str(said) == "shard 1: no active scheduler of it answers; those of 0 do"


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_who_is_there_already_is_said_to_be(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    result = moved(Shards({0: [], 1: [model_info("a")]}), monkeypatch, *words)
    assert (result.exit_code, result.output) == (0, "a is served by shard 1 already\n")


@pytest.mark.parametrize("partial", [None, ModelsAdd, ModelSet, ModelsRemove])
def test_a_model_is_said_to_be_moved_when_it_is_there_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, partial: type[PlanRequest] | None
) -> None:
    shards = Shards({0: [model_info("a")], 1: []}, partial=partial)
    result = moved(shards, monkeypatch)
    is_moved = not shards.listed[0]
    assert is_moved == (partial in (None, ModelsRemove))
    assert ("a moved to shard 1; " in result.output) == is_moved
    assert ("a is not moved whole to shard 1: ask for the move again" in result.output) != is_moved
    assert result.exit_code == (0 if partial is None else 6)
    assert ("not every model has a place" in result.output) == (partial is not None)
