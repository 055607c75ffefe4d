"""The central matchmaker: when a batch goes, where, and who is given up."""

from __future__ import annotations

from typing import Any

import pytest

from policies.batching.base import Delay
from policies.batching.registry import make_discipline
from tests.batching_stage import Stage, hosted, linear

THREE = linear(1, 5, 64)  # the model of Symphony's example: l(b) = b + 5


def stage(name: str = "deferred", slices: int = 1, delay: Delay | None = None, **options: Any) -> Stage:
    made = Stage(make_discipline(name, options))
    made.model("m", 20.0, delay)
    for order in range(slices):
        made.slice(f"s{order}", hosted("m", THREE), order=order)
    return made


def wake_at_ms(to: Stage) -> float | None:
    return to.discipline.wake_at_ms


def test_a_lone_request_waits_until_a_second_would_no_longer_fit() -> None:
    to = stage()
    to.arrive("m", 20.0)
    to.drain()
    (batch,) = to.batches
    assert batch.start_at_ms == pytest.approx(20 - 7, abs=1e-3)
    assert batch.reason == "frontrun"
    assert batch.waited_ms == 0.0


def test_a_full_batch_goes_at_once() -> None:
    to = stage()
    to.slice("s0", hosted("m", linear(1, 5, 4)))
    to.arrive("m", 20.0, count=3)
    assert to.batches == []
    to.arrive("m", 20.0, count=6)
    assert [(batch.sent_at_ms, len(batch.seqs), batch.reason) for batch in to.batches] == [(0.0, 4, "full")]
    to.drain()
    assert [(batch.start_at_ms, len(batch.seqs)) for batch in to.batches] == [(0.0, 4), (9.0, 4)]


def test_delays_send_the_batch_before_its_exec_moment() -> None:
    """One request: cost(2) = 1 + 2·0.5 + 7, so it is sent at 20 - 9 and starts 1.5 later."""
    to = stage(delay=Delay(control_ms=1.0, data_ms_per_item=0.5))
    to.arrive("m", 20.0)
    to.drain()
    (batch,) = to.batches
    assert batch.sent_at_ms == pytest.approx(11.0, abs=1e-3)
    assert batch.start_at_ms == pytest.approx(12.5, abs=1e-3)


def test_a_batch_is_sent_to_a_slice_that_is_about_to_be_free() -> None:
    to = stage("eager", delay=Delay(control_ms=2.0))
    to.arrive("m", 30.0)
    to.arrive("m", 30.0)
    to.drain()
    first, second = to.batches
    assert (first.start_at_ms, first.end_at_ms) == (2.0, 8.0)
    assert second.sent_at_ms == pytest.approx(6.0, abs=1e-3)
    assert second.start_at_ms == pytest.approx(8.0, abs=1e-3)
    assert second.waited_ms == pytest.approx(6.0, abs=1e-3)


def test_a_guard_sends_the_batch_so_much_earlier() -> None:
    to = stage()
    to.discipline.set_guard_ms(0.4)
    to.arrive("m", 20.0)
    to.drain()
    assert to.batches[0].start_at_ms == pytest.approx(12.6, abs=1e-3)


def test_a_request_does_not_start_before_its_inputs_are_ready() -> None:
    to = stage("eager")
    to.arrive("m", 20.0, ready_in_ms=6.0)
    to.drain()
    assert [batch.start_at_ms for batch in to.batches] == [6.0]


def test_a_batch_does_not_wait_for_requests_that_are_ready_too_late() -> None:
    """Two are ready, one will be at 12.5: with three, 20 - l(3) = 12 is the last moment. Frontrun of two is 12."""
    to = stage()
    to.arrive("m", 20.0, count=2)
    to.arrive("m", 20.0, ready_in_ms=12.5)
    to.drain()
    assert [(batch.start_at_ms, batch.seqs) for batch in to.batches] == [(12.0, [1, 2])]
    assert to.count("expired") == 1  # the slice is busy until 19


def test_a_request_that_will_never_be_ready_in_time_expires() -> None:
    to = stage()
    to.arrive("m", 20.0, ready_in_ms=15.0)
    to.drain()
    assert to.count("expired") == 1


def test_low_orders_are_filled_first_so_that_high_ones_stay_idle() -> None:
    to = stage(slices=8)
    for at_ms in range(0, 200, 10):
        to.until(float(at_ms))
        to.arrive("m", 20.0)
    to.drain()
    assert {batch.slice_id for batch in to.batches} == {"s0"}


def test_longest_idle_takes_turns() -> None:
    to = stage(slices=3, pick="longest_idle")
    for at_ms in range(0, 180, 20):
        to.until(float(at_ms))
        to.arrive("m", 20.0)
    to.drain()
    assert [batch.slice_id for batch in to.batches] == ["s0", "s1", "s2"] * 3


def test_a_free_slice_serves_the_candidate_with_the_smallest_latest() -> None:
    to = stage("eager")
    to.model("n", 100.0)
    to.slice("s0", hosted("m", THREE), hosted("n", THREE))
    to.arrive("m", 20.0)
    to.arrive("n", 50.0)
    to.arrive("m", 40.0)
    to.drain()
    assert [batch.model_id for batch in to.batches] == ["m", "m", "n"]


def test_among_equals_the_higher_priority_goes_first() -> None:
    to = stage("eager")
    to.model("n", 20.0, priority=1)
    to.slice("s0", hosted("m", THREE), hosted("n", THREE))
    to.arrive("m", 19.0)
    to.arrive("m", 20.0)
    to.arrive("n", 20.0)
    to.drain()
    assert [batch.model_id for batch in to.batches] == ["m", "n", "m"]


def test_a_model_goes_only_where_it_is_hosted() -> None:
    to = stage("eager", slices=0)
    to.model("n", 20.0)
    to.slice("s0", hosted("n", THREE), order=0)
    to.slice("s1", hosted("m", THREE), order=1)
    to.slice("s2", hosted("m", THREE), hosted("n", THREE), order=2)
    for _ in range(2):
        to.arrive("m", 20.0)
        to.arrive("n", 20.0)
    to.drain()
    assert sorted((batch.model_id, batch.slice_id) for batch in to.batches) == [
        ("m", "s1"),
        ("m", "s2"),
        ("n", "s0"),
        ("n", "s0"),
    ]


@pytest.mark.parametrize("is_one_unready", [False, True])
def test_a_faster_slice_gets_a_batch_grown_to_its_own_speed(is_one_unready: bool) -> None:
    """Within 10 % a slice stays in its class, whose table decides when; its own table decides how much."""
    to = stage(slices=0)
    to.slice("s0", hosted("m", [10.0, 10.0, 13.0, 16.0]))
    to.slice("s0", hosted("m", [9.5, 9.5, 12.0, 15.0]))
    to.arrive("m", 20.0, count=3)
    if is_one_unready:
        to.arrive("m", 60.0, ready_in_ms=30.0)
    to.until(7.0)
    (batch,) = to.batches
    assert batch.start_at_ms == pytest.approx(4.0, abs=1e-3)
    assert batch.end_at_ms == pytest.approx(16.0, abs=1e-3)


def test_slow_slices_leave_urgent_requests_to_fast_ones_and_take_the_others() -> None:
    to = stage("eager", slices=0)
    to.slice("slow", hosted("m", linear(3, 15, 8)), order=0)
    to.slice("fast", hosted("m", linear(1, 5, 8)), order=1, free_at_ms=4.0)
    to.arrive("m", 12.0)
    to.arrive("m", 40.0)
    to.drain()
    assert sorted((batch.slice_id, batch.seqs) for batch in to.batches) == [("fast", [1]), ("slow", [2])]


def test_a_slice_of_another_speed_serves_the_same_queue() -> None:
    to = stage(slices=2)
    to.slice("slow", hosted("m", linear(2, 10, 64)), order=9)
    to.arrive("m", 20.0, count=2)
    to.drain()
    # For the slow class frontrun comes first: 20 - (2·3 + 10) = 4 against 20 - 8 = 12.
    assert [(batch.slice_id, batch.start_at_ms) for batch in to.batches] == [("slow", 4.0)]


def test_what_cannot_finish_alone_is_answered_at_once() -> None:
    to = stage()
    to.arrive("m", 5.9)
    assert to.drops == [(0.0, True, [1])]


def test_a_request_without_a_slice_in_time_expires_when_it_could_no_longer_finish() -> None:
    to = stage(slices=0)
    to.slice("s0", hosted("m", THREE), free_at_ms=18.0)
    to.arrive("m", 20.0)
    to.drain()
    assert to.drops == [(14.0, True, [1])]


def test_without_any_slice_requests_wait_until_their_deadline() -> None:
    to = stage(slices=0)
    to.arrive("m", 20.0)
    to.drain()
    assert to.drops == [(20.0, True, [1])]


def test_a_slice_that_comes_while_requests_wait_is_used() -> None:
    to = stage(slices=0)
    to.arrive("m", 20.0)
    to.until(5.0)
    to.slice("s0", hosted("m", THREE))
    to.drain()
    assert [batch.start_at_ms for batch in to.batches] == [pytest.approx(13.0, abs=1e-3)]


def test_window_drop_gives_up_a_head_to_keep_the_target_size() -> None:
    """The slice is free at 10. The head (due 16.5) could run alone until 10.5; eight younger ones (due 23.5) make
    a batch of eight possible (10 + 13 = 23), the largest half an SLO of 27 allows. So the head goes."""
    to = Stage(make_discipline("deferred"))
    to.model("m", 27.0)
    to.slice("s0", hosted("m", THREE), free_at_ms=10.0)
    to.arrive("m", 16.5)
    to.arrive("m", 23.5, count=8)
    to.drain()
    assert to.drops == [(10.0, False, [1])]
    assert [(batch.start_at_ms, len(batch.seqs)) for batch in to.batches] == [(10.0, 8)]


@pytest.mark.parametrize("one_by_one", [0, 1, 2, 8])
def test_arrivals_beyond_what_the_head_allows_put_it_in_the_way(one_by_one: int) -> None:
    """a: l(b) = 6 b + 6, eight due at 49.5 make 7 possible, to start by 1.5; b may start until 3. a's head, due 28, allows 3."""
    to = Stage(make_discipline("eager", {"drop": "window"}))
    to.model("a", 60.0)
    to.model("b", 60.0)
    to.slice("s0", hosted("a", linear(6, 6, 9)), hosted("b", (10.0,)), free_at_ms=1.0)
    to.arrive("a", 28.0)
    to.arrive("b", 13.0)
    to.until(0.5)
    for _ in range(one_by_one):
        to.arrive("a", 49.5)
    if one_by_one < 8:
        to.arrive("a", 49.5, count=8 - one_by_one)
    to.drain()
    assert (to.batches[0].model_id, len(to.batches[0].seqs)) == ("a", 7)


def test_simple_drop_serves_the_same_head_alone() -> None:
    to = Stage(make_discipline("deferred", {"drop": "simple"}))
    to.model("m", 27.0)
    to.slice("s0", hosted("m", THREE), free_at_ms=10.0)
    to.arrive("m", 16.5)
    to.arrive("m", 23.5, count=8)
    to.drain()
    assert to.batches[0].seqs == [1]
    assert not any(is_expired is False for _, is_expired, _ in to.drops)


def test_a_slice_that_is_done_early_is_used_early() -> None:
    to = stage("eager")
    to.arrive("m", 20.0)
    to.arrive("m", 20.0)
    to.until(3.0)
    assert len(to.batches) == 1
    decisions = to.discipline.slice_free(to.batches[0].slice_id, 3.0, 3.0)  # type: ignore[arg-type]
    assert len(decisions) == 1


def test_a_slice_believed_busy_for_ever_is_left_alone_until_it_reports() -> None:
    to = stage("eager")
    to.discipline.slice_free("s0", float("inf"), 0.0)  # type: ignore[arg-type]
    to.arrive("m", 20.0)
    to.until(1.0)
    assert to.batches == []
    assert wake_at_ms(to) == pytest.approx(14.0, abs=1e-3)
    assert len(to.discipline.slice_free("s0", 1.0, 1.0)) == 1  # type: ignore[arg-type]


def test_requests_with_different_budgets_share_a_queue_by_deadline() -> None:
    to = stage()
    to.arrive("m", 30.0)
    to.arrive("m", 12.0)
    to.drain()
    assert [(batch.start_at_ms, batch.seqs) for batch in to.batches] == [(4.0, [2, 1])]


def test_withdrawn_requests_are_forgotten() -> None:
    to = stage()
    to.arrive("m", 20.0, count=4)
    to.withdraw("m", 1, 3)
    assert to.discipline.queued(to_model := next(iter(to.fates))[0]) == 1
    to.drain()
    assert [batch.seqs for batch in to.batches] == [[4]]
    assert to.discipline.queued(to_model) == 0


def test_a_removed_model_gives_its_requests_back() -> None:
    to = stage()
    to.arrive("m", 20.0, count=4)
    to.unmodel("m")
    assert to.drops == [(0.0, False, [1, 2, 3, 4])]
    assert wake_at_ms(to) is None


def test_an_slo_changed_later_counts_for_the_target_and_delays_for_the_moments() -> None:
    to = stage()
    to.arrive("m", 20.0)
    to.model("m", 20.0, Delay(control_ms=3.0))
    to.drain()
    assert to.batches[0].sent_at_ms == pytest.approx(20 - 7 - 3, abs=1e-3)


def test_a_timeout_sends_the_batch_when_the_first_request_has_waited_so_long() -> None:
    to = stage("timeout", timeout_ms=4)
    to.arrive("m", 20.0)
    to.until(2.0)
    to.arrive("m", 20.0)
    to.drain()
    assert [(batch.start_at_ms, batch.seqs, batch.reason) for batch in to.batches] == [
        (4.0, [1, 2], "timeout")
    ]


def test_a_timeout_that_is_too_long_never_passes_the_latest_moment() -> None:
    to = stage("timeout", slo_percent=100)
    to.arrive("m", 20.0)
    to.drain()
    assert [batch.start_at_ms for batch in to.batches] == [pytest.approx(14.0, abs=1e-3)]


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("times", [1.5, 3.0, 6.0])
def test_in_overload_losses_fall_on_all_models_alike(slices: int, times: float) -> None:
    """A cheap model and a dear one, by the work they ask for; a slice can do 2 and 0.1 requests a ms of them, or a little less."""
    to = Stage(make_discipline("tenuto"))
    tables = {"cheap": linear(0.2, 4, 64), "dear": linear(6, 4, 64)}
    for name in tables:
        to.model(name, 60.0)
    for order in range(slices):
        to.slice(f"s{order}", *(hosted(name, table) for name, table in tables.items()), order=order)
    rates = {"cheap": 2.0 * times * slices, "dear": 0.1 * times * slices}
    debts = dict.fromkeys(tables, 0.0)
    for at_ms in range(4000):
        to.until(float(at_ms))
        for name in tables:
            debts[name] += rates[name]
            if whole := int(debts[name]):
                debts[name] -= whole
                to.arrive(name, 60.0, count=whole)
    to.drain()
    served = {
        name: sum(fate == "ran" for key, fate in to.fates.items() if key[0] == name)
        / sum(key[0] == name for key in to.fates)
        for name in tables
    }
    assert 0.6 / times < served["dear"] < 0.95
    assert served["cheap"] == pytest.approx(served["dear"], rel=0.35)


# ---------------------------------------------------------------- run times that cross

GPU, CPU = linear(0.05, 5, 16), linear(1, 2, 16)  # a GPU is slower for up to three requests, a CPU for more


def crossed(name: str = "eager", free_at_ms: float = 0.0, **options: Any) -> Stage:
    made = Stage(make_discipline(name, options))
    made.model("m", 27.0)
    made.slice("gpu", hosted("m", GPU), order=0, free_at_ms=free_at_ms)
    made.slice("cpu", hosted("m", CPU), order=1, free_at_ms=free_at_ms)
    return made


RULES = [
    ("deferred", {}),
    ("deferred", {"drop": "simple"}),
    ("eager", {}),
    ("eager", {"drop": "window"}),
    ("tenuto", {}),
]


@pytest.mark.parametrize(("name", "options"), RULES)
@pytest.mark.parametrize("budget_ms", [3.1, 4.0, 5.0, 6.0])
def test_what_only_the_slices_that_are_slower_for_large_batches_can_serve_is_served_there(
    name: str, options: dict[str, Any], budget_ms: float
) -> None:
    to = crossed(name, **options)
    to.arrive("m", budget_ms)
    to.drain()
    assert to.count("ran") == 1
    assert budget_ms > 5.05 or to.batches[0].slice_id == "cpu"


@pytest.mark.parametrize(("name", "options"), RULES)
def test_what_no_class_can_serve_any_more_is_answered_at_that_moment(
    name: str, options: dict[str, Any]
) -> None:
    to = crossed(name, free_at_ms=50.0, **options)
    to.arrive("m", 10.0, count=2)
    to.arrive("m", 12.0)
    to.drain()
    assert to.drops == [(7.0, True, [1, 2]), (9.0, True, [3])]


@pytest.mark.parametrize("cpu_free_at_ms", [10.0, 50.0])
def test_heads_in_the_way_of_one_class_are_the_others_and_expire_if_it_is_busy(cpu_free_at_ms: float) -> None:
    """At 10 the head, due 13.5, is too urgent for the GPU, which takes those behind it."""
    to = crossed(free_at_ms=10.0)
    to.slice("cpu", hosted("m", CPU), order=1, free_at_ms=cpu_free_at_ms)
    to.arrive("m", 13.5)
    to.arrive("m", 25.0, count=8)
    to.drain()
    found = sorted((batch.slice_id, batch.start_at_ms, len(batch.seqs)) for batch in to.batches)
    if cpu_free_at_ms == 10.0:
        assert found == [("cpu", 10.0, 1), ("gpu", 10.0, 8)]
    else:
        assert found == [("gpu", 10.0, 8)]
        assert to.drops == [(10.5, True, [1])]


def test_heads_that_are_in_the_way_of_all_classes_are_given_up() -> None:
    """At 10 the first, due 15.2, would make batches of three; of those behind it the GPU can run 16, its target, and the CPU 11."""
    to = crossed("eager", free_at_ms=10.0, drop="window")
    to.arrive("m", 15.2)
    to.arrive("m", 27.0, count=40)
    to.drain()
    assert to.drops[0] == (10.0, False, [1])
    assert sorted((batch.slice_id, len(batch.seqs)) for batch in to.batches if batch.start_at_ms == 10.0) == [
        ("cpu", 15),
        ("gpu", 16),
    ]


def test_a_batch_with_a_longer_way_does_not_wait_for_one_that_is_less_urgent() -> None:
    """The slice is free at 20. x is sent then; y is more urgent and takes 5 to get there, so it goes as soon as it comes."""
    to = Stage(make_discipline("eager"))
    to.model("x", 100.0)
    to.model("y", 100.0, Delay(5.0))
    to.slice("s0", hosted("x", (1.0,)), hosted("y", (10.0,)), free_at_ms=20.0)
    to.until(1.0)
    to.arrive("x", 90.0)
    to.until(16.0)
    to.arrive("y", 44.0)
    to.drain()
    assert [(batch.model_id, batch.sent_at_ms, batch.start_at_ms) for batch in to.batches] == [
        ("y", 16.0, 21.0),
        ("x", 31.0, 31.0),
    ]


@pytest.mark.parametrize("name", ["deferred", "eager", "tenuto"])
def test_inputs_that_come_too_late_take_no_others_with_the_same_deadline_along(name: str) -> None:
    to = stage(name)
    to.arrive("m", 10.0, ready_in_ms=8.0, frontend="late")
    to.arrive("m", 10.0, count=3, frontend="ready")
    to.drain()
    assert to.count("expired") == 1
    assert [batch.seqs for batch in to.batches] == [[1, 2, 3]]
