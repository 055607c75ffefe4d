"""Ordinary life: whoever comes and goes in whatever order, the scheduler lives and each request has one fate."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import ModelId, SliceId
from fabric.messages import DrainAsked, ModelsAdd, ModelSet, ModelsRemove
from policies.batching.registry import DISCIPLINES
from roles.config.cluster import PolicyChoice
from tests.scheduler_stage import BUDGETS, NODES, SHAPES, SLOS_MS, UNLISTED, WAITS_MS, Cluster

MODELS = tuple(ModelId(name) for name in "abcd")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in DISCIPLINES if name not in {"timeout", "fixed", "shepherd"}),
    ("tenuto", {"drop": "simple", "pick": "longest_idle"}),
    ("timeout", {"timeout_ms": 4}),
    ("fixed", {"max_wait_ms": 5}),
    ("fixed", {"batch": 3}),
    ("shepherd", {"preempt_ratio": 1.5}),
]
KINDS = (
    ("arrive",) * 10
    + ("burst",) * 2
    + ("wait",) * 6
    + ("end",) * 3
    + ("slice comes",) * 2
    + ("slice adapts",) * 2
    + ("plan",) * 2
    + (
        "slice shrinks",
        "slice goes",
        "worker goes",
        "slower",
        "frontend comes",
        "frontend goes",
        "agent comes",
        "agent goes",
        "withdraw",
        "change",
        "rare",
    )
)

EXAMPLES = 40
Step = tuple[str, int]
step = st.tuples(st.sampled_from(KINDS), st.integers(0, 1 << 12))
steps = st.one_of(st.lists(step, max_size=10), st.lists(step, min_size=25, max_size=60))
one_shape = st.sampled_from(sorted(SHAPES))
shapes = st.one_of(one_shape.map(lambda one: (one,) * len(MODELS)), st.tuples(*[one_shape] * len(MODELS)))
slos = st.tuples(*[st.sampled_from(SLOS_MS)] * len(MODELS))


def take(on: Cluster, step: Step) -> None:
    """The number decides the details of the step."""
    kind, number = step
    draw = random.Random(number)
    slices = sorted(on.wanted) or [SliceId("none")]
    slice_id = draw.choice(slices)
    peers = sorted(on.frontends.values())
    model_id = draw.choice(MODELS)
    match kind:
        case "arrive":
            peer = draw.choice(peers) if peers and draw.random() < 0.95 else UNLISTED
            model_id = draw.choice(MODELS[:2] + MODELS)
            budget_ms = on.slo_ms(model_id) * draw.choice(BUDGETS)
            count = draw.choice((1, 1, 2, 7, 40))
            ready_in_ms = draw.choice((0.0, 0.0, 0.0, 3.0, 1e6))
            on.arrive(peer, model_id, count, budget_ms, draw.choice((0.0, 0.5)), ready_in_ms)
        case "burst" if peers:
            of = [(draw.choice(peers), draw.choice(MODELS[:2])) for _ in range(draw.randint(1, 2))]
            for _ in range(draw.choice((4, 15))):
                for peer, model_id in of:
                    on.arrive(peer, model_id, draw.choice((1, 9, 60)), on.slo_ms(model_id), 0.0, 0.0)
                on.wait(5.0)
        case "wait":
            on.wait(draw.choice(WAITS_MS))
        case "end":
            on.end(slice_id, draw.choice(("ok", "ok", "failed", "expired")))
        case "slice comes" if slice_id in on.wanted:
            on.slice_comes(slice_id, draw.choice((1.0, 1.0, 1.03, 2.0)))
        case "slice adapts":
            on.slice_adapts(slice_id, draw)
        case "slice shrinks":
            on.slice_shrinks(slice_id, draw.choice((0.0, 0.5, 1.0)))
        case "slice goes":
            on.slice_goes(slice_id, draw.choice(("failed", "lost", "stopped")))
        case "worker goes":
            on.worker_goes(slice_id)
        case "slower" if slice_id in on.workers:
            on.workers[slice_id].slower = draw.choice((0.5, 1.0, 1.3, 10.0))
            on.workers[slice_id].is_silent = draw.random() < 0.3
        case "frontend comes":
            on.frontend_comes(draw.choice("fg"))
        case "frontend goes":
            on.frontend_goes(draw.choice("fg"))
        case "agent comes":
            knows_slices, is_outlived = draw.random() < 0.5, draw.random() < 0.3
            on.agent_comes(draw.choice(NODES), knows_slices=knows_slices, is_outlived=is_outlived)
        case "agent goes":
            on.agent_goes(draw.choice(NODES))
        case "plan":
            on.plan(draw)
        case "withdraw" if peers:
            on.withdraw(draw.choice(peers), model_id, draw.randint(1, 30), draw.randint(1, 20))
        case "change":
            slo_ms = draw.choice(SLOS_MS)
            changes = (
                ModelsAdd(1, f'[{{"name": "{model_id}", "slo_ms": {on.slo_ms(model_id)}}}]'),
                ModelsRemove(1, (model_id,)),
                ModelSet(1, model_id, slo_ms, None),
                DrainAsked(1, draw.choice(NODES), 0, is_back=draw.random() < 0.5),
            )
            on.change(draw.choice(changes))
            if draw.random() < 0.7:
                on.plan(draw)
        case "rare":
            draw.choice((on.say_stale, on.ask_status, on.stranger_comes_and_goes))()


def play(
    batching: PolicyChoice, chosen: tuple[str, ...], slo_ms: tuple[float, ...], script: list[Step]
) -> Cluster:
    on = Cluster(batching, dict(zip(MODELS, chosen, strict=True)), slo_ms)
    for name in "fg":
        on.frontend_comes(name)
    for node_id in NODES:
        on.agent_comes(node_id, knows_slices=True)
    for slice_id in sorted(on.wanted):
        on.slice_comes(slice_id)
    for step in script:
        take(on, step)
    on.finish()
    return on


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
@given(chosen=shapes, slo_ms=slos, script=steps)
@settings(max_examples=EXAMPLES)
def test_nothing_raises_each_request_has_one_fate_and_nothing_remains_for_the_dead(
    name: str, options: dict[str, Any], chosen: tuple[str, ...], slo_ms: tuple[float, ...], script: list[Step]
) -> None:
    play(PolicyChoice(name, options), chosen, slo_ms, script)
