"""What users wait for below the peak, and how many GPUs that keeps busy: 10, 30, 50 and 70 % of it on 1 to 32 GPUs.

    python -m benchmarks.below_peak PEAKS.json [--batching tenuto] [--seconds 20] [--gpus 1,2,8,32] [--json FILE]

Each case's peak is the goodput of `tenuto` (every model loses under 1 %), searched once and kept in PEAKS.json, so that
disciplines and versions can be asked at the same rates. `p50` is over all requests, in run times of a batch of one of the
request's model: 1 is a request that nobody keeps waiting. `busy` is in GPUs; `whole`, that many GPUs the load would keep busy if batches were as large as
at the peak, rounded up, as only whole GPUs can be released; `upper`, the part of the busy time that the upper half of the ids has. Played on virtual
time without network, as in `disciplines.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.disciplines import CONTENDERS, OTHERS, TABLE2, TI, WARMUP_MS, alike, is_good, made
from benchmarks.figures import Figures, Line, add_json_option, tell
from roles.lab import scheduler_only
from roles.lab.scheduler_only import Case, Model, goodput_rps
from roles.workload.outcomes import Window

SEED = 7
LOADS = (0.1, 0.3, 0.5, 0.7)
GPUS = (1, 2, 8, 32)
PATIENT = {"name": "patient net", "alpha_ms": 4.0, "beta_ms": 4.0}
SPARE_BUSY = 0.05  # of the GPUs may be busy beyond what the load needs in whole ones
CALM_RUNS = 2.0  # the p50 on one GPU at 30 % of the peak, at most


def cases(gpus: int) -> list[Case]:
    """One model that batches well, one with a long SLO, one with a long run; four unlike models; eight of a kind, in bursts."""
    four = tuple(
        Model(name, TI[name]["alpha_ms"], TI[name]["beta_ms"], slo_ms, weight)
        for name, slo_ms, weight in (
            ("DenseNet121", 45, 1.0),
            ("ResNet50", 40, 2.0),
            ("InceptionV3", 60, 1.0),
            ("VGG16", 80, 0.5),
        )
    )
    return [
        alike(TABLE2["ResNet50"], 1, gpus, 25, 1.0),
        alike(PATIENT, 1, gpus, 300, 1.0),
        alike(TABLE2["InceptionResNetV2"], 1, gpus, 70, 1.0),
        Case(f"four models, {gpus} GPUs, Poisson", four, gpus),
        alike(TI["ResNet50V2"], 8, gpus, 50, 0.3),
    ]


def peak_rps(case: Case, window_ms: float) -> float:
    """The goodput of `tenuto`."""
    return goodput_rps(case, lambda rate: is_good(case, "tenuto", SEED, rate, window_ms))


def look(case: Case, contender: str, rate_rps: float, window_ms: float) -> tuple[float, float, float, float]:
    """At that rate: the p50 in run times, the part that is lost, the GPUs busy, the part of that in the upper half of the ids."""
    window = Window(WARMUP_MS, WARMUP_MS + window_ms)
    arrived = case.arrivals(SEED, rate_rps, window.until_ms)
    played = scheduler_only.play(case, made(case, contender), arrived)
    took = []
    for model in case.models:
        fate = played.fates[model.name]
        own = (fate.finished_at_ms - fate.arrived_at_ms)[fate.inside(window)]
        took.append(own[~np.isnan(own)] / model.exec_ms(1))
    busy_ms = np.zeros(case.gpus)
    for batch in played.batches:
        began, ended = max(batch.started_at_ms, window.from_ms), min(batch.finished_at_ms, window.until_ms)
        busy_ms[batch.gpu] += max(0.0, ended - began)
    upper = float(busy_ms[case.gpus // 2 :].sum() / busy_ms.sum()) if case.gpus > 1 else 0.0
    p50 = float(np.median(np.concatenate(took)))
    return p50, played.bad_rate(window), float(busy_ms.sum()) / window_ms, upper


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peaks", type=Path)
    parser.add_argument("--batching", default="tenuto", choices=[*CONTENDERS, *OTHERS])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)))
    parser.add_argument("--processes", type=int, default=1)
    add_json_option(parser)
    options = parser.parse_args()
    peaks: dict[str, float] = json.loads(options.peaks.read_text()) if options.peaks.exists() else {}
    figures = Figures(f"below the peak, {options.batching}, windows of {options.seconds:g} s")
    asked = [case for gpus in options.gpus.split(",") for case in cases(int(gpus))]
    with ProcessPoolExecutor(options.processes) as pool:
        missing = [case for case in asked if case.name not in peaks]
        for case, found in zip(missing, pool.map(peak_rps, missing, [10_000.0] * len(missing)), strict=True):
            peaks[case.name] = round(found, 1)
            options.peaks.write_text(json.dumps(peaks, indent=1))
        grid = [(case, load) for case in asked for load in LOADS]
        rows = list(
            pool.map(
                look,
                (case for case, _ in grid),
                [options.batching] * len(grid),
                (load * peaks[case.name] for case, load in grid),
                [options.seconds * 1000.0] * len(grid),
            )
        )
    table = figures.table(
        "p50 in run times of one request; GPUs busy, and beside it the load in whole GPUs; lost; busy time of the upper half of the ids",
        *("workload", "load", "p50", "busy", "whole", "lost %", "upper %"),
    )
    for (case, load), (p50, lost, busy, upper) in zip(grid, rows, strict=True):
        whole = math.ceil(load * case.gpus - 1e-9)
        table.rows.append(
            (case.name, f"{load:g}", round(p50, 2), round(busy, 2), whole, 100 * lost, 100 * upper)
        )
    alone = [row[0] for (case, load), row in zip(grid, rows, strict=True) if case.gpus == 1 and load <= 0.3]
    if alone:
        figures.lines.append(
            Line("p50 in run times on one GPU at 10 and 30 %, the worst", max(alone), at_most=CALM_RUNS)
        )
    over = [
        busy - math.ceil(load * case.gpus - 1e-9) - SPARE_BUSY * case.gpus
        for (case, load), (_, _, busy, _) in zip(grid, rows, strict=True)
        if len(case.models) == 1
    ]
    if over:
        figures.lines.append(
            Line(
                "GPUs busy beyond the load in whole GPUs and 0.05 of all, one model, the worst",
                max(over),
                at_most=0.0,
            )
        )
    tell(figures, options.json)


if __name__ == "__main__":
    main()
