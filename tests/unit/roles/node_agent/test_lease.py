"""What one agent grants: higher epochs only, one scheduler at a time, and nothing that is not on the disk."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from msgspec.structs import replace

from fabric.errors import FabricError
from fabric.ids import Epoch, Incarnation, NodeId
from fabric.messages import LeaseAsked, LeaseReport
from roles.node_agent.lease import NO_LEASE, KeepLease, LeaseGrants, LeaseKept, LeaseRecord
from roles.node_agent.lease_file import LeaseFile
from roles.runtime.epochs import LEASE_MS
from tests.scarcity import full_disk, limited

NODE = NodeId("a")


def asks(number: int, epoch: int, *, born: str = "0", question: int = 1) -> LeaseAsked:
    return LeaseAsked(f"scheduler-{number}", Incarnation(born), epoch, question)


def granted(lease: LeaseGrants, asked: LeaseAsked, now_ms: float) -> LeaseReport:
    """A grant, with its write."""
    done = lease.asked(asked, now_ms)
    assert isinstance(done, KeepLease)
    report = lease.kept(LeaseKept(done.record, is_written=True), now_ms)
    assert report is not None
    return report


def refused(lease: LeaseGrants, asked: LeaseAsked, now_ms: float) -> LeaseReport:
    report = lease.asked(asked, now_ms)
    assert isinstance(report, LeaseReport)
    is_own = (report.holder_id, report.incarnation) == (asked.scheduler_id, asked.incarnation)
    assert not is_own or report.epoch != asked.epoch
    return report


def test_the_first_who_asks_has_it_and_nobody_else_until_it_ends() -> None:
    lease = LeaseGrants(NODE)
    report = granted(lease, asks(0, 16, question=7), 0.0)
    assert report == LeaseReport(NODE, 16, "scheduler-0", Incarnation("0"), False, 7)
    assert refused(lease, asks(1, 17), 1.0).is_free is False
    assert lease.wake_at_ms == LEASE_MS
    assert not lease.tick(LEASE_MS - 1)
    assert lease.tick(LEASE_MS)
    assert not lease.tick(LEASE_MS + 1), "told once"
    assert granted(lease, asks(1, 17), LEASE_MS + 1).epoch == 17


def test_whoever_holds_it_keeps_it_while_it_asks_without_a_write() -> None:
    lease = LeaseGrants(NODE)
    granted(lease, asks(0, 16), 0.0)
    assert isinstance(lease.asked(asks(0, 16, question=2), 400.0), LeaseReport)
    assert lease.wake_at_ms == 400.0 + LEASE_MS
    assert refused(lease, asks(1, 17), 899.0).epoch == 16


def test_a_lower_epoch_is_never_granted() -> None:
    lease = LeaseGrants(NODE)
    granted(lease, asks(1, 33), 0.0)
    assert refused(lease, asks(0, 16), 10 * LEASE_MS).epoch == 33
    assert refused(lease, asks(1, 17), 10 * LEASE_MS).epoch == 33
    assert refused(lease, asks(1, 33, born="other"), 0.0).incarnation == Incarnation("0")


def test_a_closed_connection_frees_it_at_once() -> None:
    lease = LeaseGrants(NODE)
    granted(lease, asks(0, 16), 0.0)
    assert not lease.closed("scheduler-1")
    assert lease.closed("scheduler-0")
    assert not lease.closed("scheduler-0"), "told once"
    assert granted(lease, asks(1, 17), 1.0).holder_id == "scheduler-1"


def test_a_scheduler_that_starts_anew_has_a_higher_one_at_once() -> None:
    lease = LeaseGrants(NODE)
    granted(lease, asks(0, 16), 0.0)
    assert granted(lease, asks(0, 32, born="1"), 1.0).incarnation == Incarnation("1")


def test_nothing_is_answered_that_is_not_written() -> None:
    lease = LeaseGrants(NODE)
    done = lease.asked(asks(0, 16), 0.0)
    assert isinstance(done, KeepLease)
    assert lease.asked(asks(0, 16, question=2), 1.0) is None, "it is under way"
    assert refused(lease, asks(1, 17), 1.0).epoch == 0
    assert lease.kept(LeaseKept(done.record, is_written=False), 2.0) is None
    assert lease.record == NO_LEASE
    assert granted(lease, asks(1, 17), 3.0).epoch == 17


@pytest.mark.parametrize(
    "ask", [asks(0, 32), asks(0, 32, born="1"), asks(1, 33)], ids=["holder", "next", "other"]
)
def test_what_cannot_be_written_renews_the_lease_of_its_holder_alone(ask: LeaseAsked) -> None:
    lease = LeaseGrants(NODE)
    granted(lease, asks(0, 16), 0.0)
    now_ms = 400.0 if ask.scheduler_id == "scheduler-0" else LEASE_MS
    done = lease.asked(replace(ask, number=7), now_ms)
    assert isinstance(done, KeepLease)
    report = lease.kept(LeaseKept(done.record, is_written=False), now_ms + 1)
    is_holder = ask == asks(0, 32)
    held = LeaseReport(NODE, 16, "scheduler-0", Incarnation("0"), is_free=False, number=7)
    assert report == (held if is_holder else None)
    assert lease.record.epoch == 16
    assert lease.wake_at_ms == (now_ms + 1 if is_holder else 0.0) + LEASE_MS


@pytest.mark.parametrize(
    "holder", [NO_LEASE, LeaseRecord(Epoch(16), "scheduler-1", Incarnation("0"))], ids=["none", "own"]
)
def test_a_scheduler_that_is_gone_before_its_grant_is_written_holds_nobody_up(holder: LeaseRecord) -> None:
    lease = LeaseGrants(NODE, holder)
    lease.begin(0.0)
    done = lease.asked(asks(1, 33), 1.0)
    assert isinstance(done, KeepLease)
    lease.closed("scheduler-0")
    lease.closed("scheduler-1")
    report = lease.kept(LeaseKept(done.record, is_written=True), 2.0)
    assert report is not None
    assert (report.epoch, report.is_free, lease.wake_at_ms) == (33, True, None)
    assert granted(lease, asks(0, 48), 3.0).is_free is False


def test_another_ones_end_does_not_free_what_is_being_written() -> None:
    lease = LeaseGrants(NODE)
    done = lease.asked(asks(1, 33), 1.0)
    assert isinstance(done, KeepLease)
    assert not lease.closed("scheduler-0")
    report = lease.kept(LeaseKept(done.record, is_written=True), 2.0)
    assert report is not None
    assert report.is_free is False


def test_what_a_former_agent_granted_holds_from_the_start_of_the_next_one() -> None:
    lease = LeaseGrants(NODE, LeaseRecord(Epoch(33), "scheduler-1", Incarnation("0")))
    lease.begin(10_000.0)
    assert refused(lease, asks(0, 48), 10_000.0).epoch == 33
    assert lease.wake_at_ms == 10_000.0 + LEASE_MS
    assert isinstance(lease.asked(asks(1, 33), 10_100.0), LeaseReport), "its holder goes on"
    assert lease.wake_at_ms == 10_100.0 + LEASE_MS


def test_the_file_keeps_what_was_written_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = LeaseFile(tmp_path, "a")
    assert kept.read() == NO_LEASE
    record = LeaseRecord(Epoch(16), "scheduler-0", Incarnation("5f3a9c01"))
    assert kept.write(record)
    with full_disk():
        assert not kept.write(LeaseRecord(Epoch(33), "scheduler-1", Incarnation("0")))
    with limited(resource.RLIMIT_FSIZE, 20):  # there is room for a part of it
        assert not kept.write(LeaseRecord(Epoch(33), "scheduler-1", Incarnation("0")))
    assert "lease_not_kept" in caplog.text
    assert LeaseFile(tmp_path, "a").read() == record


@pytest.mark.parametrize("text", ["", "{", "[]", '{"epoch": "x"}', '{"epoch": 1}'])
def test_a_file_that_cannot_be_read_is_no_epoch_zero(tmp_path: Path, text: str) -> None:
    (tmp_path / "node-a.lease").write_text(text, encoding="utf-8")
    with pytest.raises(FabricError, match="cannot be read"):
        LeaseFile(tmp_path, "a").read()
