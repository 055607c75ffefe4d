"""Heads at the scheduler: it lists them with their model, and batches all that is asked of that model together."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import HeadInfo, HeadOutputs, HeadSpec, NodeHello, TensorInfo
from policies.batching.registry import make_discipline
from roles.scheduler.core import SchedulerCore
from tests.unit.roles.scheduler.test_core import AGENT, FIRST, MODEL, NODE, WORKER, hear, ready, settings

CATS, DOGS = ModelId("cats"), ModelId("dogs")
HEADS = (HeadSpec(CATS), HeadSpec(DOGS, 80.0))
Y = TensorInfo("y", "float32", (7,))


def with_heads() -> SchedulerCore:
    plain = settings()
    (model,) = plain.models
    core = SchedulerCore(
        replace(plain, models=(replace(model, heads=HEADS),)), make_discipline("deferred", {})
    )
    hear(core, AGENT, NodeHello(NODE, FIRST, (), ()))
    return core


def listed(core: SchedulerCore) -> tuple[HeadInfo, ...]:
    (model,) = core._fleet.models()
    return model.heads


def test_before_anything_is_ready_frontends_know_the_names_and_slos_of_heads() -> None:
    assert listed(with_heads()) == (HeadInfo(CATS, 20.0), HeadInfo(DOGS, 80.0))


def test_what_each_head_gives_is_the_workers_to_say_and_its_slo_the_files() -> None:
    core = with_heads()
    replica = replace(ready().replicas[0], heads=(HeadOutputs(DOGS, (Y,)),))
    hear(core, WORKER, msgspec.structs.replace(ready(), replicas=(replica,)))
    assert listed(core) == (HeadInfo(CATS, 20.0), HeadInfo(DOGS, 80.0, (Y,)))
    core._fleet.put_model(MODEL, 30.0)
    assert listed(core) == (HeadInfo(CATS, 30.0), HeadInfo(DOGS, 80.0, (Y,)))


def test_a_scheduler_that_goes_on_from_here_knows_them_too_and_a_model_that_goes_takes_them_along() -> None:
    core = with_heads()
    assert [model.heads for model in core.settings().models] == [HEADS]
    core._fleet.forget_model(MODEL)
    assert core._fleet.heads(MODEL) == ()
