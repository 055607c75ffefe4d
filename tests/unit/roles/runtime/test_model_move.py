"""The steps of a move between shards, from what their schedulers say; each leaves the cluster serving."""

from __future__ import annotations

import json

from msgspec.structs import replace

from fabric.ids import ModelId, NodeId
from fabric.messages import (
    Changed,
    GpuRef,
    ModelAdvice,
    ModelInfo,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    PlanReport,
    SchedulerStanding,
    SectionAsked,
    StatusListed,
)
from roles.runtime.model_move import Ask, Refuse, next_step
from roles.runtime.shard_reports import combined, merged, shard_of
from tests.builders import model_info

A = ModelId("a")
SECTION = '{"name": "a", "slo_ms": 50, "term": 0}'


def says(*models: ModelInfo, shard: int = 0, **counters: float) -> StatusListed:
    standing = SchedulerStanding("active", 16, 1, 1, 0, shard=shard, shards=2)
    return StatusListed(f"scheduler-{shard}", 1, (), models, counters, standing=standing)


def step(here: tuple[ModelInfo, ...], there: tuple[ModelInfo, ...], section: str = "") -> object:
    """Of a move of model a from shard 0 to shard 1."""
    return next_step(A, 1, {0: says(*here), 1: says(*there, shard=1)}, section, 9)


def test_first_its_section_is_asked_for_where_it_is() -> None:
    assert step((model_info("a"),), ()) == Ask(0, SectionAsked(9, A))


def test_then_it_is_added_where_it_goes_in_the_same_term() -> None:
    asked = step((model_info("a"),), (), SECTION)
    assert asked == Ask(1, ModelsAdd(9, json.dumps([json.loads(SECTION)])))


def test_it_is_not_switched_before_a_slice_is_ready() -> None:
    assert isinstance(step((model_info("a"),), (model_info("a", replicas=0),)), Refuse)


def test_then_its_term_grows_above_every_other_one() -> None:
    assert step((model_info("a", term=4),), (model_info("a"),)) == Ask(1, ModelSet(9, A, term=5))


def test_then_it_is_removed_where_it_was_once_it_is_left() -> None:
    asked = step((model_info("a", term=4),), (model_info("a", term=5),))
    assert asked == Ask(0, ModelsRemove(9, (A,), when_left=True, term=4))


def test_then_it_is_done() -> None:
    assert step((), (model_info("a", term=5),)) is None


def test_a_model_that_nobody_has_cannot_move() -> None:
    assert isinstance(step((model_info("b"),), ()), Refuse)


def test_a_move_that_was_interrupted_begins_from_the_shard_that_serves() -> None:
    left_over, serving = says(model_info("a", term=1), shard=0), says(model_info("a", term=2), shard=1)
    asked = next_step(A, 2, {0: left_over, 1: serving, 2: says(shard=2)}, "", 9)
    assert asked == Ask(1, SectionAsked(9, A))


def test_all_shards_are_shown_as_one() -> None:
    whole = merged(
        [
            says(model_info("a", replicas=2), model_info("b"), shard=0, frontends=3.0, guard_ms=2.0),
            says(model_info("a", term=1), shard=1, frontends=3.0, guard_ms=1.0),
        ]
    )
    assert [(one.model_id, one.replicas, one.term) for one in whole.models] == [("a", 1, 1), ("b", 1, 0)]
    assert whole.counters == {"frontends": 3.0, "guard_ms": 2.0}, "both shards have the same frontends"
    assert shard_of(says(shard=1)) == 1
    plans = [
        PlanReport("steady", "", 1, 1, (), 0, 0, drained=(GpuRef(NodeId(name), 0),)) for name in ("x", "y")
    ]
    whole = merged([replace(says(shard=shard), plan=plan) for shard, plan in enumerate(plans)])
    assert whole.plan is not None
    assert [ref.node_id for ref in whole.plan.drained] == ["x", "y"]


def test_what_waits_in_all_shards_is_their_sum_whatever_a_model_is_called() -> None:
    names = ("a", "guard_ms", "bert_msmarco", "latency_ms_max")
    shards = [replace(says(shard=shard), queued=dict.fromkeys(names, 5.0)) for shard in range(2)]
    assert merged(shards).queued == dict.fromkeys(names, 10.0)


def test_of_counters_those_in_ms_are_the_largest_but_for_cpu_time_and_all_others_sums() -> None:
    names = ("turn_ms_max", "timer_late_p99_ms", "frontends", "cpu_ms", "messages_in", "a_msg")
    whole = merged([says(shard=shard, **dict.fromkeys(names, 2.0 + shard)) for shard in range(2)])
    assert [whole.counters[name] for name in names] == [3.0, 3.0, 3.0, 5.0, 5.0, 5.0]


def test_a_model_that_moves_is_in_the_plan_of_all_shards_once_as_the_one_that_serves_it_has_it() -> None:
    """As it is among their models."""
    for rows in ([(2, 4), (0, 5)], [(0, 4), (2, 5)], [(1, 4), (1, 5)], [(0, 4), (0, 5)]):
        shards = []
        for shard, (replicas, term) in enumerate(rows):
            plan = PlanReport("steady", "", 1, 1, (ModelAdvice(A, float(shard), None, 0.0),), 0, 0)
            model = model_info("a", replicas=replicas, term=term)
            shards.append(replace(says(model, shard=shard), plan=plan))
        whole = merged(shards)
        (served,) = whole.models
        assert whole.plan is not None
        assert [(one.model_id, one.rate_rps) for one in whole.plan.models] == [(A, float(served.term - 4))]


def test_one_change_of_several_shards_is_as_good_as_its_worst_part() -> None:
    parts = [Changed(1, "ok", started=2), Changed(2, "partial", ended=1), Changed(3, "ok", kept=4)]
    whole = combined([*enumerate(parts)])
    assert (whole.status, whole.started, whole.ended, whole.kept) == ("partial", 2, 1, 4)


def test_of_one_change_of_several_shards_it_is_said_which_did_their_part_and_which_did_not() -> None:
    failed = Changed(2, "failed", reason="no memory")
    assert combined([(0, failed)]).reason == "no memory"
    assert combined([(0, failed), (1, failed)]).reason == "shard 0: no memory"
    did = [(0, Changed(1, "ok")), (1, failed), (2, Changed(3, "partial"))]
    assert combined(did).reason == "shard 1: no memory; shard 0, 2 did its part"
