"""Histories in which one thing goes wrong, under a load that shows it, and what holds in them that need not hold in any."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tests.chaos.virtual.script import ACTIVE, ALL, FAULTY_MS, Fault, Script, Shape

BATCHINGS: Final = ("tenuto", "deferred", "eager", "clockwork", "nexus", "shepherd")
CHANGES: Final = ("add", "add", "remove", "slo", "drain", "back")
PAIRS: Final = (
    ("frontend", "scheduler"),
    ("agent", "scheduler"),
    ("agent", "scheduler"),
    ("agent", "scheduler"),
    ("scheduler", "scheduler"),
    ("worker", "scheduler"),
    ("worker", "agent"),
    ("frontend", "worker"),
    ("client", "frontend"),
)
TAKEN_OVER_MS: Final = 150.0
"""After the end of the active scheduler's process, while agents and standbys are well."""
STUCK_MS: Final = 13_000.0
"""For so long no worker stands still: its agent ends it after 10 s, and the half of what it waits between two pings."""


def _one_loss(rng: random.Random, seed: int, shape: Shape) -> Script:
    """One thing goes wrong that costs no request with some room: `room_ms`."""
    fault = rng.choice(
        (
            Fault(0.0, "kill", "worker:0"),
            Fault(0.0, "kill", "worker:1"),
            Fault(0.0, "restart", "worker:1"),
            Fault(0.0, "reset", "worker:0", "scheduler:active"),
            Fault(0.0, "reset", "frontend:0", "scheduler:active"),
            Fault(0.0, "restart", "frontend:0", for_ms=150.0),
            Fault(0.0, "kill", "client:1"),
        )
    )
    shape = replace(
        shape,
        schedulers=1,
        nodes=max(2, shape.nodes),
        batching=rng.choice(("tenuto", "eager")),
        is_up=True,
        rate_rps=100.0,
        slo_ms=300.0,
    )
    return Script(seed, shape, (replace(fault, at_ms=round(rng.uniform(20.0, 500.0), 1)),))


def _takeover(rng: random.Random, seed: int, shape: Shape) -> Script:
    """The active scheduler is lost: alone, or after an operator's change, or while no agent can write the next epoch down."""
    shape = replace(shape, schedulers=rng.choice((1, 2, 3)), is_up=True)
    lost_at_ms = round(rng.uniform(500.0, FAULTY_MS), 1)
    lost = Fault(lost_at_ms, rng.choice(("kill", "restart")), f"scheduler:{ACTIVE}", "", 700.0)
    if rng.random() < 0.3:
        early = replace(lost, at_ms=round(rng.uniform(20.0, 500.0), 1), kind="kill")
        loaded = replace(shape, batching=rng.choice(("tenuto", "eager")), rate_rps=50.0, slo_ms=300.0)
        return Script(seed, loaded, (early,))
    if rng.random() < 0.4:
        shape = replace(shape, nodes=1)
        return Script(seed, shape, (Fault(lost_at_ms - 5.0, "disk", "agent:0", "", 1_500.0), lost))
    shape = replace(shape, models=rng.choice((1, 2, 2)))
    word = rng.choice(("add", "remove", "remove", "slo", "drain"))
    number = shape.models + rng.randrange(2) if word == "add" else rng.randrange(shape.models)
    return Script(seed, shape, (Fault(20.0, "change", "operator", f"{word}:{number}"), lost))


def _slow(rng: random.Random, seed: int, shape: Shape) -> Script:
    """Devices take longer than anybody thinks, and what waits for them is too late."""
    shape = replace(shape, nodes=1, gpus=1, is_up=True, rate_rps=100.0, slo_ms=rng.choice((40.0, 100.0)))
    return Script(seed, shape, (Fault(round(rng.uniform(20.0, 500.0), 1), "slow", "agent:0", for_ms=600.0),))


def _only_slice(rng: random.Random, seed: int, shape: Shape) -> Script:
    """The only slice is lost, twice, and what is asked meanwhile waits for it if it may: how long its start takes is known."""
    shape = replace(
        shape,
        schedulers=1,
        nodes=1,
        gpus=1,
        models=rng.choice((1, 2)),
        batching=rng.choice(("tenuto", "eager", *BATCHINGS)),
        is_up=True,
        start_ms=20.0,
        load_ms=rng.choice((0.0, 50.0)),
        rate_rps=100.0,
        slo_ms=300.0,
    )
    at_ms = round(rng.uniform(20.0, 300.0), 1)
    kind = rng.choice(("kill", "kill", "break", "restart"))
    return Script(seed, shape, (Fault(at_ms, kind, "worker:0"), Fault(at_ms + 500.0, kind, "worker:0")))


def _full(rng: random.Random, seed: int, shape: Shape) -> Script:
    """Queues are full under load, between any two roles but clients and frontends."""
    pairs = [pair for pair in PAIRS if "client" not in pair]
    who, whom = rng.choice(pairs)
    shape = replace(shape, is_up=True, rate_rps=100.0)
    at_ms = round(rng.uniform(20.0, FAULTY_MS), 1)
    for_ms = rng.choice((5.0, 30.0, 250.0))
    return Script(
        seed,
        shape,
        (Fault(at_ms, "full", f"{who}:{ALL}", f"{whom}:{ACTIVE if whom == 'scheduler' else 0}", for_ms),),
    )


def _back_at_once(rng: random.Random, seed: int, shape: Shape) -> Script:
    """A host loses power under load, and is back before the others have noticed."""
    who = rng.choice(("frontend:0", "frontend:1", "agent:0", "worker:0", "scheduler:active"))
    batching = rng.choice(("tenuto", *BATCHINGS))
    shape = replace(shape, is_up=True, batching=batching, rate_rps=100.0, slo_ms=300.0)
    at_ms = round(rng.uniform(100.0, FAULTY_MS), 1)
    slow = Fault(at_ms - 60.0, "slow", "agent:0", for_ms=300.0)
    return Script(seed, shape, (slow, Fault(at_ms, "vanish", who, for_ms=rng.choice((0.0, 30.0)))))


def _cut_off(rng: random.Random, seed: int, shape: Shape) -> Script:
    """The active scheduler hears of no agent any more, or stands still: it stands by before the next one is active."""
    shape = replace(shape, schedulers=rng.choice((2, 3)), is_up=True)
    at_ms, for_ms = round(rng.uniform(20.0, 500.0), 1), rng.choice((300.0, 700.0, 2_000.0))
    who, whom = f"agent:{ALL}", f"scheduler:{ACTIVE}"
    fault = rng.choice((Fault(at_ms, "cut", who, whom, for_ms), Fault(at_ms, "pause", whom, "", for_ms)))
    return Script(seed, shape, (fault,))


def _agent_again(rng: random.Random, seed: int, shape: Shape) -> Script:
    """An agent is killed whose workers outlive it: they serve on, and the next one adopts them."""
    batching = rng.choice(("tenuto", "eager"))
    shape = replace(shape, is_up=True, outlives=True, batching=batching, rate_rps=50.0, slo_ms=300.0)
    at_ms, for_ms = round(rng.uniform(20.0, 500.0), 1), rng.choice((0.0, 30.0, 150.0, 700.0))
    return Script(seed, shape, (Fault(at_ms, "kill", "agent:0", "", for_ms),))


def _stuck(rng: random.Random, seed: int, shape: Shape) -> Script:
    """A worker stands still for longer than its agent has patience with it."""
    shape = replace(shape, is_up=True)
    return Script(
        seed, shape, (Fault(round(rng.uniform(20.0, 500.0), 1), "pause", "worker:0", "", 2 * STUCK_MS),)
    )


def _changes(rng: random.Random, seed: int, shape: Shape) -> Script:
    """An operator changes one thing after the other under load, where devices may be slow."""
    shape = replace(shape, is_up=True, batching=rng.choice(BATCHINGS), rate_rps=100.0)
    at_ms = round(rng.uniform(20.0, 500.0), 1)
    faults = [Fault(at_ms - 15.0, "slow", "agent:0", "", 300.0)] if rng.random() < 0.5 else []
    for _ in range(rng.choice((1, 2, 2))):
        what = f"{rng.choice((*CHANGES, 'remove', 'drain', 'back'))}:{rng.randrange(shape.models + 1)}"
        faults.append(Fault(at_ms, "change", "operator", what))
        at_ms = round(at_ms + rng.choice((1.0, 40.0, 150.0)), 1)
    return Script(seed, shape, tuple(faults))


STORIES: Final[Mapping[Callable[[random.Random, int, Shape], Script], float]] = {
    _one_loss: 0.2,
    _takeover: 0.1,
    _slow: 0.05,
    _only_slice: 0.05,
    _full: 0.05,
    _back_at_once: 0.05,
    _cut_off: 0.05,
    _agent_again: 0.03,
    _stuck: 0.02,
    _changes: 0.05,
}
"""With how often each is drawn; the rest are any faults."""


@dataclass(frozen=True)
class Expected:
    """What holds in a history beside what always does."""

    room_ms: float | None = None
    """With how much budget requests are answered that are asked between the first fault and the second."""
    active_ms: float | None = None
    """When the next scheduler is active at the latest."""
    ended_ms: float | None = None
    """When nobody stands still any more: an agent ends a worker that does so for too long."""
    keeps_workers: bool = False
    """All of them live on."""


def expected_of(script: Script) -> Expected:
    """Nothing where more goes wrong than one thing."""
    faults, shape = script.faults, script.shape
    if not faults or not shape.is_up:
        return Expected()
    first, last = faults[0], faults[-1]
    is_taken_over = (
        all(one.kind == "change" for one in faults[:-1])
        and (last.kind, last.who) in {("kill", f"scheduler:{ACTIVE}"), ("restart", f"scheduler:{ACTIVE}")}
        and shape.schedulers > 1
    )
    is_agent_alone = len(faults) == 1 and (first.kind, first.who) == ("kill", "agent:0")
    is_stuck = len(faults) == 1 and first.kind == "pause" and first.for_ms > STUCK_MS
    return Expected(
        room_ms=None if shape.run_once else _room_ms(first, shape),
        active_ms=last.at_ms + TAKEN_OVER_MS if is_taken_over else None,
        ended_ms=first.at_ms + STUCK_MS if is_stuck else None,
        keeps_workers=is_agent_alone and shape.outlives,
    )


def _room_ms(first: Fault, shape: Shape) -> float | None:
    """What one worker of several had goes to another one, at once, or when who lost a connection is listed again.

    What is asked while there is no slice, or no scheduler, waits for the next one. Where schedulers stand by, the active one needs
    most of the agents.
    """
    has_others = shape.nodes > 1
    is_agent_spared = shape.schedulers == 1 or shape.nodes > 2
    match first:
        case Fault(kind="kill" | "restart", who="worker:0" | "worker:1" | "worker:2") if has_others:
            return 250.0
        case Fault(kind="kill" | "restart", who="worker:0") if shape.gpus == 1 and shape.schedulers == 1:
            return 250.0 + 2 * shape.start_ms + shape.load_ms
        case Fault(kind="kill", who="client:0" | "client:1" | "client:2") if has_others:
            return 150.0
        case Fault(kind="reset", who="worker:0", whom="scheduler:active") if has_others:
            return 250.0
        case Fault(kind="reset", who="frontend:0", whom="scheduler:active") if has_others:
            return 300.0
        case Fault(kind="kill", who="scheduler:active") if shape.schedulers > 1:
            return 450.0
        case Fault(kind="restart", who="scheduler:active") if shape.schedulers > 1:
            return 150.0  # it hands over
        case Fault(kind="kill", who="agent:0") if shape.outlives and is_agent_spared:
            return 150.0
        case _:
            return None
