"""Usher's parts and options, its answers to what cannot be, and GPUs of several types."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import ModelId
from policies.placement.common.base import PlacedModelInput, Placement
from policies.placement.registry import placement_policy
from policies.placement.usher.grouping import balanced_groups
from profiles.gpu import gpu_profile
from profiles.store import shipped_profile
from tests.requirement_profiles import Case, Cell, by_share, case, check_sound, v100s

FAST = {4: Cell(4, 30), 8: Cell(6, 40)}  # 1000 and 1333 requests per second
SLOW = {4: Cell(40, 60), 8: Cell(70, 70)}  # 100 and 114


def place(of: Case, policy: str = "usher", **options: Any) -> Placement:
    placement = placement_policy(policy, options).place(of.models, of.gpus, of.profiles)
    check_sound(placement, of)
    return placement


def hosted(placement: Placement) -> list[tuple[int, str, int | None]]:
    return [(p.gpu, str(m.model_id), m.batch) for p in placement.slices for m in p.models]


# ---------------------------------------------------------------- groups


def test_ties_of_the_matching_go_to_the_smallest_names() -> None:
    # All pairings weigh 4: names pair a with b, c with d, and then all four. A fifth is left out at first; then
    # {a, b} with it weighs 3 and {a, b} with {c, d} 4.
    names = [ModelId(name) for name in "dcba"]
    assert balanced_groups(dict.fromkeys(names, 1)) == [("a", "b", "c", "d")]
    assert balanced_groups(dict.fromkeys([*names, ModelId("e")], 1)) == [("a", "b", "e"), ("c", "d")]


def test_a_compute_heavy_model_is_paired_with_the_memory_heavy_one_that_balances_it() -> None:
    # |5 - 4| + |-8 + 9| = 2 is the least; then no union of two pairs is over four models: all in one group,
    # unless a fifth is there: |1 - 1| = 0 joins the pairs, e is left alone.
    values = {"a": 5, "b": -8, "c": -4, "d": 9, "e": 100}
    assert balanced_groups({ModelId(k): v for k, v in values.items()}) == [("a", "b", "c", "d"), ("e",)]


def test_groups_have_at_most_four_models() -> None:
    groups = balanced_groups({ModelId(f"m{i:02}"): i for i in range(11)})
    assert max(len(group) for group in groups) <= 4
    assert sum(len(group) for group in groups) == 11


def test_without_networkx_given_groups_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)  # as if the extra were not installed
    of = case({"a": (50, 500, FAST), "b": (50, 500, FAST)})
    with pytest.raises(ConfigError, match="extra `plan`"):
        place(of)
    assert place(of, groups=[["a", "b"]]).expected_goodput_rps == pytest.approx(1000)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("a", "must list the groups"),
        ([], "must list the groups"),
        (["a"], r"groups\[0\]"),
        ([[1]], "names of its models"),
        ([["a", "b", "c", "d", "e"]], "at most 4"),
        ([["a"], ["a", "b"]], "model a is listed twice"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: object, message: str) -> None:
    of = case({"a": (50, 500, FAST), "b": (50, 500, FAST)})
    with pytest.raises(ConfigError, match=message):
        place(of, groups=groups)


def test_given_groups_keep_their_order_unless_told_otherwise() -> None:
    # One GPU of compute for either: the first group gets it. b could serve 1333 of 2000, a all of its 500.
    heavy = {4: Cell(4, 60), 8: Cell(6, 70)}
    of = case({"a": (50, 500, heavy), "b": (50, 1200, heavy)})
    assert hosted(place(of, groups=[["a"], ["b"]])) == [(0, "a", 4)]
    assert hosted(place(of, groups=[["a"], ["b"]], group_order="goodput")) == [(0, "b", 8)]


# ---------------------------------------------------------------- options and shares


@pytest.mark.parametrize(("least_percent", "batches"), [(10.0, {4, 8}), (25.0, {8}), (60.0, set())])
def test_a_share_that_the_profile_does_not_know_is_no_option(least_percent: float, batches: set[int]) -> None:
    of = by_share(case({"a": (60, 5, {4: Cell(10, 20), 8: Cell(16, 40)})}), least_percent)
    plan = placement_policy("usher", {}).place(of.models, of.gpus, of.profiles)
    (known,) = of.profiles.values()
    for planned in plan.slices:
        known.exec_table(planned.share_percent)
    assert {m.batch for p in plan.slices for m in p.models} <= batches
    assert bool(plan.slices) == bool(batches)
    reasons = [one.reason for one in plan.unplaced]
    assert reasons == ([] if batches else ["its batches want smaller shares than the smallest one profiled"])


def test_a_growing_cluster_meets_all_rates_with_the_fewest_gpus() -> None:
    # Fixed takes the first configuration that serves all: batch 4 needs two GPUs of 60 %. Growing finds that a
    # single replica of batch 8 would do.
    of = case({"a": (50, 1200, {4: Cell(4, 60), 8: Cell(6, 70)})}, 3)
    assert place(of, cluster="growing").gpus_used == (0,)
    both = case({"a": (50, 500, {4: Cell(4, 60), 8: Cell(6, 40)}), "b": (50, 500, {4: Cell(4, 60)})}, 3)
    groups = [["a", "b"]]
    assert place(both, groups=groups).gpus_used == (0, 1)
    assert hosted(place(both, groups=groups, cluster="growing")) == [(0, "a", 8), (0, "b", 4)]


def test_a_growing_cluster_that_cannot_meet_all_rates_serves_what_it_can() -> None:
    of = case({"a": (100, 200, SLOW), "b": (100, 200, SLOW)}, 3)
    placement = place(of, groups=[["a", "b"]], cluster="growing")
    assert placement.expected_goodput_rps == pytest.approx(200 + 8000 / 70)
    assert len(placement.unplaced) == 1


def test_c_min_over_the_gpus_is_not_served_or_capped() -> None:
    of = case({"a": (100, 1000, SLOW)}, 2)  # 1000/114.3 -> 9 GPUs
    thesis = place(of)
    assert thesis.slices == ()
    assert "needs 9 GPUs" in thesis.unplaced[0].reason
    capped = place(of, c_min="cap")
    assert hosted(capped) == [(0, "a", 8), (1, "a", 8)]
    assert capped.unplaced[0].rate_rps == pytest.approx(1000 - 2 * 8000 / 70)
    assert "2 of its 2 replicas of batch 8" in capped.unplaced[0].reason


@pytest.mark.parametrize(
    ("policy", "share_percent"), [("usher", 87.39), ("wao-usher", 17.55), ("wsm-usher", 36.26)]
)
def test_the_metric_is_the_mps_share(policy: str, share_percent: float) -> None:
    # Table A.1, resnet50 batch 4: achieved occupancy, its weighted mean, weighted SM utilisation.
    model = PlacedModelInput(ModelId("resnet50"), slo_ms=200, rate_rps=500)
    gpus = v100s(1)
    assert gpus[0].memory_bytes == gpu_profile("v100").memory_bytes
    placement = placement_policy(policy).place(
        [model], gpus, {(model.model_id, "v100"): shipped_profile("thesis-v100/resnet50")}
    )
    (planned,) = placement.slices
    assert planned.share_percent == pytest.approx(share_percent)
    assert planned.models[0].predicted_ms == pytest.approx(6.782, abs=0.001)  # 4 / 589.78 s
    assert planned.models[0].rate_rps == 500


def test_the_decision_shows_the_group_its_metrics_and_the_next_best() -> None:
    (decision,) = place(case({"a": (50, 1200, FAST)}, 2)).decisions
    assert decision.subject == "group a on v100"
    assert decision.chosen == "a: 1 of batch 8"
    assert decision.metrics["a_creq_percent"] == 40
    assert decision.rejected[0].option == "a: 2 of batch 4"
    assert decision.rejected[0].metrics["expected_goodput_rps"] == pytest.approx(1200)
    assert {rejected.option: rejected.reason for rejected in decision.rejected}[
        "a: 1 of batch 4"
    ] == "it serves less"


# ---------------------------------------------------------------- what cannot be


def test_a_batch_whose_metric_is_unknown_is_left_out() -> None:
    of = case({"a": (50, 900, {4: Cell(4, None), 8: Cell(6, 40), 16: Cell(9, 50, None)})})
    assert hosted(place(of)) == [(0, "a", 8)]


def test_given_memory_counts_for_every_batch_and_can_be_too_much() -> None:
    of = case({"a": (50, 900, {4: Cell(4, 40, None)}), "b": (50, 900, {4: Cell(4, 40, None)})})
    models = [replace(model, memory_bytes=9 * 2**30) for model in of.models]
    placement = placement_policy("usher").place(models, of.gpus, of.profiles)
    assert len(placement.slices) == 1  # 2 · 9 GB are over 16 GB
    (missing,) = placement.unplaced
    assert "none of its" in missing.reason


def test_a_model_that_is_only_profiled_outside_ushers_batch_sizes_is_unplaced() -> None:
    placement = place(case({"a": (50, 10, {1: Cell(2, 20), 2: Cell(3, 30)})}))
    assert "4 to 128" in placement.unplaced[0].reason


# ---------------------------------------------------------------- several types


def test_each_model_goes_to_the_type_where_its_gpus_cost_least() -> None:
    # a needs one V100 (3.00) or two T4s (2 · 1.00); b fits neither T4's run time.
    slots = (*v100s(2, price=3.0), *v100s(3, "t4", first=2, price=1.0))
    of = case({"a": (50, 1200, FAST), "b": (50, 500, FAST)}, slots)
    known = dict(of.profiles)
    known[(ModelId("a"), "t4")] = case({"a": (50, 1, {4: Cell(5, 30), 8: Cell(8, 40)})}).profiles[
        (ModelId("a"), "v100")
    ]
    known[(ModelId("b"), "t4")] = case({"b": (50, 1, {4: Cell(60, 90)})}).profiles[(ModelId("b"), "v100")]
    of = replace(of, profiles=known)
    placement = place(of)
    assert {gpu: model for gpu, model, _ in hosted(placement)} == {0: "b", 2: "a", 3: "a"}
    (chosen, *_) = placement.decisions
    assert (chosen.subject, chosen.chosen, chosen.metrics) == ("GPU type of a", "t4", {"price_per_hour": 2.0})
