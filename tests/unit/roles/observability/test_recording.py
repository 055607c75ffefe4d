"""Arrivals that frontends counted, joined to a trace: held against a list of all arrivals."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import ModelId
from fabric.messages import RequestsRemembered
from roles.frontend.arrival_bins import ARRIVAL_BIN_MS, MinuteBins
from roles.observability.recording import Recording
from roles.workload.arrivals import read_trace

M = ModelId("m")


def answer(bins: MinuteBins, now_ms: float) -> RequestsRemembered:
    return RequestsRemembered((), bins.listed(now_ms), ARRIVAL_BIN_MS, 0, bins.number(now_ms))


@given(
    gaps=st.lists(st.floats(0, 4_000), min_size=1, max_size=200),
    ask_every_ms=st.floats(500, 59_000),
    offset_ms=st.just(0.0) | st.floats(1e3, 1e7) | st.floats(-1e7, -1e3),
)
def test_every_arrival_is_in_the_trace_once_within_a_bin(
    gaps: list[float], ask_every_ms: float, offset_ms: float
) -> None:
    """The frontend's clock is `offset_ms` ahead of the asker's."""
    began_ms = 2e7
    bins, came, now_ms = MinuteBins(ARRIVAL_BIN_MS), list[float](), began_ms
    recording = Recording(began_ms, began_ms + 1e9)
    recording.note("f", M, answer(bins, now_ms + offset_ms), now_ms)
    asked_at_ms = now_ms
    for gap_ms in gaps:
        while asked_at_ms + ask_every_ms <= now_ms + gap_ms:
            asked_at_ms += ask_every_ms
            recording.note("f", M, answer(bins, asked_at_ms + offset_ms), asked_at_ms)
        now_ms += gap_ms
        bins.note(now_ms + offset_ms)
        came.append(now_ms - began_ms)
    last_ms = now_ms + 2 * ARRIVAL_BIN_MS
    recording.note("f", M, answer(bins, last_ms + offset_ms), last_ms)
    found = [float(line.split(",")[0]) for line in list(recording.lines())[1:]]
    # What came within the bin in which the recording began may lie just before that.
    lost = len(came) - len(found)
    assert 0 <= lost <= sum(moment <= 2 * ARRIVAL_BIN_MS for moment in came)
    for exact, told in zip(came[lost:], found, strict=True):
        assert abs(exact - told) <= 2 * ARRIVAL_BIN_MS
    assert recording.missed_s == 0


def test_what_was_forgotten_meanwhile_is_said() -> None:
    bins = MinuteBins(ARRIVAL_BIN_MS)
    bins.note(0.0)
    recording = Recording(0.0, 1e6)
    recording.note("f", M, answer(bins, 5.0), 5.0)
    bins.note(100_000.0)
    recording.note("f", M, answer(bins, 100_005.0), 100_005.0)
    assert recording.missed_s == pytest.approx(40.0, abs=0.02)
    assert recording.counts == {M: 2}


def test_the_trace_is_one_that_the_simulator_reads(tmp_path: Path) -> None:
    recording = Recording(0.0, 1e6)
    for model in ("b", "a"):
        bins = MinuteBins(ARRIVAL_BIN_MS)
        for moment_ms in (10.0, 10.5, 999.0):
            bins.note(moment_ms)
        recording.note("f", ModelId(model), answer(bins, 1_010.0), 1_010.0)
    path = tmp_path / "trace.csv"
    path.write_text("".join(recording.lines()), encoding="utf-8")
    trace = read_trace(path, [ModelId("a"), ModelId("b")])
    assert trace.at_ms[ModelId("a")].size == trace.at_ms[ModelId("b")].size == 3


def test_only_the_span_that_is_asked_for_is_told() -> None:
    bins = MinuteBins(ARRIVAL_BIN_MS)
    for moment_ms in (1_000.0, 20_000.0, 39_000.0):
        bins.note(moment_ms)
    recording = Recording(10_000.0, 30_000.0)
    recording.note("f", M, answer(bins, 40_000.0), 40_000.0)
    assert recording.counts == {M: 1}


def test_models_that_are_served_no_more_or_with_another_slo_are_told() -> None:
    recording = Recording(0.0, 1e3)
    for served in ({"a": 1.0, "b": 1.0}, {"b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 2.0}):
        recording.asks({ModelId(one): ms for one, ms in served.items()}, {}, 0.0)
    assert (recording.removed, recording.renewed) == ({ModelId("a")}, {ModelId("c")})


def test_frontends_whose_process_ended_are_told() -> None:
    recording = Recording(0.0, 1e3)
    for its in ({"f0": "a", "f1": "b", "f2": "c"}, {"f0": "a", "f1": "d"}, {"f0": "a", "f1": "d", "f3": "e"}):
        recording.asks({}, its, 0.0)
    assert recording.ended == {"f1", "f2"}


@pytest.mark.parametrize(("frontend", "model"), [("f", "new"), ("new", "m")])
def test_what_was_not_there_has_forgotten_nothing(frontend: str, model: str) -> None:
    """A model that is added, or a frontend that is started, half an hour into a recording."""
    recording, bins = Recording(0.0, 1e7), MinuteBins(ARRIVAL_BIN_MS)
    for asked_at_ms in range(0, 1_800_001, 20_000):
        recording.asks({M: 50.0}, {"f": "one"}, asked_at_ms)
        recording.note("f", M, answer(bins, asked_at_ms), asked_at_ms)
    its = MinuteBins(ARRIVAL_BIN_MS)
    its.note(1_810_000.0)
    recording.asks({M: 50.0, ModelId("new"): 50.0}, {"f": "one", "new": "two"}, 1_820_000.0)
    recording.note(frontend, ModelId(model), answer(its, 1_820_000.0), 1_820_000.0)
    assert (recording.missed_s, recording.counts) == (0.0, {ModelId(model): 1})


def test_what_was_not_there_may_have_forgotten_what_came_since_all_were_asked() -> None:
    recording, bins = Recording(0.0, 1e7), MinuteBins(ARRIVAL_BIN_MS)
    recording.asks({M: 50.0}, {"f": "one"}, 0.0)
    recording.asks({M: 50.0}, {"f": "one"}, 100_000.0)  # it did not answer before
    recording.note("f", M, answer(bins, 100_000.0), 100_000.0)
    assert recording.missed_s == pytest.approx(40.0, abs=0.02)
