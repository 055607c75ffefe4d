"""Symphony's figures 5, 6 and 7: deferred batches beside eager ones and beside timeouts (sections 3.3 and 3.4).

Eager is the paper's: the same gathering of batches, with the window drop, and exec = now (its line 5 with k = 0). Beside it
stands eager with the simple drop, which suits it better (ADR 0010).
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fabric.ids import ModelId, SliceId
from policies.batching.base import BatchModel, BatchSlice, Discipline, HostedModel
from policies.batching.registry import make_discipline
from roles.lab.reproduce.report import Grid, Range, Reproduction, Row, Value
from roles.lab.reproduce.symphony.workloads import (
    SYSTEMS,
    System,
    copies,
    effort_of,
    goodput_of,
    goodputs_of,
    model_of,
    table,
)
from roles.lab.scheduler_only import Case, Model, Played, play

DEFERRED: System = SYSTEMS["Symphony"]
EAGER: System = ("eager", {"drop": "window"})
EAGER_SIMPLE: System = ("eager", {"drop": "simple"})

# ---------------------------------------------------------------- figure 5

EXAMPLE = Model("m", 1.0, 5.0, 12.0)
EXAMPLE_GPUS, EXAMPLE_GAP_MS, EXAMPLE_REQUESTS = 3, 0.75, 60
MISSING = (13, 14, 15)
EAGER_FREE_AT_MS = (11.25, 14.25, 17.25)
"""When the staggered batches of R1 to R12 end: figure 5a is eager from R16 on."""


def _example(name: str, numbers: Sequence[int], free_at_ms: Sequence[float]) -> tuple[Played, Sequence[int]]:
    case = Case("three GPUs", (EXAMPLE,), EXAMPLE_GPUS)
    discipline: Discipline = make_discipline(name, {"drop": "simple"})
    hosted = HostedModel(ModelId("m"), tuple(EXAMPLE.exec_ms(size) for size in range(1, 8)))
    discipline.add_model(BatchModel(ModelId("m"), EXAMPLE.slo_ms), 0.0)
    for gpu, free in enumerate(free_at_ms):
        discipline.add_slice(BatchSlice(SliceId(f"gpu-{gpu}"), gpu, (hosted,), free), 0.0)
    arrived = np.array([EXAMPLE_GAP_MS * (number - 1) for number in numbers])
    return play(case, discipline, [arrived]), numbers


def _dropped(played: Played, numbers: Sequence[int]) -> list[int]:
    refused = np.flatnonzero(~np.isnan(played.fates["m"].refused_at_ms))
    return [numbers[index] for index in refused.tolist()]


def figure_5() -> Reproduction:
    """Three requests are missing: eager scheduling deteriorates, deferred scheduling regains its pattern."""
    numbers = [number for number in range(1, EXAMPLE_REQUESTS + 1) if number not in MISSING]
    deferred, named = _example("deferred", numbers, (0.0,) * EXAMPLE_GPUS)
    eager, late = _example("eager", [number for number in numbers if number > max(MISSING)], EAGER_FREE_AT_MS)
    first = deferred.batches[0]
    at_23 = next((one for one in eager.batches if one.started_at_ms == 23.25), None)
    lost = _dropped(eager, late)
    # The last batches are of what little comes after the end of the example.
    steady = {one.batch_size for one in deferred.batches[:-2]}
    rows = (
        Row("5b: the first batch starts at", 2.25, first.started_at_ms),
        Row("5b: its size", 4, first.batch_size),
        Row("5b: sizes of all batches", "4", ", ".join(str(size) for size in sorted(steady))),
        Row("5b: dropped", 0, len(_dropped(deferred, named))),
        Row(
            "5a: sizes of the first four batches, from R16 on",
            "1, 4, 4, 1",
            ", ".join(str(one.batch_size) for one in eager.batches[:4]),
        ),
        Row(
            "5a: size of the batch at 23.25, when seven wait", 2, None if at_23 is None else at_23.batch_size
        ),
        Row(
            "5a: the first that are dropped", "R35, R37, R38", ", ".join(f"R{number}" for number in lost[:3])
        ),
        Row("5a: dropped of R16 to R60", None, len(lost)),
    )
    return Reproduction(
        "symphony-figure-5",
        "Symphony: three missing requests",
        "Symphony, figure 5 (section 3.3): l(b) = b + 5, SLO 12, a request every 0.75, 3 GPUs, R13 to R15 missing.",
        rows,
    )


# ---------------------------------------------------------------- figure 6


def figure_6(*, is_full: bool = False) -> Reproduction:
    """6a: eager scheduling as beta grows. 6b: timeouts in percent of the SLO, one model and the zoo."""
    effort = effort_of(is_full=is_full)
    betas_ms = tuple(range(1, 16, 1 if is_full else 7))
    systems = {"deferred": DEFERRED, "eager": EAGER, "eager, simple drop": EAGER_SIMPLE}
    rows, bars_a = [], []
    over = {}
    for beta_ms in betas_ms:
        model = Model("m", 1.0, float(beta_ms), 2 * (8.0 + beta_ms))
        found = goodputs_of(Case("", copies(model, 10), 32), systems, effort)
        over[beta_ms] = found["eager"] / found["deferred"]
        bars_a.append((f"beta/alpha = {beta_ms}", tuple(round(one) for one in found.values())))
    rows.append(
        Row("6a: eager over deferred at beta/alpha = 1", 1.0, round(over[1], 3), "the paper: nearly the same")
    )
    rows.append(
        Row(
            f"6a: eager over deferred at beta/alpha = {betas_ms[-1]}",
            "less: deferral has a bigger advantage",
            round(over[betas_ms[-1]], 3),
        )
    )
    percents = (5, 10, 20, 30, 40, 50, 60, 70, 80) if is_full else (10, 30, 50)
    timeouts: dict[str, System] = {
        f"{percent} %": ("timeout", {"slo_percent": percent}) for percent in percents
    }
    bars_b = []
    workloads = {
        "one ResNet50, 50 ms, 8 GPUs": Case("", (model_of("table2", "ResNet50", 50.0),), 8),
        "37 models of table 4, 64 GPUs": Case("", tuple(table("a100")), 64),
    }
    for name, case in workloads.items():
        found = goodputs_of(case, {"deferred": DEFERRED, "0 %": EAGER, **timeouts}, effort)
        best = max(found[label] for label in ("0 %", *timeouts)) / found["deferred"]
        is_one = len(case.models) == 1
        rows.append(
            Row(
                f"6b, {name}: the best timeout over deferred",
                1.0 if is_one else "much lower",
                round(best, 3),
                ""
                if is_one
                else "a waiting batch is ranked by its latest start here, however it came to wait (ADR 0011)",
            )
        )
        bars_b.append((name, tuple(round(one) for one in found.values())))
    return Reproduction(
        "symphony-figure-6",
        "Symphony: eager batches and timeouts",
        "Symphony, figure 6 (section 3.4.1). 6a: 10 models with alpha = 1 ms, SLO 2l(8), 32 GPUs; 6b: timeouts of a part of the SLO.",
        tuple(rows),
        (
            Grid("6a, goodput, requests/s:", tuple(systems), tuple(bars_a)),
            Grid("6b, goodput, requests/s, by timeout:", ("deferred", "0 %", *timeouts), tuple(bars_b)),
        ),
    )


# ---------------------------------------------------------------- figure 7


@dataclass(frozen=True, slots=True)
class Synthetic:
    """One workload of table 1; `model` None: the 35 models of table 3 together, each with its own SLO."""

    model: str | None
    models: int
    gpus_per_model: float
    slo_ms: float
    shape: float

    @property
    def case(self) -> Case:
        """As it is played."""
        if self.model is None:
            models = tuple(table("gtx1080ti"))
        else:
            models = copies(model_of("gtx1080ti", self.model, self.slo_ms), self.models)
        return Case(self.name, models, round(self.gpus_per_model * len(models)), self.shape)

    @property
    def name(self) -> str:
        """Its options."""
        what = "mixed" if self.model is None else f"{self.models} {self.model}, {self.slo_ms:g} ms"
        return f"{what}, {self.gpus_per_model:g} GPUs a model, gamma {self.shape:g}"


TABLE_1: Mapping[str, tuple[float, ...]] = {
    "models": (8, 16, 24, 32, 48, 64),
    "gpus_per_model": (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0),
    "slo_ms": (20, 25, 30, 40, 50),
    "shape": (0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
}
TABLE_1_MODELS = ("DenseNet121", "InceptionV3", "ResNet50V2", "VGG16", "Xception", "BERT")
SAMPLE_SIZE = 6
SAMPLE_BOUND_RPS = 4000.0
NAMED = (
    Synthetic(None, 35, 1.0, 0.0, 1.0),
    Synthetic("DenseNet121", 8, 1.0, 30.0, 1.0),
    Synthetic("DenseNet121", 8, 1.0, 30.0, 0.2),
    Synthetic("BERT", 8, 1.0, 40.0, 1.0),
)
"""Of the kinds that figures 7a, 7b and 7c show; part of each sample."""


def synthetic_workloads() -> list[Synthetic]:
    """All of table 1: 7,560 of one model's profile, 42 mixed. The paper counts 5,880 and does not say which."""
    alike = [
        Synthetic(model, int(count), per_model, slo_ms, shape)
        for model in TABLE_1_MODELS
        for count, per_model, slo_ms, shape in itertools.product(*TABLE_1.values())
    ]
    mixed = [
        Synthetic(None, 35, per_model, 0.0, shape)
        for per_model, shape in itertools.product(TABLE_1["gpus_per_model"], TABLE_1["shape"])
    ]
    return [*alike, *mixed]


def drawn_workloads(count: int = SAMPLE_SIZE, bound_rps: float = SAMPLE_BOUND_RPS) -> list[Synthetic]:
    """`NAMED` and a seeded sample of those that no schedule can carry more than `bound_rps` of."""
    small = [one for one in synthetic_workloads() if one not in NAMED and one.case.bound_rps <= bound_rps]
    return [*NAMED, *random.Random(1).sample(small, count)]


def figure_7(*, is_full: bool = False) -> Reproduction:
    """Goodput of deferred over that of eager batches on the workloads of table 1."""
    effort = effort_of(is_full=is_full)
    chosen = synthetic_workloads() if is_full else drawn_workloads()
    over: dict[str, dict[Synthetic, float]] = {"window": {}, "simple": {}}
    bars: list[tuple[str, tuple[Value, ...]]] = []
    for one in chosen:
        case = one.case
        deferred = goodput_of(case, DEFERRED, effort)
        cells: list[Value] = [round(deferred)]
        for drop, system in (("window", EAGER), ("simple", EAGER_SIMPLE)):
            eager = goodput_of(case, system, effort, deferred)
            cells.append(round(deferred / eager, 2) if eager else None)
            if eager:
                over[drop][one] = deferred / eager
        bars.append((one.name, tuple(cells)))
    rows = [row for drop, found in over.items() if found for row in _rows_of_7(drop, found)]
    return Reproduction(
        "symphony-figure-7",
        "Symphony: deferred over eager on synthetic workloads",
        f"Symphony, figure 7 (section 3.4.2), table 1's workloads with table 3's profiles; the paper plays 5,880, table 1 spans "
        f"{len(synthetic_workloads()):,}. Here {'all' if is_full else f'{len(chosen)} small ones, {SAMPLE_SIZE} of them drawn'}.",
        tuple(rows),
        ()
        if is_full
        else (
            Grid(
                "Goodput of deferred, requests/s, and over that of eager:",
                ("deferred", "over window drop", "over simple drop"),
                tuple(bars),
            ),
        ),
    )


def _rows_of_7(drop: str, found: Mapping[Synthetic, float]) -> list[Row]:
    why = (
        "eager dispatch gained most when a waiting batch got its right rank (docs/results/disciplines.md); the paper's eager is its own "
        "scheduler's"
    )
    kinds: tuple[tuple[str, Value, Callable[[Synthetic], bool]], ...] = (
        ("7a, mixed", Range(1.35, 2.02), lambda one: one.model is None),
        (
            "7b, DenseNet121 at 30 ms",
            Range(1.34, 3.34),
            lambda one: one.model == "DenseNet121" and one.slo_ms == 30,
        ),
        ("7c, BERT", "similar", lambda one: one.model == "BERT"),
    )
    rows = []
    for name, paper, is_one in kinds:
        ratios = [ratio for one, ratio in found.items() if is_one(one)]
        if ratios:
            rows.append(
                Row(
                    f"{name}: deferred over eager with {drop} drop, median",
                    paper,
                    round(statistics.median(ratios), 3),
                    why,
                )
            )
    part = {
        limit: 100 * sum(one >= limit for one in found.values()) / len(found) for limit in (0.95, 1.5, 2.0)
    }
    return [
        *rows,
        Row(f"7d, {drop} drop: at least 0.95, % of workloads", "almost all", round(part[0.95], 1), why),
        Row(
            f"7d, {drop} drop: 1.5 and more, % of workloads",
            16,
            round(part[1.5], 1),
            f"of {len(found)} workloads; {why}",
        ),
        Row(f"7d, {drop} drop: 2 and more, % of workloads", "extreme cases", round(part[2.0], 1), why),
    ]
