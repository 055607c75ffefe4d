"""What a scheduler remembers of batches, as an operator is told it."""

from __future__ import annotations

import pytest

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import BatchEntry, RecordsAsked
from roles.scheduler.dispatch import recorder
from roles.scheduler.dispatch.recorder import BATCHES_MAX, RECORDS_MAX, BatchRecorder

NEWEST = 1 << 52
COUNT = BATCHES_MAX + 100
TIMES_MS = (0.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.0)


def filled() -> BatchRecorder:
    own = BatchRecorder()
    for number in range(1, COUNT + 1):
        own._ended.append(
            recorder._Ended(
                number,
                BatchId(number),
                ModelId("m"),
                SliceId("here/gpu0/0"),
                3,
                "ok",
                "slice_free",
                *TIMES_MS,
            )
        )
    return own


def test_all_that_is_remembered_is_told_page_by_page_newest_first() -> None:
    own, before = filled(), NEWEST
    found: list[int] = []
    while page := own.remembered(RecordsAsked(ModelId(""), before), 2.0).batches:
        assert len(page) <= RECORDS_MAX
        found += [one.number for one in page]
        before = page[-1].number
    assert found == list(range(COUNT, COUNT - BATCHES_MAX, -1))


def test_no_more_is_made_than_is_told_for_batches_wait_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    entry_of = recorder._entry

    def counted(one: recorder._Ended, now_ms: float) -> BatchEntry:
        nonlocal made
        made += 1
        return entry_of(one, now_ms)

    monkeypatch.setattr(recorder, "_entry", counted)
    filled().remembered(RecordsAsked(ModelId(""), NEWEST), 2.0)
    assert made == RECORDS_MAX


def test_only_what_is_new_is_told_to_one_who_asks_for_that_and_the_answer_says_so() -> None:
    own = filled()
    told = own.remembered(RecordsAsked(ModelId(""), NEWEST, after=COUNT - 3), 2.0)
    assert [one.number for one in told.batches] == [COUNT, COUNT - 1, COUNT - 2]
    assert told.after == COUNT - 3, "the plan is not sent along then"
    assert own.remembered(RecordsAsked(ModelId(""), NEWEST, after=COUNT), 2.0).batches == ()
