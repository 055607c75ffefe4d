from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.peers.cases import Inputs
from benchmarks.peers.sender import Hope, Load, SdkTarget, judged
from fabric.client import InferResult
from fabric.errors import Overloaded
from fabric.ids import ModelId
from fabric.messages import Ledger
from roles.benchmark.http_connections import HttpTarget
from roles.benchmark.player import PlannedRequest, PlayedRequest
from roles.benchmark.share import Recorder, merged
from roles.workload.outcomes import Window


def a_load(models: tuple[str, ...] = ("a",), rate_rps: float = 200.0) -> Load:
    inputs: dict[str, Inputs] = {model: {} for model in models}
    return Load(SdkTarget(("ipc://nowhere",)), inputs, rate_rps, 25.0, 1, Window(1000.0, 6000.0))


def played(model: str, at_ms: float, latency_ms: float, late_ms: float = 0.1) -> PlayedRequest:
    planned = PlannedRequest(at_ms, model, {}, 25.0)
    if math.isnan(latency_ms):
        return PlayedRequest(planned, late_ms, 5.0, error=Overloaded("shed"))
    return PlayedRequest(planned, late_ms, latency_ms, result=InferResult({}, Ledger(batch_size=2)))


def test_the_models_share_the_rate_evenly_and_arrive_in_order() -> None:
    load = a_load(models=("a", "b", "c", "d"), rate_rps=4000.0)
    of_model, at_ms, _ = merged(load.workload, load.window.until_ms)
    assert np.all(np.diff(at_ms) >= 0)
    assert at_ms[-1] < 6000
    # 6 s of 1000 r/s each: a Poisson count of 6000 has a standard deviation of 77
    assert np.bincount(of_model) == pytest.approx(np.full(4, 6000), abs=5 * 77)


def test_twice_the_rate_brings_the_same_bursts_twice_as_fast() -> None:
    _, slow_at_ms, _ = merged(a_load(rate_rps=100.0).workload, 6000.0)
    _, fast_at_ms, _ = merged(a_load(rate_rps=200.0).workload, 3000.0)
    assert fast_at_ms * 2 == pytest.approx(slow_at_ms)


def test_a_load_is_given_up_when_more_than_one_percent_of_a_model_is_bad() -> None:
    # 200 requests of each model count, of which 2 may be bad; the third ends it.
    requests = [(model, 1000.0 + number) for number in range(200) for model in ("a", "b")]
    hope = Hope(a_load(models=("a", "b")), requests)
    for request in (played("a", 1000, 30.0), played("a", 1001, math.nan), played("b", 1001, 26.0)):
        hope.note(request)
    assert not hope.is_gone
    hope.note(played("a", 1002, 25.1))
    assert hope.is_gone


def test_what_is_late_or_refused_before_the_window_is_no_loss() -> None:
    hope = Hope(a_load(), [("a", 10.0), ("a", 1000.0)])
    hope.note(played("a", 10.0, 400.0))
    assert not hope.is_gone


def test_a_request_is_good_up_to_its_slo() -> None:
    hope = Hope(a_load(), [("a", 1000.0)])
    hope.note(played("a", 1000.0, 25.0))
    assert not hope.is_gone


def test_the_verdict_counts_the_window_and_the_model_that_fares_worst() -> None:
    load = a_load(models=("a", "b"))
    recorder = Recorder([ModelId("a"), ModelId("b")])
    recorder.note(played("a", 999.0, 100.0))  # before the window
    for number in range(99):
        recorder.note(played("a", 1000.0 + number, 10.0))
    recorder.note(played("a", 1999.0, math.nan))
    recorder.note(played("b", 2000.0, 10.0, late_ms=3.0))
    verdict = judged(load, recorder.record(), is_cut=False)
    assert (verdict.offered, verdict.good) == (101, 100)
    assert verdict.bad_rate == pytest.approx(0.01)
    assert not verdict.is_good  # under 1 % is asked for
    assert verdict.errors == {"Overloaded": 1}
    assert verdict.p99_ms == 10.0
    assert verdict.batch_mean == 2.0


def test_a_bad_verdict_is_in_doubt_when_the_sender_was_late_and_a_good_one_never_is() -> None:
    def verdict(latency_ms: float) -> tuple[bool, bool]:
        recorder = Recorder([ModelId("a")])
        for number in range(100):
            recorder.note(played("a", 1000.0 + number, latency_ms, late_ms=5.0))
        found = judged(a_load(), recorder.record(), is_cut=latency_ms > 25)
        return found.is_good, found.is_valid

    assert verdict(10.0) == (True, True)
    assert verdict(40.0) == (False, False)


def test_only_the_fabric_tells_where_the_time_went() -> None:
    recorder = Recorder([ModelId("a")])
    recorder.note(played("a", 1000.0, 10.0))
    load = a_load()
    assert judged(load, recorder.record(), is_cut=False).stages_ms
    by_http = replace(load, target=HttpTarget({}))
    assert not judged(by_http, recorder.record(), is_cut=False).stages_ms
