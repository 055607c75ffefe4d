"""What Symphony and Usher print, by hand from their texts, beside what `tenuto reproduce` says they print."""

from __future__ import annotations

import numpy as np
import pytest

from policies.batching.base import Delay
from profiles.store import shipped_data, shipped_profile
from roles.lab import scheduler_only
from roles.lab.reproduce import gpulet, gpulet_violations, usher
from roles.lab.reproduce.symphony import batch_sizes, changing, deferral, systems
from roles.lab.reproduce.symphony.workloads import SYSTEMS, Effort, copies, model_of, table
from roles.lab.scheduler_only import Case, Model
from roles.workload.outcomes import Window


def test_table_2s_bounds_are_the_papers() -> None:
    """By hand: (25/2 - 5.072)/1.053 = 7.05; 8·7/(7·1.053 + 5.072) = 4.5005 a ms. 25/1.125 = 22.2; 128/21.92 = 5.839.
    (35 - 18.368)/5.09 = 3.27; 24/33.638 = 0.7135. 70/1.125 = 62.2, less 18.368, over 5.09: 8.6; 64/59.088 = 1.0831.
    """
    resnet, inception = (
        model_of("table2", name, slo) for name, slo in (("ResNet50", 25.0), ("InceptionResNetV2", 70.0))
    )
    assert batch_sizes.no_coordination(resnet, 8) == pytest.approx((7, 4500.5), abs=0.1)
    assert batch_sizes.staggered(resnet, 8) == pytest.approx((16, 5839.4), abs=0.1)
    assert batch_sizes.no_coordination(inception, 8) == pytest.approx((3, 713.5), abs=0.1)
    assert batch_sizes.staggered(inception, 8) == pytest.approx((8, 1083.1), abs=0.1)


def test_what_table_2_states_is_what_the_shipped_data_say() -> None:
    for row in shipped_data("symphony_profiles")["table2"]["models"]:
        stated = batch_sizes.STATED[row["name"]]
        assert stated.slo_ms == row["slo_ms"]
        assert stated.no_coordination == tuple(row["no_coordination"].values())
        assert stated.staggered == tuple(row["staggered"].values())
        assert {name.lower(): rps for name, rps in stated.goodput_rps.items()} == row["measured_goodput_rps"]


def test_figure_5_is_the_texts() -> None:
    rows = {row.what: row for row in deferral.figure_5().rows}
    assert {what: row.ours for what, row in rows.items() if row.paper is not None} == {
        what: row.paper for what, row in rows.items() if row.paper is not None
    }
    assert rows["5a: the first that are dropped"].ours == "R35, R37, R38"
    assert rows["5a: size of the batch at 23.25, when seven wait"].ours == 2


def test_table_1_spans_7560_workloads_of_one_profile_and_42_mixed_ones() -> None:
    """6 models · 6 numbers · 7 ratios · 5 SLOs · 6 shapes = 7560; 7 ratios · 6 shapes = 42."""
    every = deferral.synthetic_workloads()
    assert sum(one.model is not None for one in every) == 7560
    assert sum(one.model is None for one in every) == 42
    drawn = deferral.drawn_workloads()
    assert drawn == deferral.drawn_workloads()
    assert len(set(drawn)) == len(drawn) == len(deferral.NAMED) + deferral.SAMPLE_SIZE
    assert set(drawn) <= set(every)


def test_the_zoos_are_the_appendix() -> None:
    ti, a100 = table("gtx1080ti"), table("a100")
    assert (len(ti), len(a100)) == (35, 37)
    # Table 3: VGG16 2.734, 5.786, 33 ms: 2.116, the weakest of the strong. EfficientNetB2: 1.548.
    is_strong = systems.PARTS["strong"]
    weakest = min(
        (one for one in ti if is_strong(one.beta_ms / one.alpha_ms)),
        key=lambda one: one.beta_ms / one.alpha_ms,
    )
    assert (weakest.name, weakest.alpha_ms, weakest.beta_ms, weakest.slo_ms) == ("VGG16", 2.734, 5.786, 33)


def test_nine_disciplines_are_beside_each_other_in_figure_9() -> None:
    assert len(systems.DISCIPLINES) == 9
    assert SYSTEMS["Clockwork"] == ("clockwork", {"sizes": "all"}), "as the authors ran it"


def test_the_fewest_gpus_of_a_steady_load() -> None:
    """l(b) = b + 1, SLO 20: a GPU carries at most 19/20 a ms. 1500/s are 1.5 a ms, so two; 500/s one."""
    model = [Model("m", 1.0, 1.0, 20.0)]
    effort = Effort((1,), 200.0, 1000.0, 1000.0, 1, 1.01)
    assert systems.fewest_gpus(model, SYSTEMS["Symphony"], 500.0, effort) == 1
    assert systems.fewest_gpus(model, SYSTEMS["Symphony"], 1500.0, effort) == 2
    assert (
        systems.fewest_gpus([Model("m", 1.0, 30.0, 20.0)], SYSTEMS["Symphony"], 500.0, effort, limit=8)
        is None
    )


def test_latency_of_the_network_costs_goodput() -> None:
    effort = Effort((1,), 200.0, 1000.0, 1000.0, 1, 1.02)

    def goodput(delay_ms: float) -> float:
        case = Case("", copies(model_of("table2", "ResNet50", 20.0), 2), 2, delay=Delay(delay_ms))

        def is_good(rate: float) -> bool:
            made = scheduler_only.made(case, *SYSTEMS["Symphony"])
            return scheduler_only.is_good(case, made, 1, rate, effort.window(case, rate))

        return scheduler_only.goodput_rps(case, is_good, grid=effort.grid)

    near, far = goodput(0.0), goodput(5.0)
    assert far < 0.9 * near


def test_changing_rates_follow_the_loads() -> None:
    case = Case("", tuple(table("gtx1080ti")[:3]), 4)
    rates = changing.changing_rates(case, 1, len(changing.LOADS))
    totals = np.sum([[rps for _, rps in steps] for steps in rates.values()], axis=0)
    assert totals == pytest.approx([load * case.bound_rps for load in changing.LOADS])


def test_a_random_partition_is_the_best_of_its_tries() -> None:
    problem = changing.drawn_problem(1)
    few, more = (changing.random_partition(problem, 1, tries) for tries in (1, 20))
    assert more.objective_percent <= few.objective_percent
    assert more.method == "random"


def test_ushers_figures_3_and_7_are_the_texts() -> None:
    """Section 2.2: (70 + 65 + 40)/3 = 58.33 on three GPUs; M1 halved: (65 + 80 + 40)/3 = 61.67; two GPUs when divided.
    Section 2.3: 180/3 = 60 and 160/3 = 53.33 against 180/2 = 90 and 160/2 = 80.
    """
    m1, m2, m3 = usher.FIGURE_3
    assert m1.by_batch[4] == (10.0, 40.0), "10 % of weights, half of 60 %"
    assert usher.packed([m1.only(8), m2.only(8), m3.only(8)]).memory_percent == pytest.approx(175 / 3)
    assert usher.packed([m1.only(4), m2.only(8), m3.only(8)]).memory_percent == pytest.approx(185 / 3)
    assert usher.packed(usher.FIGURE_3).gpus == 2
    apart, interleaved = (
        usher.packed(usher.FIGURE_7, [["M1", "M2"], ["M3"], ["M4"]]),
        usher.packed(usher.FIGURE_7),
    )
    assert (apart.gpus, apart.compute_percent, apart.memory_percent) == pytest.approx((3, 60.0, 160 / 3))
    assert (interleaved.gpus, interleaved.compute_percent, interleaved.memory_percent) == (2, 90.0, 80.0)


def test_a_window_is_long_enough_for_the_rarest_model_within_its_bounds() -> None:
    effort = Effort((1,), 100.0, 1000.0, 5000.0, 500, 1.01)
    case = Case("", copies(Model("m", 1.0, 1.0, 20.0), 4), 1)
    assert effort.window(case, 1000.0) == Window(100.0, 2100.0)
    assert effort.window(case, 100.0) == Window(100.0, 5100.0)
    assert effort.window(case, 1e6) == Window(100.0, 1100.0)


def test_figure_11_compares_four_setups_at_a_tight_and_a_loose_slo() -> None:
    found = systems.figure_11(effort=Effort((1,), 50.0, 150.0, 150.0, 1, 1.2), gpus=3, count=2)
    (grid,) = found.grids
    assert len(grid.rows) == 2 * 2 * 2
    assert {"equal, Poisson, 20 ms", "Zipf 0.9, gamma 0.05, 100 ms"} <= {name for name, _ in grid.rows}
    assert all(
        isinstance(one, int | float) and one > 0
        for name, values in grid.rows
        for one in values
        if "Poisson" in name
    )


def test_figure_15_goes_into_overload_and_out_again() -> None:
    found = changing.figure_15(gpus=6, count=3)
    rows = {row.what: row.ours for row in found.rows}
    assert rows["seconds in overload in which more GPUs are advised, %"] == 100
    assert rows["seconds below half of the peak in which GPUs are released, %"] == 100
    (grid,) = found.grids
    bad = [float(values[-1] or 0.0) for _, values in grid.rows]  # type: ignore[arg-type]
    assert max(bad) > 1
    assert bad[-1] < 1


def test_gpulets_violations_are_few_where_little_is_asked() -> None:
    (member,) = gpulet.workloads()["scen2"][:1]
    for scheduler in gpulet_violations.COMPARED:
        assert gpulet_violations.violations_percent([member], scheduler, 20.0) < 1
        assert gpulet_violations.violations_percent([member], scheduler, 5000.0) > 50, (
            "far more than four GPUs carry"
        )


def test_the_thesis_models_are_heavy_in_something() -> None:
    ratios = [
        usher._creq_over_mreq(shipped_profile(f"thesis-v100/{name}")) for name in usher._table_a1_models()
    ]
    assert len(ratios) == 13
    assert all(ratio > 0 for ratio in ratios)
