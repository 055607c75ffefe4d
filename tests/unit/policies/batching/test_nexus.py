"""Nexus: which models its slices are packed with, and how requests are routed to them."""

from __future__ import annotations

import pytest

from fabric.ids import ModelId, SliceId
from policies.batching.base import Delay
from policies.batching.baselines.squishy import (
    Bin,
    ModelLoad,
    PackedPlan,
    homes_of,
    pack,
    saturated_size,
    spread,
)
from policies.batching.batch_moments import exec_table
from policies.batching.registry import make_discipline
from tests.batching_stage import Stage, hosted, linear

TABLE = linear(1, 5, 64)  # l(b) = b + 5


def stage() -> Stage:
    made = Stage(make_discipline("nexus"))
    made.model("m", 40.0)
    made.slice("s0", hosted("m", TABLE), order=0)
    return made


def starts(of: Stage) -> list[tuple[float, str, list[int]]]:
    return [(batch.start_at_ms, batch.slice_id, batch.seqs) for batch in of.batches]


LOAD = ModelLoad(ModelId("m"), 40.0, 1.0)


def bins(count: int, **tables: tuple[float, ...]) -> list[Bin]:
    padded = {ModelId(name): exec_table(table) for name, table in tables.items()}
    return [Bin(SliceId(f"s{place}"), padded) for place in range(count)]


def packed(loads: list[ModelLoad], slices: list[Bin]) -> PackedPlan:
    return pack(loads, homes_of(loads, slices))


def test_a_saturated_slice_runs_the_largest_batch_that_leaves_half_the_slo_for_waiting() -> None:
    assert saturated_size(exec_table(TABLE), 40.0) == 15
    assert saturated_size(exec_table(TABLE), 11.0) == 1
    assert saturated_size(exec_table(TABLE), 5.0) == 0


def test_a_load_is_packed_into_dedicated_slices_and_a_residue() -> None:
    """15 requests in 20 ms saturate a slice: 0.75 a ms. One a ms is one of these and 0.25 a ms: b + 5 + 4·b <= 40
    for b = 7."""
    plan = packed([LOAD], bins(2, m=TABLE))
    assert not plan.left
    shares = {name: [(share.batch_size, share.per_ms) for share in of] for name, of in plan.shares.items()}
    assert shares == {"s0": [(15, 0.75)], "s1": [(7, 0.25)]}
    assert packed([LOAD], bins(1, m=TABLE)).left == {"m"}


def test_residues_share_a_slice_while_their_batches_fit_into_the_shorter_duty_cycle() -> None:
    loads = [ModelLoad(ModelId("a"), 60.0, 0.1), ModelLoad(ModelId("b"), 50.0, 0.05)]
    plan = packed(loads, bins(2, a=TABLE, b=TABLE))
    assert not plan.left
    assert list(plan.shares) == ["s0"]
    # a: b + 5 + 10 b <= 60 → 5, duty 50. b: b + 5 + 20 b <= 50 → 2, duty 40. Together 40: batches 4 and 2.
    assert sorted((share.load.model_id, share.batch_size) for share in plan.shares[SliceId("s0")]) == [
        ("a", 4),
        ("b", 2),
    ]


def test_the_load_is_scaled_to_fill_exactly_the_slices_there_are() -> None:
    plan = spread([LOAD], bins(3, m=TABLE))
    assert sum(share.per_ms for of in plan.shares.values() for share in of) == pytest.approx(2.25, rel=0.02)


def capacity_of(plan: PackedPlan, name: str) -> float:
    return sum(share.per_ms for of in plan.shares.values() for share in of if share.load.model_id == name)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("neighbours", [["x"], ["x", "y"], ["x", "y", "z"]])
@pytest.mark.parametrize("slo_ms", [11.0, 100.0])
def test_models_with_one_slice_hold_back_nobody_who_has_others(
    slo_ms: float, neighbours: list[str], is_first: bool
) -> None:
    """The first or the last of ten slices hosts others besides c; whether these fit there or not, c gets the nine."""
    loads = [
        ModelLoad(ModelId("c"), 100.0, 8.0),
        *(ModelLoad(ModelId(name), slo_ms, 0.005) for name in neighbours),
    ]
    shared = Bin(SliceId("shared"), {load.model_id: exec_table(TABLE) for load in loads})
    own = bins(9, c=TABLE)
    plan = spread(loads, [shared, *own] if is_first else [*own, shared])
    assert capacity_of(plan, "c") >= 0.95 * 9 * 45 / 50
    if slo_ms == 100.0:
        assert all(capacity_of(plan, name) >= 0.005 for name in neighbours)


def test_a_model_that_overloads_its_slice_holds_back_only_those_that_share_it() -> None:
    """a can have a tenth of what it asks for; c and d, which have other slices, get theirs and batches to match."""
    loads = [
        ModelLoad(ModelId("a"), 40.0, 7.5),
        ModelLoad(ModelId("c"), 40.0, 1.0),
        ModelLoad(ModelId("d"), 40.0, 0.5),
    ]
    host_a = Bin(SliceId("s9"), {ModelId("a"): exec_table(TABLE), ModelId("c"): exec_table(TABLE)})
    plan = spread(loads, [host_a, *bins(3, c=TABLE, d=TABLE)])
    assert capacity_of(plan, "a") == pytest.approx(0.75, rel=0.02)
    assert capacity_of(plan, "c") >= 1.0
    assert capacity_of(plan, "d") >= 0.5


@pytest.mark.parametrize("count", range(3, 12))
def test_no_slice_is_kept_back(count: int) -> None:
    """Three models, none of which can share a slice with another."""
    loads = [ModelLoad(ModelId(name), 11.0, 0.1) for name in "abc"]
    plan = spread(loads, bins(count, a=TABLE, b=TABLE, c=TABLE))
    assert len(plan.shares) == count


def test_a_slice_too_slow_for_a_model_is_not_its_own() -> None:
    slow = Bin(SliceId("slow"), {ModelId("m"): exec_table(linear(1, 40, 8))})
    assert set(spread([LOAD], [slow, *bins(2, m=TABLE)]).shares) == {"s0", "s1"}
    to = Stage(make_discipline("nexus"))
    to.model("m", 40.0)
    to.slice("slow", hosted("m", linear(1, 40, 8)), order=0)
    for order in (1, 2):
        to.slice(f"fast{order}", hosted("m", TABLE), order=order)
    to.model("n", 40.0)  # nobody asks for it: it rides along
    for at_ms in range(0, 1500, 10):
        to.until(float(at_ms))
        to.arrive("m", 40.0)
    to.drain()
    assert to.count("ran") == 150


@pytest.mark.parametrize("length", [1, 8, 40, 80, 200])
def test_nexus_serves_long_runs_as_well_as_short_ones(length: int) -> None:
    """0.8 of what ten slices carry, however many requests arrive together."""
    to = Stage(make_discipline("nexus"))
    to.model("m", 100.0)
    for order in range(10):
        to.slice(f"s{order}", hosted("m", TABLE), order=order)
    asked = 0
    while asked < 8000:
        to.until(asked / 7.2)
        to.arrive("m", 100.0, count=length)
        asked += length
    to.drain()
    assert to.count("ran") >= 0.99 * asked


def test_nexus_runs_at_most_the_assigned_batch_whenever_its_slice_is_free() -> None:
    to = stage()
    to.arrive("m", 40.0)
    to.arrive("m", 60.0, count=20)
    to.until(30.0)
    assert [(start, len(seqs)) for start, _, seqs in starts(to)] == [(0.0, 1), (6.0, 15), (26.0, 5)]


def test_nexus_drops_heads_that_would_force_a_smaller_batch() -> None:
    to = stage()
    to.arrive("m", 40.0)
    to.arrive("m", 14.0)
    to.arrive("m", 40.0, count=15)
    to.until(6.0)
    assert to.drops == [(6.0, False, [2])]
    assert [(start, len(seqs)) for start, _, seqs in starts(to)] == [(0.0, 1), (6.0, 15)]


def test_nexus_does_not_use_a_slice_that_is_not_the_requests_own() -> None:
    """Two models, two slices: each has its own, and a burst of one does not reach the other's idle slice."""
    to = Stage(make_discipline("nexus"))
    for name in ("a", "b"):
        to.model(name, 13.0)
    for order in range(2):
        to.slice(f"s{order}", hosted("a", TABLE), hosted("b", TABLE), order=order)
    for _ in range(3):
        to.arrive("a", 13.0)
    to.drain()
    assert len({batch.slice_id for batch in to.batches}) == 1


@pytest.mark.parametrize("at_ms", [half / 2 for half in range(40)])
def test_nexus_loses_nothing_when_a_model_is_added_while_another_ones_requests_wait(at_ms: float) -> None:
    to = Stage(make_discipline("nexus"))
    to.model("m", 60.0, Delay(control_ms=2.0))
    to.slice("s0", hosted("m", TABLE), hosted("n", TABLE))
    to.arrive("m", 60.0)
    to.arrive("m", 60.0)
    to.until(at_ms)
    to.model("n", 60.0)
    to.arrive("n", 60.0)
    to.drain()
    assert (to.count("ran"), len(to.batches)) == (3, 3)


def test_nexus_reassigns_slices_by_measured_rates() -> None:
    """After the first second it knows that all the load is a's, and gives it both slices."""
    to = Stage(make_discipline("nexus"))
    for name in ("a", "b"):
        to.model(name, 13.0)
    for order in range(2):
        to.slice(f"s{order}", hosted("a", TABLE), hosted("b", TABLE), order=order)
    for at_ms in range(0, 1400, 4):
        to.until(float(at_ms))
        to.arrive("a", 13.0)
    early = {batch.slice_id for batch in to.batches if batch.start_at_ms < 1000}
    late = {batch.slice_id for batch in to.batches if batch.start_at_ms > 1100}
    assert len(early) == 1
    assert late == {"s0", "s1"}


def uneven(slow: int) -> list[Bin]:
    fast = {ModelId(name): exec_table(linear(0.5, 2, 16)) for name in "ab"}
    late = {ModelId(name): exec_table(linear(5, 20, 16)) for name in "ab"}
    return [Bin(SliceId("fast"), fast), *(Bin(SliceId(f"slow{place}"), late) for place in range(slow))]


@pytest.mark.parametrize("slo_ms", [100.0, 200.0])
@pytest.mark.parametrize("rate", [0.001, 0.039, 0.1, 0.17, 0.28, 1.0, 1.5])
@pytest.mark.parametrize("slow", [0, 1, 3])
def test_no_slice_is_planned_to_carry_more_than_its_batches_do(slow: int, rate: float, slo_ms: float) -> None:
    """Whatever the slices' speeds: what is a residue on the fast slice may be several times what a slow one carries."""
    two = exec_table(
        (40.0, 50.0, 200.0)
    )  # of 39 a second with an SLO of 100 ms, one at a time is too slow, two are not
    slices = [*uneven(slow), Bin(SliceId("two"), {ModelId("a"): two})]
    loads = [ModelLoad(ModelId(name), slo_ms, rate) for name in "ab"]
    for plan in (packed(loads, slices), packed(loads[:1], slices[-1:]), spread(loads, slices)):
        for share in (share for of in plan.shares.values() for share in of):
            assert share.per_ms <= share.batch_size / share.table[share.batch_size] + 1e-9


def test_a_residue_that_finds_slow_slices_only_fills_them_one_after_another() -> None:
    loads = [
        ModelLoad(ModelId("a"), 200.0, 0.9),
        ModelLoad(ModelId("b"), 200.0, 0.75),
    ]  # a slow one carries 0.16
    plan = packed(loads, uneven(5))
    assert not plan.left
    assert [[share.load.model_id for share in of] for of in plan.shares.values()] == [["a"], *[["b"]] * 5]
    assert capacity_of(plan, "b") == pytest.approx(0.75)
    assert packed(loads, uneven(4)).left == {"b"}
