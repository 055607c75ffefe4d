"""A placement, as the thesis draws them: one column per GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fabric.ids import ModelId
from policies.placement.common.base import WHOLE_PERCENT, GpuSlot, Placement, PlannedSlice
from roles.lab.plots.axes import model_colours

PLAN_GPUS = 48  # columns that can still be read
LINES_IN_A_SLICE = 6  # more names than that would cover each other


def plot_placement(
    path: Path, placement: Placement, gpus: Sequence[GpuSlot], policy: str, models: Sequence[ModelId]
) -> None:
    """Draw a plan into a PNG: one column per GPU, its slices stacked by share, labelled with model and batch.

    Slices without a limit divide what the others leave, and are hatched: their height says nothing.
    `models`: of the file, so that each has the colour that it has in other pictures.
    """
    mpl.use("Agg")
    shown = gpus[:PLAN_GPUS]
    figure = Figure(figsize=(max(4.0, 1.6 * len(shown) + 1.5), 6), layout="constrained")
    axes = figure.subplots()
    colours = model_colours(models)
    for column, gpu in enumerate(shown):
        bottom = 0.0
        own = [planned for planned in placement.slices if gpu.index in planned.gpus]
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
    colours: Mapping[str, Any],
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
