"""Tenuto's discipline: what is held, for how long, and who stops holding."""

from __future__ import annotations

import math
import random
from statistics import median
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fabric.ids import ModelId
from policies.batching.base import NEVER_MS, BatchModel, Delay
from policies.batching.batch_moments import cost_table, exec_table, lead_table
from policies.batching.disciplines import tenuto
from policies.batching.disciplines.tenuto import Tenuto
from policies.batching.holding import (
    Demand,
    Hold,
    Openings,
    Prospect,
    plan_holds,
    plan_reserves,
    prospect,
)
from policies.batching.matchmaking.model_state import ModelPlan
from policies.batching.registry import make_discipline
from roles.lab import scheduler_only
from roles.lab.scheduler_only import Case, Model
from tests.batching_stage import Stage, hosted, linear

TABLE = linear(1, 5, 64)
SLO_MS = 25.0


def stage(slices: int, models: tuple[str, ...] = ("m",), **options: Any) -> Stage:
    made = Stage(make_discipline("tenuto", options))
    for name in models:
        made.model(name, SLO_MS)
    for order in range(slices):
        made.slice(f"s{order}", *(hosted(name, TABLE) for name in models), order=order)
    return made


def feed(to: Stage, gaps_ms: dict[str, float], until_ms: float) -> None:
    """Each model's requests come at its constant gap."""
    next_at_ms = {name: to.now_ms + gap_ms for name, gap_ms in gaps_ms.items()}
    while True:
        name = min(next_at_ms, key=lambda name: next_at_ms[name])
        if next_at_ms[name] >= until_ms:
            break
        to.until(next_at_ms[name], is_inclusive=False)
        to.arrive(name, SLO_MS)
        next_at_ms[name] += gaps_ms[name]


def prospect_of(
    rate_rps: float, alpha_ms: float = 1.0, beta_ms: float = 5.0, slo_ms: float = SLO_MS
) -> Prospect:
    model = BatchModel("m", slo_ms)  # type: ignore[arg-type]  # a name is a name
    run_times = exec_table([alpha_ms * size + beta_ms for size in range(1, 65)])
    return prospect(model, run_times, cost_table(run_times, lead_table(model.delay, 64)), rate_rps)


def holds_ms(prospects: list[Prospect], slices: int, lost_share: float = 0.0) -> list[float]:
    planned = plan_holds(Demand(prospects, slices), [lost_share] * len(prospects), lost_share)
    return [hold.hold_ms for one, hold in zip(prospects, planned, strict=True)]


def test_a_lone_request_on_an_idle_cluster_goes_at_once() -> None:
    to = stage(2)
    for moment_ms in (0.0, 700.0, 1500.0, 9000.0):
        to.until(moment_ms)
        to.arrive("m", SLO_MS)
        assert to.batches[-1].sent_at_ms == moment_ms


def test_a_long_slo_is_no_reason_to_wait() -> None:
    to = Stage(make_discipline("tenuto"))
    to.model("m", 2000.0)
    to.slice("s0", hosted("m", TABLE))
    for second in range(12):
        to.until(second * 100.0)
        to.arrive("m", 2000.0)
        assert to.batches[-1].sent_at_ms == second * 100.0


def test_a_busy_single_model_is_deferred() -> None:
    to, rival = stage(4), Stage(make_discipline("deferred"))
    rival.model("m", SLO_MS)
    for order in range(4):
        rival.slice(f"s{order}", hosted("m", TABLE), order=order)
    for one in (to, rival):
        feed(one, {"m": 0.4}, 1500.0)
    settled = [len(batch.seqs) for batch in to.batches if batch.sent_at_ms > 1000.0]
    deferred = [len(batch.seqs) for batch in rival.batches if batch.sent_at_ms > 1000.0]
    assert sum(settled) / len(settled) == pytest.approx(sum(deferred) / len(deferred), rel=0.05)


def settled_batch(to: Stage, from_ms: float = 1_000.0) -> float:
    sizes = [len(batch.seqs) for batch in to.batches if batch.sent_at_ms > from_ms]
    return sum(sizes) / len(sizes)


@pytest.mark.parametrize("change", ["delay", "speed"])
def test_a_model_that_is_described_anew_keeps_its_plan(change: str) -> None:
    """Measured delays and speeds change all the time; each change makes new candidates."""
    to, undisturbed = stage(4), stage(4)
    for moment in range(100):
        for one in (to, undisturbed):
            feed(one, {"m": 0.4}, moment * 20.0)
        if change == "delay":
            to.model("m", SLO_MS, Delay(control_ms=0.001 * (moment % 2)))
        else:
            for order in range(4):
                to.slice(f"s{order}", hosted("m", linear(1 + 0.001 * (moment % 2), 5, 64)), order=order)
    assert settled_batch(to) == pytest.approx(settled_batch(undisturbed), rel=0.1)


def test_what_a_model_lost_is_not_forgotten_when_its_group_is_made_anew() -> None:
    """Else it would seem to lose more than the others, with whom it is compared: here, than itself."""
    to = stage(1)
    for moment in range(100):
        feed(to, {"m": 0.5}, moment * 20.0)
        to.model("m", SLO_MS, Delay(control_ms=0.001 * (moment % 2)))
    discipline = to.discipline
    assert isinstance(discipline, Tenuto)
    (group,) = discipline._groups
    assert group.wait_losses.share > 0.01
    assert group.wait_losses.share == pytest.approx(discipline._counts[ModelId("m")].losses.share)


@pytest.mark.parametrize("others", [0, 99, 399])
def test_losses_are_forgotten_within_the_same_time_however_many_models_there_are(others: int) -> None:
    """With many models plans are rarer."""
    to = stage(1, ("m", *(f"m{number}" for number in range(others))))
    discipline = to.discipline
    assert isinstance(discipline, Tenuto)
    feed(to, {"m": 50.0}, 60.0)
    (group,) = discipline._groups
    group.wait_losses.share = 0.1
    feed(to, {"m": 50.0}, 2_560.0)
    assert group.wait_losses.share == pytest.approx(0.1 * math.exp(-1.0), rel=0.25)


@pytest.mark.parametrize("gap_ms", [400.0, 1_000.0, 10_000.0])
def test_losses_are_not_remembered_for_longer_where_little_is_asked(gap_ms: float) -> None:
    """There plans are rare: they are made when a batch leaves."""
    to = stage(1)
    discipline = to.discipline
    assert isinstance(discipline, Tenuto)
    feed(to, {"m": gap_ms}, gap_ms + 60.0)
    (group,) = discipline._groups
    group.wait_losses.share = 0.1
    feed(to, {"m": gap_ms}, 2 * gap_ms + 2_560.0)
    assert group.wait_losses.share <= 0.1 * math.exp(-0.8)


def planned(to: Stage) -> dict[str, ModelPlan | None]:
    assert isinstance(to.discipline, Tenuto)
    return {str(model_id): state.plan for model_id, state in to.discipline._models.items()}


@pytest.mark.parametrize("gap_ms", [0.25, 1.5], ids=["more than there is room for", "room for all"])
def test_a_plan_in_parts_is_the_one_that_is_made_at_once(gap_ms: float) -> None:
    names = tuple(f"m{number}" for number in range(6))
    at_once, in_parts = stage(2, names), stage(2, names)
    for to in (at_once, in_parts):
        feed(to, {name: gap_ms * (3 + number) for number, name in enumerate(names)}, 1_500.0)
    assert planned(at_once) == planned(in_parts)
    assert isinstance(at_once.discipline, Tenuto)
    assert isinstance(in_parts.discipline, Tenuto)
    at_once.discipline._plan(1_600.0)
    parts = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tenuto, "MODELS_A_PART", 0)
        while not parts or in_parts.discipline._parts is not None:
            in_parts.discipline._plan(1_600.0)
            parts += 1
    assert parts > 1
    assert planned(at_once) == planned(in_parts)
    assert at_once.discipline._plan_at_ms == in_parts.discipline._plan_at_ms


def finish_plan(discipline: Tenuto, now_ms: float) -> int:
    """Finish the plan that is under way, or make one. Returns how many parts that took."""
    parts = 1
    discipline._plan(now_ms)
    while discipline._parts is not None:
        discipline._plan(now_ms)
        parts += 1
    return parts


@pytest.mark.parametrize("done", [1, 2, 3])
@pytest.mark.parametrize("change", ["model comes", "model goes", "slice comes", "slice goes"])
def test_what_changes_while_a_plan_is_made_is_in_the_next_one(
    done: int, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = stage(2, ("a", "b", "c"))
    discipline = to.discipline
    assert isinstance(discipline, Tenuto)
    feed(to, {"a": 2.0, "b": 3.0, "c": 4.0}, 1_500.0)
    monkeypatch.setattr(tenuto, "MODELS_A_PART", 0)
    for _ in range(done):
        discipline._plan(1_600.0)
    if change == "model comes":
        to.model("d", SLO_MS)
        for order in range(2):
            to.slice(f"s{order}", *(hosted(name, TABLE) for name in "abcd"), order=order)
    elif change == "model goes":
        to.unmodel("c")
    elif change == "slice comes":
        to.slice("s2", *(hosted(name, TABLE) for name in "abc"), order=2)
    else:
        to.unslice("s1")
    for _ in range(2):  # what is under way goes on as it began
        finish_plan(discipline, 1_601.0)
    (group,) = discipline._groups
    assert set(group.model_ids) == discipline._models.keys()
    assert group.slices == {"slice comes": 3.0, "slice goes": 1.0}.get(change, 2.0)
    assert all(state.plan is not None for state in discipline._models.values())


def test_a_plan_of_many_models_ends_although_their_slices_change_all_the_time() -> None:
    """Run times are measured, and corrected, more often than a plan of many parts takes."""
    names = [f"m{number:03}" for number in range(2 * tenuto.MODELS_A_PART)]
    to = Stage(make_discipline("tenuto", {}))
    for number, name in enumerate(names):
        to.model(name, SLO_MS)
        to.slice(f"s{number}", hosted(name, TABLE), order=number)
    discipline = to.discipline
    assert isinstance(discipline, Tenuto)
    feed(to, dict.fromkeys(names, 40.0), 100.0)
    parts = 0
    while any(plan is None for plan in planned(to).values()):
        discipline._plan(to.now_ms)
        parts += 1
        assert parts <= 3 * len(names) / tenuto.MODELS_A_PART + 1  # three steps for each model
        to.slice(f"s{parts}", hosted(names[parts], linear(1, 5 + parts / 100, 64)), order=parts)
    assert discipline._parts is None or parts > 1


def test_a_rehearsal_hears_what_arrives_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    to = stage(1, ("a", "b"))
    discipline = to.discipline
    assert isinstance(discipline, Tenuto)
    assert discipline._rehearsals is not None
    feed(to, {"a": 2.0, "b": 3.0}, 1_500.0)
    finish_plan(discipline, 1_600.0)
    discipline._rehearsals.is_recording = True
    heard: list[ModelId] = []
    monkeypatch.setattr(discipline._rehearsals, "note", lambda model_id, *_: heard.append(model_id))
    monkeypatch.setattr(tenuto, "MODELS_A_PART", 0)
    to.until(1_800.0)
    for _ in range(3):
        discipline._plan(to.now_ms)
        assert discipline._parts is not None
        heard.clear()
        to.arrive("a", SLO_MS)
        assert heard == ["a"]


def test_what_gains_most_by_holding_is_held_longest() -> None:
    rare, popular = holds_ms([prospect_of(20.0), prospect_of(400.0)], 2, lost_share=1.0)
    assert rare < popular
    weak, strong = holds_ms([prospect_of(100.0, 5.0, 0.5), prospect_of(100.0, 0.5, 9.0)], 1, lost_share=1.0)
    assert weak == 0.0 < strong


def test_while_nobody_loses_by_waiting_idle_gpus_stay_idle() -> None:
    """By hand: 8 at 100 requests/s with l(b) = b + 5 open a batch each 16.36 + 10 ms under deferral, so 2.32 slices are busy."""
    many = [prospect_of(100.0) for _ in range(8)]
    assert sum(one.work_deferred() for one in many) == pytest.approx(
        0.8 + 8 * 5.0 / (16.3636 + 10.0), abs=1e-3
    )
    for slices in (8, 16, 1000):
        for hold_ms in holds_ms(many, slices):
            assert 0.8 + 8 * 5.0 / (hold_ms + 10.0) == pytest.approx(3.0, abs=1e-3)
    for hold_ms in holds_ms(many, 4):  # of which others may have all at a batch's last moment
        assert 0.8 + 8 * 5.0 / (hold_ms + 10.0) == pytest.approx(4.0, abs=1e-3)
    assert max(holds_ms(many, 16, lost_share=0.01)) == 0.0


@pytest.mark.parametrize("rate_rps", [40.0, 70.0, 130.0, 250.0, 400.0])
def test_holding_saves_whole_slices_or_nothing(rate_rps: float) -> None:
    """What is planned keeps as many whole slices busy as full deferral, and all of the last one, if going at once needs that much."""
    many = [prospect_of(rate_rps) for _ in range(8)]
    deferred, eager = (
        sum(one.alpha_ms * one.per_ms + one.opening(hold_ms) for one in many)
        for hold_ms in (many[0].hold_max_ms, 0.0)
    )
    planned = sum(
        one.alpha_ms * one.per_ms + one.opening(hold_ms)
        for one, hold_ms in zip(many, holds_ms(many, 200), strict=True)
    )
    assert planned == pytest.approx(min(eager, math.ceil(deferred)), abs=0.01)


def p50_ms(discipline: str, alpha_ms: float, beta_ms: float, slo_ms: float, load: float) -> float:
    """Of one model on one slice, at that part of what two batches within the SLO can do."""
    size = max(1, int((slo_ms / 2 - beta_ms) / alpha_ms))
    per_ms = load * size / (alpha_ms * size + beta_ms)
    draw = random.Random(5)
    to = Stage(make_discipline(discipline))
    to.model("m", slo_ms)
    to.slice("s0", hosted("m", linear(alpha_ms, beta_ms, max(2, 2 * size))))
    came_ms: dict[int, float] = {}
    at_ms = 0.0
    while at_ms < 6_000.0:
        at_ms += draw.expovariate(per_ms)
        to.until(at_ms, is_inclusive=False)
        came_ms[len(came_ms) + 1] = at_ms
        to.arrive("m", slo_ms)
    to.drain()
    waits_ms = [
        batch.start_at_ms + alpha_ms * len(batch.seqs) + beta_ms - came_ms[seq]
        for batch in to.batches
        for seq in batch.seqs
        if came_ms[seq] > 2_000.0
    ]
    return median(waits_ms)


@pytest.mark.parametrize("slo_runs", [3.0, 8.0, 40.0])
@pytest.mark.parametrize(("alpha_ms", "beta_ms"), [(4.0, 4.0), (1.0, 9.0), (0.1, 5.0), (8.0, 0.1)])
def test_on_one_slice_with_little_to_do_no_latency_is_spent(
    alpha_ms: float, beta_ms: float, slo_runs: float
) -> None:
    """Nobody could use the device time that longer holds would save. (Where the slice has to batch, going at once takes two runs too.)"""
    alone_ms = alpha_ms + beta_ms
    for load in (0.05, 0.3):
        took_ms = p50_ms("tenuto", alpha_ms, beta_ms, slo_runs * alone_ms, load)
        at_once_ms = p50_ms("eager", alpha_ms, beta_ms, slo_runs * alone_ms, load)
        assert took_ms <= max(2.0 * alone_ms, 1.1 * at_once_ms)


def test_holding_is_longer_the_fewer_slices_there_are() -> None:
    many = [prospect_of(100.0) for _ in range(8)]
    found = [holds_ms(many, slices, lost_share=0.01)[0] for slices in (2, 3, 4, 6, 8)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_holding_is_shorter_the_less_opening_batches_costs() -> None:
    """The price by hand: eight alike models, 0.5 of 8 slices left for opening (5 ms each 10 ms unheld: 4 slices)."""
    many = [prospect_of(100.0, 0.9) for _ in range(8)]
    in_all = 8 * 0.9 * 100.0 / 1000.0
    slices = 3
    left = slices + 0.4 * slices - in_all  # overbooked by 0.15 for each of 8 models, at most 0.4
    for opened in (1.0, 0.9, 0.8):
        (hold_ms,) = {hold.hold_ms for hold in plan_holds(Demand(many, slices, opened), [0.01] * 8, 0.01)}
        by_hand = max(0.0, 8 * 5.0 / (left / opened) - 10.0)
        assert hold_ms == pytest.approx(by_hand, abs=1e-9), opened


def bisected_price(prospects: list[Prospect], allowed: float) -> float:
    """By factors, without any formula for it: the lowest price at which opening batches keeps no more than that busy."""

    def busy(price: float) -> float:
        return sum(one.opening(one.hold_ms(price)) for one in prospects)

    if busy(0.0) <= max(0.0, allowed):
        return 0.0
    low, high = (
        1e-12,
        max((one.hold_max_ms + 1.0 / one.per_ms) ** 2 / one.beta_ms for one in prospects if one.beta_ms),
    )
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if busy(middle) > allowed else (low, middle)
    return high


def test_the_price_of_holding_is_the_one_that_bisecting_finds() -> None:
    draws = random.Random(1)
    for case in range(200):
        many = [
            prospect_of(
                10.0 ** draws.uniform(-3, 4),
                10.0 ** draws.uniform(-2, 1),
                draws.choice((0.0, 10.0 ** draws.uniform(-3, 1))),
                10.0 ** draws.uniform(1, 5),
            )
            for _ in range(draws.choice((1, 2, 3, 30)))
        ]
        unheld = sum(one.opening(0.0) for one in many)
        least = sum(one.opening(one.hold_max_ms) for one in many)
        for part in (-1.0, 0.0, 0.001, draws.random(), 0.999, 1.0, 2.0):
            allowed = least + part * (unheld - least)
            found, expected = Openings(many).price(allowed), bisected_price(many, allowed)
            if part in (
                0.0,
                1.0,
            ):  # there the price is where the last one stops, or the first one begins, to be held longer
                busy = sum(one.opening(one.hold_ms(found)) for one in many)
                assert busy == pytest.approx(allowed, rel=1e-6), (case, part)
            else:
                assert found == pytest.approx(expected, rel=1e-6), (case, part)


@pytest.mark.parametrize(("burst", "held"), [(1, True), (10, False)])
def test_bursts_fill_batches_without_holding(burst: int, held: bool) -> None:
    """The same rate either way; 8 models need 6.4 slices one by one and 1.2 in tens, 3 are there, and some are lost."""
    names = tuple("abcdefgh")
    to = stage(3, names)
    discipline = to.discipline
    assert isinstance(discipline, Tenuto)
    gap_ms = 10.0 * burst
    for step in range(8 * int(4_000.0 / gap_ms)):
        to.until(step * gap_ms / 8)
        for _ in range(burst):
            to.arrive(names[step % 8], SLO_MS)
        for group in discipline._groups:
            group.wait_losses.share = 0.01  # so that nothing is held to save slices
    plans = [state.plan for state in discipline._models.values()]
    assert all(plan is not None and (plan.timeout_ms > 0.0) is held for plan in plans)


@pytest.mark.parametrize("slo_ms", [100.0, 500.0, 2500.0])
@pytest.mark.parametrize("leaving", [["s0"], ["s1"], ["s2"], ["s0", "s1"], ["s1", "s2"]], ids="-".join)
@pytest.mark.parametrize("is_slower", [False, True])
def test_nobody_waits_because_a_slice_has_left(slo_ms: float, leaving: list[str], is_slower: bool) -> None:
    """Half a slice's worth of work: one of three serves whoever comes, two could be released. Whichever leaves, what is left serves as before.

    `is_slower`: it does not leave, but is found to be slower, and with that another kind of slice.
    """
    table, slower = linear(1, 9, 64), linear(2, 18, 64)

    def longest_wait_ms(changed: list[str]) -> float:
        to = Stage(make_discipline("tenuto"))
        to.model("m", slo_ms)
        for order in range(3):
            to.slice(f"s{order}", hosted("m", table), order=order)
        for step in range(400):
            to.until(step * 20.0, is_inclusive=False)
            if step == 200:
                for name in changed:
                    if is_slower:
                        to.slice(name, hosted("m", slower), order=int(name[1:]))
                    else:
                        to.unslice(name)
            to.arrive("m", slo_ms)
        to.drain()
        assert to.count("ran") == 400
        after = [batch for batch in to.batches if batch.sent_at_ms >= 200 * 20.0]
        return max(batch.end_at_ms - 20.0 * (batch.seqs[0] - 1) for batch in after)

    assert longest_wait_ms(leaving) <= 2 * (slower[0] if is_slower else longest_wait_ms([]))


@pytest.mark.parametrize("slo_ms", [1e3, 1e4, 6e4, 3e5, 3.6e6])
@pytest.mark.parametrize("rate_rps", [0.05, 0.25, 2.0])
def test_a_model_with_all_the_time_in_the_world_makes_nobody_wait(slo_ms: float, rate_rps: float) -> None:
    """The others are held as if it were not there, but for what it takes."""
    busy = prospect_of(250.0, 1.0, 9.0, 500.0)
    alone_ms = holds_ms([busy], 4)[0]
    beside_ms = holds_ms([busy, prospect_of(rate_rps, 1.0, 9.0, slo_ms)], 4)[0]
    least = (rate_rps / 1e3) * 10.0  # slices that it keeps busy where nothing of it is held
    exact_ms = next(
        hold_ms / 100 for hold_ms in range(50_000) if busy.opening(hold_ms / 100) <= 1.0 - 0.25 - least
    )
    assert alone_ms <= beside_ms <= exact_ms + 0.05


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("gap_ms", [25.0, 50.0])
def test_where_little_is_asked_a_pipeline_takes_it_at_once(slices: int, stages: int, gap_ms: float) -> None:
    run_ms = linear(2, 18, 32)
    model = hosted("m", run_ms)
    model = replace(model, interval_ms=tuple(one / stages for one in run_ms) if stages > 1 else ())
    to = Stage(make_discipline("tenuto"))
    to.model("m", 1_000.0)
    for order in range(slices):
        to.slice(f"s{order}", model, order=order)
    for step in range(200):
        to.until(step * gap_ms, is_inclusive=False)
        to.arrive("m", 1_000.0)
    to.drain()
    assert max(batch.end_at_ms - gap_ms * (batch.seqs[0] - 1) for batch in to.batches) <= 2 * run_ms[0]


def test_who_loses_more_than_the_others_stops_holding_and_giving_up_heads() -> None:
    many = [prospect_of(300.0) for _ in range(4)]
    calm, unlucky = plan_holds(Demand(many, 3), [0.0, 0.1, 0.0, 0.0], mean=0.01)[:2]
    assert calm.hold_ms > 0.0
    assert calm.target > 1
    assert unlucky == Hold(0.0, 1, spares_reserve=False)
    assert calm.spares_reserve


def test_models_that_share_no_slice_are_planned_apart() -> None:
    """The idle one's request goes at once, however busy the other is."""
    to = Stage(make_discipline("tenuto"))
    for order, name in enumerate(("busy", "idle")):
        to.model(name, SLO_MS)
        to.slice(f"s{order}", hosted(name, TABLE), order=order)
    feed(to, {"busy": 1.6, "idle": 400.0}, 2500.0)
    idle = [batch for batch in to.batches if batch.model_id == "idle"]
    assert len(idle) == 6
    assert all(batch.sent_at_ms % 400.0 == 0.0 for batch in idle)


def test_a_model_that_comes_later_is_planned_too() -> None:
    to = stage(1)
    feed(to, {"m": 8.0}, 500.0)
    to.model("late", SLO_MS)
    to.slice("s0", hosted("m", TABLE), hosted("late", TABLE))
    feed(to, {"m": 8.0, "late": 8.0}, 1500.0)
    to.drain()
    assert to.count("waiting") == 0
    assert to.count("ran") > 0.95 * len(to.fates)


@pytest.mark.parametrize("options", [{}, {"drop": "window"}], ids=str)
def test_overload_is_flat(options: dict[str, Any]) -> None:
    served = []
    for gap_ms in (1.0, 0.5, 0.25):
        to = stage(1, ("a", "b"), **options)
        feed(to, {"a": 2 * gap_ms, "b": 2 * gap_ms}, 3000.0)
        to.drain()
        served.append(to.count("ran"))
    assert served[1] >= 0.97 * served[0]
    assert served[2] >= 0.97 * served[1]


def test_a_reserve_is_kept_where_full_deferral_is_what_carries_the_load() -> None:
    many = [prospect_of(300.0) for _ in range(40)]
    deferred = sum(one.work_deferred() for one in many)
    assert 23.0 < deferred < 24.0
    assert plan_reserves(Demand(many, 24), [24]) == [1]  # 0.35 of the root of 24 is 1.7
    assert plan_reserves(Demand(many, 48), [48]) == [24]  # could be released
    assert plan_reserves(Demand(many, 48), [32, 16]) == [16, 8]
    assert plan_reserves(Demand(many, 48), [48], mean=0.0005) == [
        12
    ]  # half of what ends the calm: half of what is idle is used
    assert plan_reserves(Demand(many, 48), [48], mean=0.001) == [0]  # half the slices would be idle
    assert plan_reserves(Demand(many, 24), [16, 8]) == [1, 0]
    assert plan_reserves(Demand([prospect_of(300.0) for _ in range(400)], 240), [240]) == [5]


def lost_of(one: Prospect, slices: int, busy: float) -> float:
    """Of a batch that has to go while all slices are busy: the part of its requests that comes too late, as far as slices are idle otherwise."""
    size = 1.0 + one.per_ms * one.hold_max_ms
    freed_ms = (one.alpha_ms * size + one.beta_ms) / slices
    heads = min(1.0, (1.0 + one.per_ms * freed_ms) / size)
    return (1.0 - busy / slices) * math.exp(-one.alpha_ms / freed_ms) * heads


@pytest.mark.parametrize(
    ("rate_rps", "models", "slices"), [(4.0, 20, 4), (20.0, 20, 4), (20.0, 5, 4), (300.0, 12, 9)]
)
def test_what_equal_models_lose_by_meeting_is_a_matter_of_coins(
    rate_rps: float, models: int, slices: int
) -> None:
    one = prospect_of(rate_rps)
    own = one.work_deferred()
    others, busy = models - 1, own % 1.0
    free = slices - models * math.floor(own)
    all_taken = sum(
        math.comb(others, count) * busy**count * (1.0 - busy) ** (others - count)
        for count in range(free, others + 1)
    )
    assert all_taken > 0.0
    foreseen = Demand([one] * models, slices).foreseen
    assert foreseen == pytest.approx(all_taken * lost_of(one, slices, models * own), rel=1e-4)


def test_what_unlike_models_lose_by_meeting_is_about_what_their_own_coins_say() -> None:
    many = [prospect_of(rate_rps) for rate_rps in (5.0, 10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 100.0)]
    exact, work = 0.0, sum(one.work_deferred() for one in many)
    for asking in range(8):
        busy_slices = [1.0]  # how likely 0, 1, 2 … slices are taken by the others
        for number, one in enumerate(many):
            if number != asking:
                part = one.work_deferred()
                assert part < 1.0
                busy_slices = [
                    stay * (1.0 - part) + more * part
                    for stay, more in zip([*busy_slices, 0.0], [0.0, *busy_slices], strict=True)
                ]
        exact += many[asking].per_ms * sum(busy_slices[4:]) * lost_of(many[asking], 4, work)
    exact /= sum(one.per_ms for one in many)
    assert 0.0005 < exact < 0.05
    assert Demand(many, 4).foreseen == pytest.approx(exact, rel=0.25)


def test_nobody_meets_where_there_is_nobody_else_or_a_slice_for_everyone() -> None:
    assert Demand([], 4).foreseen == 0.0
    for slices in (1, 4):
        assert Demand([prospect_of(600.0)], slices).foreseen == 0.0
    assert Demand([prospect_of(20.0)] * 4, 4).foreseen == 0.0
    assert Demand([prospect_of(5_000.0)] * 20, 4).foreseen == 0.0  # far too much: that will be measured
    losses = [Demand([prospect_of(20.0)] * 20, slices).foreseen for slices in range(3, 21)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 0.02
    assert 1e-6 > losses[-2] > losses[-1] == 0.0


def test_models_that_would_meet_on_few_slices_are_not_held_until_they_have_lost() -> None:
    """Twenty models with six requests a second each, in bursts, on four GPUs (a held-out row of docs/results/disciplines.md)."""
    models = tuple(Model(f"m{number}", 1.061, 10.312, 29.0) for number in range(20))
    case = Case("twenty", models, 4, 0.2)
    lost = {}
    for name in ("deferred", "eager", "tenuto"):
        played = scheduler_only.play(
            case, scheduler_only.made(case, name, {}), case.arrivals(1, 120.0, 25_000.0)
        )
        lost[name] = sum(
            int(np.isnan(fate.finished_at_ms[fate.arrived_at_ms >= 5_000.0]).sum())
            for fate in played.fates.values()
        )
    assert lost["deferred"] > 0 == lost["eager"] == lost["tenuto"]


def test_no_reserve_is_larger_than_what_holding_saves() -> None:
    many = [prospect_of(200.0, 5.0, 0.01) for _ in range(40)]
    assert plan_reserves(Demand(many, 24), [24]) == [0]
    assert plan_reserves(Demand([], 24), [24]) == [0]


def test_what_saves_nothing_by_waiting_does_not_spare_the_reserve() -> None:
    weak, strong = plan_holds(
        Demand([prospect_of(300.0, 5.0, 0.0), prospect_of(300.0, 1.0, 9.0)], 3), [0.01] * 2, mean=0.01
    )
    assert (weak.spares_reserve, strong.spares_reserve) == (False, True)


def reserving() -> Stage:
    """Two slices, one of them kept for who cannot wait, and the other busy until 6 ms."""
    discipline = make_discipline("tenuto")
    assert isinstance(discipline, Tenuto)
    to = Stage(discipline)
    for name in ("m", "n", "o"):
        to.model(name, SLO_MS)
    for order in range(2):
        to.slice(f"s{order}", *(hosted(name, TABLE) for name in ("m", "n", "o")), order=order)
    discipline._plan_at_ms = NEVER_MS  # no plan may come in between
    for state in discipline._models.values():  # what a plan sets
        (candidate,) = state.candidates
        candidate.spares_reserve = True
        candidate.pools[0].reserve = 1
    to.arrive("m", SLO_MS)
    to.until(1.0)
    return to


def sent(to: Stage) -> list[tuple[str, str, float]]:
    return [(batch.model_id, batch.slice_id, batch.sent_at_ms) for batch in to.batches]


def test_who_could_wait_leaves_the_last_idle_slice_alone_until_another_one_is_free() -> None:
    to = reserving()
    to.arrive("n", SLO_MS)
    to.drain()
    assert sent(to) == [("m", "s0", 0.0), ("n", "s0", 6.0)]


def test_who_can_wait_no_longer_takes_the_reserve() -> None:
    to = reserving()
    to.arrive("n", SLO_MS)
    to.arrive("o", 8.0)  # a second request would no longer fit 7 ms before its deadline
    to.drain()
    model_id, slice_id, sent_at_ms = sent(to)[1]
    assert (model_id, slice_id) == ("o", "s1")
    assert sent_at_ms == pytest.approx(2.0, abs=1e-3)
    assert sent(to)[2][0] == "n"


def test_a_batch_that_waits_beside_the_reserve_still_grows() -> None:
    to = reserving()
    for _ in range(3):
        to.arrive("n", SLO_MS)
    to.drain()
    assert [len(batch.seqs) for batch in to.batches] == [1, 3]


def test_a_model_that_is_removed_while_it_waits_beside_the_reserve_is_forgotten() -> None:
    to = reserving()
    to.arrive("n", SLO_MS)
    to.unmodel("n")
    to.drain()
    assert sent(to) == [("m", "s0", 0.0)]


def test_more_time_than_the_slo_is_no_reason_to_hold_longer() -> None:
    """Requests that come one by one, each with ten times its model's SLO: held for a companion, they would take eight."""
    to = Stage(make_discipline("tenuto"))
    to.model("m", 200.0)
    to.slice("s0", hosted("m", (150.0, 300.0)))
    for number in range(12):
        to.until(250.0 * number)
        to.arrive("m", 2_000.0)
    to.drain()
    assert [batch.seqs for batch in to.batches] == [[number] for number in range(1, 13)]
    assert all(batch.start_at_ms - 250.0 * number < 50.0 for number, batch in enumerate(to.batches))
