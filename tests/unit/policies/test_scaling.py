from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from fabric.ids import ModelId
from policies.scaling import ObservedLoad, ScaleAdvice, ScaleAdvisor, advised_gpus, missing_for_models


@pytest.mark.parametrize(
    ("gpus", "bad_rate", "idle_fraction", "advised"),
    [
        (8, 0.0, 0.0, 8),
        (8, 0.009, 0.24, 7),  # idle: 8 x 0.24 = 1.9 released, rounded down
        (8, 0.0, 0.25, 6),
        (8, 0.5, 0.0, 16),  # half is lost: as many again
        (8, 0.01, 0.5, 9),  # bad before idle
        (10, 0.2, 0.0, 13),  # 10 x 0.25 = 2.5, rounded up
        (8, 0.75, 0.0, 32),
        (8, 0.0, 1.0, 1),
        (0, 0.0, 0.0, 0),
    ],
)
def test_advice_follows_the_two_signals(
    gpus: int, bad_rate: float, idle_fraction: float, advised: int
) -> None:
    assert advised_gpus(gpus, bad_rate, idle_fraction) == advised


def test_what_an_expensive_model_loses_is_many_gpus() -> None:
    cheap, dear = ObservedLoad(1_900, 0, 1.0), ObservedLoad(100, 75, 3.0)  # 3.75 % of all are lost
    assert advised_gpus(4, 75 / 2_000, 0.0) == 5
    # Three GPUs serve a quarter of the dear one's requests: nine more would serve all.
    assert missing_for_models(4, {ModelId("cheap"): cheap, ModelId("dear"): dear}) == 9
    assert missing_for_models(4, {ModelId("cheap"): cheap}) == 0
    rare = ObservedLoad(50, 1, 1.0)  # of so few one bad request is more than 1 %
    assert missing_for_models(8, {ModelId("cheap"): cheap, ModelId("rare"): rare}) == 0
    assert missing_for_models(4, {}) == 0


# ---------------------------------------------------------------- hysteresis


def watch(
    advisor: ScaleAdvisor,
    seconds: range,
    gpus: int = 10,
    idle: float = 0.0,
    bad: Mapping[str, float] | None = None,
) -> ScaleAdvice:
    """One look a second at models that share the busy time evenly, 1000 requests each."""
    rates = bad or {"a": 0.0, "b": 0.0}
    each_ms = 1000 * gpus * (1 - idle) / len(rates)
    loads = {ModelId(name): ObservedLoad(1000, round(1000 * rate), each_ms) for name, rate in rates.items()}
    for second in seconds:
        advisor.observe(gpus, loads, 1000.0 * second)
    return advisor.advice()


def test_bad_requests_are_answered_within_the_ask_window() -> None:
    advice = watch(ScaleAdvisor(), range(3), bad={"a": 0.2, "b": 0.2})
    assert advice.gpus == 13  # 10 x 0.25 = 2.5, rounded up
    assert advice.models == pytest.approx({"a": 1.25, "b": 1.25})


def test_one_model_that_suffers_is_seen_behind_many_that_do_not() -> None:
    bad = {f"m{i}": 0.0 for i in range(19)} | {"z": 0.1}  # 0.5 % of all
    advice = watch(ScaleAdvisor(), range(20), gpus=40, bad=bad)
    assert advice.models == pytest.approx({"z": 2 / 9})  # its share, 2 GPUs, times 0.1 / 0.9
    assert advice.gpus == 41


def test_asking_stops_only_at_half_the_threshold() -> None:
    advisor = ScaleAdvisor()
    assert watch(advisor, range(20), bad={"a": 0.008}).gpus == 10
    assert watch(advisor, range(20, 40), bad={"a": 0.012}).gpus == 11
    assert watch(advisor, range(40, 60), bad={"a": 0.008}).gpus == 11
    assert watch(advisor, range(60, 80), bad={"a": 0.004}).gpus == 10
    assert watch(advisor, range(80, 100), bad={"a": 0.008}).gpus == 10


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_advice_is_the_same_whether_anybody_has_looked_at_it_before_or_not(*, is_looked_at: bool) -> None:
    """A journal has no page of metrics in it, and its replay gave other advice."""
    advisor = ScaleAdvisor()
    for second in range(40):
        loads = {ModelId("a"): ObservedLoad(1000, 20 if second < 5 else 7, 9_000.0)}
        advisor.observe(10, loads, 1000.0 * second)
        if is_looked_at:
            assert advisor.advice() == advisor.advice()
    assert advisor.advice().gpus == 11, "asked for, and not much better since"


def test_idle_gpus_are_released_after_a_whole_window_and_not_before() -> None:
    advisor = ScaleAdvisor()
    assert watch(advisor, range(119), idle=0.35).gpus == 10
    advice = watch(advisor, range(119, 122), idle=0.35)
    assert advice.gpus == 7
    assert advice.models == pytest.approx({"a": -1.75, "b": -1.75})


def test_a_model_that_nobody_asks_leaves_zero_gpus_idle_not_minus_zero() -> None:
    advisor = ScaleAdvisor()
    for second in range(122):
        advisor.observe(4, {ModelId("a"): ObservedLoad(0, 0, 0.0)}, 1000.0 * second)
    assert str(advisor.advice().models) == "{'a': 0.0}"


def test_the_busiest_moment_of_the_window_decides_what_is_released() -> None:
    advisor = ScaleAdvisor()
    watch(advisor, range(60), idle=0.8)
    watch(advisor, range(60, 75), idle=0.2)
    assert watch(advisor, range(75, 180), idle=0.8).gpus == 8
    assert watch(advisor, range(180, 300), idle=0.8).gpus == 2  # forgotten


def test_a_little_idle_time_is_kept_but_does_not_end_a_release() -> None:
    advisor = ScaleAdvisor()
    assert watch(advisor, range(200), gpus=20, idle=0.08).gpus == 20
    assert watch(advisor, range(200, 400), gpus=20, idle=0.12).gpus == 18
    assert watch(advisor, range(400, 600), gpus=20, idle=0.08).gpus == 19
    assert watch(advisor, range(600, 800), gpus=20, idle=0.04).gpus == 20


def test_a_new_size_is_judged_by_what_happens_on_it() -> None:
    advisor = ScaleAdvisor()
    assert watch(advisor, range(200), idle=0.5).gpus == 5
    assert watch(advisor, range(200, 230), gpus=5).gpus == 5
    assert watch(advisor, range(230, 260), gpus=5, bad={"a": 0.5}).gpus == 10


def test_few_requests_say_nothing_about_one_percent() -> None:
    advisor = ScaleAdvisor()
    for second in range(10):
        advisor.observe(4, {ModelId("a"): ObservedLoad(5, 1, 4000.0)}, 1000.0 * second)
    assert advisor.advice() == ScaleAdvice(4, {})


@pytest.mark.parametrize("seed", range(20))
def test_models_of_which_nothing_is_served_change_no_advice(seed: int) -> None:
    """Whatever the others do: such a model asks for nothing, and keeps no idle GPU from being released."""
    draw = random.Random(f"never served {seed}")
    gpus, never = draw.randint(1, 20), [ModelId(f"never{i}") for i in range(draw.randint(1, 3))]
    without, beside = ScaleAdvisor(), ScaleAdvisor()
    for look in range(250):
        if look % 50 == 0:
            idle, bad_rate = draw.choice([0.0, 0.07, 0.6]), draw.choice([0.0, 0.0, 0.007, 0.2])
        served = {
            ModelId(name): ObservedLoad(1000, round(1000 * bad_rate), 500 * gpus * (1 - idle))
            for name in "ab"
        }
        lost = draw.choice([1, 50, 5000])
        without.observe(gpus, served, 1000.0 * look)
        beside.observe(gpus, served | dict.fromkeys(never, ObservedLoad(lost, lost, 0.0)), 1000.0 * look)
        assert beside.advice().gpus == without.advice().gpus
        named = {name: lacks for name, lacks in beside.advice().models.items() if name not in never or lacks}
        assert named == without.advice().models


def test_no_number_of_gpus_helps_a_model_that_is_never_served() -> None:
    advisor = ScaleAdvisor()
    for second in range(10):
        advisor.observe(4, {ModelId("a"): ObservedLoad(1000, 1000, 0.0)}, 1000.0 * second)
    assert advisor.advice().gpus == 4


def test_a_cluster_without_gpus_or_news_is_left_alone() -> None:
    assert ScaleAdvisor().advice() == ScaleAdvice(0, {})
    advisor = ScaleAdvisor()
    for second in range(200):
        advisor.observe(0, {}, 1000.0 * second)
    assert advisor.advice() == ScaleAdvice(0, {})


def test_an_outage_releases_no_gpu() -> None:
    advisor = ScaleAdvisor()
    assert watch(advisor, range(200), gpus=8, idle=1.0, bad={"a": 1.0, "b": 1.0}).gpus == 8
    # Nor do the first answers after it: its idle time is forgotten.
    assert watch(advisor, range(200, 300), gpus=8, idle=0.5, bad={"a": 1.0, "b": 0.0}).gpus == 8
    assert watch(advisor, range(300, 400), gpus=8, idle=0.5, bad={"a": 1.0, "b": 0.0}).gpus == 4
