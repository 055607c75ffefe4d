"""Tenuto's placement on small cases, worked out by hand with the law `sm` of ADR 0040.

Slices without a limit, W the SM utilisation as a fraction: beside neighbours with Σ W a batch takes
l · max(1, W + Σ W, 1 + W · Σ W).
"""

from __future__ import annotations

from typing import Any

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId
from policies.placement.common.base import PlacedModelInput, Placement, PlannedModel, PlannedSlice
from policies.placement.common.conditions import ConditionedPolicy, Conditions
from policies.placement.common.gpu_kinds import gpu_classes
from policies.placement.registry import placement_policy
from policies.placement.tenuto import exact
from policies.placement.tenuto.exact import exact_cluster
from policies.placement.tenuto.forecast import forecast_of
from policies.placement.tenuto.goodput import GoodputModel
from policies.placement.tenuto.task import task_of
from policies.solver import Solved, prove
from profiles.interference import interference_named
from profiles.model import LinearProfile
from profiles.store import shipped_profile
from tests.requirement_profiles import Case, Cell, by_share, case, v100s


def conditions(of: Case, strength: float = 1.0, **rest: Any) -> Conditions:
    profiles = {model_id: profile for (model_id, _), profile in of.profiles.items()}
    return Conditions({"v100": interference_named("sm", profiles, "v100", {"strength": strength})}, **rest)


def place(of: Case, under: Conditions | None = None, **options: Any) -> Placement:
    policy = placement_policy("tenuto", options)
    assert isinstance(policy, ConditionedPolicy)
    return policy.under(conditions(of) if under is None else under).place(of.models, of.gpus, of.profiles)


def hosted(placement: Placement) -> list[tuple[int, str, int | None]]:
    return [(p.gpu, str(m.model_id), m.batch) for p in placement.slices for m in p.models]


HALF = {8: Cell(10, 40)}  # 800 requests per second alone, with 40 % of the SMs


def test_two_slices_side_by_side_carry_what_one_cannot() -> None:
    # One carries 800. Two with both busy for u of the time: f = 1 + 0.4 · 0.4 u, u = 1200 f / 1600, so
    # u = 0.75 / (1 - 0.12) = 0.852 and f = 1.136: 11.36 ms for a batch, and time to spare.
    placement = place(case({"a": (100, 1200, HALF)}), slices_max=2)
    assert hosted(placement) == [(0, "a", 8), (0, "a", 8)]
    assert [p.share_percent for p in placement.slices] == [None, None]
    first = placement.slices[0].models[0]
    assert first.predicted_ms == pytest.approx(11.36, rel=0.01)
    assert first.batch_max == 8
    assert placement.expected_goodput_rps == pytest.approx(1200)
    assert placement.unplaced == ()


def test_rivals_that_want_shares_nobody_measured_are_no_reason_to_plan_nothing() -> None:
    of = by_share(case({"a": (100, 500, HALF), "b": (100, 500, HALF)}), 50.0)
    placement = place(of)
    assert {model_id for _, model_id, _ in hosted(placement)} == {"a", "b"}
    assert {p.share_percent for p in placement.slices} == {None}


def test_what_the_slices_cannot_carry_is_unplaced() -> None:
    # Both never idle: 2 · 800 / 1.16 = 1379, of which 96 % are planned with: 1324.
    placement = place(case({"a": (100, 3000, HALF)}), slices_max=2)
    assert placement.expected_goodput_rps == pytest.approx(1324, abs=1)
    (left,) = placement.unplaced
    assert left.rate_rps == pytest.approx(3000 - 1324, abs=1)
    assert left.reason == "its slices carry no more within its SLO, beside their neighbours"


def test_a_stronger_interference_leaves_less() -> None:
    # 1.16 becomes 1.08 and 1.24: 2 · 800 / 1.08 · 0.96 = 1422, and 1239.
    of = case({"a": (100, 3000, HALF)})
    for strength, rps in ((0.5, 1422), (1.5, 1239)):
        placement = place(of, conditions(of, strength), slices_max=2)
        assert placement.expected_goodput_rps == pytest.approx(rps, abs=1)


def test_a_batch_of_which_the_rate_fills_little_in_time_is_not_planned_under_fixed_batches() -> None:
    # At 50 requests per second a batch of 64 takes 1280 ms to form, one of 4 takes 80.
    of = case({"a": (200, 50, {4: Cell(20, 30), 64: Cell(25, 40)})})
    placement = place(of, conditions(of, has_fixed_batches=True))
    assert placement.expected_goodput_rps == pytest.approx(50)
    assert hosted(placement) == [(0, "a", 6)]  # 1 + 50 · 0.1 s


@pytest.mark.parametrize("interference", [True, False])
def test_a_batch_of_one_waits_for_no_other_request(interference: bool) -> None:
    # One request in 50 ms keeps the SLO of 25: alone it takes 10 of them. A batch of two would wait for the next.
    of = case({"a": (25, 20, {1: Cell(10, 40), 2: Cell(11, 40)})}, 2)
    under = conditions(of, has_fixed_batches=True) if interference else Conditions(has_fixed_batches=True)
    placement = place(of, under)
    assert {batch for _, _, batch in hosted(placement)} == {1}
    assert placement.expected_goodput_rps == pytest.approx(20)
    assert placement.unplaced == ()


def test_the_way_to_the_device_and_back_counts() -> None:
    # 10 ms alone on its only slice: staggered it needs 20 of the 21 ms, and with 2 · 1 + 1 ms of way 23.
    of = case({"a": (21, 100, HALF)})
    assert place(of, slices_max=1).expected_goodput_rps == pytest.approx(100)
    late = conditions(of, control_ms=1, result_ms=1)
    assert place(of, late, slices_max=1).expected_goodput_rps == 0


def test_of_two_models_the_worse_served_one_gains_where_it_costs_little() -> None:
    # Alike but for the names, and one GPU that carries half of both: goodput alone may starve either.
    whole = {8: Cell(10, 100)}
    placement = place(case({"a": (100, 800, whole), "b": (100, 800, whole)}), fairness_cost=0.05)
    served = {u.model_id: 1 - (u.rate_rps or 0) / 800 for u in placement.unplaced}
    assert min(served[ModelId("a")], served[ModelId("b")]) > 0.4


def test_a_floor_is_kept_whatever_goodput_it_costs() -> None:
    # Alone a carries 800 and b 200, and both want all SMs: each request of b costs four of a. Two slices of a
    # beside one of b: 2/3 of 800 and 1/3 of 200.
    of = case({"a": (400, 800, {8: Cell(10, 100)}), "b": (400, 200, {8: Cell(40, 100)})})

    def served(placement: Placement) -> dict[str, float]:
        left = {str(one.model_id): one.rate_rps or 0.0 for one in placement.unplaced}
        return {"a": 1 - left.get("a", 0.0) / 800, "b": 1 - left.get("b", 0.0) / 200}

    free, fair = place(of), place(of, floor=0.3)
    assert min(served(free).values()) < 0.3 <= min(served(fair).values())
    assert (free.expected_goodput_rps or 0) > (fair.expected_goodput_rps or 0)


def test_why_names_the_plans_that_were_not_taken() -> None:
    decision = place(case({"a": (100, 1200, HALF)})).decisions[0]
    assert decision.chosen.startswith("shared in space")
    assert {"shared in time", "exclusive", "wsm-milp"} <= {one.option for one in decision.rejected}


@pytest.mark.parametrize("rate_rps", [None, 1200.0])
def test_where_nobody_knows_what_sharing_in_space_costs_it_is_symphony(rate_rps: float | None) -> None:
    of = case({"a": (100, 1200, HALF), "b": (100, 500, HALF)}, 2)
    models = [type(m)(m.model_id, m.slo_ms, rate_rps) for m in of.models]
    symphony = placement_policy("symphony").place(models, of.gpus, of.profiles)
    assert placement_policy("tenuto").place(models, of.gpus, of.profiles) == symphony


def test_an_unknown_rate_is_symphony_even_where_interference_is_known() -> None:
    of = case({"a": (100, 1200, HALF)}, 2)
    models = [type(m)(m.model_id, m.slo_ms) for m in of.models]
    policy = placement_policy("tenuto")
    assert isinstance(policy, ConditionedPolicy)
    placed = policy.under(conditions(of)).place(models, of.gpus, of.profiles)
    assert placed == placement_policy("symphony").place(models, of.gpus, of.profiles)


def test_without_known_interference_fixed_batches_still_have_sizes() -> None:
    # l(b) = b + 5 on two GPUs, 300 requests per second: b = 1 keeps 0.9 of each busy, b = 2 half, so 2 it is.
    of = case({"a": (100, 300, HALF)}, 2)
    profiles = {key: LinearProfile(1, 5, 64) for key in of.profiles}
    policy = placement_policy("tenuto")
    assert isinstance(policy, ConditionedPolicy)
    placed = policy.under(Conditions(has_fixed_batches=True)).place(of.models, of.gpus, profiles)
    assert hosted(placed) == [(0, "a", 2), (1, "a", 2)]


def test_a_model_with_a_rate_of_zero_is_left_out_with_the_reason() -> None:
    placed = place(case({"a": (100, 500, HALF), "idle": (100, 0, HALF)}))
    assert {model for _, model, _ in hosted(placed)} == {"a"}
    assert [(str(u.model_id), u.reason) for u in placed.unplaced] == [
        ("idle", "its rate_rps is 0: there is nothing to plan for")
    ]


def test_models_that_no_gpu_can_serve_are_unplaced_and_the_others_placed() -> None:
    of = case({"a": (100, 500, HALF), "late": (5, 500, HALF), "unknown": (100, 500, HALF)})
    profiles = {key: p for key, p in of.profiles.items() if key[0] != "unknown"}
    policy = placement_policy("tenuto")
    assert isinstance(policy, ConditionedPolicy)
    placed = policy.under(conditions(of)).place(of.models, of.gpus, profiles)
    assert {model for _, model, _ in hosted(placed)} == {"a"}
    reasons = {str(u.model_id): u.reason for u in placed.unplaced}
    assert reasons["late"] == "its SLO of 5 ms is below the 10 ms of a single request"
    assert reasons["unknown"] == "it has no profile for GPU type v100"


def test_a_model_that_is_forecast_late_takes_idle_gpus_and_nothing_from_others() -> None:
    # Staggered, a batch that takes 10 ms alone needs 15 on two GPUs. On the GPU of the other its requests would run all the same.
    late = (14, 100, HALF)
    alone = place(case({"late": late}, 2))
    assert [(gpu, model) for gpu, model, _ in hosted(alone)] == [(0, "late"), (1, "late")]
    assert alone.unplaced[0].reason == "its slices carry no more within its SLO, beside their neighbours"
    beside = place(case({"good": (100, 500, HALF), "late": late}))
    assert {model for _, model, _ in hosted(beside)} == {"good"}
    assert beside.unplaced[0].reason == "other models bring more goodput on these GPUs"


def test_no_gpu_is_an_error() -> None:
    of = case({"a": (100, 500, HALF)})
    with pytest.raises(ConfigError, match="there is no GPU to place on"):
        placement_policy("tenuto").place(of.models, (), of.profiles)


def test_a_forecast_counts_what_others_plans_do_not() -> None:
    # wsm-milp puts two of 40 % on one GPU and expects 800 each; beside each other both take 11.6 ms: 690, less 4 %.
    of = case({"a": (100, 800, HALF), "b": (100, 800, HALF)})
    plan = placement_policy("wsm-milp", {"time_limit_s": 120}).place(of.models, of.gpus, of.profiles)
    assert plan.expected_goodput_rps == pytest.approx(1600)
    served = forecast_of(plan, of.models, of.gpus, of.profiles, conditions(of))
    assert served == pytest.approx({"a": 662, "b": 662}, abs=1)


def test_a_planned_batch_that_the_rate_does_not_fill_waits_for_its_end() -> None:
    # At 5 r/s MAX_WAIT (100 ms) closes a batch of 8 at one request, 110 ms after it came.
    of = case({"a": (60, 5, {1: Cell(10, 40), 8: Cell(20, 40)})})
    under = Conditions(has_fixed_batches=True)
    for batch, served_rps in ((8, 0.0), (1, 5.0)):
        plan = Placement((PlannedSlice(0, None, (PlannedModel(ModelId("a"), batch),)),))
        assert forecast_of(plan, of.models, of.gpus, of.profiles, under) == {"a": served_rps}


# Eight models on 16 V100s at rates beyond what they carry: one of few such tasks that the root of the search tree does
# not prove, on some processors: sums are rounded differently on others, and the search then goes another way.
HARD = {
    "bloom_560": (300, 114),
    "densenet121": (100, 919),
    "alexnet": (200, 23914),
    "resnext50_32x4d": (300, 2311),
    "mobilenet_v2": (100, 5312),
    "xlnet": (300, 62),
    "gpt2": (200, 498),
    "t5": (500, 489),
}


@pytest.mark.parametrize("is_proven", [True, False])
def test_a_cluster_is_exact_only_where_it_is_proven(is_proven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def prove_or_not(pulp: Any, program: Any, nodes_max: int, gap: float) -> Solved | None:
        given.append(nodes_max)
        return prove(pulp, program, nodes_max, gap) if is_proven else None

    monkeypatch.setattr(exact, "prove", prove_or_not)
    profiles = {(ModelId(name), "v100"): shipped_profile(f"thesis-v100/{name}") for name in HARD}
    models = tuple(PlacedModelInput(ModelId(name), slo_ms, rps) for name, (slo_ms, rps) in HARD.items())
    of = Case(models, v100s(16), profiles)
    task = task_of(models, gpu_classes(of.gpus), profiles, conditions(of), slices_max=8)
    assert task is not None
    found = exact_cluster(task, GoodputModel(task))
    assert len(given) == 1
    assert 0 < given[0] <= exact.NODES_MAX
    if not is_proven:
        assert found is None  # the search then starts from nothing alone
    elif found is not None:  # whether the nodes suffice is the processor's to say
        assert sum(found[0].values()) == 16
