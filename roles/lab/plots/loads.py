"""A live run: latency as histogram and distribution, and the stages it is made of."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from roles.benchmark.share import STAGES
from roles.benchmark.verdict import LoadRun

BINS = 100


def plot_load(path: Path, run: LoadRun) -> None:
    """Draw a run into a PNG. Requests without an answer are in no picture but in the titles' counts."""
    mpl.use("Agg")
    figure = Figure(figsize=(15, 5), layout="constrained")
    histogram, distribution, stages = figure.subplots(1, 3)
    model, latency_ms = run.column("model"), run.column("latency_ms")
    for place, config in enumerate(run.config.models):
        own = latency_ms[model == place]
        known = np.sort(own[~np.isnan(own)])
        if not known.size:
            continue
        label = f"{config.name}: {known.size} of {own.size} answered"
        histogram.hist(known, bins=BINS, histtype="step", label=label)
        distribution.plot(known, np.arange(1, known.size + 1) / own.size, label=label)
        distribution.axvline(config.slo_ms, linestyle=":", color=f"C{place % 10}")
    for axes, title, y_label in (
        (histogram, "latency", "requests"),
        (distribution, "latency, distribution (dotted: SLO)", "part of the requests sent"),
    ):
        axes.set(title=title, xlabel="ms from the intended moment", ylabel=y_label)
        axes.legend(fontsize="small")
    breakdown = run.breakdown_ms()
    mean_ms = [breakdown[stage]["mean"] or 0.0 for stage in STAGES]
    p99_ms = [breakdown[stage]["p99"] or 0.0 for stage in STAGES]
    stages.barh([stage.removesuffix("_ms") for stage in STAGES], p99_ms, color="C1", label="p99")
    stages.barh([stage.removesuffix("_ms") for stage in STAGES], mean_ms, color="C0", label="mean")
    stages.invert_yaxis()
    stages.set(title="where the time went", xlabel="ms")
    stages.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=100)
