from __future__ import annotations

import pytest

from fabric.ids import ModelId
from policies.placement.common.base import PlacedModelInput
from roles.lab.reproduce import EXPERIMENTS, gpulet, gpulet_applications
from roles.lab.reproduce.gpulet import SCHEDULERS, WorkloadModel


def rates(number: int) -> dict[str, float | None]:
    return {str(model.model_id): model.rate_rps for model in gpulet.grid_scenario(number)}


def test_the_grid_is_numbered_with_the_first_model_slowest() -> None:
    assert rates(1) == {"bert": 100}
    assert rates(2) == {"bert": 200}
    assert rates(3) == {"densenet161": 100}
    assert rates(4) == {"densenet161": 100, "bert": 100}
    assert rates(3**8) == {"lenet1": 100}
    everything = rates(gpulet.grid_size())
    assert list(everything) == [
        *("lenet1", "googlenet", "resnet50", "ssd-mobilenetv1", "vgg16"),
        *("mnasnet1_0", "mobilenet_v2", "densenet161", "bert"),
    ]
    assert set(everything.values()) == {200}


def test_a_sample_is_seeded_and_the_whole_grid_is_whole() -> None:
    assert gpulet.grid_sample(5) == gpulet.grid_sample(5)
    assert gpulet.grid_sample(5) != gpulet.grid_sample(5, seed=2)
    assert gpulet.grid_sample(10**6) == list(range(1, 3**9))


def test_the_workloads_are_those_of_the_paper() -> None:
    found = gpulet.workloads()
    assert list(found) == ["game", "traffic", "scen1", "scen2", "scen3", "scen4", "scen5"]
    assert [member.profile for member in found["game"]] == ["lenet1"] * 6 + ["resnet50"]
    assert {member.profile: member.slo_ms for member in found["traffic"]} == {
        "ssd-mobilenetv1": 90,
        "googlenet": 112,
        "vgg16": 112,
    }
    assert [(member.profile, member.slo_ms) for member in found["scen2"]] == [
        ("densenet161", 202),
        ("vgg16", 142),
    ]


def test_the_applications_are_the_graphs_of_figure_12() -> None:
    game, traffic = (
        gpulet_applications.cluster(name, SCHEDULERS[1], "equal", 50.0).applications[0].plan
        for name in ("game", "traffic")
    )
    assert (game.slo_ms, traffic.slo_ms) == (95, 136)
    assert [stage.after for stage in game.graph.stages] == [()] * 7
    assert {stage.name: stage.after for stage in traffic.graph.stages} == {
        "ssd-mobilenetv1": (),
        "googlenet": ("ssd-mobilenetv1",),
        "vgg16": ("ssd-mobilenetv1",),
    }
    # Within 1 ms what the authors give each model: 69 and 67.
    assert set(traffic.budgets("equal").values()) == {68.0}
    assert {run[0] for run in game.run_ms.values()} == {game.run_ms["lenet1"][0], game.run_ms["resnet50"][0]}


def test_an_application_is_schedulable_where_all_of_its_models_are() -> None:
    planned = gpulet_applications.cluster("traffic", SCHEDULERS[1], "equal", 100.0).place()
    assert planned.unplaced == ()
    assert {model.model_id for one in planned.slices for model in one.models} == {
        "ssd-mobilenetv1",
        "googlenet",
        "vgg16",
    }
    assert gpulet_applications.cluster("traffic", SCHEDULERS[1], "equal", 5_000.0).place().unplaced != ()


@pytest.mark.parametrize("scheduler", [one for one in SCHEDULERS if one.search != "exhaustive"])
def test_the_highest_rate_is_schedulable(scheduler: gpulet.Scheduler) -> None:
    member = WorkloadModel(ModelId("bert"), "bert", 22)
    rate_rps = gpulet.highest_rps([member], 1, scheduler)
    asked = [PlacedModelInput(ModelId("bert"), 22, rate_rps)]
    assert rate_rps > 500
    assert scheduler.policy.gpus_needed(asked, gpulet.gpus(1), gpulet.profiles_of([member])) == 1


def test_a_model_that_is_too_slow_has_no_rate() -> None:
    too_slow = [WorkloadModel(ModelId("vgg16"), "vgg16", 10)]
    assert gpulet.highest_rps(too_slow, 1, SCHEDULERS[0]) == 0


def test_schedulability_has_the_papers_order() -> None:
    found = gpulet.schedulability(sample=12, gpu_counts=(3,))
    served = [row.ours for row in found.rows]
    numbers = [one for one in served if isinstance(one, float)]
    assert len(numbers) == len(served)
    whole, plain, disturbed, ideal, ideal_disturbed = numbers
    assert whole <= disturbed <= plain <= ideal
    assert disturbed <= ideal_disturbed
    assert found.name in EXPERIMENTS


def test_throughput_is_compared_with_time_sharing() -> None:
    found = gpulet.slo_preserved_throughput(gpu_count=1)
    (grid,) = found.grids
    assert [name for name, _ in grid.rows] == list(gpulet.workloads())
    assert len(found.rows) == 2
    assert found.rows[-1].paper == 61.7
    assert found.name in EXPERIMENTS
