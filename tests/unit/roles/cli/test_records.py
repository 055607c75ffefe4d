"""What `why`, `what-if`, `explain` and `trace` gather of a made-up cluster, and what they say is not in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fabric.curve import new_pair
from fabric.errors import PeerLost
from fabric.ids import BatchId, ModelId
from fabric.keys import OPERATOR, Keyring, Trusted
from fabric.messages import (
    BatchesRemembered,
    Ledger,
    RecordsAsked,
    RequestRecord,
    RequestsRemembered,
    StatusListed,
)
from roles.cli.records import remembered, unasked_remark
from roles.cli.why import situation_of
from roles.frontend.arrival_bins import ARRIVAL_BIN_MS, MinuteBins
from roles.runtime.running_cluster import ActiveScheduler, ClusterReport, ProcessReport

MODELS = (ModelId("a"), ModelId("b"))
EACH = 3


def report(*role_ids: str, connected: int) -> ClusterReport:
    """These frontends run here; so many have a connection to the scheduler."""
    processes = [ProcessReport(role_id, 7, True, {"client": [role_id]}) for role_id in role_ids]
    status = StatusListed("scheduler-0", 7, (), (), {"frontends": float(connected)})
    return ClusterReport({}, processes, status, {}, active={0: ActiveScheduler(["here"], status)})


def answer(
    addresses: Sequence[str], asked: RecordsAsked, kind: type, limit_ms: float, **_: Any
) -> RequestsRemembered | BatchesRemembered:
    """Each frontend has three requests of each model, one in an answer; `frontend-1` falls silent before the last two."""
    del limit_ms
    if kind is BatchesRemembered:
        return BatchesRemembered(())
    number = min(EACH, asked.before - 1)
    if addresses == ["frontend-1"] and asked.model_id == MODELS[1] and number < EACH:
        raise PeerLost("nobody answers")
    ledger = Ledger(request_id=f"{addresses[0]}-{asked.model_id}-{number}")
    record = RequestRecord(
        number, ledger.request_id, asked.model_id, "late", "", 1.0, 25.0, ledger, BatchId(0)
    )
    arrivals, bad = [0] * 12_000, [0] * 60
    arrivals[6_000], bad[30] = 5, 2
    return RequestsRemembered(
        (record,) if number else (), tuple(arrivals), 5.0, 2, 100_000, 0, tuple(bad), (0,) * 60
    )


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.cli.records.ask_role", answer)


def test_of_a_frontend_that_falls_silent_midway_nothing_is_counted(tmp_path: Path) -> None:
    found = remembered(tmp_path, MODELS, report=report("frontend-0", "frontend-1", connected=2))
    assert list(found.remarks) == ["frontend-1 does not answer: what it remembers is left out"]
    assert {one.record.request_id.rpartition("-")[0] for one in found.requests} == {
        "frontend-0-a",
        "frontend-0-b",
    }
    assert found.counts.bad(60_000.0) == {"a": 2, "b": 2}
    assert found.counts.offered(60_000.0) == {"a": 5, "b": 5}


def test_of_those_that_answer_everything_is_counted_once(tmp_path: Path) -> None:
    found = remembered(tmp_path, MODELS, report=report("frontend-0", "frontend-2", connected=2))
    assert list(found.remarks) == []
    assert len(found.requests) == 2 * len(MODELS) * EACH
    assert found.counts.bad(60_000.0) == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("connected", "said"),
    [
        (
            2,
            "1 frontend of another host was not asked: with --via HOST and --key all of a deployed cluster are",
        ),
        (
            4,
            "3 frontends of other hosts were not asked: with --via HOST and --key all of a deployed cluster are",
        ),
    ],
)
def test_frontends_of_other_hosts_are_known_not_to_be_in_it(
    tmp_path: Path, connected: int, said: str
) -> None:
    found = remembered(tmp_path, MODELS, report=report("frontend-0", connected=connected))
    assert list(found.remarks) == [said]


def test_who_comes_with_a_key_by_another_host_is_not_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.cli.records.via_host", lambda: "h")
    keyring = Keyring(new_pair(OPERATOR), Trusted())
    assert unasked_remark(1, keyring) == "1 frontend of another host was not asked"
    assert "with --via HOST" in unasked_remark(1, None)


def test_of_a_cluster_whose_only_frontend_does_not_answer_nothing_is_said(tmp_path: Path) -> None:
    found = remembered(tmp_path, MODELS, report=report("frontend-1", connected=1))
    with pytest.raises(PeerLost, match="no answer of frontend-1"):
        situation_of(found)


class Clock:
    """The asker's, and every frontend's."""

    ms = 1_000_000.0

    def now_ms(self) -> float:
        return Clock.ms


def test_a_late_answer_does_not_shift_a_frontend_against_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests come to both; the first answer of one is 80 ms on its way."""
    came = [990_000.0 + at * 500.0 for at in range(19)]
    ways_ms = iter([1.0, 1.0, 80.0, 1.0])

    def late(addresses: Sequence[str], asked: RecordsAsked, kind: type, limit_ms: float, **_: Any) -> Any:
        del addresses, limit_ms
        if kind is BatchesRemembered:
            return BatchesRemembered(())
        arrivals = MinuteBins(ARRIVAL_BIN_MS)
        for at_ms in came:
            arrivals.note(at_ms)
        now_ms = Clock.ms
        Clock.ms += next(ways_ms)
        return RequestsRemembered(
            (), arrivals.listed(now_ms), ARRIVAL_BIN_MS, 0, arrivals.number(now_ms), 0, (0,) * 60, (0,) * 60
        )

    monkeypatch.setattr("roles.cli.records.ask_role", late)
    monkeypatch.setattr("roles.cli.records.MonotonicClock", Clock)
    found = remembered(tmp_path, MODELS, report=report("frontend-0", "frontend-1", connected=2))
    for its in found.counts.by_model().values():
        assert [count for count in its if count] == [2] * len(came)
