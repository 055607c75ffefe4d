"""gpulet's quantities, by hand from its definitions and data (Choi et al., USENIX ATC 2022, and the authors' code)."""

from __future__ import annotations

import pytest

from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput
from policies.placement.gpulet import quantities
from policies.placement.gpulet.quantities import inflated_rps, knee, residue, saturated, size_costs
from policies.placement.registry import placement_policy
from profiles.model import LinearProfile, TableProfile
from profiles.store import shipped_data, shipped_profile
from tests.gpulet_checker import interference_factor, overhead_ms, planned_ms

LINE = LinearProfile(1.0, 5.0)  # L(b) = b + 5, so L' = 1.1 (b + 5)


def test_the_constants_are_those_of_the_data_file() -> None:
    given = shipped_data("gpulet_2080ti")
    constants = given["scheduler_constants"]
    assert constants["latency_ratio"] == quantities.LATENCY_RATIO
    assert constants["ignored_residual_rate_rps"] == quantities.IGNORED_RPS
    assert constants["max_models_per_gpulet"] == quantities.MODELS_MAX
    assert constants["usable_mem_fraction"] == quantities.USABLE_MEMORY
    assert constants["mem_per_new_partition_context_mb"] * 2**20 == quantities.PARTITION_BYTES
    assert constants["knee_min_gain"] == quantities.KNEE_MIN_GAIN
    assert constants["residue_slo_slack"] == quantities.RESIDUE_SLACK
    assert constants["interference_retry_threshold"] == quantities.KEPT_FRACTION
    assert tuple(given["partition_sizes_pct"]) == quantities.SIZES
    assert tuple(tuple(pair) for pair in given["partition_pairs_pct"]) == quantities.PAIRS
    assert given["batch_range"] == [1, quantities.BATCH_MAX]


@pytest.mark.parametrize(
    ("rate_rps", "expected"),
    [  # quantiles of Poisson from tables: 3, 4, 67, 124
        (0.5, 4),
        (1, 5),
        (50, 68),
        (100, 125),
        (550.5, 605),  # int(605.55)
        (600, 660),  # 1.1 * 600 is 660.0000000000001 in floats
        (1000, 1100),
    ],
)
def test_a_rate_is_inflated_to_the_99th_percentile_plus_one(rate_rps: float, expected: int) -> None:
    assert inflated_rps(rate_rps) == expected


def test_a_gpulet_is_saturated_by_the_largest_batch_that_fits_twice_into_the_slo() -> None:
    costs = size_costs(LINE, 100)
    assert costs is not None
    # 2 * 1.1 (b + 5) <= 40  ⇔  b <= 13.18; 13 of them take 1.1 * 18 = 19.8 ms: 656.57 a second
    found = saturated(costs, 40)
    assert (found.batch, found.is_in_time) == (13, True)
    assert found.exec_ms == pytest.approx(19.8)
    assert found.rps == pytest.approx(13_000 / 19.8)
    # 2 * 1.1 * 6 = 13.2 > 13: batch 1 is taken to compare sizes, and not in time
    assert saturated(costs, 13)[0] == 1
    assert not saturated(costs, 13).is_in_time


def test_batch_32_can_be_chosen() -> None:
    costs = size_costs(LINE, 100)
    assert costs is not None
    assert saturated(costs, 1000).batch == 32


def test_a_residue_takes_the_largest_batch_with_its_duty_cycle_in_the_slo() -> None:
    costs = size_costs(LINE, 100)
    assert costs is not None
    # 1.1 (b + 5) + 10 b <= 100  ⇔  11.1 b <= 94.5  ⇔  b <= 8.5
    found = residue(costs, 100, 100)
    assert found is not None
    assert (found.batch, found.duty_ms) == (8, 80)
    assert found.exec_ms == pytest.approx(1.1 * 13)


def test_a_low_rate_gets_a_shortened_duty_cycle() -> None:
    costs = size_costs(LINE, 100)
    assert costs is not None
    # one request each 200 ms, the SLO is 100: batch 1 at 100 - 1.1 * 6 = 93.4 ms
    found = residue(costs, 100, 5)
    assert found is not None
    assert found.batch == 1
    assert found.duty_ms == pytest.approx(93.4)


def test_a_rate_over_the_capacity_is_no_residue() -> None:
    costs = size_costs(LINE, 100)
    assert costs is not None
    # 1.1 (b + 5) <= b never holds: 1000 a second cannot be kept up with
    assert residue(costs, 100, 1000) is None


def test_the_knee_is_the_step_that_gains_most_per_percent() -> None:
    # gains per percent: 100/20 = 5, 60/10 = 6, 40/10 = 4, 10/20 = 0.5
    assert knee({20: 100, 40: 200, 50: 260, 60: 300, 80: 310, 100: 900}) == 50
    # the step to 50 gains 0.4 % a percent but less than 5 % in all, so it is not looked at
    assert knee({20: 1000, 40: 1060, 50: 1100, 60: 1101, 80: 1102, 100: 1103}) == 40
    assert knee({20: 100, 40: 101, 50: 102, 60: 103, 80: 104, 100: 105}) == 20
    # from 80 to 100 nothing is looked at
    assert knee({20: 100, 40: 110, 50: 116, 60: 122, 80: 160, 100: 900}) == 80


def test_the_shipped_example_carries_50_requests_a_second_inflated() -> None:
    example = shipped_data("gpulet_2080ti")["shipped_example_schedule"]["rows"]
    for row in (example[0], example[2]):
        assert 1000 * row["batch"] / row["duty_cycle_ms"] == pytest.approx(inflated_rps(50), rel=1e-5)
    # With L = 5 b + 5 and the SLO of vgg16, 142 ms: 6 + 88.24 + 38.5 fits, 7 takes 102.94 + 44 = 146.94.
    costs = size_costs(LinearProfile(5, 5), 100)
    assert costs is not None
    found = residue(costs, 142, inflated_rps(50))
    assert found is not None
    assert found.batch == example[0]["batch"]
    assert found.duty_ms == pytest.approx(example[0]["duty_cycle_ms"], rel=1e-5)


def test_interference_factors_by_hand() -> None:
    # googlenet, batch 4, on 60 %:  L2 0.16847077 * 0.6 = 0.10108246, memory 0.32603619 * 0.6 = 0.19562171
    # bert, batch 1, on 40 %:       L2 0.09237958 * 0.4 = 0.03695183, memory 0.29028426 * 0.4 = 0.11611371
    # googlenet's factor is the constant 0.89536939 plus 0.11290839 * 0.10108246 plus 0.71595987 * 0.03695183
    # plus 0.35486592 * 0.19562171 plus 0.08820383 * 0.11611371: 0.01141306, 0.02645603, 0.06941948 and
    # 0.01024167 over the constant make 1.01289963. bert's: 0.00417217, 0.07237099, 0.04120480 and 0.01725458
    # over it make 1.03037193.
    googlenet = size_costs(shipped_profile("gpulet-2080ti/googlenet"), 60)
    bert = size_costs(shipped_profile("gpulet-2080ti/bert"), 40)
    assert googlenet is not None
    assert bert is not None
    assert googlenet.own[3] + bert.pressure(1) == pytest.approx(1.01289963, abs=1e-7)
    assert bert.own[0] + googlenet.pressure(4) == pytest.approx(1.03037193, abs=1e-7)
    assert interference_factor(("googlenet", 4, 60), ("bert", 1, 40)) == pytest.approx(1.01289963, abs=1e-7)


def test_the_planned_time_has_ratio_overhead_and_interference() -> None:
    # googlenet, batch 1, 20 %: L = 13.7677, overhead 1.9 * 0.242238: 1.1 * (13.7677 + 0.4602522) = 15.65074742
    googlenet = size_costs(shipped_profile("gpulet-2080ti/googlenet"), 20)
    assert googlenet is not None
    assert googlenet.exec_ms(1) == pytest.approx(15.65074742)
    # a factor of 1.1 adds 1.1 * 13.7677 * 0.1
    assert googlenet.exec_ms(1, 1.1 - googlenet.own[0]) == pytest.approx(15.65074742 + 1.514447)
    # lenet's overhead is the table's 0.00285466 ms and 0.4 ms more
    lenet = size_costs(shipped_profile("gpulet-2080ti/lenet1"), 20)
    assert lenet is not None
    assert lenet.exec_ms(1) == pytest.approx(1.1 * 2.60885466)
    assert overhead_ms("ssd-mobilenetv1", 1) == pytest.approx(2.5 * 0.416397)
    assert planned_ms("bert", 1, 40, []) == pytest.approx(1.1 * 4.2095)


def test_other_profiles_have_no_batching_overhead() -> None:
    costs = size_costs(LINE, 100)
    assert costs is not None
    assert costs.exec_ms(3) == pytest.approx(1.1 * 8)


def test_algorithm_1_on_a_model_that_fills_one_gpulet_and_a_rest() -> None:
    # L(b, p) = (b + 5) k(p), k = 4, 2, 1.9, 1.8, 1.7, 1.6 at 20, 40, 50, 60, 80, 100 %; SLO 88 ms, 2 L' <= 88:
    # (b + 5) k <= 40:  b = 5, 15, 16, 17, 18, 20
    # saturated, b / (1.1 (b + 5) k): 113.6, 340.9, 364.5, 390.3, 418.5, 454.5 a second
    # gain per percent: 11.4 to 40 %, 2.4, 2.6, 1.4: p_eff is 40 %
    slow = {20: 4.0, 40: 2.0, 50: 1.9, 60: 1.8, 80: 1.7, 100: 1.6}
    profile = TableProfile({size: {1: 6 * k, 32: 37 * k} for size, k in slow.items()})
    # 380 a second inflate to 427: one saturated gpulet of 340.9, batch 15 each 2.2 * 20 = 44 ms, leaves
    # R = 86.09, one request each 11.615 ms. On 40 %: 2.2 (b + 5) + 11.615 b <= 88 gives b = 5 (22 + 58.08), which
    # does not fit on 20 % (44 + 58.08 > 88), so both wishes are for 40 %. The first cuts the GPU into 40 and 60;
    # the second finds the 60 %, where 1.98 (b + 5) + 11.615 b <= 88 gives b = 5 too: 19.8 + 58.08.
    slots = [GpuSlot(0, "x", 16 * 2**30, NodeId("a"), 0)]
    placed = placement_policy("gpulet").place(
        [PlacedModelInput(ModelId("m"), 88.0, 380.0)], slots, {(ModelId("m"), "x"): profile}
    )
    assert inflated_rps(380) == 427
    assert [(s.share_percent, s.models[0].batch) for s in placed.slices] == [(40, 15), (60, 5)]
    saturated_part, rest = (s.models[0] for s in placed.slices)
    assert saturated_part.duty_ms == pytest.approx(44)
    assert rest.duty_ms == pytest.approx(5000 / (427 - 15_000 / 44))
    assert rest.predicted_ms == pytest.approx(19.8)
    assert placed.unplaced == ()
    assert placed.expected_goodput_rps == pytest.approx(380)
