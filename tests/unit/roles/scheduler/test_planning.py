"""A plan made while the cluster serves is the one that its configuration would begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fabric.ids import ModelId, NodeId, SliceId
from fabric.messages import CurrentSlice, GpuRef, PlanAsked, ReplicaHint
from policies.placement.common.base import GpuSlot, PlacedModelInput, slice_memory_bytes
from policies.placement.registry import placement_policy
from profiles.model import TableProfile
from roles.config.read_config import parse_config
from roles.scheduler.planning.make_plan import make_plan

MODELS = [
    {"name": name, "slo_ms": slo_ms, "rate_rps": rate_rps, "profile": {"ref": f"igniter-v100/{name}"}}
    for name, slo_ms, rate_rps in (("alexnet", 15, 500), ("resnet50", 40, 400), ("vgg19", 60, 200))
]


def test_a_plan_starts_pipelines_as_one_slice() -> None:
    model = {"name": "m", "slo_ms": 100, "profile": {"table": {1: 20}, "stages": {2: [11, 11]}}}
    pipeline = {"gpu": 0, "following": [1], "models": [{"model": "m"}]}
    document = {
        "models": [model],
        "cluster": {"gpus": 2},
        "placement": {"given": {"slices": [pipeline]}},
    }
    asked = PlanAsked(1, json.dumps(document), "", (), {})
    assert [start.spec.following for start in make_plan(asked).moves[0].starts] == [(1,)]


@pytest.mark.parametrize("policy", ["symphony", "exclusive", "tenuto", "given"])
def test_a_model_whose_gpus_are_out_of_use_is_unplaced_for_that_reason(policy: str) -> None:
    """The policies see the other GPUs alone, of which none could ever host it."""
    profile = {"alpha_ms": 1, "beta_ms": 5}
    slices = [{"gpu": 0, "models": [{"model": "emu"}]}, {"gpu": 2, "models": [{"model": "real"}]}]
    document = {
        "models": [
            {"name": "emu", "slo_ms": 50, "rate_rps": 20, "profile": profile},
            {"name": "real", "slo_ms": 50, "rate_rps": 20, "loader": {"python": "a:B"}, "profile": profile},
            {"name": "hopeless", "slo_ms": 2, "rate_rps": 20, "profile": profile},
            {"name": "huge", "slo_ms": 50, "rate_rps": 20, "memory_mb": 900_000, "profile": profile},
        ],
        "cluster": {
            "nodes": [
                {"host": "emulated", "gpus": 2, "device": "emulated", "type": "generic"},
                {"host": "here", "gpus": 1, "device": "cpu", "type": "generic"},
            ]
        },
        "placement": {"given": {"slices": slices}} if policy == "given" else policy,
    }

    def reasons(*out: int, node: str = "emulated") -> dict[str, str]:
        gpus_out = tuple(GpuRef(NodeId(node), gpu) for gpu in out)
        made = make_plan(PlanAsked(1, json.dumps(document), "", (), {}, gpus_out))
        return {one.model_id: one.reason for one in made.unplaced}

    assert "emu" not in reasons()
    assert "drained" not in reasons()["hopeless"]
    both = reasons(0, 1)
    assert both["emu"] == "its GPUs are drained or away: emulated"
    for name in ("hopeless", "huge"):
        assert "drained" not in both[name], "no GPU of the cluster could host it"
    assert "emu" not in reasons(1), "the other one can host it"
    # On an emulated device its answers would be made up.
    assert reasons(0, node="here")["real"] == "its GPUs are drained or away: here"


@pytest.mark.parametrize("batching", ["fixed", "deferred"])
@pytest.mark.parametrize("interference", ["none", "igniter"])
def test_a_plan_knows_what_it_will_run_under(batching: str, interference: str) -> None:
    document: dict[str, Any] = {
        "models": MODELS,
        "cluster": {"gpus": 4, "gpu_type": "v100", "interference": interference},
        "placement": "tenuto",
        "batching": batching,
    }
    wanted = [
        (slice_.gpu, slice_.share_percent, [(one.model_id, one.batch) for one in slice_.models])
        for slice_ in parse_config(document, Path()).place().slices
    ]
    plan = make_plan(PlanAsked(1, json.dumps(document), "", (), {}))
    assert plan.reason == ""
    made = [
        (start.spec.gpu, start.spec.share_percent, [(hint.model_id, hint.batch) for hint in start.hints])
        for move in plan.moves
        for start in move.starts
    ]
    assert sorted(made, key=str) == sorted(wanted, key=str)


def test_a_slice_takes_the_memory_of_the_batches_that_its_plan_allows() -> None:
    """Of 4 GB a batch of 32 needs 3.5, one of 4 needs 1: a second slice has room beside the first one, while both are loaded."""
    profile = TableProfile(
        {100.0: {1: 5.0, 4: 8.0, 32: 40.0}}, memory_by_batch={1: 2**29, 4: 2**30, 32: 7 * 2**29}
    )
    models = [PlacedModelInput(ModelId("m"), 100.0, 10.0)]
    gpus = [GpuSlot(0, "v100", 2**32, NodeId("left"), 0)]
    profiles = {(ModelId("m"), "v100"): profile}
    assert slice_memory_bytes(models, "v100", profiles) == 7 * 2**29
    assert slice_memory_bytes(models, "v100", profiles, batch_max={ModelId("m"): 4}) == 2**30
    hosted = {"gpu": 0, "share_percent": 25, "models": [{"model": "m", "batch_max": 4}]}
    placed = placement_policy("given", {"slices": [hosted, hosted]}).place(models, gpus, profiles)
    assert (len(placed.slices), placed.unplaced) == (2, ())


@pytest.mark.parametrize(("batch_max", "reason"), [(4, ""), (None, "no memory for a larger slice")])
def test_a_slice_grows_only_where_it_is_replaced_while_it_serves(batch_max: int | None, reason: str) -> None:
    """Of 16 GB a batch of 4 needs 0.7, one of 128 10.5: to be larger it would have to end first, and nothing would serve its model."""
    slice_id = SliceId("left/gpu0/0")
    model = {"name": "m", "slo_ms": 250, "profile": {"ref": "thesis-v100/vgg19"}}
    hosted = {"model": "m", "batch_max": batch_max}
    document = {
        "models": [model],
        "cluster": {"nodes": [{"host": "left", "gpus": 1, "type": "v100", "memory_gb": 16}]},
        "placement": {"given": {"slices": [{"gpu": 0, "share_percent": 25, "models": [hosted]}]}},
    }
    hint = ReplicaHint(ModelId("m"), batch_max=batch_max)
    current = CurrentSlice(slice_id, NodeId("left"), 0, 25.0, (hint,), 2**29)
    asked = PlanAsked(1, json.dumps(document), "", (current,), {}, grown=slice_id, share_percent=35.0)
    made = make_plan(asked)
    assert reason in made.reason
    assert [(start.after, move.ends) for move in made.moves for start in move.starts] == (
        [] if reason else [((), (slice_id,))]
    )


@pytest.mark.parametrize("late", [0, 1])
def test_the_slice_that_grows_is_the_one_that_ends_also_beside_another_one_like_it(late: int) -> None:
    names = [SliceId(f"left/gpu0/{number}") for number in range(2)]
    hints = (ReplicaHint(ModelId("a"), 4, 3.0),)
    current = tuple(CurrentSlice(slice_id, NodeId("left"), 0, 25.0, hints, 2**20) for slice_id in names)
    model = {"name": "a", "slo_ms": 250, "profile": {"alpha_ms": 1.0, "beta_ms": 5.0}}
    document = {"models": [model], "cluster": {"nodes": [{"host": "left"}]}, "placement": "gpulet"}
    grown = names[late]
    made = make_plan(PlanAsked(1, json.dumps(document), "", current, {}, grown=grown, share_percent=35.0))
    assert [one.slice_id for one in made.kept] == [names[1 - late]]
    assert [move.ends for move in made.moves] == [(grown,)]


@pytest.mark.parametrize("digest", [0, 1])
def test_the_growth_of_a_slice_leaves_all_others_as_they_are_whatever_they_host(digest: int) -> None:
    """`b` was removed, and the plan without it is still to come: only from its hints is it known where it is."""
    names = [SliceId(f"left/gpu0/{number}") for number in range(3)]
    hints = {name: ReplicaHint(ModelId(name), 4, 3.0, digest=digest) for name in "ab"}
    hosted = ((hints["a"],), (hints["a"], hints["b"]), (hints["b"],))
    current = tuple(
        CurrentSlice(slice_id, NodeId("left"), 0, 25.0, of, 2**20)
        for slice_id, of in zip(names, hosted, strict=True)
    )
    model = {"name": "a", "slo_ms": 250, "profile": {"alpha_ms": 1.0, "beta_ms": 5.0}}
    document = {"models": [model], "cluster": {"nodes": [{"host": "left"}]}, "placement": "gpulet"}
    for grown, others in ((names[0], names[1:]), (names[1], names[::2])):
        asked = PlanAsked(1, json.dumps(document), "", current, {}, grown=grown, share_percent=35.0)
        made = make_plan(asked)
        assert made.reason == ""
        assert {one.slice_id: one.hints for one in made.kept} == {
            one.slice_id: one.hints for one in current if one.slice_id in others
        }
        ((start,),) = [move.starts for move in made.moves]
        assert [one.model_id for one in start.spec.models] == ["a"]
        assert start.spec.share_percent == 35.0
        assert [(move.ends, move.changes) for move in made.moves] == [((grown,), ())]
    made = make_plan(PlanAsked(1, json.dumps(document), "", current, {}, grown=names[2], share_percent=35.0))
    assert (made.moves, made.reason) == ((), "it hosts nothing that is wanted")
