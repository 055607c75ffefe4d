"""A live run: latency as histogram and distribution, and the stages it is made of."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from roles.benchmark.share import STAGES
from roles.benchmark.verdict import LoadRun
from roles.lab.plots.axes import LINES, describe, model_colours, model_legend

BINS = 100


def plot_load(path: Path, run: LoadRun) -> None:
    """Draw a run into a PNG. Requests without an answer are in no picture but in the titles' counts."""
    mpl.use("Agg")
    load_figure(run).savefig(path, format="png", dpi=100)


def load_figure(run: LoadRun) -> Figure:
    """The same, not written yet. A model has one colour in all panels."""
    figure = Figure(figsize=(15, 6), layout="constrained")
    histogram, distribution, stages = figure.subplots(1, 3)
    model, latency_ms = run.column("model"), run.column("latency_ms")
    colours = model_colours(str(config.name) for config in run.config.models)
    labels: dict[str, str] = {}
    for place, config in enumerate(run.config.models):
        own = latency_ms[model == place]
        known = np.sort(own[~np.isnan(own)])
        if not known.size:
            continue
        colour = colours[config.name]
        labels[config.name] = f"{config.name}: {known.size} of {own.size} answered"
        histogram.hist(known, bins=BINS, histtype="step", color=colour)
        distribution.plot(known, np.arange(1, known.size + 1) / own.size, color=colour)
        distribution.axvline(config.slo_ms, linestyle=":", color=colour)
    for axes, title, y_label in (
        (histogram, "latency", "requests"),
        (distribution, "latency, distribution (dotted: SLO)", "part of the requests sent"),
    ):
        describe(axes, title, "ms from the intended moment", y_label)
    breakdown = run.breakdown_ms()
    mean_ms = [breakdown[stage]["mean"] or 0.0 for stage in STAGES]
    p99_ms = [breakdown[stage]["p99"] or 0.0 for stage in STAGES]
    stages.barh([stage.removesuffix("_ms") for stage in STAGES], p99_ms, color=LINES[2], label="p99")
    stages.barh([stage.removesuffix("_ms") for stage in STAGES], mean_ms, color=LINES[0], label="mean")
    stages.invert_yaxis()
    describe(stages, "where the time went", "ms", "")
    model_legend(figure, colours, labels)
    return figure
