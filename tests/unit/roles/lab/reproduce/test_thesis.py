"""The thesis' experiments run again: what the thesis states must come out, and the settings are its own."""

from __future__ import annotations

import pytest

from roles.lab.reproduce import EXPERIMENTS, thesis
from roles.lab.reproduce.report import Reproduction, Row
from roles.lab.reproduce.thesis_runs import IGNITER, contenders, describe, expected, play, without_rates
from roles.lab.reproduce.thesis_settings import (
    FIGURE_6_1,
    FIGURE_6_10,
    FIGURE_6_15,
    JUDGED,
)
from roles.scheduler.settings import settings_from


def row(found: Reproduction, start: str) -> Row:
    (only,) = [one for one in found.rows if one.what.startswith(start)]
    return only


def test_the_settings_are_those_of_the_figures() -> None:
    assert (len(FIGURE_6_1), len(FIGURE_6_10), len(FIGURE_6_15)) == (6, 8, 15)
    assert len({setting.name for setting in JUDGED}) == len(JUDGED) == 29
    assert {setting.ideal_rps for setting in FIGURE_6_1} == {2500}
    assert {setting.ideal_rps for setting in FIGURE_6_10} == {1200}
    assert {setting.gpu_count for setting in FIGURE_6_15} == {4}
    assert FIGURE_6_1[2].requests_per_model == 4000
    assert FIGURE_6_10[0].rates_rps == {"resnet50": 300, "mobilenet_v2": 300, "bert": 300, "gpt2": 300}
    for setting in JUDGED:
        assert len(setting.gpus()) == setting.gpu_count
        assert len(setting.profiles()) == len(setting.inputs()) == len(setting.loads)


def test_the_worked_examples_reach_the_stated_goodput() -> None:
    found = thesis.worked_examples()
    stated = [one for one in found.rows if isinstance(one.paper, float)]
    assert len(stated) == 4
    for one in stated:
        assert one.ours == pytest.approx(one.paper, abs=0.011), one.what


def test_batches_of_64_are_full_at_1000_requests_a_second_and_not_at_600() -> None:
    found = thesis.filling()
    assert row(found, "6.19 time to fill 64 at 600").ours == pytest.approx(107, abs=0.5)
    not_full, full = (row(found, f"6.19 densenet121, target 64, {rate}").ours for rate in (600, 1000))
    assert isinstance(not_full, float)
    assert isinstance(full, float)
    assert not_full < 62 < full


def test_a_bar_is_planned_once_and_played_under_each_discipline() -> None:
    setting = FIGURE_6_1[0]
    usher = next(one for one in contenders(setting) if one.label == "Usher")
    played = play(setting, usher, ("fixed", "deferred"), strength=0.5)
    assert describe(played.plan).startswith("GPU 0: ")
    assert played.plan.expected_goodput_rps == pytest.approx(500)
    for batching in ("fixed", "deferred"):
        assert 0 < played.goodput_rps(batching) <= played.outcomes[batching].offered
    (model,) = {m.model_id for planned in played.plan.slices for m in planned.models}
    assert played.model_goodput_rps("fixed", model) == played.goodput_rps("fixed")


def test_the_thesis_router_shares_by_batch_size_whatever_the_plan_says() -> None:
    setting = FIGURE_6_1[5]
    plan = setting.config(IGNITER.policy, family=IGNITER.family).place()
    hints = settings_from(setting.config(), without_rates(plan)).hints
    assert all(weight == batch for batch, weight in hints.values())
    assert hints != settings_from(setting.config(), plan).hints


def test_the_thesis_has_a_policy_more_where_nothing_is_colocated() -> None:
    labels = [one.label for one in contenders(FIGURE_6_10[0])]
    assert labels == ["iGniter", "Usher", "WAO-Usher", "AO-MILP", "WSM-MILP"]
    assert expected(FIGURE_6_10[7], "wsm-milp").expected_goodput_rps == pytest.approx(1200)


def test_every_experiment_of_the_thesis_has_a_name() -> None:
    named = {name for name in EXPERIMENTS if name.startswith("thesis-")}
    assert {"thesis-worked-examples", "thesis-figure-6-1", "thesis-figure-6-15"} <= named
