"""Symphony's table 2 and figures 1 and 12: one model on eight GPUs, its batches and how long its requests wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roles.lab.reproduce.report import Grid, Range, Reproduction, Row, Value
from roles.lab.reproduce.symphony.workloads import (
    IDEAL,
    OURS,
    SYSTEMS,
    effort_of,
    goodputs_of,
    model_of,
    played_at,
)
from roles.lab.scheduler_only import Case, Model, Played
from roles.workload.outcomes import Window, nearest_rank

GPUS = 8
WINDOW = Window(2000.0, 12_000.0)
PERCENTILES = (0.1, 0.5, 0.9)
CLOCKWORK_ITSELF = "Clockwork, powers of two"


@dataclass(frozen=True, slots=True)
class Stated:
    """What table 2 and figure 1 say of a model, in the table's order of columns."""

    slo_ms: float
    no_coordination: tuple[int, float]
    staggered: tuple[int, float]
    goodput_rps: Mapping[str, float]
    median_batch: Mapping[str, float]


STATED: Mapping[str, Stated] = {
    "ResNet50": Stated(
        25.0,
        (7, 4501.0),
        (16, 5839.0),
        {"Symphony": 5264.0, "Clockwork": 1358.0, "Nexus": 4027.0, "Shepherd": 4445.0},
        {"Clockwork": 1.0, "Nexus": 6.0, "Shepherd": 9.0, "Symphony": 14.0},
    ),
    "InceptionResNetV2": Stated(
        70.0,
        (3, 713.0),
        (8, 1083.0),
        {"Symphony": 926.0, "Clockwork": 458.0, "Nexus": 618.0, "Shepherd": 778.0},
        {"Clockwork": 1.0, "Nexus": 2.0, "Shepherd": 4.0, "Symphony": 8.0},
    ),
}
WHY = {
    "Symphony": "without its network, for which it sets 2 ms and more of the SLO aside",
    "Clockwork": "its cost of a decision, which the paper blames (section 5.2), is not played: ours is a better Clockwork",
    "Nexus": IDEAL,
    "Shepherd": IDEAL,
    CLOCKWORK_ITSELF: "the sizes of Clockwork itself; the other rows have all sizes, as Symphony's authors ran it (section 5)",
}


def no_coordination(model: Model, gpus: int) -> tuple[int, float]:
    """Batch size and throughput where a request may wait for a whole batch: floor((SLO/2 - beta)/alpha) (section 5.3)."""
    return _bound(model, gpus, model.slo_ms / 2)


def staggered(model: Model, gpus: int) -> tuple[int, float]:
    """The same where it waits for an N-th of one: floor((SLO/(1 + 1/N) - beta)/alpha)."""
    return _bound(model, gpus, model.slo_ms / (1 + 1 / gpus))


def _bound(model: Model, gpus: int, exec_ms: float) -> tuple[int, float]:
    batch = math.floor((exec_ms - model.beta_ms) / model.alpha_ms)
    return batch, 1000 * gpus * batch / model.exec_ms(batch)


def table_2(*, is_full: bool = False) -> Reproduction:
    """Bounds, goodput of each system, then its batches and waiting at that goodput."""
    effort = effort_of(is_full=is_full)
    rows: list[Row] = []
    sizes: list[tuple[str, tuple[Value, ...]]] = []
    waits: list[tuple[str, tuple[Value, ...]]] = []
    for name, stated in STATED.items():
        model = model_of("table2", name, stated.slo_ms)
        case = Case(f"1 {name}", (model,), GPUS)
        for what, paper, (batch, rps) in (
            ("no coordination", stated.no_coordination, no_coordination(model, GPUS)),
            ("staggered", stated.staggered, staggered(model, GPUS)),
        ):
            rows.append(Row(f"Table 2, {name}, {what}: batch size", paper[0], batch))
            rows.append(Row(f"Table 2, {name}, {what}: throughput, requests/s", paper[1], round(rps, 1)))
        systems = {**SYSTEMS, CLOCKWORK_ITSELF: ("clockwork", {}), "tenuto": OURS}
        found = goodputs_of(case, systems, effort)
        for system, rps in found.items():
            paper_rps = stated.goodput_rps.get(system)
            rows.append(
                Row(
                    f"Table 2, {name}, {system}: goodput, requests/s",
                    paper_rps,
                    round(rps, 1),
                    WHY.get(system, ""),
                )
            )
        played = {
            system: played_at(case, systems[system], rps, WINDOW) for system, rps in found.items() if rps
        }
        for system, one in played.items():
            batches = np.sort(
                [
                    b.batch_size
                    for b in one.batches
                    if b.batch_size and WINDOW.from_ms <= b.started_at_ms < WINDOW.until_ms
                ]
            )
            by_request = np.sort(np.repeat(batches, batches))
            rows.append(
                Row(
                    f"Figure 1, {name}, {system}: median batch size",
                    stated.median_batch.get(system),
                    nearest_rank(batches, 0.5),
                    "at its own goodput here; the paper does not say at which rate" if system in WHY else "",
                )
            )
            sizes.append((f"{name}, {system}", tuple(nearest_rank(by_request, part) for part in PERCENTILES)))
            waits.append(
                (f"{name}, {system}", tuple(round(float(v), 2) for v in _waits_ms(one, (*PERCENTILES, 1.0))))
            )
        rows += _waiting_rows(name, stated.slo_ms, played)
    percent = tuple(f"p{100 * part:g}" for part in PERCENTILES)
    return Reproduction(
        "symphony-table-2",
        "Symphony: one model on eight GPUs",
        "Symphony, table 2 and figures 1 and 12 (sections 2.2 and 5.3), Poisson arrivals.",
        tuple(rows),
        (
            Grid("Figure 1, the batch size that a request runs in:", percent, tuple(sizes)),
            Grid(
                "Figure 12, from a request's arrival to the start of its batch, ms:",
                (*percent, "longest"),
                tuple(waits),
            ),
        ),
    )


def _waits_ms(played: Played, parts: tuple[float, ...]) -> list[float]:
    (fate,) = played.fates.values()
    ran = fate.inside(WINDOW) & ~np.isnan(fate.finished_at_ms)
    waited = fate.started_at_ms[ran] - fate.arrived_at_ms[ran]
    return [float(np.quantile(waited, part)) for part in parts]


def _waiting_rows(name: str, slo_ms: float, played: Mapping[str, Played]) -> list[Row]:
    """The text of section 5.3 on figure 12."""
    median = {system: _waits_ms(one, (0.5,))[0] for system, one in played.items()}
    rows = [
        Row(
            f"Figure 12, {name}: median wait of {rival} over Symphony's",
            Range(2.0, 3.0),
            round(median[rival] / median["Symphony"], 2),
            "at each one's own goodput; Symphony's own wait is chosen: it holds a batch until it is full",
        )
        for rival in ("Nexus", "Clockwork")
        if rival in median
    ]
    if "Nexus" in played:
        longest = _waits_ms(played["Nexus"], (1.0,))[0]
        rows.append(
            Row(
                f"Figure 12, {name}: longest wait of Nexus, of the SLO",
                0.5,
                round(longest / slo_ms, 2),
                "the paper: around half",
            )
        )
    return rows
