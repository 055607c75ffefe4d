"""The plan that a scheduler which was killed goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric.limits import DOCUMENT_CHARS_MAX
from fabric.messages import PlanCopy
from roles.scheduler.planning.saved_plan import AGAIN_AFTER_MS, SavedPlan
from tests.scarcity import full_disk


class HandClock:
    """Says what it was told to."""

    def __init__(self) -> None:
        self.at_ms = 1_000.0

    def now_ms(self) -> float:
        return self.at_ms


def test_a_full_disk_is_counted_and_tried_again_and_leaves_what_was_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = HandClock(), tmp_path / "scheduler-0.plan"
    kept = SavedPlan(tmp_path, "scheduler-0", {"of": "this"})
    assert kept.is_due(16, 0, clock), "also what a scheduler begins with: the next one may read another file"
    assert kept.is_due(16, 1, clock)
    kept.write(PlanCopy(16, 1, kept.digest, "first"), clock.at_ms)
    assert not kept.is_due(16, 1, clock)
    before = path.read_bytes()
    with full_disk():
        kept.write(PlanCopy(16, 2, kept.digest, "second"), clock.at_ms)
    assert (kept.failures, path.read_bytes()) == (1, before)
    assert [entry.name for entry in tmp_path.iterdir()] == ["scheduler-0.plan"]
    assert "plan_not_kept" in caplog.text
    assert not kept.is_due(16, 2, clock), "not at every turn"
    clock.at_ms += AGAIN_AFTER_MS
    assert kept.is_due(16, 2, clock)
    kept.write(PlanCopy(16, 2, kept.digest, "second"), clock.at_ms)
    assert not kept.is_due(16, 2, clock)
    assert path.read_bytes() != before
    assert kept.is_due(32, 2, clock), "of another epoch"


def test_a_file_is_known_by_what_it_says_however_its_keys_are_written(tmp_path: Path) -> None:
    """A table's batch sizes may be numbers, texts or some of each: JSON has texts only."""
    tables: list[dict[str | int, float]] = [{1: 5.0, "2": 6.0}, {"1": 5.0, "2": 6.0}, {2: 6.0, 1: 5.0}]
    digests = {SavedPlan(tmp_path, "scheduler-0", {"table": table}).digest for table in tables}
    assert len(digests) == 1
    assert SavedPlan(tmp_path, "scheduler-0", {"table": {1: 5.0}}).digest not in digests


def test_a_plan_that_cannot_be_written_holds_back_no_other(tmp_path: Path) -> None:
    """Else standbys would not be sent a change that an operator has heard is done."""
    clock = HandClock()
    kept = SavedPlan(tmp_path, "scheduler-0", {"of": "this"})
    with full_disk():
        for number in range(3):
            assert kept.is_due(16, number, clock)
            kept.write(PlanCopy(16, number, kept.digest, "a plan"), clock.at_ms)
            assert not kept.is_due(16, number, clock)
        assert kept.is_due(32, 2, clock), "of another epoch"


def test_a_plan_that_is_too_large_for_a_message_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = SavedPlan(tmp_path, "scheduler-0", {"of": "this"})
    large = "x" * (DOCUMENT_CHARS_MAX + 1)
    assert [kept.log_if_too_large(one) for one in (large[1:], large, large)] == [False, True, True]
    assert caplog.text.count("plan_too_large") == 1
