"""A simulated run: batch sizes, queueing, goodput, busy GPUs, batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from roles.lab.plots.axes import LINES, describe, model_colours, model_legend, whole_numbers
from roles.simulator.load_sweep import AtLoad
from roles.simulator.simulation import SimulatedRun
from roles.workload.outcomes import batch_sizes_in

GANTT_BATCHES = 12  # of the GPU that has most: enough to see the staggered pattern
GANTT_GPUS = 32  # more rows than that are a grey wall
SECOND_MS = 1000.0


def plot_run(path: Path, run: SimulatedRun, loads: Sequence[AtLoad]) -> None:
    """Draw a run into a PNG: batch sizes, queueing delay, goodput, busy GPUs, and the batches themselves."""
    mpl.use("Agg")
    run_figure(run, loads).savefig(path, format="png", dpi=100)


def run_figure(run: SimulatedRun, loads: Sequence[AtLoad]) -> Figure:
    """The same, not written yet. A model has one colour in all panels."""
    figure = Figure(figsize=(15, 10), layout="constrained")
    axes = figure.subplots(2, 3)
    colours = model_colours(traffic.model_id for traffic in run.traffic)
    _draw_batch_sizes(axes[0, 0], run, colours)
    _draw_queueing(axes[0, 1], run, colours)
    _draw_over_time(axes[0, 2], run)
    _draw_goodput(axes[1, 0], loads)
    _draw_busy(axes[1, 1], loads)
    _draw_batches(axes[1, 2], run, colours)
    model_legend(figure, colours)
    return figure


def _draw_batch_sizes(axes: Axes, run: SimulatedRun, colours: Mapping[str, Any]) -> None:
    sizes = batch_sizes_in(run.batches, run.window)
    largest = max((max(of_model) for of_model in sizes.values()), default=1)
    bins = [size + 0.5 for size in range(largest + 1)]
    for model_id, of_model in sizes.items():
        axes.hist(of_model, bins=bins, histtype="step", color=colours[model_id])
    describe(axes, "batch sizes", "requests in a batch", "batches")


def _draw_queueing(axes: Axes, run: SimulatedRun, colours: Mapping[str, Any]) -> None:
    for traffic in run.traffic:
        inside = (traffic.arrived_at_ms >= run.window.from_ms) & (traffic.arrived_at_ms < run.window.until_ms)
        delay_ms = (traffic.started_at_ms - traffic.arrived_at_ms)[inside]
        delay_ms = np.sort(delay_ms[~np.isnan(delay_ms)])
        if delay_ms.size:
            part = np.arange(1, delay_ms.size + 1) / delay_ms.size
            axes.plot(delay_ms, part, color=colours[traffic.model_id])
    describe(axes, "queueing delay", "ms from arrival to start", "part of the requests that ran")


def _draw_over_time(axes: Axes, run: SimulatedRun) -> None:
    edges_ms = np.arange(run.window.from_ms, run.window.until_ms + SECOND_MS, SECOND_MS)
    arrived = [traffic.arrived_at_ms for traffic in run.traffic]
    good = [
        traffic.arrived_at_ms[traffic.finished_at_ms - traffic.arrived_at_ms <= traffic.slo_ms]
        for traffic in run.traffic
    ]
    for label, moments, colour in (("offered", arrived, LINES[1]), ("good", good, LINES[0])):
        counts, _ = np.histogram(np.concatenate(moments), edges_ms)
        axes.plot(edges_ms[:-1] / SECOND_MS, counts, label=label, color=colour)
    axes.set_ylim(bottom=0)
    describe(axes, "over time", "s", "requests each second")


def _draw_goodput(axes: Axes, loads: Sequence[AtLoad]) -> None:
    offered = [load.outcome.offered / load.outcome.duration_s for load in loads]
    good = [load.outcome.good / load.outcome.duration_s for load in loads]
    axes.plot(offered, offered, linestyle=":", color=LINES[1], label="offered")
    axes.plot(offered, good, marker="o", color=LINES[0], label="goodput")
    describe(axes, "goodput against load", "offered, requests/s", "requests/s")


def _draw_busy(axes: Axes, loads: Sequence[AtLoad]) -> None:
    offered = [load.outcome.offered / load.outcome.duration_s for load in loads]
    busy = [load.outcome.gpus.busy_fraction for load in loads]
    axes.plot(
        offered,
        [sum(fractions) / len(fractions) for fractions in busy],
        marker="o",
        color=LINES[0],
        label="all GPUs",
    )
    axes.plot(offered, [fractions[0] for fractions in busy], linestyle=":", color=LINES[1], label="lowest id")
    axes.plot(
        offered, [fractions[-1] for fractions in busy], linestyle=":", color=LINES[2], label="highest id"
    )
    axes.set_ylim(0, 1.05)
    describe(axes, "busy GPUs against load", "offered, requests/s", "busy part of the time")


def _draw_batches(axes: Axes, run: SimulatedRun, colours: Mapping[str, Any]) -> None:
    inside = [batch for batch in run.batches if batch.started_at_ms >= run.window.from_ms]
    busiest: dict[int, int] = {}
    shown = []
    for batch in sorted(inside, key=lambda batch: batch.started_at_ms):
        if batch.gpu >= GANTT_GPUS:
            continue
        busiest[batch.gpu] = busiest.get(batch.gpu, 0) + 1
        if busiest[batch.gpu] > GANTT_BATCHES:
            break
        shown.append(batch)
    for model_id in colours:
        own = [batch for batch in shown if batch.model_id == model_id]
        if not own:
            continue
        axes.barh(
            [batch.gpu for batch in own],
            [batch.finished_at_ms - batch.started_at_ms for batch in own],
            left=[batch.started_at_ms for batch in own],
            height=0.8,
            color=colours[model_id],
            edgecolor="white",
        )
    axes.invert_yaxis()
    whole_numbers(axes.yaxis)
    describe(axes, "batches", "ms", "GPU")
