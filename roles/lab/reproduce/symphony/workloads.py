"""What Symphony's experiments have in common: its models, the systems it compares, how goodput is asked.

Played is the discipline alone (`roles/lab/scheduler_only.py`), the paper's "scheduler-only": no network, no lateness, and
rivals that cost no time to decide. The rivals are our implementations of what section 2.2 says of them (ADR 0013).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from profiles.store import shipped_data
from roles.lab.scheduler_only import Case, Model, Played, goodput_rps, is_good, made, play
from roles.workload.outcomes import Window

System = tuple[str, Mapping[str, Any]]
SYSTEMS: Final[Mapping[str, System]] = {
    "Symphony": ("deferred", {}),
    "Clockwork": ("clockwork", {"sizes": "all"}),
    "Nexus": ("nexus", {}),
    "Shepherd": ("shepherd", {}),
}
"""By the paper's name: the discipline and its options. Clockwork with all batch sizes, as the authors ran it (section 5)."""
OURS: Final[System] = ("tenuto", {})
IDEAL = "rivals are played without their costs: no time to decide, no distributed frontends, no network (ADR 0013)"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is played. A window is long enough for `arrivals` of the rarest model, within its bounds."""

    seeds: tuple[int, ...]
    warmup_ms: float
    window_ms: float
    window_ms_max: float
    arrivals: int
    grid: float

    def window(self, case: Case, rate_rps: float) -> Window:
        """At that total rate."""
        needed_ms = 1000 * self.arrivals / (rate_rps * case.rarest)
        length_ms = min(max(self.window_ms, needed_ms), self.window_ms_max)
        return Window(self.warmup_ms, self.warmup_ms + length_ms)


SAMPLE: Final = Effort((1,), 2000.0, 4000.0, 8000.0, 1000, 1.01)
FULL: Final = Effort((1, 2, 3), 5000.0, 20_000.0, 60_000.0, 2000, 1.005)


def effort_of(*, is_full: bool) -> Effort:
    """In full: windows as `tenuto goodput` has them, three seeds."""
    return FULL if is_full else SAMPLE


def goodput_of(case: Case, system: System, effort: Effort, near_rps: float = 0.0) -> float:
    """The highest total rate at which every model loses under 1 %, the median of the seeds; the search begins at `near_rps`."""
    found = []
    for seed in effort.seeds:

        def is_good_at(rate_rps: float, seed: int = seed) -> bool:
            return is_good(case, made(case, *system), seed, rate_rps, effort.window(case, rate_rps))

        found.append(goodput_rps(case, is_good_at, near_rps, effort.grid))
    return statistics.median(found)


def goodputs_of(case: Case, systems: Mapping[str, System], effort: Effort) -> dict[str, float]:
    """Of each system on the same arrivals; each search begins where the first one's has ended."""
    found: dict[str, float] = {}
    for name, system in systems.items():
        found[name] = goodput_of(case, system, effort, next(iter(found.values()), 0.0))
    return found


def played_at(
    case: Case, system: System, rate_rps: float, window: Window, seed: int = 1, run_ms: float = 0.0
) -> Played:
    """What became of every request at that total rate; load goes on a little behind the window."""
    until_ms = window.until_ms + max(model.slo_ms for model in case.models)
    return play(case, made(case, *system), case.arrivals(seed, rate_rps, until_ms), run_ms)


def table(gpu: str) -> list[Model]:
    """The models of table 3 (``gtx1080ti``) or 4 (``a100``), each with its own SLO, equally popular."""
    return [_model(row) for row in shipped_data("symphony_profiles")[gpu]]


def model_of(gpu: str, name: str, slo_ms: float | None = None) -> Model:
    """One of them, with another SLO where one is given. ``table2`` is a table too, without SLOs."""
    rows: Sequence[Mapping[str, Any]] = shipped_data("symphony_profiles")[gpu]
    rows = rows if gpu != "table2" else shipped_data("symphony_profiles")["table2"]["models"]
    return _model(next(row for row in rows if row["name"] == name), slo_ms)


def copies(model: Model, count: int, zipf: float = 0.0) -> tuple[Model, ...]:
    """So many specialised variants of one model; the i-th has the weight i^-zipf."""
    return tuple(
        Model(f"{model.name}-{rank}", model.alpha_ms, model.beta_ms, model.slo_ms, rank**-zipf)
        for rank in range(1, count + 1)
    )


def _model(row: Mapping[str, Any], slo_ms: float | None = None) -> Model:
    return Model(row["name"], row["alpha_ms"], row["beta_ms"], row["slo_ms"] if slo_ms is None else slo_ms)
