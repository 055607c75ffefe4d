"""What a person is told at once: each rule, and that a healthy cluster says nothing."""

from __future__ import annotations

import pytest

from fabric.ids import ModelId
from fabric.messages import PlanReport, SliceState, UnplacedInfo
from roles.page.alarms import ALARMS_MAX, alarms_of, is_missed
from roles.runtime.running_cluster import ProcessReport
from tests.page_stage import Stage, live, slice_of

FINE = {"a": live("a"), "b": live("b")}


def told(stage: Stage) -> list[tuple[str, str]]:
    return [(one.level, one.about) for one in alarms_of(stage.look(1_000.0))]


def test_a_healthy_cluster_says_nothing() -> None:
    plan = PlanReport("steady", "", 4, 2, (), 3, 0)
    counters = {"scheduler-0": {"timer_late_p99_ms": 0.3, "clients_keys_refused": 0.0}}
    assert told(Stage(figures=FINE, plan=plan, counters=counters)) == []


def test_a_model_that_misses_its_slo_is_said_with_its_figures() -> None:
    missed = live("b", late=3, dropped={"Overloaded": 9}, bad_rate=0.12)
    (alarm,) = alarms_of(Stage(figures={**FINE, "b": missed}).look(1_000.0))
    assert (alarm.level, alarm.about) == ("bad", "b")
    assert alarm.text == "misses its SLO: 12.0% of the last 10 s (3 late, 9 Overloaded)"


@pytest.mark.parametrize(
    ("late", "bad_rate", "missed", "alarms"),
    [(1, 0.5, True, 0), (1, 0.2, False, 0), (2, 0.02, True, 1), (2, 0.009, False, 0), (0, None, False, 0)],
)
def test_one_bad_request_alone_is_no_missed_slo_unless_it_is_half_of_them_and_no_alarm(
    late: int, bad_rate: float | None, missed: bool, alarms: int
) -> None:
    own = live("a", late=late, bad_rate=bad_rate)
    assert is_missed(own) is missed
    assert len(told(Stage(figures={**FINE, "a": own}))) == alarms


@pytest.mark.parametrize("state", list(SliceState))
def test_slices_that_do_not_serve_are_said(state: SliceState) -> None:
    found = told(Stage(figures=FINE, slices=[slice_of("here/gpu0/0", "a", state=state)]))
    levels = {SliceState.STARTING: "warn", SliceState.FAILED: "bad", SliceState.LOST: "bad"}
    assert found == ([(levels[state], "here/gpu0/0")] if state in levels else [])


def test_what_is_wrong_with_processes_and_plan_is_said_the_bad_first() -> None:
    plan = PlanReport("steady", "", 2, 5, (), 0, 0, (UnplacedInfo(ModelId("c"), 30.0, "no room"),))
    stage = Stage(
        figures=FINE,
        plan=plan,
        counters={"node-here": {"timer_late_p99_ms": 40.0}, "frontend-0": {"client_keys_refused": 7.0}},
        processes=[ProcessReport("gateway-0", 1, False, {})],
        silent=["frontend-1"],
    )
    assert told(stage) == [
        ("bad", "gateway-0"),
        ("bad", "frontend-1"),
        ("bad", "c"),
        ("warn", "node-here"),
        ("warn", "frontend-0"),
        ("warn", "GPUs"),
    ]


def test_models_without_a_ready_slice_are_said_and_there_is_a_bound() -> None:
    names = [f"m{number}" for number in range(ALARMS_MAX + 20)]
    found = told(Stage(models=names, replicas=0))
    assert len(found) == ALARMS_MAX
    assert set(found) <= {("bad", name) for name in names}
