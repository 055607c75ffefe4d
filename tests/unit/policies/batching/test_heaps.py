"""Heaps with lazy deletion stay as small as what counts in them, however far away the moments of the rest are."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from fabric.ids import ModelId
from policies.batching.registry import DISCIPLINES, make_discipline
from policies.batching.timers import ENTRIES_MAX
from tests.batching_stage import Stage, hosted

MODELS, SLICES, PER_MS, FOR_MS = 12, 6, 3.0, 1_500.0
EXEC_MS = (3.0, 4.0, 5.0, 6.0)
OPTIONS: dict[str, dict[str, Any]] = {"timeout": {"timeout_ms": 5}, "fixed": {"batch": 4}}


def heaps(discipline: Any) -> dict[str, int]:
    """Of its own and of what it is made of, the entries in each."""
    found: dict[str, int] = {}
    pending, seen = [("", discipline)], set[int]()
    while pending:
        name, one = pending.pop()
        if id(one) in seen or not type(one).__module__.startswith("policies.batching"):
            continue
        seen.add(id(one))
        slots = [slot for kind in type(one).__mro__ for slot in getattr(kind, "__slots__", ())]
        for key in {*slots, *getattr(one, "__dict__", {})}:
            value = getattr(one, key, None)
            if isinstance(value, list):
                found[f"{name}.{key}"] = len(value)
            if isinstance(value, dict):
                value = list(value.values())
            parts = value if isinstance(value, list | tuple | set) else [value]
            pending += [(f"{name}.{key}", each) for each in parts]
    return found


@pytest.mark.parametrize("slo_ms", [100.0, 3_600_000.0])
@pytest.mark.parametrize("name", DISCIPLINES)
def test_no_heap_grows_with_the_requests_that_were_served(name: str, slo_ms: float) -> None:
    """Budgets of an hour, most of which are answered at once: what is kept is bounded by what is queued and what is there."""
    discipline = make_discipline(name, OPTIONS.get(name))
    stage = Stage(discipline, is_in_time=False)
    models = [f"m{number}" for number in range(MODELS)]
    for model in models:
        stage.model(model, slo_ms)
    for number in range(SLICES):
        stage.slice(f"s{number}", *(hosted(model, EXEC_MS) for model in models), order=number)
    draw = Random(3)
    most_queued = 0
    while stage.now_ms < FOR_MS:
        stage.until(stage.now_ms + draw.expovariate(PER_MS))
        stage.arrive(draw.choice(models), 3_600_000.0)
        most_queued = max(most_queued, sum(discipline.queued(ModelId(model)) for model in models))
    allowed = 2 * (most_queued + MODELS * SLICES) + ENTRIES_MAX
    assert allowed < 0.4 * FOR_MS * PER_MS, "the load is light enough to show it"
    assert {name: size for name, size in heaps(discipline).items() if size > allowed} == {}
