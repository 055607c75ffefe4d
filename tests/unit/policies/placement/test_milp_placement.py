"""The MILP policies' options, their limits, and GPUs of several kinds."""

from __future__ import annotations

import random
import sys
from typing import Any

import pulp
import pytest
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import ModelId
from policies.placement.common.base import Placement
from policies.placement.common.demands import ResourceDemand
from policies.placement.common.gpu_kinds import GpuClass
from policies.placement.milp import Milp
from policies.placement.milp.packing import feasible_patterns
from policies.placement.registry import placement_policy
from tests.requirement_profiles import Case, Cell, case, check_sound, profile, random_case, v100s


def place(of: Case, policy: str = "wsm-milp", **options: Any) -> Placement:
    options = {"time_limit_s": 120, **options}  # a busy machine must not change the plan
    placement = placement_policy(policy, options).place(of.models, of.gpus, of.profiles)
    check_sound(placement, of)
    return placement


def hosted(placement: Placement) -> list[tuple[int, str, int | None]]:
    return [(p.gpu, str(m.model_id), m.batch) for p in placement.slices for m in p.models]


TWO = {4: Cell(4, 40), 64: Cell(40, 90)}  # 1000 and 1600 requests per second


def test_of_equal_goodputs_the_second_stage_takes_the_least_run_time() -> None:
    of = case({"a": (50, 800, TWO)}, 2)
    placement = place(of)
    assert hosted(placement) == [(0, "a", 4)]
    assert placement.decisions[0].chosen.startswith("the proven optimum (highs), of equal ones")
    without = place(of, second_stage=False)
    assert without.expected_goodput_rps == pytest.approx(800)
    assert without.decisions[0].chosen == "a proven optimum (highs)"


def test_the_second_stage_shares_gpus_where_that_takes_no_longer() -> None:
    of = case({"a": (50, 800, {4: Cell(4, 40)}), "b": (50, 800, {4: Cell(4, 40)})}, 3)
    assert hosted(place(of)) == [(0, "a", 4), (0, "b", 4)]


def test_no_mps_share_and_the_load_split_evenly_over_the_replicas() -> None:
    placement = place(case({"a": (50, 1500, {4: Cell(4, 60)})}, 2))
    assert [planned.share_percent for planned in placement.slices] == [None, None]
    assert [planned.models[0].rate_rps for planned in placement.slices] == [pytest.approx(750)] * 2
    assert placement.unplaced == ()


def test_all_replicas_of_a_model_have_one_batch_size() -> None:
    # 64 beside 4 would serve 1400 on two GPUs: 1600/s is not needed, 1000 + 400. One size: twice 4.
    placement = place(case({"a": (50, 1400, TWO)}, 2))
    assert [batch for _, _, batch in hosted(placement)] in ([4, 4], [64])
    assert placement.expected_goodput_rps == pytest.approx(1400)


def test_at_most_so_many_replicas() -> None:
    of = case({"a": (50, 3000, {4: Cell(4, 60)})}, 4)
    assert len(place(of).slices) == 3
    limited = place(of, max_replicas=2)
    assert len(limited.slices) == 2
    assert limited.unplaced[0].rate_rps == pytest.approx(1000)
    reason = limited.unplaced[0].reason
    assert "its 2 replicas of batch 4 carry 2000.0" in reason
    assert "it may have no more" in reason
    contended = place(case({"a": (50, 2000, {4: Cell(4, 90)}), "b": (50, 2000, {4: Cell(2, 90)})}, 2))
    assert [one.reason.rpartition("; ")[2] for one in contended.unplaced] == [
        "other models bring more goodput than another one"
    ]


def test_a_model_that_is_alone_may_have_no_more_than_one_on_each_gpu_that_is_fast_enough() -> None:
    of = case({"a": (50, 5000, {4: Cell(4, 60)})}, (*v100s(1), *v100s(1, "t4", first=1)))
    (short,) = place(
        replace(of, profiles={**of.profiles, (ModelId("a"), "t4"): profile({4: Cell(400, 60)})})
    ).unplaced
    assert "it may have no more" in short.reason


def test_the_build_filter_leaves_out_batches_that_take_too_long_to_fill() -> None:
    # 1200/s fill 120 in 100 ms: 64 once, 4 up to 30 times. One of 64 serves all, so do two of 4; in 50 ms only 60
    # come, and 64 is out.
    of = case({"a": (500, 1200, {4: Cell(4, 90), 64: Cell(5, 90)})}, 2)
    assert hosted(place(of, build_filter=True)) == [(0, "a", 64)]
    assert hosted(place(of, build_filter=True, max_wait_ms=50)) == [(0, "a", 4), (1, "a", 4)]
    rare = place(case({"a": (500, 10, {4: Cell(4, 90)})}), build_filter=True)
    assert "full within 100 ms" in rare.unplaced[0].reason
    silent = place(case({"a": (500, 1 / 30, {1: Cell(4, 90), 4: Cell(4, 90)})}, 2), build_filter=True)
    assert hosted(silent) == [(0, "a", 1)]


def test_the_build_filter_does_not_bound_replicas_with_batches_of_one() -> None:
    """12/s are 1.2 in 100 ms, and one replica carries 6.7: each request fills its batch at once, whichever it goes to."""
    placement = place(case({"a": (400, 12, {1: Cell(150, 90), 4: Cell(390, 90)})}, 2), build_filter=True)
    assert hosted(placement) == [(0, "a", 1), (1, "a", 1)]
    assert placement.unplaced == ()


def test_the_decisions_show_each_models_batch_beside_the_others() -> None:
    decisions = place(case({"a": (50, 800, TWO)})).decisions
    assert decisions[0].metrics == {"expected_goodput_rps": pytest.approx(800), "gap_rps": 0}
    assert (decisions[1].subject, decisions[1].chosen) == ("a", "1 of batch 4")
    assert decisions[1].metrics["creq_percent"] == 40
    assert [rejected.option for rejected in decisions[1].rejected] == ["batch 64"]


def test_gpus_of_two_kinds_share_one_program_and_one_batch_size() -> None:
    # The T4 runs 8 within the SLO, the V100 both; one size for both GPUs is 8.
    slots = (*v100s(1), *v100s(1, "t4", first=1))
    of = case({"a": (50, 5000, {4: Cell(4, 60), 8: Cell(6, 60)})}, slots)
    known = dict(of.profiles)
    known[(ModelId("a"), "t4")] = case({"a": (50, 1, {8: Cell(20, 60)})}).profiles[(ModelId("a"), "v100")]
    placement = place(replace(of, profiles=known))
    assert hosted(placement) == [(0, "a", 8), (1, "a", 8)]
    assert placement.expected_goodput_rps == pytest.approx(8000 / 6 + 400)


def test_a_model_profiled_for_one_type_only_stays_there() -> None:
    slots = (*v100s(1), *v100s(1, "t4", first=1))
    of = case({"a": (50, 5000, {4: Cell(4, 60)})}, slots)
    known = {key: value for key, value in of.profiles.items() if key[1] == "v100"}
    assert hosted(place(replace(of, profiles=known))) == [(0, "a", 4)]


def test_patterns_are_every_set_that_fits_and_stop_at_the_limit() -> None:
    half, most = ResourceDemand(4, 1, 50_000_000, 0), ResourceDemand(8, 1, 60_000_000, 0)
    offers = {0: (half, most), 1: (half,)}
    assert feasible_patterns(offers, 10) == [((0, 0),), ((0, 0), (1, 0)), ((0, 1),), ((1, 0),)]
    assert feasible_patterns(offers, 3) is None
    assert GpuClass(v100s(2)).slot.index == 0


# ---------------------------------------------------------------- solvers


def test_without_pulp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulp", None)  # as if the extra were not installed
    with pytest.raises(ConfigError, match="extra `plan`"):
        place(case({"a": (50, 800, TWO)}))


def test_cbc_is_the_fallback_and_reaches_the_same_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    of = random_case(random.Random("cbc"), models=3, gpus=3, batches=(4, 8))
    by_highs = place(of)
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _: False)
    by_cbc = place(of)
    assert "(cbc)" in by_cbc.decisions[0].chosen
    assert by_cbc.expected_goodput_rps == pytest.approx(by_highs.expected_goodput_rps, abs=1e-3)


@pytest.mark.parametrize("is_highs", [True, False])
def test_stopped_by_the_clock_the_plan_is_sound_and_says_how_far_it_may_be_off(
    monkeypatch: pytest.MonkeyPatch, is_highs: bool
) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _: is_highs)
    of = random_case(random.Random("long"), models=12, gpus=12, batches=(4, 8, 16, 32))
    placement = place(of, time_limit_s=0.05)
    assert placement.expected_goodput_rps is not None
    if not placement.decisions:
        assert placement.slices == ()
        assert "no placement within 0.05 s" in placement.unplaced[0].reason
        return
    overall = placement.decisions[0]
    assert overall.metrics["gap_rps"] >= 0
    assert "found in 0.05 s" in overall.chosen or "proven" in overall.chosen


def test_within_nodes_no_clock_has_a_say() -> None:
    of = random_case(random.Random(7), 6, 5, (1, 4, 16, 64))
    policy = placement_policy("wsm-milp", {"time_limit_s": 1e-9})
    assert isinstance(policy, Milp)
    assert policy.within_nodes(1000).place(of.models, of.gpus, of.profiles).slices == place(of).slices
