"""What a scheduler keeps is bounded by what is there, not by what ever was."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fabric.ids import ModelId, SliceId
from fabric.messages import ChangedSlice
from policies.batching.registry import DISCIPLINES
from roles.config.cluster import PolicyChoice
from roles.scheduler.dispatch import recorder
from tests.scheduler_stage import NODES, SHAPES, Cluster, objects_within

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
OPTIONS: dict[str, dict[str, Any]] = {"timeout": {"timeout_ms": 4}, "fixed": {"max_wait_ms": 5}}
FEW, MANY = 102, 612  # alike in all that a round depends on


def host(on: Cluster, model_id: ModelId, slice_id: SliceId) -> None:
    """Add a model to what is served, and to what that slice hosts."""
    on.shapes[model_id], on._slo_ms[model_id] = "line", 50.0
    actuator, record = on.core._actuator, on.core._fleet.slices[slice_id]
    actuator.put_models([(on._model(model_id), 1)], on.now_ms)
    change = ChangedSlice(slice_id, (*record.spec.models, on._model(model_id)), ())
    actuator.widen(record, change, lambda *_: record.order, on.now_ms)
    on.deliver(actuator.take(on.now_ms))
    on.workers[slice_id].tables[model_id] = SHAPES["line"]
    on._announce(slice_id)


def let_go(on: Cluster, model_id: ModelId, slice_id: SliceId) -> None:
    """Serve it no more, while its batches run."""
    actuator, record = on.core._actuator, on.core._fleet.slices[slice_id]
    actuator.remove_models((model_id,), on.now_ms)
    actuator.leave(record, frozenset({model_id}), on.now_ms)
    on.deliver(actuator.take(on.now_ms))
    on.wait(20.0)
    actuator.narrow(record, frozenset({model_id}), lambda *_: record.order, on.now_ms)
    on.deliver(actuator.take(on.now_ms))
    del on.workers[slice_id].tables[model_id]
    on._announce(slice_id)


@pytest.mark.parametrize("name", DISCIPLINES)
def test_it_holds_no_more_after_many_restarts_than_after_few(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices are measured anew at each start; frontends, nodes and models come under names never heard before."""
    monkeypatch.setattr(recorder, "BATCHES_MAX", FEW)  # so that few fill it
    shapes = {A: "line", B: "long", C: "no intercept"}
    on = Cluster(PolicyChoice(name, OPTIONS.get(name, {})), shapes, (20.0, 60.0, 60.0))
    for node_id in NODES:
        on.agent_comes(node_id, knows_slices=True)
    sizes = []
    for count in range(MANY + 1):
        for which in "fg":
            on.frontend_comes(which)
        slice_id = sorted(on.wanted)[count % 3]
        on.worker_goes(slice_id)
        on.slice_comes(slice_id, 1.0 if count % 2 else 1.1 + count / 1_000)
        on.slice_shrinks(slice_id, 0.5)
        on.stranger_comes_and_goes()
        added = ModelId(f"added-{count}")
        host(on, added, slice_id)
        for peer in on.frontends.values():
            for model_id in (A, B, added):
                on.arrive(peer, model_id, 1 + count % 6, 60.0, 0.0, 0.0)
        on.wait(3.0)
        for peer in on.frontends.values():
            on.withdraw(peer, A, 2, 1)
        let_go(on, added, slice_id)
        if count in (FEW, MANY):
            on.wait(150_000.0)  # longer than any history of loads, which is cut when somebody looks at it
            on.ask_status()
            # Of numbers there are as many as the slices that happen to be here share.
            held = objects_within(on.core, lambda one: not isinstance(one, int | float))
            sizes.append(Counter(type(one).__name__ for one in held))
    few, many = sizes
    assert many.total() <= 1.02 * few.total(), f"{MANY - FEW} rounds leave {many - few}"
