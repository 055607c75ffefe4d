"""What `compare` and `reproduce` answer: bars beside bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from roles.lab.compare import Compared
from roles.lab.reproduce.document import rows_with_numbers, value_text
from roles.lab.reproduce.report import Reproduction

HATCHES = (None, "//", "..", "xx", "--")  # by batching; colours are by placement
NAME_LENGTH = 40  # of a combination in a legend, of a line beside an axis


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
    rows = rows_with_numbers(found)
    figure = Figure(figsize=(10, max(3.0, 0.4 * len(rows) + 1.5)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [100 * (row.ratio or 0.0) for row in rows], 0.7, color="C0", alpha=0.75)
    for place, row in zip(places, rows, strict=True):
        beside = f"paper {value_text(row.paper)}, ours {value_text(row.ours)}"
        axes.text(2, place, beside, va="center", fontsize="small")
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks(places, [fill(row.what, NAME_LENGTH) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ours, % of the paper's")
    figure.suptitle(fill(found.title, 2 * NAME_LENGTH))
    figure.savefig(path, format="png", dpi=100)
