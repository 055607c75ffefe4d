"""What goes wrong in a history, as data: drawn from a seed, made smaller, written down and read again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import yaml

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
FAULTY_MS: Final = 1_000.0
TAKEN_OVER_MS: Final = 150.0
"""After the end of the active scheduler's process, while agents and standbys are well."""
ALL: Final = "all"
ACTIVE: Final = "active"
BATCHINGS: Final = ("tenuto", "deferred", "eager", "clockwork", "nexus", "shepherd")


@dataclass(frozen=True)
class Fault:
    """`who` and `whom`: a role and a number, counted round among the living, or `ALL` of them, or the `ACTIVE` scheduler.

    `for_ms`: of what lasts, or until the next start. Of a change `whom` is what is asked for: `add:2` of a model, `drain:0` of a node.
    """

    at_ms: float
    kind: str
    who: str
    whom: str = ""
    for_ms: float = 0.0


@dataclass(frozen=True)
class Shape:
    """A cluster and its load."""

    schedulers: int = 1
    """One of which is active."""
    nodes: int = 1
    gpus: int = 1
    frontends: int = 1
    clients: int = 1
    models: int = 1
    batching: str = "tenuto"
    is_up: bool = True
    """Whether all is well before anything goes wrong; else that begins with the first start."""
    outlives: bool = False
    delay_ms: float = 0.2
    start_ms: float = 60.0
    load_ms: float = 0.0
    """Of a slice, or of a model more on it."""
    resends: bool = False
    """Whether clients send what a frontend that they lost had not answered to another one."""
    run_once: bool = False
    """Whether the last model must not run a request twice."""
    application: bool = False
    """Whether clients ask an application, too: the first model, and for its answer the last one, twice."""
    cancels: float = 0.0
    """Which part of the requests is cancelled before its deadline."""
    priorities: bool = False
    """Whether requests have priorities of their own."""
    heartbeat_ms: float = 250.0
    rate_rps: float = 40.0
    slo_ms: float = 100.0


@dataclass(frozen=True)
class Script:
    """One history. The seed decides what the script does not say: arrivals, jitter, what of a broken connection arrives."""

    seed: int
    shape: Shape = field(default_factory=Shape)
    faults: tuple[Fault, ...] = ()

    def text(self) -> str:
        """One line of YAML."""
        written = {
            "seed": self.seed,
            "shape": asdict(self.shape),
            "faults": [asdict(one) for one in self.faults],
        }
        line = yaml.safe_dump(written, default_flow_style=True, sort_keys=False, width=1 << 20)
        return str(line).strip()


def read(text: str) -> Script:
    """What `text` wrote. Raises TypeError, KeyError for something else."""
    found: dict[str, Any] = yaml.safe_load(text)
    faults = tuple(Fault(**one) for one in found["faults"])
    return Script(int(found["seed"]), Shape(**found["shape"]), faults)


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
    (story,) = rng.choices((None, *STORIES), (0.5, *STORIES.values()))
    script = Script(seed, shape, tuple(faults)) if story is None else story(rng, seed, shape)
    if script.shape.batching == "shepherd":  # which runs requests twice
        script = replace(script, shape=replace(script.shape, run_once=False))
    return script


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
    """An operator's change, and then the active scheduler is lost; in some histories no agent can write the next epoch down."""
    shape = replace(shape, schedulers=rng.choice((1, 2, 3)), is_up=True)
    lost_at_ms = round(rng.uniform(500.0, FAULTY_MS), 1)
    lost = Fault(lost_at_ms, rng.choice(("kill", "restart")), f"scheduler:{ACTIVE}", "", 700.0)
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
    pairs = [pair for pair in _PAIRS if "client" not in pair]
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


STORIES: Final = {
    _one_loss: 0.2,
    _takeover: 0.1,
    _slow: 0.05,
    _only_slice: 0.05,
    _full: 0.05,
    _back_at_once: 0.05,
    _cut_off: 0.05,
}
"""With how often each is drawn; the rest are any faults."""


def room_ms(script: Script) -> float | None:
    """What budget lasts for another try after the first fault; None: nobody can promise that.

    One worker of several ends, or a connection does: what it had goes to another one, at once, or when who lost it is listed again.
    """
    first, shape = script.faults[0], script.shape
    if shape.nodes < 2 or shape.run_once or not shape.is_up:
        return None
    match first:
        case Fault(kind="kill" | "restart", who="worker:0" | "worker:1" | "worker:2"):
            return 250.0
        case Fault(kind="kill", who="client:0" | "client:1" | "client:2"):
            return 150.0
        case Fault(kind="reset", who="worker:0", whom="scheduler:active"):
            return 250.0
        case Fault(kind="reset", who="frontend:0", whom="scheduler:active"):
            return 300.0
        case _:
            return None


def taken_over_ms(script: Script) -> float | None:
    """When the next scheduler is active at the latest; None: nobody can promise that."""
    last = script.faults[-1]
    is_plain = script.shape.is_up and all(one.kind == "change" for one in script.faults[:-1])
    is_loss = last.kind in {"kill", "restart"} and last.who == f"scheduler:{ACTIVE}"
    return last.at_ms + TAKEN_OVER_MS if is_plain and is_loss and script.shape.schedulers > 1 else None


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
            who, whom = rng.choice(_PAIRS)
            is_all = who == "agent" and rng.random() < 0.5
            who = f"{who}:{ALL}" if is_all else f"{who}:{rng.randrange(3)}"
            whom = f"{whom}:{rng.randrange(3)}"
            for_ms = {
                "cut": rng.choice((30.0, 250.0, 1_000.0, 3_000.0, 6_500.0)),
                "delay": 400.0,
                "full": rng.choice((1.0, 30.0, 250.0, 1_500.0)),
            }.get(kind, 0.0)
    return Fault(at_ms, kind, who, whom, for_ms)


CHANGES: Final = ("add", "add", "remove", "slo", "drain", "back")
_PAIRS: Final = (
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


def smaller(script: Script) -> Iterator[Script]:
    """Scripts that may fail for the same reason, the smallest first."""
    faults = script.faults
    for place in range(len(faults)):
        yield replace(script, faults=faults[:place] + faults[place + 1 :])
    plain = Shape()
    for name, value in asdict(plain).items():
        if getattr(script.shape, name) != value and name not in {"slo_ms", "delay_ms", "start_ms"}:
            yield replace(script, shape=replace(script.shape, **{name: value}))
    for place, fault in enumerate(faults):
        if fault.for_ms > 30.0:
            shorter = replace(fault, for_ms=round(fault.for_ms / 2, 1))
            yield replace(script, faults=(*faults[:place], shorter, *faults[place + 1 :]))
