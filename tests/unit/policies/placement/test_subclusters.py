from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from fabric.ids import ModelId, NodeId
from policies.connected_models import components
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, Profiles
from policies.placement.registry import placement_policy
from policies.solver import SolverTime
from policies.subclusters.base import Problem
from profiles.model import LinearProfile

GIB = 2**30
PROFILE = LinearProfile(1.0, 5.0, 64)  # SLO 30 ms: batches of 10 in 15 ms


def gpus(count: int, gpu_type: str = "v100", memory_gb: float = 16, first: int = 0) -> list[GpuSlot]:
    return [GpuSlot(i, gpu_type, int(memory_gb * GIB), NodeId("a"), i) for i in range(first, first + count)]


def models(rates: Mapping[str, float | None], memory_gb: float = 1.0) -> list[PlacedModelInput]:
    return [PlacedModelInput(ModelId(name), 30.0, rate, int(memory_gb * GIB)) for name, rate in rates.items()]


def profiles(*names: str, gpu_type: str = "v100") -> Profiles:
    return {(ModelId(name), gpu_type): PROFILE for name in names}


def place(
    rates: Mapping[str, float | None],
    slots: list[GpuSlot],
    subclusters: int,
    current: Placement | None = None,
    memory_gb: float = 1.0,
) -> Placement:
    known = {key: p for gpu_type in ("v100", "t4") for key, p in profiles(*rates, gpu_type=gpu_type).items()}
    policy = placement_policy("symphony", {"subclusters": subclusters})
    return policy.place(models(rates, memory_gb), slots, known, current)


def hosted(placement: Placement) -> list[str]:
    return ["".join(sorted(model.model_id for model in one.models)) for one in placement.slices]


def test_models_are_divided_evenly_and_gpus_take_turns() -> None:
    placed = place({"a": 400, "b": 300, "c": 200, "d": 100}, gpus(4), 2)
    assert hosted(placed) in (["ad", "bc", "ad", "bc"], ["bc", "ad", "bc", "ad"])
    assert placed.unplaced == ()
    assert placed.violations == ()


def test_gpus_are_divided_by_load() -> None:
    placed = place({"a": 900, "b": 300}, gpus(8), 2)  # as uneven as only two models can be
    assert Counter(hosted(placed)) == {"a": 6, "b": 2}
    assert hosted(placed)[:4].count("a") == 3  # each sub-cluster's low ids are low ids of the cluster


def test_every_kind_of_gpu_is_divided_alike() -> None:
    slots = [*gpus(4, "v100"), *gpus(4, "t4", first=4)]
    placed = place({"a": 300, "b": 300}, slots, 2)
    assert Counter(hosted(placed)[:4]) == {"a": 2, "b": 2}
    assert Counter(hosted(placed)[4:]) == {"a": 2, "b": 2}


def test_memory_is_what_subclusters_are_for() -> None:
    rates = dict.fromkeys("abcdefgh", 10.0)
    assert len(place(rates, gpus(4, memory_gb=4), 1).unplaced) == 4
    placed = place(rates, gpus(4, memory_gb=4), 2)
    assert placed.unplaced == ()
    assert {len(names) for names in hosted(placed)} == {4}
    tight = place(rates, gpus(4, memory_gb=3), 2)
    assert [one.reason for one in tight.unplaced] == ["memory: none of 2 sub-clusters has room for it"] * 2


def test_gpus_with_less_memory_host_what_they_can() -> None:
    slots = [*gpus(2, memory_gb=4), *gpus(2, memory_gb=2, first=2)]
    placed = place(dict.fromkeys("abcdefgh", 10.0), slots, 2)
    assert placed.unplaced == ()
    assert [len(names) for names in hosted(placed)] == [4, 4, 2, 2]


def test_the_expected_goodput_is_the_sum_of_what_each_subcluster_carries() -> None:
    light = place({"a": 400, "b": 400}, gpus(4), 2)
    assert light.expected_goodput_rps == 800
    alone = place({"a": 1e5}, gpus(2), 1).expected_goodput_rps
    assert alone is not None
    assert place({"a": 1e5, "b": 1e5}, gpus(4), 2).expected_goodput_rps == pytest.approx(2 * alone)
    assert place({"a": None, "b": None}, gpus(4), 2).expected_goodput_rps is None


def test_more_subclusters_than_gpus_or_models_are_said_to_be_too_many() -> None:
    placed = place({"a": 10, "b": 10, "c": 10}, gpus(2), 5)
    assert placed.violations == ("5 sub-clusters were asked for; there are GPUs and models for 2",)
    assert placed.unplaced == ()
    assert place({"a": 10}, gpus(2), 2).violations != ()
    assert place({}, gpus(2), 2).slices == ()


def test_a_model_that_no_gpu_can_serve_is_left_out_with_the_gpus_reason() -> None:
    slots = gpus(2)
    policy = placement_policy("symphony", {"subclusters": 2})
    placed = policy.place(models({"a": 10, "b": 10, "x": 10}), slots, profiles("a", "b"))
    assert [(one.model_id, one.reason) for one in placed.unplaced] == [
        ("x", "it has no profile for GPU type v100")
    ]


def test_a_model_is_on_no_other_gpus_because_they_are_of_other_subclusters() -> None:
    decisions = place({"a": 900, "b": 300}, gpus(8), 2).decisions
    assert [rejected.reason for one in decisions for rejected in one.rejected] == [
        "a can use none of the others: it may not leave its sub-cluster, which has 6 GPUs",
        "b can use none of the others: it may not leave its sub-cluster, which has 2 GPUs",
    ]
    assert [one.rejected for one in place({"a": 900, "b": 300}, gpus(8), 1).decisions] == [(), ()]


def test_a_new_plan_keeps_models_and_gpus_where_they_are() -> None:
    rates = {f"m{i:02}": 100.0 + i for i in range(20)}
    first = place(rates, gpus(8), 4)
    assert place(rates, gpus(8), 4, first) == first
    changed = {name: rate * (1.5 if name < "m05" else 1.0) for name, rate in rates.items()} | {"new": 50.0}
    second = place(changed, gpus(9), 4, first)
    assert second.unplaced == ()
    of_first = {m.model_id: one.gpu for one in reversed(first.slices) for m in one.models}
    of_second = {m.model_id: one.gpu for one in reversed(second.slices) for m in one.models}
    assert sum(of_first[name] != of_second[name] for name in map(ModelId, rates)) <= 2  # a tenth of 20


def test_subclusters_are_the_connected_components_of_the_plan() -> None:
    placed = place({f"m{i}": 100.0 for i in range(12)}, gpus(6), 3)
    found = components([[model.model_id for model in one.models] for one in placed.slices])
    assert len(found) == 3
    assert sum(len(component) for component in found) == 12


@pytest.mark.parametrize("seed", range(8))
def test_a_model_that_some_gpu_can_host_has_one_in_its_subcluster(seed: int) -> None:
    """Whatever the types of the GPUs, their memory and the order of the models are; else there are fewer sub-clusters."""
    draw = random.Random(seed)
    sizes_gb = {"v100": 16.0, "t4": draw.choice([16.0, 4.0]), "a100": 40.0}
    types = draw.choices(sorted(sizes_gb), k=draw.randint(2, 9))
    slots = [slot for i, name in enumerate(types) for slot in gpus(1, name, sizes_gb[name], first=i)]
    names = [f"m{place}" for place in range(draw.randint(2, 7))]
    large = {name: draw.choice([0.1, 0.1, 3.0]) for name in names}
    asked = [
        PlacedModelInput(ModelId(name), 30.0, draw.uniform(1, 300), int(large[name] * GIB)) for name in names
    ]
    runs_on = {name: draw.sample(sorted(set(types)), draw.randint(1, len(set(types)))) for name in names}
    known = {(ModelId(name), of): PROFILE for name in names for of in runs_on[name]}
    wanted = draw.randint(2, 4)
    policy = placement_policy("symphony", {"subclusters": wanted})
    draw.shuffle(asked)
    placed = policy.place(asked, slots, known)
    if sum(large.values()) <= 4:
        assert placed.unplaced == ()
    carried = {entry.model_id for one in placed.slices for entry in one.models}
    assert carried | {one.model_id for one in placed.unplaced} == set(names)
    plans = [placed]
    for _ in range(4):
        plans.append(policy.place(asked, slots, known, plans[-1]))
    assert hosted(plans[-1]) == hosted(plans[-2])


@pytest.mark.parametrize("order", ["abcd", "cabd", "dcba"])
def test_the_only_gpu_of_a_type_goes_to_the_model_that_needs_it(order: str) -> None:
    asked = models(dict.fromkeys(order, 100.0))
    known = {(ModelId(name), "t4" if name == "c" else "v100"): PROFILE for name in order}
    placed = placement_policy("symphony", {"subclusters": 2}).place(
        asked, [*gpus(3), *gpus(1, "t4", first=3)], known
    )
    assert placed.unplaced == ()
    assert placed.violations == ()
    assert hosted(placed)[3] == "c"


def test_no_gpu_is_given_to_models_that_cannot_use_it() -> None:
    known = {**profiles("a"), **profiles("c", gpu_type="t4")}
    slots = [*gpus(2), *gpus(2, "t4", first=2)]
    placed = placement_policy("symphony", {"subclusters": 2}).place(models({"a": 9, "c": 9}), slots, known)
    assert hosted(placed) == ["a", "a", "c", "c"]


def test_with_fewer_gpus_of_a_type_than_subclusters_there_are_fewer() -> None:
    """Each of the models needs the one t4 and a GPU of its own sub-cluster cannot be shared."""
    slots = [*gpus(2), *gpus(1, "t4", first=2)]
    known = profiles("a", "b", gpu_type="t4")
    placed = placement_policy("symphony", {"subclusters": 2}).place(models({"a": 9, "b": 9}), slots, known)
    assert hosted(placed) == ["ab"]


def test_equal_inputs_have_equal_plans_also_where_subclusters_divide_by_the_type_of_gpu() -> None:
    draw = random.Random(1)
    sizes_gb = {"v100": 16, "t4": 16, "a100": 40}
    types = list(sizes_gb)
    slots = [slot for i in range(60) for slot in gpus(1, types[i % 3], sizes_gb[types[i % 3]], first=i)]
    asked: list[PlacedModelInput] = []
    for i in range(60):
        rate, gib = draw.uniform(1, 50), draw.uniform(0.1, 2.0)
        asked.append(PlacedModelInput(ModelId(f"m{i}"), 30.0, rate, int(gib * GIB)))
    known = {
        (model.model_id, of): PROFILE for model in asked for of in draw.sample(types, draw.choice([1, 2, 3]))
    }
    policy = placement_policy("symphony", {"subclusters": 20})
    plans = [policy.place(asked, slots, known)]
    for _ in range(3):
        plans.append(policy.place(asked, slots, known, plans[-1]))
    assert [plan.unplaced for plan in plans] == [()] * 4
    assert [plan.slices for plan in plans[1:]] == [plans[0].slices] * 3
    slower = [
        PlacedModelInput(m.model_id, m.slo_ms, m.rate_rps and m.rate_rps * 0.99, m.memory_bytes)
        for m in asked
    ]
    assert policy.place(slower, slots, known, plans[-1]).slices == plans[-1].slices


def test_all_divisions_of_a_plan_have_one_solvers_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that leaves models out asks the solver, for each size of memory; two of 4 GB fit into each of four sizes."""
    given_s: list[float] = []

    def unsolved(problem: Problem, time: SolverTime) -> None:
        given_s.append(time.left_s)
        time.spend(4.0)

    monkeypatch.setattr("policies.subclusters.solve_partition", unsolved)
    rates: dict[str, float | None] = dict.fromkeys("abcdefg", 100.0)
    slots = [gpu for place in range(4) for gpu in gpus(2, memory_gb=10 + place / 4, first=2 * place)]
    assert len(place(rates, slots, 3, memory_gb=4).unplaced) == 1
    assert given_s == [10.0, 6.0, 2.0], "and the fourth has none"


@pytest.mark.parametrize("seed", range(26))
def test_a_plan_leaves_no_more_out_than_without_subclusters_and_says_how_many_it_has(seed: int) -> None:
    """Models without a place count first, then GPUs without a model. The same input again has the same plan."""
    draw = random.Random(f"left out {seed}")
    types = draw.choices(["v100", "t4", "a100"], k=draw.randint(2, 6))
    slots = [slot for i, name in enumerate(types) for slot in gpus(1, name, first=i)]
    rates = {f"m{i}": draw.choice([10.0, 100.0]) for i in range(draw.randint(2, 5))}
    known = {(ModelId(name), of): PROFILE for name in rates for of in draw.sample(types, draw.randint(1, 2))}
    wanted = draw.randint(2, 4)
    policy = placement_policy("symphony", {"subclusters": wanted})
    placed = policy.place(models(rates), slots, known)
    whole = placement_policy("symphony").place(models(rates), slots, known)
    assert left_out(placed, slots) <= left_out(whole, slots)
    found = len(components([[model.model_id for model in one.models] for one in placed.slices]))
    said = f"{wanted} sub-clusters were asked for; there are GPUs and models for {found}"
    assert placed.violations == ((said,) if found < wanted else ())
    again = policy.place(models(rates), slots, known, placed)
    assert (again.slices, again.violations) == (placed.slices, placed.violations)


def left_out(placed: Placement, slots: list[GpuSlot]) -> tuple[int, int]:
    return len(placed.unplaced), len(slots) - len(placed.gpus_used)
