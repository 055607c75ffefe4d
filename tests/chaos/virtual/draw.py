"""Which history a seed is: any faults at any moments, or one of the stories."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from tests.chaos.virtual.script import ACTIVE, ALL, FAULTY_MS, Fault, Script, Shape
from tests.chaos.virtual.stories import BATCHINGS, CHANGES, PAIRS, STORIES

ROLES: Final = ("scheduler", "frontend", "agent", "worker", "client")
KINDS: Final = {
    "kill": 6,
    "vanish": 3,
    "pause": 4,
    "restart": 2,
    "reset": 4,
    "lose": 2,
    "cut": 3,
    "delay": 2,
    "full": 2,
    "sleep": 2,
    "slow": 1,
    "raise": 1,
    "break": 1,
    "hang": 1,
    "disk": 1,
    "change": 3,
}
"""With how often each is drawn. docs/testing.md says what they mean."""


def draw(seed: int) -> Script:
    """The history of that number."""
    rng = random.Random(f"{seed}/script")
    shape = Shape(
        schedulers=rng.choice((1, 2, 2, 3)),
        nodes=rng.choice((1, 1, 2, 3)),
        gpus=rng.choice((1, 2)),
        frontends=rng.choice((1, 2)),
        clients=rng.choice((1, 2)),
        models=rng.choice((1, 1, 2)),
        batching=rng.choice(("tenuto",) * 4 + BATCHINGS),
        is_up=rng.random() < 0.75,
        outlives=rng.random() < 0.3,
        delay_ms=rng.choice((0.05, 0.3, 2.0)),
        start_ms=rng.choice((20.0, 80.0, 200.0)),
        load_ms=rng.choice((0.0, 0.0, 50.0, 300.0)),
        resends=rng.random() < 0.5,
        run_once=rng.random() < 0.3,
        cancels=rng.choice((0.0, 0.0, 0.2)),
        application=rng.random() < 0.3,
        priorities=rng.random() < 0.3,
        heartbeat_ms=rng.choice((250.0, 500.0)),
        rate_rps=rng.choice((10.0, 25.0, 50.0)),
        slo_ms=rng.choice((40.0, 100.0, 300.0)),
    )
    count = rng.choice((1, 1, 2, 2, 3, 4, 6, 8))
    from_ms, span_ms = 20.0, FAULTY_MS
    if rng.random() < 0.5:  # one upon the other
        from_ms, span_ms = rng.uniform(20.0, FAULTY_MS - 200.0), rng.choice((5.0, 50.0, 200.0))
    faults = sorted((_fault(rng, from_ms, span_ms) for _ in range(count)), key=lambda one: one.at_ms)
    (story,) = rng.choices((None, *STORIES), (0.45, *STORIES.values()))
    script = Script(seed, shape, tuple(faults)) if story is None else story(rng, seed, shape)
    if script.shape.batching == "shepherd":  # which runs requests twice
        script = replace(script, shape=replace(script.shape, run_once=False))
    return script


def _fault(rng: random.Random, from_ms: float, span_ms: float) -> Fault:
    at_ms = round(min(from_ms + rng.random() * span_ms, FAULTY_MS), 1)
    kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    who, whom, for_ms = _one(rng), "", 0.0
    match kind:
        case "kill" | "restart":
            for_ms = rng.choice((0.0, 30.0, 150.0, 700.0))
        case "vanish":
            for_ms = rng.choice((30.0, 700.0, 4_000.0))
        case "disk":
            who, for_ms = rng.choice(("scheduler:active", "agent:0", "agent:1")), rng.choice((100.0, 1_500.0))
        case "change":
            who, whom = "operator", f"{rng.choice(CHANGES)}:{rng.randrange(4)}"
        case "pause":
            for_ms = rng.choice((20.0, 120.0, 500.0, 900.0, 2_200.0))
        case "sleep":
            who = rng.choice(_HOSTED)
            for_ms = rng.choice((100.0, 1_000.0, 4_000.0))
        case "slow" | "raise":
            who, for_ms = f"agent:{rng.randrange(3)}", rng.choice((100.0, 600.0))
        case "break" | "hang":
            who = f"worker:{rng.randrange(3)}"
        case _:
            who, whom = rng.choice(PAIRS)
            is_all = who == "agent" and rng.random() < 0.5
            who = f"{who}:{ALL}" if is_all else f"{who}:{rng.randrange(3)}"
            whom = f"{whom}:{rng.randrange(3)}"
            for_ms = {
                "cut": rng.choice((30.0, 250.0, 1_000.0, 3_000.0, 6_500.0)),
                "delay": 400.0,
                "full": rng.choice((1.0, 30.0, 250.0, 1_500.0)),
            }.get(kind, 0.0)
    return Fault(at_ms, kind, who, whom, for_ms)


_HOSTED: Final = (
    "scheduler:active",
    "scheduler:active",
    "scheduler:0",
    "scheduler:1",
    "frontend:0",
    "frontend:1",
    "agent:0",
    "agent:1",
    "worker:0",
    "worker:1",
)
"""No clients: of one whose clock stood still, its frontend takes what it says for late for up to a minute."""


def _one(rng: random.Random) -> str:
    who = f"{rng.choice(ROLES)}:{rng.randrange(3)}"
    return f"scheduler:{ACTIVE}" if who == "scheduler:0" else who
