"""What goes wrong in a history, as data: made smaller, written down and read again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import yaml

FAULTY_MS: Final = 1_000.0
ALL: Final = "all"
ACTIVE: Final = "active"


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
