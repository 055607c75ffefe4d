"""What is made of records: spans, a timeline, sentences of one request; each from records made by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import BatchEntry, Ledger, RequestRecord, RequestsRemembered
from roles.config.read_config import parse_config
from roles.frontend.arrival_bins import ARRIVAL_BIN_MS, MinuteBins
from roles.observability.batch_timeline import write_timeline
from roles.observability.diagnosis import Cause, Finding
from roles.observability.explain import explain
from roles.observability.last_minute import minute_from
from roles.observability.remembered import BatchSeen, CountsSeen, RequestSeen, zero_of_clock_ms
from roles.observability.spans import Spans
from roles.scheduler.settings import settings_from

OURS, BERT = ModelId("resnet50"), ModelId("bert")
HERE = SliceId("here/gpu0/0")


def late_request(number: int = 1, outcome: str = "late") -> RequestSeen:
    """47 ms of 25: held for 2, then 31 behind a batch of bert."""
    ledger = Ledger(0.0, 0.0, 2.0, 31.0, 1.0, 0.0, 12.0, 1.0, 47.0, 3, HERE, "slice_free", f"abcdef-{number}")
    record = RequestRecord(number, f"abcdef-{number}", OURS, outcome, "", 100.0, 25.0, ledger, BatchId(2))
    return RequestSeen(record, 1_000.0, 1_047.0)


def batch(
    number: int,
    model_id: ModelId,
    started_at_ms: float,
    exec_ms: float,
    size: int = 3,
    table_ms: float | None = None,
) -> BatchSeen:
    table_ms = exec_ms if table_ms is None else table_ms
    entry = BatchEntry(
        number,
        BatchId(number),
        model_id,
        HERE,
        size,
        "ok",
        "full",
        0,
        0,
        exec_ms,
        table_ms,
        exec_ms,
        1.0,
        0.0,
        0.0,
    )
    return BatchSeen(entry, started_at_ms - 1.0, started_at_ms, started_at_ms + exec_ms)


BATCHES = [
    batch(1, BERT, 1_003.0, 31.0),
    batch(2, OURS, 1_034.0, 12.0),
    batch(3, OURS, 1_100.0, 8.0, size=1),
    batch(4, BERT, 1_050.0, 31.0),
]


def test_a_late_request_is_told_as_a_person_would_tell_it() -> None:
    its = explain(late_request(), BATCHES, {HERE})
    assert list(its.sentences) == [
        "Request abcdef-1 of resnet50 was answered too late: after 47 ms, 22 ms more than the 25 ms that it had at the frontend.",
        (
            "Its time: 2.0 ms held on purpose, for a larger batch, 31 ms waiting because it had to,"
            " 1.0 ms its inputs on the way to the worker, 12 ms running, 1.0 ms its outputs on the way back."
        ),
        "It ran on here/gpu0/0 in a batch of 3, which left because of 'slice_free'.",
        "While it waited the slice was busy with others: 31 ms behind batches of bert on here/gpu0/0.",
        "Alone it would have taken 10 ms.",
        "It would have been in time with no other model's batch before it: 16 ms.",
    ]
    assert its.behind_ms == {"bert on here/gpu0/0": 31.0}


def test_a_run_that_was_slower_than_its_table_is_the_cause_where_it_is() -> None:
    ledger = Ledger(0.0, 0.0, 2.0, 0.0, 1.0, 0.0, 40.0, 1.0, 44.0, 3, HERE, "full", "a-1")
    slow = RequestSeen(
        RequestRecord(1, "a-1", OURS, "late", "", 0.0, 25.0, ledger, BatchId(2)), 1_000.0, 1_044.0
    )
    its = explain(slow, [batch(2, OURS, 1_003.0, 40.0, table_ms=10.0)], {HERE})
    assert "That batch took 40 ms, 4.0 times what it should (10 ms)." in its.sentences
    assert its.would_have_met == ("a run as fast as its table says: 14 ms",)


def test_a_budget_that_is_less_than_a_run_alone_is_the_cause_where_it_is() -> None:
    ledger = Ledger(waited_ms=0.6, total_ms=0.8, request_id="a-1")
    record = RequestRecord(1, "a-1", OURS, "DeadlineExceeded", "", 0.0, 0.7, ledger, BatchId(0))
    its = explain(RequestSeen(record, 1_200.0, 1_200.8), BATCHES, {HERE})
    assert its.sentences[-1] == (
        "A run alone takes 8.0 ms of the 0.7 ms that it had: only a larger budget or a faster device would have brought it in time."
    )


def test_a_good_request_needs_no_counterfactual() -> None:
    its = explain(late_request(outcome="good"), BATCHES, {HERE})
    assert its.would_have_met == ()
    assert its.sentences[0].startswith("Request abcdef-1 of resnet50 was answered in time")


def test_a_request_that_was_given_up_with_time_left_says_what_that_was_kept_for() -> None:
    def refused(total_ms: float) -> list[str]:
        ledger = Ledger(0.0, 0.0, 0.0, total_ms, 0.0, 0.0, 0.0, 0.0, total_ms, 0, SliceId(""), "", "a-1")
        record = RequestRecord(
            1, "a-1", OURS, "DeadlineExceeded", "could no longer finish", 0.0, 27.0, ledger, BatchId(0)
        )
        return list(explain(RequestSeen(record, 2_000.0, 2_000.0 + total_ms), BATCHES, {HERE}).sentences)

    kept = "left, of which a run alone takes 9.0 ms; the rest is kept back"
    assert any(f"It had 17 ms {kept}" in sentence for sentence in refused(10.0))
    assert not any("kept back" in sentence for sentence in refused(17.5))


def test_slices_that_were_idle_are_slices_where_it_could_have_gone() -> None:
    ledger = Ledger(waited_ms=40.0, total_ms=40.0, request_id="a-1")
    record = RequestRecord(1, "a-1", OURS, "DeadlineExceeded", "", 0.0, 40.0, ledger, BatchId(0))
    refused = RequestSeen(record, 1_000.0, 1_040.0)
    hosting = {HERE, *(SliceId(f"here/gpu{number}/0") for number in (1, 2, 3))}
    sentences = explain(refused, [batch(1, BERT, 1_000.0, 40.0)], hosting).sentences
    assert (
        "Meanwhile the slices where it could have gone were busy 25% of the time:"
        " 40 ms behind batches of bert on here/gpu0/0."
    ) in sentences


def test_what_a_process_counts_since_its_start_is_not_of_the_last_minute() -> None:
    findings = [
        Finding(Cause.HOST, 1.0, "timers of frontend-0 are late (p99 since its start)", "", "frontend-0"),
        Finding(Cause.BURSTS, 1.0, "requests come in bursts", ""),
    ]
    assert explain(late_request(), BATCHES, {HERE}, findings).sentences[-2:] == (
        "Timers of frontend-0 are late (p99 since its start).",
        "In the last minute: requests come in bursts.",
    )


def test_what_nothing_explains_is_said_to_be_so() -> None:
    ledger = Ledger(0.0, 0.0, 2.0, 0.0, 40.0, 0.0, 40.0, 1.0, 83.0, 1, HERE, "full", "a-1")
    lost = RequestSeen(
        RequestRecord(1, "a-1", OURS, "late", "", 0.0, 25.0, ledger, BatchId(9)), 1_000.0, 1_083.0
    )
    its = explain(lost, [], set())
    assert its.alone_ms is None
    assert its.sentences[-1] == "No single change that is known here would have brought it in time."


def test_a_request_whose_batch_is_not_remembered_was_granted_all_the_same() -> None:
    ledger = Ledger(waited_ms=1.0, total_ms=30.0, slice_id=HERE, request_id="a-1")
    record = RequestRecord(1, "a-1", OURS, "WorkerLost", "", 0.0, 100.0, ledger, BatchId(9))
    its = explain(RequestSeen(record, 1_000.0, 1_030.0), [], {HERE})
    assert "It was granted to here/gpu0/0; how its batch ended is not remembered." in its.sentences


def test_a_request_is_exported_as_a_span_with_its_stages_below() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans(exporter)
    assert spans.export([late_request(1), late_request(2, "good")], offset_ms=1e12) == 2
    assert spans.export([late_request(3)], offset_ms=1e12) == 1
    spans.close()
    found = exporter.get_finished_spans()
    whole = [one for one in found if one.parent is None]
    assert [one.name for one in whole] == ["infer resnet50"] * 3
    assert [one.status.status_code for one in whole] == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.ERROR]
    first = whole[0]
    assert first.start_time is not None
    assert first.end_time is not None
    assert (first.end_time - first.start_time) / 1e6 == 47.0
    below = [one for one in found if one.parent is not None and one.parent.span_id == first.context.span_id]
    assert [one.name for one in below] == ["held", "waited", "transfer", "gpu", "return"]
    assert below[0].start_time == first.start_time
    assert below[-1].end_time == first.end_time


def test_a_timeline_has_a_row_for_each_slice_and_model_and_begins_at_0(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_timeline(path, BATCHES, [late_request()])
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {"GPU here/gpu0", "here/gpu0/0", "requests", "resnet50"}
    (begun,) = [event for event in events if event["ph"] == "b"]
    assert (begun["ts"], begun["args"]["request_id"]) == (0.0, "abcdef-1")
    assert begun["name"] == "resnet50 late", "viewers make a row of each name"
    bars = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert bars[:2] == [("bert x3", 3_000.0, 31_000.0), ("resnet50 x3", 34_000.0, 12_000.0)]


def test_no_span_of_many_is_dropped_where_the_collector_is_slow() -> None:
    class Slow(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            time.sleep(0.2)
            return super().export(spans)

    exporter = Slow()
    spans = Spans(exporter)
    assert spans.export([late_request(number) for number in range(1, 701)], offset_ms=1e12) == 700
    spans.close()
    assert len(exporter.get_finished_spans()) == 4_200


def test_what_the_collector_does_not_take_is_counted() -> None:
    class Refusing(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            super().export(spans)
            return SpanExportResult.FAILURE

    spans = Spans(Refusing())
    assert spans.export([late_request(number) for number in range(1, 4)], offset_ms=1e12) == 3
    assert spans.refused() == 3
    taken = Spans(InMemorySpanExporter())
    taken.export([late_request(1)], offset_ms=1e12)
    assert taken.refused() == 0
    for one in (spans, taken):
        one.close()


def counted(
    at_ms: Sequence[float], told_at_ms: float, zero_ms: float = 0.0, *, bad_at_ms: Sequence[float] = ()
) -> RequestsRemembered:
    """What a frontend that requests came to at these moments says of them at that one. `zero_ms`: when its host was started."""
    arrivals, bad = MinuteBins(ARRIVAL_BIN_MS), MinuteBins(1_000.0)
    for bins, moments in ((arrivals, at_ms), (bad, bad_at_ms)):
        for moment in moments:
            bins.note(moment - zero_ms)
    now_ms = told_at_ms - zero_ms
    by_second = bad.listed(now_ms)
    return RequestsRemembered(
        (),
        arrivals.listed(now_ms),
        ARRIVAL_BIN_MS,
        sum(by_second),
        arrivals.number(now_ms),
        0,
        by_second,
        tuple([0] * len(by_second)),
    )


def test_what_came_at_one_moment_is_in_one_bin_whenever_frontends_are_asked() -> None:
    """Two frontends and two models: the last answer comes 700 ms after the first."""
    seen = CountsSeen()
    moments = [65_000.0, 80_000.0, 99_990.0]
    for model_id, at_ms, told_at_ms in (
        (OURS, moments, 100_000.0),
        (BERT, moments, 100_350.0),
        (OURS, moments, 100_500.0),
        (BERT, [*moments, 100_002.0], 100_700.0),
    ):
        seen.add(model_id, counted(at_ms, told_at_ms), 0.0)
    its = seen.by_model()
    assert its[OURS] == its[BERT], "of the span that all answers cover"
    assert [count for count in its[OURS] if count] == [2, 2, 2]
    assert len(its[OURS]) * seen.bin_ms == 60_000.0 - ARRIVAL_BIN_MS - 700.0
    assert seen.offered(60_000.0) == {OURS: 6, BERT: 6}, "what came after the first answer is not in it"


@pytest.mark.parametrize("told_at_ms", [1_000_000.0, 1_000_900.0])
@pytest.mark.parametrize("gap_ms", [0.0, 3_000.0])
@pytest.mark.parametrize("span_ms", [60_000.0, 12_500.0, 400.0])
def test_what_came_and_what_was_bad_is_of_the_span_that_is_named(
    told_at_ms: float, gap_ms: float, span_ms: float
) -> None:
    """200 requests a second of each model, 20 of them bad; the second model is asked later."""
    seen = CountsSeen()
    for model_id, at_ms in ((BERT, told_at_ms), (OURS, told_at_ms + gap_ms)):
        came = [at_ms - ago * 5.0 for ago in range(14_000, -1, -1)]
        seen.add(model_id, counted(came, at_ms, bad_at_ms=came[::10]), 0.0)
    counted_s = seen.counted_ms(span_ms) / 1e3
    assert counted_s == round(counted_s) >= 1
    assert counted_s == pytest.approx(span_ms / 1e3, abs=1.0 + (gap_ms / 1e3) * (span_ms == 60_000.0))
    assert seen.offered(span_ms) == {BERT: 200 * counted_s, OURS: 200 * counted_s}
    assert seen.bad(span_ms) == {BERT: 20 * counted_s, OURS: 20 * counted_s}


@pytest.mark.parametrize("apart_ms", [0.0, 30_000.0, 86_400_000.0, -86_400_000.0])
def test_frontends_whose_hosts_were_started_at_other_times_are_put_beside_each_other(apart_ms: float) -> None:
    seen = CountsSeen()
    told_at_ms = 200_000_000.0
    moments = [told_at_ms - ago_ms for ago_ms in (55_000.0, 30_000.0, 3_000.0)]
    for zero_ms in (0.0, apart_ms):
        told = counted(moments, told_at_ms, zero_ms, bad_at_ms=moments[1:])
        seen.add(OURS, told, zero_of_clock_ms(told, told_at_ms))
    its = seen.by_model()[OURS]
    assert len(its) * seen.bin_ms == pytest.approx(60_000.0, abs=3 * ARRIVAL_BIN_MS)
    came = [number for number, count in enumerate(its) if count]
    for ago_ms in (55_000.0, 30_000.0, 3_000.0):
        at = len(its) - round(ago_ms / ARRIVAL_BIN_MS)
        assert sum(its[at - 2 : at + 3]) == 2, "to within a bin"
    assert len(came) <= 6
    for span_ms, offered, bad in ((60_000.0, 6, 4), (40_000.0, 4, 4), (10_000.0, 2, 2), (500.0, 0, 0)):
        assert (seen.offered(span_ms), seen.bad(span_ms)) == ({OURS: offered}, {OURS: bad})


def test_what_an_older_frontend_says_of_the_minute_is_not_lost() -> None:
    seen = CountsSeen()
    told = counted([10_000.0, 50_000.0], 60_000.0, bad_at_ms=[10_000.0, 50_000.0])
    seen.add(OURS, replace(told, bad_by_second=(), unserved_by_second=()), 0.0)
    assert seen.bad(60_000.0) == {OURS: 2}


def test_nothing_is_counted_where_nobody_serves_the_model() -> None:
    seen = CountsSeen()
    seen.add(OURS, RequestsRemembered(()), 0.0)
    assert (seen.by_model(), seen.offered(60_000.0)) == ({}, {})


def test_a_model_is_judged_by_the_seconds_that_are_played() -> None:
    """8,000 requests a second for 20 s, half of them bad, then 1,600 for 40 s, all good: of the latter 40,000 are 25 s."""
    seen = CountsSeen()
    arrivals, bad = (40,) * 4_000 + (8,) * 8_000, (4_000,) * 20 + (0,) * 40
    newest = 20_000 * 200 - 1
    told = RequestsRemembered((), arrivals, ARRIVAL_BIN_MS, sum(bad), newest, 0, bad, (0,) * 60)
    seen.add(OURS, told, 0.0)
    model = {"name": OURS, "slo_ms": 25, "profile": {"alpha_ms": 0.2, "beta_ms": 5, "max_batch": 64}}
    config = parse_config({"models": [model], "cluster": {"gpus": 1}}, Path())
    minute = minute_from(config, settings_from(config), seen.by_model(), seen.bin_ms)
    assert minute.span_ms == pytest.approx(25_000.0, abs=10.0)
    assert seen.offered(minute.span_ms)[OURS] == pytest.approx(40_000, rel=0.05)
    assert seen.bad(minute.span_ms) == {OURS: 0}
    assert seen.bad(60_000.0) == {OURS: 80_000}
