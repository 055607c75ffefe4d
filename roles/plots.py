"""Pictures of runs, plans and comparisons. The only room for matplotlib, which is an extra (`plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fabric.ids import ModelId
from policies.placement.base import WHOLE_PERCENT, GpuSlot, Placement, PlannedSlice
from roles.compare import Compared
from roles.outcomes import batch_sizes_in
from roles.reproduce.document import rows_with_numbers, value_text
from roles.reproduce.report import Reproduction
from roles.sim.loads import AtLoad
from roles.sim.simulation import SimulatedRun

GANTT_BATCHES = 12  # of the GPU that has most: enough to see the staggered pattern
GANTT_GPUS = 32  # more rows than that are a grey wall
SECOND_MS = 1000.0
PLAN_GPUS = 48  # columns that can still be read
HATCHES = (None, "//", "..", "xx", "--")  # by batching; colours are by placement
NAME_LENGTH = 40  # of a combination in a legend, of a line beside an axis
LINES_IN_A_SLICE = 6  # more names than that would cover each other


def plot_run(path: Path, run: SimulatedRun, loads: Sequence[AtLoad]) -> None:
    """Draw a run into a PNG: batch sizes, queueing delay, goodput, busy GPUs, and the batches themselves."""
    mpl.use("Agg")
    figure = Figure(figsize=(15, 9), layout="constrained")
    axes = figure.subplots(2, 3)
    _draw_batch_sizes(axes[0, 0], run)
    _draw_queueing(axes[0, 1], run)
    _draw_over_time(axes[0, 2], run)
    _draw_goodput(axes[1, 0], loads)
    _draw_busy(axes[1, 1], loads)
    _draw_batches(axes[1, 2], run)
    figure.savefig(path, format="png", dpi=100)


def _draw_batch_sizes(axes: Axes, run: SimulatedRun) -> None:
    sizes = batch_sizes_in(run.batches, run.window)
    largest = max((max(of_model) for of_model in sizes.values()), default=1)
    bins = [size + 0.5 for size in range(largest + 1)]
    for model_id, of_model in sizes.items():
        axes.hist(of_model, bins=bins, histtype="step", label=model_id)
    _describe(axes, "batch sizes", "requests in a batch", "batches")


def _draw_queueing(axes: Axes, run: SimulatedRun) -> None:
    for traffic in run.traffic:
        inside = (traffic.arrived_at_ms >= run.window.from_ms) & (traffic.arrived_at_ms < run.window.until_ms)
        delay_ms = (traffic.started_at_ms - traffic.arrived_at_ms)[inside]
        delay_ms = np.sort(delay_ms[~np.isnan(delay_ms)])
        if delay_ms.size:
            axes.plot(delay_ms, np.arange(1, delay_ms.size + 1) / delay_ms.size, label=traffic.model_id)
    _describe(axes, "queueing delay", "ms from arrival to start", "part of the requests that ran")


def _draw_over_time(axes: Axes, run: SimulatedRun) -> None:
    edges_ms = np.arange(run.window.from_ms, run.window.until_ms + SECOND_MS, SECOND_MS)
    arrived = [traffic.arrived_at_ms for traffic in run.traffic]
    good = [
        traffic.arrived_at_ms[traffic.finished_at_ms - traffic.arrived_at_ms <= traffic.slo_ms]
        for traffic in run.traffic
    ]
    for label, moments in (("offered", arrived), ("good", good)):
        counts, _ = np.histogram(np.concatenate(moments), edges_ms)
        axes.plot(edges_ms[:-1] / SECOND_MS, counts, label=label)
    axes.set_ylim(bottom=0)
    _describe(axes, "over time", "s", "requests each second")


def _draw_goodput(axes: Axes, loads: Sequence[AtLoad]) -> None:
    offered = [load.outcome.offered / load.outcome.duration_s for load in loads]
    good = [load.outcome.good / load.outcome.duration_s for load in loads]
    axes.plot(offered, offered, linestyle=":", label="offered")
    axes.plot(offered, good, marker="o", label="goodput")
    _describe(axes, "goodput against load", "offered, requests/s", "requests/s")


def _draw_busy(axes: Axes, loads: Sequence[AtLoad]) -> None:
    offered = [load.outcome.offered / load.outcome.duration_s for load in loads]
    busy = [load.outcome.busy_fraction for load in loads]
    axes.plot(offered, [sum(fractions) / len(fractions) for fractions in busy], marker="o", label="all GPUs")
    axes.plot(offered, [fractions[0] for fractions in busy], linestyle=":", label="lowest id")
    axes.plot(offered, [fractions[-1] for fractions in busy], linestyle=":", label="highest id")
    axes.set_ylim(0, 1.05)
    _describe(axes, "busy GPUs against load", "offered, requests/s", "busy part of the time")


def _draw_batches(axes: Axes, run: SimulatedRun) -> None:
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
    names = [traffic.model_id for traffic in run.traffic]
    for number, model_id in enumerate(names):
        own = [batch for batch in shown if batch.model_id == model_id]
        if not own:
            continue
        axes.barh(
            [batch.gpu for batch in own],
            [batch.finished_at_ms - batch.started_at_ms for batch in own],
            left=[batch.started_at_ms for batch in own],
            height=0.8,
            color=f"C{number % 10}",
            edgecolor="white",
            label=model_id,
        )
    axes.invert_yaxis()
    _describe(axes, "batches", "ms", "GPU")


def plot_placement(path: Path, placement: Placement, gpus: Sequence[GpuSlot], policy: str) -> None:
    """Draw a plan into a PNG: one column per GPU, its slices stacked by share, labelled with model and batch.

    Slices without a limit divide what the others leave, and are hatched: their height says nothing.
    """
    mpl.use("Agg")
    shown = gpus[:PLAN_GPUS]
    figure = Figure(figsize=(max(4.0, 1.6 * len(shown) + 1.5), 6), layout="constrained")
    axes = figure.subplots()
    names = dict.fromkeys(model.model_id for planned in placement.slices for model in planned.models)
    colours = {model_id: f"C{number % 10}" for number, model_id in enumerate(names)}
    for column, gpu in enumerate(shown):
        bottom = 0.0
        own = [planned for planned in placement.slices if planned.gpu == gpu.index]
        for planned, height in zip(own, _heights(own), strict=True):
            _draw_slice(axes, column, bottom, height, planned, colours)
            bottom += height
    axes.axhline(WHOLE_PERCENT, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shown)), [f"GPU {gpu.index}\n{gpu.gpu_type}" for gpu in shown])
    axes.set_xlim(-0.6, len(shown) - 0.4)
    title = policy
    if placement.expected_goodput_rps is not None:
        title += f": {placement.expected_goodput_rps:.1f} requests/s expected"
    if len(shown) < len(gpus):
        title += f" (the first {len(shown)} of {len(gpus)} GPUs)"
    axes.set_title(title, wrap=True)
    axes.set_ylabel("share of the GPU, %")
    figure.savefig(path, format="png", dpi=100)


def _heights(slices: Sequence[PlannedSlice]) -> list[float]:
    """The shares; slices without one divide the rest, and where there is none they are a tenth each."""
    without = sum(planned.share_percent is None for planned in slices)
    left = WHOLE_PERCENT - sum(planned.share_percent or 0.0 for planned in slices)
    each = max(left / without, WHOLE_PERCENT / 10) if without else 0.0
    return [each if planned.share_percent is None else planned.share_percent for planned in slices]


def _draw_slice(
    axes: Axes,
    column: int,
    bottom: float,
    height: float,
    planned: PlannedSlice,
    colours: Mapping[ModelId, str],
) -> None:
    """A slice; models that take turns on it stand side by side."""
    width = 0.8 / len(planned.models)
    for place, model in enumerate(planned.models):
        axes.bar(
            column - 0.4 + (place + 0.5) * width,
            height,
            width,
            bottom,
            color=colours[model.model_id],
            edgecolor="white",
            hatch="//" if planned.share_percent is None else None,
            alpha=0.75,
        )
    lines = [
        model.model_id if model.batch is None else f"{model.model_id} b={model.batch}"
        for model in planned.models
    ]
    if len(lines) > LINES_IN_A_SLICE:
        lines = [*lines[: LINES_IN_A_SLICE - 1], f"and {len(lines) - LINES_IN_A_SLICE + 1} more"]
    if planned.share_percent is not None:
        lines.append(f"{planned.share_percent:g} %")
    axes.text(column, bottom + height / 2, "\n".join(lines), ha="center", va="center", fontsize="small")


def plot_comparison(path: Path, rows: Sequence[Compared]) -> None:
    """Draw a comparison into a PNG: each model's goodput as a group of bars, one bar a combination."""
    mpl.use("Agg")
    played = [row for row in rows if row.outcome is not None]
    names = list(played[0].offered_by_model_rps) if played else []
    bars = max(1, len(played))
    figure = Figure(figsize=(max(4.0, 0.2 * bars * len(names)) + 6, 5), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(names), dtype=np.float64)
    placements = list(dict.fromkeys(row.placement for row in played))
    batchings = list(dict.fromkeys(row.batching for row in played))
    for number, row in enumerate(played):
        heights = [row.goodput_by_model_rps[name] for name in names]
        name = f"{row.placement} / {row.batching}"
        if len(name) > NAME_LENGTH:
            name = f"{name[:NAME_LENGTH]}…"
        axes.bar(
            places + (number + 0.5) * 0.8 / bars - 0.4,
            heights,
            0.8 / bars,
            color=f"C{placements.index(row.placement) % 10}",
            hatch=HATCHES[batchings.index(row.batching) % len(HATCHES)],
            edgecolor="white",
            label=f"{name}: {sum(heights):.1f}",
        )
    if played:
        offered_rps = [played[0].offered_by_model_rps[name] for name in names]
        axes.hlines(offered_rps, places - 0.42, places + 0.42, color="black", linewidth=1, label="offered")
    axes.set_xticks(places, names, rotation=30 if len(names) > 4 else 0)
    axes.set_title("goodput by model")
    axes.set_ylabel("requests/s")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, format="png", dpi=100)


def plot_reproduction(path: Path, found: Reproduction) -> None:
    """Draw the rows that have two numbers into a PNG: ours in percent of the paper's, whatever their unit."""
    mpl.use("Agg")
    rows = [(what, paper, ours) for what, paper, ours in rows_with_numbers(found) if paper]
    figure = Figure(figsize=(10, max(3.0, 0.4 * len(rows) + 1.5)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [100 * ours / paper for _, paper, ours in rows], 0.7, color="C0", alpha=0.75)
    for place, (_, paper, ours) in zip(places, rows, strict=True):
        axes.text(
            2, place, f"paper {value_text(paper)}, ours {value_text(ours)}", va="center", fontsize="small"
        )
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks(places, [fill(what, NAME_LENGTH) for what, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ours, % of the paper's")
    figure.suptitle(fill(found.title, 2 * NAME_LENGTH))
    figure.savefig(path, format="png", dpi=100)


def _describe(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(axes.get_legend_handles_labels()[1]) in range(1, 11):
        axes.legend(fontsize="small")
