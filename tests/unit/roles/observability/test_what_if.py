"""The last minute with a change: beside the minute as it was, on a cluster that one can reckon by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fabric.errors import FabricError
from fabric.ids import ModelId
from fabric.messages import GpuRef
from roles.config.read_config import parse_config
from roles.observability.last_minute import REPEATED_MS, Minute, minute_from, minute_of
from roles.observability.what_if import Change, what_if
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.replay_start import about_scheduler
from roles.scheduler.settings import settings_from

A, B = ModelId("a"), ModelId("b")
BIN_MS = 5.0
# A batch of one takes 20 ms, one of two 38 ms: a GPU does some 53 a second at the very most.
DOCUMENT: dict[str, Any] = {
    "models": [
        {"name": "a", "slo_ms": 100, "profile": {"alpha_ms": 18, "beta_ms": 2, "max_batch": 4}},
        {"name": "b", "slo_ms": 100, "profile": {"alpha_ms": 1, "beta_ms": 2, "max_batch": 4}},
    ],
    "cluster": {"gpus": 1},
}


def minute(rate_of_a: int, span_s: int = 10) -> Minute:
    """`rate_of_a` requests a second come evenly for `a`, and one for `b`."""
    config = parse_config(DOCUMENT, Path())
    bins = round(1e3 * span_s / BIN_MS)
    counts = {}
    for model_id, rate in ((A, rate_of_a), (B, 1)):
        its = [0] * bins
        for number in range(rate * span_s):
            its[int(number * bins / (rate * span_s))] += 1
        counts[model_id] = its
    return minute_from(config, settings_from(config), counts, BIN_MS)


def test_twice_the_requests_on_the_same_gpu_are_too_many_and_with_a_second_one_are_not() -> None:
    own = minute(30)
    more = what_if(own, Change(rates={A: 2.0}), {})
    assert more.today.models[A].bad_rate == 0.0
    assert more.then.models[A].bad_rate > 0.05
    assert more.then.models[A].offered == 2 * more.today.models[A].offered == 600
    assert more.sentence.startswith("With 2 times the requests of a: a")
    assert "would miss" in more.sentence
    both = what_if(own, Change(rates={A: 2.0}, gpus=1), {})
    assert both.then.models[A].bad_rate < 0.01
    assert both.gpus == (1, 2)
    assert both.sentence.endswith("all models keep their SLOs, as they do today.")


def test_a_longer_slo_lets_batches_grow_that_a_short_one_forbids() -> None:
    document = {
        **DOCUMENT,
        "models": [
            {
                **DOCUMENT["models"][0],
                "profile": {"alpha_ms": 2, "beta_ms": 30, "max_batch": 16},
                "slo_ms": 40,
            }
        ],
    }
    config = parse_config(document, Path())
    counts = {
        A: [1 if number % 4 == 0 else 0 for number in range(2_000)]
    }  # 50 a second, one alone takes 32 ms
    own = minute_from(config, settings_from(config), counts, BIN_MS)
    found = what_if(own, Change(slos_ms={A: 200.0}), {})
    assert found.today.models[A].bad_rate > 0.2
    assert found.then.models[A].bad_rate == 0.0
    assert "a would keep its SLO" in found.sentence


def test_a_healthy_play_of_a_minute_that_was_not_is_doubted() -> None:
    found = what_if(minute(20), Change(gpus=1), {A: 0.4, B: 0.0})
    assert found.doubt.startswith("In truth 40% of a were late or refused")
    assert found.sentence == "With 1 GPU more all models keep their SLOs.", "today they do not"
    assert what_if(minute(20), Change(gpus=1), {A: 0.01}).doubt == ""
    assert what_if(minute(20), Change(gpus=1), {ModelId("of another plan"): 0.9}).doubt == ""


def test_requests_of_applications_are_played_as_their_models() -> None:
    """`a` has no SLO of its own: stages alone ask it."""
    a, b = DOCUMENT["models"]
    application = {
        "name": "shop",
        "slo_ms": 300,
        "stages": {"one": {"model": "a"}, "two": {"model": "b", "after": "one"}},
    }
    document = {
        **DOCUMENT,
        "models": [{key: value for key, value in a.items() if key != "slo_ms"}, b],
        "applications": [application],
    }
    config = parse_config(document, Path())
    counts = {model_id: [number % 20 == 0 for number in range(2_000)] for model_id in (A, B)}
    own = minute_from(config, settings_from(config), counts, BIN_MS)
    for change in (Change(rates={A: 2.0}), Change(slos_ms={A: 30.0}), Change(gpus=1)):
        found = what_if(own, change, {})
        assert {name: one.offered for name, one in found.today.models.items()} == {"a": 100, "b": 100}
    assert own.bad_rate(A) == own.without([B]).bad_rate(A) == 0.0


def test_a_minute_without_requests_cannot_be_played() -> None:
    with pytest.raises(FabricError, match="too few requests"):
        what_if(minute(0, 10).without([B]), Change(gpus=1), {})


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.5, 3.0])
def test_another_rate_keeps_the_bursts(factor: float) -> None:
    own = minute(40)
    burst = np.sort(np.concatenate([np.full(200, 2_000.0), np.linspace(0, 9_990, 200)]))
    changed = Minute(own.config, own.settings, {**own.arrivals, A: burst}, own.span_ms).with_rate(A, factor)
    came = changed.arrivals[A]
    assert np.all(np.diff(came) >= 0)
    assert came.max() < own.span_ms
    assert came.size == pytest.approx(400 * factor, rel=0.15)
    in_burst = np.count_nonzero((came >= 2_000.0) & (came < 2_000.0 + REPEATED_MS))
    assert in_burst == pytest.approx(200 * factor, rel=0.2)
    assert changed.arrivals[B] is own.arrivals[B]


def test_gpus_that_are_drained_do_not_serve_beside_those_that_come() -> None:
    config = parse_config({**DOCUMENT, "cluster": {"gpus": 3}}, Path())
    placed = config.place(gpus=config.gpus[:1])
    settings = settings_from(config, placed)
    planning = controller_settings(config, DOCUMENT | {"cluster": {"gpus": 3}}, "", placed, settings)
    drained = frozenset(GpuRef(gpu.node_id, gpu.local_index) for gpu in config.gpus[1:])
    planning = replace(planning, desired=replace(planning.desired, drained=drained))
    plan = about_scheduler(settings, config.batching, planning).decode()
    counts = {
        A: [number % 4 == 0 for number in range(2_000)],
        B: [number % 200 == 0 for number in range(2_000)],
    }
    found = what_if(minute_of(plan, counts, BIN_MS), Change(gpus=1), {})
    assert found.gpus == (1, 2)
    assert [busy > 0 for busy in found.today.gpus.busy_fraction] == [True, False, False]
    assert [busy > 0 for busy in found.then.gpus.busy_fraction] == [True, False, False, True]
