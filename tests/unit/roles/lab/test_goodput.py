from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fabric.ids import ModelId
from policies.slo import BAD_RATE_ALLOWED
from roles.config.read_config import parse_config
from roles.lab import goodput
from roles.lab.goodput import (
    ARRIVALS_OF_THE_RAREST,
    BOUND_MARGIN,
    Bisection,
    Goodput,
    Question,
    bound_rps,
    find_goodput,
    question_of,
)
from roles.simulator.simulation import simulate

RESNET = {
    "name": "resnet50",
    "slo_ms": 25,
    "rate_rps": 300,
    "profile": {"alpha_ms": 1.053, "beta_ms": 5.072},
}
BERT = {"name": "bert", "slo_ms": 60, "rate_rps": 100, "profile": {"alpha_ms": 2, "beta_ms": 6}}


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not about how well a rate is known: a fifth of the time."""
    monkeypatch.setattr(goodput, "ARRIVALS_OF_THE_RAREST", 400)


def question(*models: dict[str, Any], duration_s: float = 2.0, **cluster: Any) -> Question:
    config = parse_config({"models": list(models), "cluster": {"gpus": 1, **cluster}}, Path())
    return question_of(config, warmup_s=0.5, duration_s_min=duration_s)


def answer(asked: Question, seeds: tuple[int, ...] = (1,), workers: int = 1) -> Goodput:
    with ThreadPoolExecutor(workers) as executor:
        return find_goodput(asked, seeds, executor, workers, lambda done: None)


def test_a_bisection_ends_within_half_a_percent() -> None:
    bisection = Bisection(1000.0)
    asked = 0
    while not bisection.is_done:
        rate = next(bisection.next_rates())
        bisection.tell({rate: rate <= 617.3})
        asked += 1
    assert bisection.low <= 617.3 < bisection.high
    assert bisection.high - bisection.low <= 0.005 * bisection.low
    assert asked <= 10


def test_a_bisection_of_nothing_ends_at_0() -> None:
    bisection = Bisection(1000.0)
    while not bisection.is_done:
        bisection.tell({next(bisection.next_rates()): False})
    assert bisection.low == 0.0


def test_rates_tried_ahead_are_those_the_next_steps_ask_for() -> None:
    ahead = list(itertools.islice(Bisection(16.0).next_rates(), 7))
    assert ahead == [8.0, 12.0, 4.0, 14.0, 10.0, 6.0, 2.0]
    known = {8.0: True, 12.0: False, 10.0: True}
    bisection = Bisection(16.0)
    bisection.tell(known)
    assert (bisection.low, bisection.high) == (10.0, 12.0)


def test_progress_goes_from_0_to_1() -> None:
    bisection = Bisection(1000.0)
    seen = [bisection.progress]
    while not bisection.is_done:
        rate = next(bisection.next_rates())
        bisection.tell({rate: rate <= 617.3})
        seen.append(bisection.progress)
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("table", "best_ms"),
    [
        ({1: 10, 2: 40}, 10.0),
        ({1: 10, 2: 11, 3: 60}, 5.5),
        ({1: 10, 2: 11, 3: 12}, 4.0),
        ({1: 10, 2: 500}, 10.0),
    ],
)
def test_no_rate_that_a_gpu_carries_is_over_the_bound(table: dict[int, float], best_ms: float) -> None:
    """Where run times rise faster than batches the largest one is not the cheapest; one over the SLO is none."""
    asked = question({"name": "m", "slo_ms": 100, "rate_rps": 50, "profile": {"table": table}})
    assert bound_rps(asked) == pytest.approx(1000 / best_ms)


def test_a_rate_that_is_nothing_beside_another_bounds_nothing() -> None:
    asked = question({**RESNET, "rate_rps": 1e-318}, {**BERT, "rate_rps": 1e6})
    assert 0 < bound_rps(asked) < 1000


@pytest.mark.parametrize(
    ("mean", "times"), [([[0, 4], [1, 2]], 2), ([[0, 2], [1, 4]], 2), ([[0, 0], [1, 4]], 4)]
)
def test_fan_outs_that_change_bound_by_the_moment_that_asks_least(
    mean: list[list[float]], times: int
) -> None:
    stages = {"only": {"model": "m", "fan_out": {"poisson": mean}}}
    config = parse_config(
        {
            "models": [{"name": "m", "profile": {"table": {1: 10}}}],
            "applications": [{"name": "app", "slo_ms": 100, "rate_rps": 50, "stages": stages}],
            "cluster": {"gpus": 1},
        },
        Path(),
    )
    assert bound_rps(question_of(config, 0.5, 2.0)) == pytest.approx(100 / times)


def test_goodput_is_just_under_what_a_gpu_can_do() -> None:
    asked = question(RESNET)
    found = answer(asked)
    assert bound_rps(asked) == pytest.approx(1000 * 18 / (1.053 * 18 + 5.072))
    assert 0.3 * bound_rps(asked) < found.goodput_rps < bound_rps(asked)
    assert found.rates_rps == {"resnet50": found.goodput_rps}
    assert found.duration_s == pytest.approx(2000 / found.goodput_rps)


@pytest.mark.usefixtures("short_windows")
def test_the_answer_does_not_depend_on_the_number_of_workers() -> None:
    asked = question(RESNET)
    assert answer(asked, workers=4) == answer(asked, workers=1)


def test_proportions_are_kept_and_the_rarest_model_sets_the_window() -> None:
    asked = question(RESNET, BERT)
    assert asked.window(400.0).duration_s == pytest.approx(20.0)  # 2,000 of bert's 100 r/s
    assert asked.window(4e6).until_ms == pytest.approx(500)  # 2 M requests
    assert asked.window(4e6).duration_s == pytest.approx(0.4)
    found = answer(question(RESNET, BERT, gpus=2))
    assert found.rates_rps[ModelId("resnet50")] == pytest.approx(3 * found.rates_rps[ModelId("bert")])


@pytest.mark.usefixtures("short_windows")
def test_the_median_of_the_seeds_counts() -> None:
    found = answer(question(RESNET), seeds=(1, 2, 3), workers=2)
    assert found.goodput_rps == sorted(found.per_seed_rps)[1]


def test_models_that_cannot_be_served_are_listed_and_left_out() -> None:
    tight = {**RESNET, "name": "tight", "slo_ms": 5}
    silent = {**RESNET, "name": "silent", "rate_rps": 0}
    far = {**RESNET, "name": "far", "slo_ms": 6.2}
    network = {"control_ms": 1, "result_ms": 1}
    asked = question(RESNET, tight, silent, far, network=network)
    reasons = {str(model_id): reason for model_id, reason in asked.unserved}
    assert "SLO of 5 ms is below" in reasons["tight"]
    assert reasons["silent"] == "its rate is 0"
    assert "and 2 ms of network" in reasons["far"]
    assert set(asked.rates_rps) == {"resnet50"}
    assert answer(asked).goodput_rps > 0


def test_where_nothing_can_be_served_the_goodput_is_0() -> None:
    found = answer(question({**RESNET, "slo_ms": 1}), seeds=(1, 2))
    assert found.as_json() == {
        "goodput_rps": 0.0,
        "per_seed_rps": [0.0, 0.0],
        "rates": {},
        "duration_s": 0.0,
        "unserved": [
            {"model": "resnet50", "reason": found.unserved[0][1]},
        ],
    }


def test_a_trace_is_played_faster(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("at_ms\n" + "\n".join(str(k * 10) for k in range(100)), encoding="utf-8")
    model = {
        "name": "m",
        "slo_ms": 25,
        "arrival": {"process": "trace", "path": "t.csv"},
        "profile": RESNET["profile"],
    }
    asked = question_of(parse_config({"models": [model], "cluster": {"gpus": 1}}, tmp_path), 0.5, 2.0)
    assert asked.total_rps == pytest.approx(100, rel=0.02)
    assert answer(asked).goodput_rps > 300


def application(**keys: Any) -> dict[str, Any]:
    stages = {"first": {"model": "resnet50"}, "second": {"model": "bert", "after": "first", "fan_out": 2}}
    return {"name": "app", "slo_ms": 90, "rate_rps": 50, "stages": stages, **keys}


@pytest.mark.usefixtures("short_windows")
def test_goodput_of_an_application_is_counted_from_end_to_end() -> None:
    models = [
        {key: value for key, value in one.items() if key not in ("slo_ms", "rate_rps")}
        for one in (RESNET, BERT)
    ]
    config = parse_config({"models": models, "applications": [application()], "cluster": {"gpus": 1}}, Path())
    asked = question_of(config, warmup_s=0.5, duration_s_min=2.0)
    assert asked.unserved == ()
    assert asked.total_rps == pytest.approx(50.0)
    found = answer(asked)
    assert list(found.rates_rps) == ["app"]
    # Two of bert and one of resnet50 in the largest batches that 90 ms allow: no schedule carries more.
    bert_ms, resnet_ms = (2 * 42 + 6) / 42, (1.053 * 64 + 5.072) / 64
    assert bound_rps(asked) == pytest.approx(1000 / (2 * bert_ms + resnet_ms), rel=0.01)
    assert 50 < found.goodput_rps < bound_rps(asked)


def test_an_application_whose_model_is_nowhere_is_unserved() -> None:
    models = [{**RESNET, "memory_mb": 10}, {**BERT, "memory_mb": 100_000, "rate_rps": 0}]
    config = parse_config({"models": models, "applications": [application()], "cluster": {"gpus": 1}}, Path())
    asked = question_of(config, warmup_s=0.5, duration_s_min=2.0)
    assert {name for name, _ in asked.unserved} == {"app"}
    assert next(reason for name, reason in asked.unserved if name == "app").startswith("bert: ")
    assert list(asked.rates_rps) == ["resnet50"]


SLOW = {"name": "m", "slo_ms": 300, "profile": {"alpha_ms": 10, "beta_ms": 10, "max_batch": 8}}
OTHER = {**SLOW, "name": "other"}


def traced(path: Path, *parts: tuple[float, int], name: str = "m") -> dict[str, Any]:
    """A model whose trace has, one after the other, so many seconds of so many requests a second."""
    draws, from_ms, lines = random.Random(1), 0.0, ["at_ms"]
    for seconds, rate_rps in parts:
        until_ms = from_ms + 1000 * seconds
        moments = sorted(draws.uniform(from_ms, until_ms) for _ in range(int(seconds * rate_rps)))
        lines += [f"{at_ms:.3f}" for at_ms in moments]
        from_ms = until_ms
    (path / f"{name}.csv").write_text("\n".join(lines), encoding="utf-8")
    return {**SLOW, "name": name, "arrival": {"process": "trace", "path": f"{name}.csv"}}


LOUD_FIRST, QUIET_FIRST, LONG = ((30, 20), (170, 2)), ((30, 2), (30, 20)), ((400, 20), (400, 2))
VARYING: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "a trace that is loud first": lambda path: [traced(path, *LOUD_FIRST)],
    "a trace that is quiet first": lambda path: [traced(path, *QUIET_FIRST)],
    "a trace of which only the begin is played": lambda path: [traced(path, *LONG)],
    "two traces": lambda path: [traced(path, *LOUD_FIRST), traced(path, *QUIET_FIRST, name="n")],
    "a trace beside a rate": lambda path: [traced(path, *LOUD_FIRST), {**OTHER, "rate_rps": 6}],
    "steps": lambda path: [{**SLOW, "rate_rps": [[0, 40], [5, 4]]}],
    "steps beside a rate": lambda path: [{**SLOW, "rate_rps": [[0, 40], [5, 4]]}, {**OTHER, "rate_rps": 6}],
    "steps beside a trace": lambda path: [
        {**OTHER, "rate_rps": [[0, 40], [5, 4]]},
        traced(path, *LOUD_FIRST),
    ],
    "a rate that begins late": lambda path: [{**SLOW, "rate_rps": [[1, 20]]}],
}


def varying(path: Path, models: list[dict[str, Any]]) -> Question:
    config = parse_config({"models": models, "cluster": {"gpus": 1}}, path)
    return question_of(config, warmup_s=0.5, duration_s_min=2.0)


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("case", VARYING)
def test_the_answer_is_a_rate_that_was_offered_and_no_schedule_carries_more(
    tmp_path: Path, case: str
) -> None:
    """Windows of other parts of a trace than the proportions were taken from had a sixth of the rate that was reported."""
    asked = varying(tmp_path, VARYING[case](tmp_path))
    played: dict[float, float] = {}

    def is_good(asked: Question, seed: int, total_rps: float) -> bool:
        workload = replace(asked.workload, seed=seed).scaled(total_rps / asked.total_rps)
        outcome = simulate(asked.config, workload, asked.window(total_rps), asked.settings).outcome
        if outcome.worst_bad_rate < BAD_RATE_ALLOWED:
            played[total_rps] = outcome.offered / outcome.duration_s
            return True
        return False

    with ThreadPoolExecutor(1) as executor:
        found = find_goodput(asked, (1,), executor, 1, lambda done: None, is_good)
    assert found.goodput_rps == pytest.approx(played[max(played)], rel=0.15)
    assert found.goodput_rps == pytest.approx(sum(found.rates_rps.values()))
    assert 0 < found.goodput_rps <= BOUND_MARGIN * bound_rps(asked)


@pytest.mark.parametrize("case", [case for case in VARYING if case != "steps beside a trace"])
def test_windows_of_all_rates_have_the_same_proportions(tmp_path: Path, case: str) -> None:
    """Else a rate would be called better than another one for what was left out of it."""
    asked = varying(tmp_path, VARYING[case](tmp_path))
    for factor in (0.1, 0.9, 1.0, 2.7, 30.0):
        window = asked.window(factor * asked.total_rps)
        for source in asked.workload.scaled(factor).sources:
            rate_rps = source.expected(window.from_ms, window.until_ms) / window.duration_s
            assert rate_rps == pytest.approx(factor * asked.rates_rps[source.model_id], rel=0.01)


def test_at_the_highest_rate_a_trace_is_played_for_the_shortest_window(tmp_path: Path) -> None:
    asked = varying(tmp_path, [traced(tmp_path, *LONG)])
    window = asked.window(bound_rps(asked))
    assert window.duration_s >= 2.0
    assert window.from_ms / 1000 >= 0.5
    assert bound_rps(asked) * window.duration_s >= ARRIVALS_OF_THE_RAREST


def test_the_part_of_a_trace_is_whole_rounds_where_it_is_short(tmp_path: Path) -> None:
    asked = varying(tmp_path, [traced(tmp_path, *QUIET_FIRST)])
    assert asked.total_rps == pytest.approx(11.0, rel=0.01)


def test_a_model_whose_trace_begins_late_is_asked_for(tmp_path: Path) -> None:
    asked = varying(tmp_path, [traced(tmp_path, (30, 0), (30, 20))])
    assert asked.unserved == ()
    assert asked.total_rps == pytest.approx(10.0, rel=0.02)


def test_the_window_has_the_last_step_for_as_long_as_the_longest_before_it() -> None:
    asked = question({**SLOW, "rate_rps": [[0, 20], [10, 30], [40, 25]]}, {**OTHER, "rate_rps": 25})
    assert asked.part is not None
    assert asked.part.until_ms >= 70_000
    assert asked.part.from_ms == 500


@pytest.mark.parametrize("last_rps", [1.0, 40.0])
def test_the_window_of_steps_has_enough_of_the_rarest_model(last_rps: float) -> None:
    """At a quarter of the highest rate that is asked, which a goodput hardly ever is below."""
    asked = question({**SLOW, "rate_rps": [[0, 10], [1, last_rps]]}, {**OTHER, "rate_rps": 60})
    assert asked.part is not None
    factor = 0.25 * BOUND_MARGIN * bound_rps(asked) / asked.total_rps
    for source in asked.workload.scaled(factor).sources:
        assert source.expected(asked.part.from_ms, asked.part.until_ms) > 0.9 * ARRIVALS_OF_THE_RAREST
    highest_rps = BOUND_MARGIN * bound_rps(asked)
    assert highest_rps * asked.part.until_ms / 1000 <= 1.01 * goodput.REQUESTS_MAX


def test_a_step_that_no_window_reaches_is_said_not_to_be_played() -> None:
    asked = question({**SLOW, "rate_rps": [[0, 20], [100_000, 30]]})
    (remark,) = asked.remarks()
    assert remark.startswith("m: its rate from 100,000 s on is not played")
    assert question({**SLOW, "rate_rps": [[0, 20], [10, 30]]}).remarks() == []
