"""What a frontend counts of its requests, through its core."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.ids import BatchId, ModelId, PeerId
from fabric.messages import (
    BatchFailed,
    CancelRequest,
    Dropped,
    RecordsAsked,
    RequestsRemembered,
    SeqRun,
)
from roles.frontend.arrival_bins import MinuteBins
from roles.frontend.core import FrontendCore
from roles.frontend.events import ClientSaid, FrontendEvent, Reply, SchedulerSaid, TurnEnded, WorkerSaid
from roles.frontend.recorder import MODELS_MAX, RECORDS_MAX, REMEMBERED_MAX, RequestRecorder
from roles.runtime.core import Lost, Tick
from roles.runtime.metrics import catalog
from roles.runtime.metrics.catalog import Metric
from roles.runtime.metrics.snapshot import Buckets
from tests.builders import (
    CLIENT,
    DIGITS,
    SLICE,
    asked,
    computed,
    directory,
    frontend_settings,
    grant,
    model_info,
)


def linked(slo_ms: float = 100.0, replicas: int = 1) -> FrontendCore:
    core = FrontendCore(frontend_settings())
    core.handle(Tick(), 0.0)
    core.handle(directory((model_info(slo_ms=slo_ms, replicas=replicas),)), 0.0)
    return core


def counted(core: FrontendCore, metric: Metric) -> dict[tuple[str, ...], float | Buckets]:
    return {one.labels: one.value for one in core.recorder.measured(core.margins_ms) if one.metric is metric}


def outcomes(core: FrontendCore) -> dict[str, float]:
    found = counted(core, catalog.REQUESTS)
    return {
        outcome: value for (_, outcome), value in found.items() if not isinstance(value, Buckets) and value
    }


def buckets(core: FrontendCore, metric: Metric) -> Buckets:
    found = counted(core, metric)[DIGITS,]
    assert isinstance(found, Buckets)
    return found


def test_each_request_has_one_outcome() -> None:
    core = linked()
    for number in range(1, 7):
        core.handle(asked(number), 0.0)
    core.handle(asked(7, model_id="nothing"), 0.0)
    core.handle(asked(8, budget_ms=10.0, late_ms=20.0), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(ClientSaid(CLIENT, CancelRequest(6)), 1.0)
    core.handle(grant((0, 2)), 5.0)
    core.handle(computed(0, 1), 20.0)
    core.handle(SchedulerSaid(Dropped(DIGITS, (SeqRun(2, 1),), "Overloaded", "given up")), 21.0)
    core.handle(Tick(), 100.0)
    assert outcomes(core) == {"good": 2, "Overloaded": 1, "Cancelled": 1, "DeadlineExceeded": 3}
    counters = core.counters
    assert (
        sum(outcomes(core).values()) == counters["accepted"] + counters["refused_at_door"] - 1
    )  # of no model


def test_refusals_of_ours_are_shown_before_the_first_one() -> None:
    """Prometheus sees no increase in a series that begins with its first value: a short outage would not be there for its rules."""
    core = linked()
    ours = {"DeadlineExceeded", "Overloaded", "NoReplica", "WorkerLost", "Internal"}
    assert counted(core, catalog.REQUESTS) == {(DIGITS, code): 0 for code in {"good", "late"} | ours}
    core.handle(asked(1, late_ms=200.0), 0.0)
    (its,) = core.recorder.figures(ModelId(""), 1_000.0).models
    assert its.refused == {"DeadlineExceeded": 1.0}, "what people read has none that never came"


def test_whose_client_leaves_is_abandoned() -> None:
    core = linked()
    core.handle(asked(1), 0.0)
    core.handle(Lost(CLIENT, "closed"), 1.0)
    assert outcomes(core) == {"abandoned": 1}


def test_an_answer_after_the_moment_that_its_client_needs_is_late() -> None:
    core = linked()
    core.handle(asked(1, way_ms=10.0), 0.0)
    core.handle(asked(2), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 2)), 5.0)
    core.handle(computed(0, 1), 95.0)
    assert outcomes(core) == {"good": 1, "late": 1}


def test_latency_and_the_stages_of_the_ledger_are_counted() -> None:
    core = linked()
    core.handle(asked(1), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1), waited_ms=4.0), 10.0)
    core.handle(computed(0, transfer_ms=1.0, queue_ms=2.0, gpu_ms=3.0), 20.0)
    latency = buckets(core, catalog.LATENCY)
    assert (sum(latency.counts), latency.total) == (1, 20.0)
    assert latency.counts[list(latency.bounds).index(25.0)] == 1
    assert buckets(core, catalog.HELD).total == pytest.approx(6.0)
    assert buckets(core, catalog.WAITED).total == pytest.approx(4.0)
    stages = {stage: value for (_, stage), value in counted(core, catalog.STAGES).items()}
    assert stages == pytest.approx(
        {
            "preprocess": 0.0,
            "held": 0.006,
            "waited": 0.004,
            "transfer": 0.001,
            "queue": 0.002,
            "gpu": 0.003,
            "return": 0.004,
        }
    )


def test_another_slo_begins_anew_and_the_same_goes_on() -> None:
    core = linked()
    core.handle(asked(1, late_ms=200.0), 0.0)
    core.handle(directory((model_info(slo_ms=100.0),)), 1.0)
    assert outcomes(core) == {"DeadlineExceeded": 1}
    core.handle(directory((model_info(slo_ms=50.0),)), 2.0)
    assert outcomes(core) == {}
    assert buckets(core, catalog.LATENCY).bounds[-1] == 200.0
    core.handle(directory(()), 3.0)
    assert counted(core, catalog.REQUESTS) == {}


def test_there_is_a_limit_to_how_many_models_are_counted() -> None:
    recorder = RequestRecorder()
    recorder.know([model_info(f"m{number}") for number in range(MODELS_MAX + 5)])
    recorder.turned_away(model_info(f"m{MODELS_MAX + 1}").model_id, "Overloaded", 0.0)
    shown = {one.labels[0] for one in recorder.measured({})}
    assert len(shown) == MODELS_MAX


# ---------------------------------------------------------------- what is remembered

OPERATOR = PeerId("operator/00000000")
NEWEST = 1 << 52


def remembered(
    core: FrontendCore, now_ms: float, model_id: str = DIGITS, before: int = NEWEST, request_id: str = ""
) -> RequestsRemembered:
    (reply,) = core.handle(ClientSaid(OPERATOR, RecordsAsked(ModelId(model_id), before, request_id)), now_ms)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, RequestsRemembered)
    return reply.message


def answered_at(core: FrontendCore, number: int, asked_at_ms: float, took_ms: float) -> None:
    core.handle(asked(number), asked_at_ms)
    core.handle(TurnEnded(), asked_at_ms)
    core.handle(grant((number - 1, 1), batch_id=number), asked_at_ms + 1.0)
    core.handle(computed(number - 1, batch_id=number), asked_at_ms + took_ms)


def test_late_and_refused_requests_are_always_remembered_and_others_now_and_then() -> None:
    core = linked()
    for number in range(1, 101):
        answered_at(core, number, 10.0 * number, 5.0)
    core.handle(asked(101), 2_000.0)
    core.handle(asked(102), 2_000.0)
    core.handle(Tick(), 2_100.0)
    kept = remembered(core, 2_100.0).requests
    assert [one.outcome for one in kept[:2]] == ["DeadlineExceeded"] * 2
    good = [one for one in kept if one.outcome == "good"]
    assert len(good) == 50, "one every 20 ms, of one every 10"
    assert kept[0].ended_ago_ms == 0.0
    assert kept[0].ledger.total_ms == 100.0


def test_one_request_is_found_by_the_name_in_its_ledger() -> None:
    core = linked()
    answered_at(core, 1, 0.0, 5.0)
    core.handle(asked(2), 50.0)
    core.handle(Tick(), 150.0)
    (first,) = [one for one in remembered(core, 200.0).requests if one.outcome == "good"]
    assert first.request_id == first.ledger.request_id
    (found,) = remembered(core, 200.0, "", request_id=first.request_id).requests
    assert (found.number, found.batch_id, found.ledger.slice_id) == (first.number, 1, SLICE)


def test_a_flood_of_refusals_has_its_bound_and_leaves_what_was_good() -> None:
    core = linked()
    answered_at(core, 1, 0.0, 5.0)
    refusals = REMEMBERED_MAX
    for number in range(2, 2 + refusals):
        core.handle(asked(number), 10.0)
    core.handle(Tick(), 110.0)
    found: list[str] = []
    before = NEWEST
    while page := remembered(core, 110.0, before=before).requests:
        assert len(page) <= RECORDS_MAX
        found += [one.outcome for one in page]
        before = page[-1].number
    assert Counter(found) == {"DeadlineExceeded": REMEMBERED_MAX // 2, "good": 1}


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (Tick(), "DeadlineExceeded"),
        (ClientSaid(CLIENT, CancelRequest(1)), "Cancelled"),
        (Lost(CLIENT, "closed"), "abandoned"),
        (WorkerSaid(BatchFailed(BatchId(7), SLICE, DIGITS, (0,), "Internal", "it raised")), "Internal"),
        (directory((replace(model_info(), is_idempotent=False),), slices=()), "WorkerLost"),
    ],
)
def test_one_that_ends_while_it_is_granted_is_remembered_with_its_slice(
    event: FrontendEvent, outcome: str
) -> None:
    core = FrontendCore(frontend_settings())
    core.handle(Tick(), 0.0)
    core.handle(directory((replace(model_info(), is_idempotent=False),)), 0.0)
    core.handle(asked(1), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1), batch_id=7), 2.0)
    core.handle(event, 100.0 if isinstance(event, Tick) else 50.0)
    (record,) = core.recorder.remembered(RecordsAsked(DIGITS, 1 << 40), 200.0).requests
    assert (record.outcome, record.batch_id) == (outcome, 7)
    assert (record.ledger.slice_id, record.ledger.waited_ms) == (SLICE, 2.0)


def test_only_the_operator_may_ask() -> None:
    core = linked()
    assert core.handle(ClientSaid(CLIENT, RecordsAsked(DIGITS, NEWEST)), 0.0) == []
    assert core.counters["offences_not_owner"] == 1


def test_arrivals_and_bad_ones_of_the_last_minute_are_counted_where_they_were() -> None:
    core = linked()
    for number, at_ms in enumerate((0.0, 1.0, 7.0, 20_000.0, 61_000.0), 1):
        core.handle(asked(number), at_ms)
        core.handle(Tick(), at_ms + 100.0)
    told = remembered(core, 61_100.0)
    assert (len(told.arrivals), told.bin_ms) == (12_000, 5.0)
    now = int(61_100.0 // 5.0)
    at = {now - (11_999 - place): count for place, count in enumerate(told.arrivals) if count}
    assert at == {20_000 // 5: 1, 61_000 // 5: 1}
    assert told.bad == 2


def test_those_that_found_no_slice_are_counted_among_the_bad_ones_of_the_minute() -> None:
    core = linked(replicas=0)
    core.handle(asked(1), 0.0)
    core.handle(asked(2), 5_000.0)
    told = remembered(core, 5_100.0)
    assert (told.bad, told.unserved) == (2, 2)
    for by_second in (told.bad_by_second, told.unserved_by_second):
        assert len(by_second) == 60
        assert (by_second[-1], by_second[-6]) == (1, 1), "now, and 5 s ago"
    told = remembered(core, 62_000.0)
    assert (told.bad, told.unserved) == (1, 1)
    late = linked()
    late.handle(asked(1), 0.0)
    late.handle(Tick(), 100.0)
    assert (remembered(late, 200.0).bad, remembered(late, 200.0).unserved) == (1, 0)


@given(
    moments=st.lists(st.floats(0, 200_000), min_size=1, max_size=60).map(sorted),
    wait_ms=st.floats(0, 130_000),
)
def test_bins_of_a_minute_hold_what_came_in_it(moments: list[float], wait_ms: float) -> None:
    bins = MinuteBins(1_000.0)
    for at_ms in moments:
        bins.note(at_ms)
    now_ms = moments[-1] + wait_ms
    counts = bins.listed(now_ms)
    newest = int(now_ms // 1_000.0)
    expected = Counter(int(at_ms // 1_000.0) for at_ms in moments if int(at_ms // 1_000.0) > newest - 60)
    assert len(counts) == 60
    assert {newest - 59 + place: count for place, count in enumerate(counts) if count} == expected


def test_only_what_is_new_is_told_to_one_who_asks_for_that() -> None:
    core = linked()
    for number in range(1, 11):
        answered_at(core, number, 30.0 * number, 5.0)
    newest = remembered(core, 400.0).requests
    asking = RecordsAsked(DIGITS, NEWEST, after=newest[3].number)
    (reply,) = core.handle(ClientSaid(OPERATOR, asking), 400.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, RequestsRemembered)
    assert reply.message.requests == newest[:3]
