"""That each look tells what came since the last one, once: whoever takes over, is started anew, or says nothing for a while."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import PeerLost
from fabric.ids import BatchId, ModelId, PeerId, SliceId
from fabric.messages import (
    BatchesRemembered,
    Ledger,
    RecordsAsked,
    RequestRecord,
    RequestsRemembered,
    SchedulerStanding,
    StatusListed,
)
from roles.page.polling import ANSWER_MS, Looks
from roles.page.snapshot import Look
from roles.runtime.live_figures import LiveFigures
from roles.runtime.running_cluster import ActiveScheduler, ClusterReport, ProcessReport
from roles.scheduler.dispatch import recorder
from roles.scheduler.dispatch.recorder import RECORDS_MAX, BatchRecorder

NOW_MS = 100_000.0
MODEL = ModelId("m")


class Cluster:
    """Of schedulers, each with its recorder while it is active, and a frontend. `silent` ones do not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorders: dict[int, BatchRecorder] = {0: BatchRecorder()}
        self.active = {0: ("scheduler-0", 1)}
        """By shard: who schedules it, and in which epoch."""
        self.silent: set[str] = set()
        self.answers: float = math.inf
        """That it still gives to questions for batches."""
        self.at_ms = NOW_MS
        self.incarnation = "first"
        self.requests = 0
        self.batches = 0
        self.looks = Looks(Path(), self, None)
        monkeypatch.setattr("roles.page.polling.look", lambda *_: self._report())
        monkeypatch.setattr("roles.page.polling.live_figures", lambda *_: LiveFigures({}))
        monkeypatch.setattr("roles.page.polling.ask_role", self._ask)

    def now_ms(self) -> float:
        return self.at_ms

    def takes_over(self, role_id: str, epoch: int, shard: int = 0) -> None:
        self.active[shard] = role_id, epoch
        self.recorders[shard] = BatchRecorder()

    def runs(self, count: int, shard: int = 0) -> None:
        own = self.recorders[shard]
        for _ in range(count):
            own.number += 1
            self.batches += 1
            batch_id, slice_id = BatchId(self.batches), SliceId("here/gpu0/0")
            times_ms = (NOW_MS - 5.0, NOW_MS - 1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.0)
            own._ended.append(
                recorder._Ended(own.number, batch_id, MODEL, slice_id, 3, "ok", "full", *times_ms)
            )

    def look(self) -> list[int]:
        """Batches that it told, in order."""
        return sorted(one.entry.batch_id for one in self._look().batches)

    def asked(self) -> list[str]:
        """Requests that it told."""
        return [one.record.request_id for one in self._look().requests]

    def _look(self) -> Look:
        return self.looks.look()

    def _report(self) -> ClusterReport:
        active = {
            shard: ActiveScheduler((role_id,), self._status(role_id, epoch))
            for shard, (role_id, epoch) in self.active.items()
            if role_id not in self.silent
        }
        if not active:
            raise PeerLost("no active scheduler answers")
        processes = [ProcessReport(f"scheduler-{number}", 10, True, {}, "one") for number in range(3)]
        processes.append(ProcessReport("frontend-0", 11, True, {"client": ["frontend-0"]}, self.incarnation))
        first = next(iter(active.values())).status
        return ClusterReport({}, processes, first, {}, active=active)

    def _status(self, role_id: str, epoch: int) -> StatusListed:
        return StatusListed(role_id, 10, (), (), {}, standing=SchedulerStanding("active", epoch, 1, 1, 1, ()))

    def _ask(
        self, addresses: Sequence[str], asked: RecordsAsked, kind: type, *_: Any, server: PeerId, **__: Any
    ) -> Any:
        if addresses[0] in self.silent:
            self.at_ms += ANSWER_MS
            raise PeerLost("nobody answers")
        if kind is RequestsRemembered:
            numbers = range(self.requests, asked.after, -1)
            return RequestsRemembered(tuple(map(self._request, numbers)))
        assert kind is BatchesRemembered
        if not self.answers:
            raise PeerLost("nobody answers")
        self.answers -= 1
        shard = next(shard for shard, (role_id, _) in self.active.items() if role_id == addresses[0])
        return self.recorders[shard].remembered(asked, NOW_MS)

    def _request(self, number: int) -> RequestRecord:
        name = f"{self.incarnation}-{number}"
        return RequestRecord(number, name, MODEL, "late", "", 0.0, 50.0, Ledger(), BatchId(0))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_each_batch_is_told_once(cluster: Cluster) -> None:
    assert cluster.look() == []
    cluster.runs(3)
    assert cluster.look() == [1, 2, 3]
    assert cluster.look() == []
    cluster.runs(2)
    assert cluster.look() == [4, 5]


@pytest.mark.parametrize("is_read", [True, False])
def test_who_is_active_again_in_the_same_process_counts_anew(cluster: Cluster, *, is_read: bool) -> None:
    """`is_read`: the page was looked at while the other one was active."""
    cluster.runs(500)
    cluster.look()
    cluster.takes_over("scheduler-1", 2)
    cluster.runs(5)
    if is_read:
        assert cluster.look() == [501, 502, 503, 504, 505]
    cluster.takes_over("scheduler-0", 3)
    cluster.runs(4)
    assert cluster.look() == [506, 507, 508, 509]


def test_a_frontend_that_was_started_anew_counts_anew_also_under_the_same_pid(cluster: Cluster) -> None:
    cluster.requests = 7
    cluster.asked()
    cluster.requests, cluster.incarnation = 2, "second"
    assert sorted(cluster.asked()) == ["second-1", "second-2"]
    assert cluster.asked() == []


def fails_whole(cluster: Cluster) -> None:
    cluster.silent = {"scheduler-0"}
    with pytest.raises(PeerLost):
        cluster.look()


def misses_one_shard(cluster: Cluster) -> None:
    cluster.takes_over("scheduler-2", 1, shard=1)
    cluster.silent = {"scheduler-0"}
    assert cluster.look() == []


@pytest.mark.parametrize("look", [fails_whole, misses_one_shard])
def test_who_was_silent_once_tells_what_came_since_and_nothing_twice(
    cluster: Cluster, look: Callable[[Cluster], None]
) -> None:
    cluster.runs(20)
    cluster.requests = 3
    cluster.look()
    look(cluster)
    cluster.silent = set()
    cluster.runs(2)
    cluster.requests += 1
    seen = cluster._look()
    assert sorted(one.entry.batch_id for one in seen.batches) == [21, 22]
    assert Counter(one.record.number for one in seen.requests) == {4: 1}


def test_who_is_silent_while_it_is_asked_for_its_records_tells_nothing_twice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.runs(20)
    cluster.look()
    report = cluster._report()
    monkeypatch.setattr("roles.page.polling.look", lambda *_: report)
    cluster.silent = {"scheduler-0", "frontend-0"}
    assert cluster.look() == []
    cluster.silent = set()
    cluster.runs(2)
    assert cluster.look() == [21, 22]


def test_batches_between_what_was_told_and_where_a_scheduler_fell_silent_are_told_later(
    cluster: Cluster,
) -> None:
    cluster.runs(3)
    cluster.look()
    cluster.runs(2 * RECORDS_MAX)
    cluster.answers = 1
    assert cluster.look() == []
    cluster.answers = math.inf
    assert cluster.look() == [*range(4, 2 * RECORDS_MAX + 4)]


def test_a_look_is_of_the_moment_of_its_batches_whoever_is_silent_after_it(cluster: Cluster) -> None:
    """What runs while a silent frontend is waited for is not in it: the slice would seem idle for so long."""
    cluster.silent = {"frontend-0"}
    cluster.runs(1)
    seen = cluster._look()
    assert cluster.at_ms == NOW_MS + ANSWER_MS
    assert seen.at_ms == NOW_MS
