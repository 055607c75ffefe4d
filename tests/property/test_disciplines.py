"""Whatever happens in whatever order: each request has one fate and each slice one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import ModelId
from policies.batching.base import Delay, HostedModel
from policies.batching.disciplines import tenuto
from policies.batching.registry import DISCIPLINES, make_discipline
from tests.batching_stage import Stage, hosted, linear

MODELS = ("a", "b", "c")
SLO_MS = {"a": 20.0, "b": 35.0, "c": 60.0}
TABLES = {"a": linear(1.0, 5.0, 8), "b": linear(0.0, 6.0, 16), "c": linear(4.0, 12.0, 6)}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deferred", {}),
    ("deferred", {"drop": "simple"}),
    ("deferred", {"pick": "longest_idle"}),
    ("eager", {}),
    ("eager", {"drop": "window"}),
    ("timeout", {"timeout_ms": 4}),
    ("timeout", {"slo_percent": 90}),
    *((name, {}) for name in DISCIPLINES if name not in {"deferred", "eager", "timeout"}),
]
# Only these promise that a batch is never planned past its tightest deadline.
IN_TIME = {"deferred", "eager", "timeout", "tenuto", "clockwork", "shepherd"}

Action = Callable[[Stage], None]


@dataclass(frozen=True)
class Step:
    wait_ms: float
    what: str
    act: Action

    def __repr__(self) -> str:
        return f"+{self.wait_ms} {self.what}"


models = st.sampled_from(MODELS)
frontends = st.sampled_from(("f", "g"))
slices = st.sampled_from(("s0", "s1", "s2"))
waits = st.sampled_from((0.0, 0.0, 0.25, 1.0, 3.0, 9.0))


@cache
def _at(name: str, scale: float) -> HostedModel:
    return hosted(name, [scale * ms for ms in TABLES[name]], target=3)


def _models_on(names: frozenset[str], scaled: frozenset[str], scale: float) -> tuple[HostedModel, ...]:
    """What is not `scaled` is as it was: corrections change one model of a slice."""
    return tuple(_at(name, scale if name in scaled else 1.0) for name in MODELS if name in names)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    wait_ms = draw(waits)
    kind = draw(
        st.sampled_from(
            ("arrive",) * 12 + ("slice", "slice", "unslice", "model", "unmodel", "withdraw", "guard")
        )
    )
    if kind == "arrive":
        name, count = draw(models), draw(st.sampled_from((1, 1, 1, 2, 5, 20)))
        budget_ms = SLO_MS[name] * draw(st.sampled_from((1.0, 1.0, 1.0, 0.5, 0.1)))
        span_ms = draw(st.sampled_from((0.0, 0.5, 1.0)))
        ready_in_ms = draw(st.sampled_from((0.0, 0.0, 0.0, 2.0, 50.0)))
        frontend = draw(frontends)
        priority = draw(st.sampled_from((None, None, 0, 3)))

        def arrive(stage: Stage) -> None:
            stage.arrive(
                name,
                budget_ms,
                count=count,
                span_ms=span_ms,
                ready_in_ms=ready_in_ms,
                frontend=frontend,
                priority=priority,
            )

        return Step(
            wait_ms,
            f"arrive {name} x{count} {budget_ms} span {span_ms} ready {ready_in_ms} {frontend} {priority}",
            arrive,
        )
    if kind == "slice":
        name = draw(slices)
        names = draw(st.frozensets(models, min_size=1))
        scaled = draw(st.one_of(st.just(names), st.frozensets(models)))
        scale = draw(st.sampled_from((1.0, 1.0, 1.02, 1.3, 2.0)))
        return Step(
            wait_ms,
            f"slice {name} {sorted(names)}, {sorted(scaled)} x{scale}",
            lambda stage: stage.slice(name, *_models_on(names, scaled, scale), order=int(name[1])),
        )
    if kind == "unslice":
        name = draw(slices)
        return Step(wait_ms, f"unslice {name}", lambda stage: stage.unslice(name))
    if kind == "model":
        name, delay = (
            draw(models),
            Delay(draw(st.sampled_from((0.0, 0.5))), draw(st.sampled_from((0.0, 0.1)))),
        )
        return Step(wait_ms, f"model {name} {delay}", lambda stage: stage.model(name, SLO_MS[name], delay))
    if kind == "unmodel":
        name = draw(models)

        def unmodel(stage: Stage) -> None:
            stage.unmodel(name)
            stage.model(name, SLO_MS[name])

        return Step(wait_ms, f"unmodel {name}", unmodel)
    if kind == "withdraw":
        name, first, count = draw(models), draw(st.integers(1, 30)), draw(st.integers(1, 10))
        return Step(
            wait_ms, f"withdraw {name} {first}+{count}", lambda stage: stage.withdraw(name, first, count)
        )
    guard_ms = draw(st.sampled_from((0.0, 0.3)))
    return Step(wait_ms, f"guard {guard_ms}", lambda stage: stage.discipline.set_guard_ms(guard_ms))


def play(name: str, options: dict[str, Any], script: list[Step]) -> Stage:
    stage = Stage(make_discipline(name, options), is_in_time=name in IN_TIME)
    for model in MODELS:
        stage.model(model, SLO_MS[model])
    for order in range(2):
        stage.slice(f"s{order}", *_models_on(frozenset(MODELS), frozenset(), 1.0), order=order)
    for step in script:
        stage.until(stage.now_ms + step.wait_ms)
        step.act(stage)
    stage.drain()
    return stage


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
@given(script=st.lists(steps(), max_size=60))
@settings(max_examples=60, deadline=None)
def test_each_request_has_one_fate_whatever_happens(
    name: str, options: dict[str, Any], script: list[Step]
) -> None:
    stage = play(name, options, script)
    assert stage.count("waiting") == 0
    assert all(stage.discipline.queued(ModelId(model)) == 0 for model in MODELS)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
@given(script=st.lists(steps(), max_size=40))
@settings(max_examples=15, deadline=None)
def test_the_same_events_give_the_same_decisions(
    name: str, options: dict[str, Any], script: list[Step]
) -> None:
    first, second = play(name, options, script), play(name, options, script)
    assert first.batches == second.batches
    assert first.drops == second.drops


@given(script=st.lists(steps(), max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_same_holds_while_tenuto_plans_in_parts(script: list[Step]) -> None:
    """As it does where there are many models: anything may happen between two parts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tenuto, "MODELS_A_PART", 0)
        first, second = play("tenuto", {}, script), play("tenuto", {}, script)
    assert first.count("waiting") == 0
    assert first.batches == second.batches
    assert first.drops == second.drops
