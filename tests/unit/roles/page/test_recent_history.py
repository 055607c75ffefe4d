"""How busy slices are and where requests' time goes, of batches and requests that a test made up: figures by hand."""

from __future__ import annotations

import pytest

from fabric.ids import ModelId
from roles.page.recent_history import BATCHES_MAX, KEPT_MS, STAGES, Lately
from tests.page_stage import batch, live, request

A, B = "here/gpu0/0", "here/gpu0/1"
A_MODEL = ModelId("a")


def test_busy_is_the_part_of_the_last_five_seconds_that_batches_ran() -> None:
    lately = Lately()
    its = [batch("a", A, 4_000.0, 2_000.0), batch("b", A, 6_500.0, 500.0), batch("a", B, 9_000.0, 250.0)]
    lately.add(its, [], float("-inf"), 10_000.0)
    # From 5 s to 10 s: one second of the first batch, all of the others.
    assert lately.busy() == {A: {"a": 0.2, "b": 0.1}, B: {"a": 0.05}}


def test_busy_is_taken_from_where_nothing_is_missing() -> None:
    lately = Lately()
    lately.add([batch("a", A, 9_500.0, 250.0)], [], 9_000.0, 10_000.0)
    assert lately.busy() == {A: {"a": 0.25}}
    lately.add([batch("a", A, 10_500.0, 250.0)], [], float("-inf"), 11_000.0)
    assert lately.busy() == {A: {"a": 0.25}}, "500 ms of the two seconds that are known"


def test_nothing_known_is_nothing_busy() -> None:
    lately = Lately()
    assert lately.busy() == {}
    lately.add([], [], 1_000.0, 1_000.0)
    assert lately.busy() == {}


def test_what_is_old_is_forgotten_and_there_is_a_bound() -> None:
    lately = Lately()
    lately.add([batch("a", A, 0.0, 1.0)], [], float("-inf"), 1.0)
    lately.add([batch("a", A, KEPT_MS + 5.0, 1.0)], [], float("-inf"), KEPT_MS + 6.0)
    assert len(lately.batches) == 1
    flood = [batch("a", A, KEPT_MS + number / 1e3, 1.0) for number in range(BATCHES_MAX + 9)]
    lately.add(flood, [], float("-inf"), KEPT_MS + 20.0)
    assert len(lately.batches) == BATCHES_MAX


def test_mean_sizes_are_of_batches_that_ran() -> None:
    lately = Lately()
    its = [batch("a", A, 1.0, 1.0, 2), batch("a", A, 2.0, 1.0, 6), batch("a", A, 3.0, 1.0, 9, "cut_off")]
    lately.add(its, [], float("-inf"), 10.0)
    assert lately.batch_means() == {"a": 4.0}


def test_the_mean_of_a_sample_and_of_all_late_ones_is_weighted_by_how_many_there_were() -> None:
    lately = Lately()
    good = [request("a", "good", 90.0, held_ms=10.0, gpu_ms=10.0) for _ in range(2)]
    late = [request("a", "late", 95.0, held_ms=30.0, waited_ms=40.0, gpu_ms=10.0) for _ in range(10)]
    refused = [request("a", "Overloaded", 95.0, waited_ms=500.0)]
    lately.add([], [*good, *late, *refused], float("-inf"), 100.0)
    # 10 late ones in 10 s beside 9 good ones a second: one request in ten was late.
    found = lately.stages_ms({A_MODEL: live("a", goodput_rps=9.0, late=10)})[A_MODEL]
    by_stage = dict(zip(STAGES, found, strict=True))
    assert by_stage["held"] == pytest.approx(0.9 * 10 + 0.1 * 30)
    assert by_stage["waited"] == pytest.approx(0.1 * 40)
    assert by_stage["gpu"] == pytest.approx(10.0)
