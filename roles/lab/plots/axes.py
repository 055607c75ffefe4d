"""What the pictures have in common: a colour for each model, the same in every panel, and legends beside the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

LEGEND_MAX = 20
COLOURS = 20
LINES = ("black", "0.45", "0.7")
"""Of what is of no model: no model has such a colour."""


def model_colours(names: Iterable[str]) -> dict[str, tuple[float, float, float, float]]:
    """By name, in the order of the file; after the twentieth they begin anew."""
    palette = mpl.colormaps["tab20"]
    # Strong ones first: the palette has a pale one after each.
    order = [*range(0, COLOURS, 2), *range(1, COLOURS, 2)]
    order.remove(14)  # grey, as what is of no model
    order.remove(15)
    return {name: palette(order[number % len(order)]) for number, name in enumerate(names)}


def model_legend(
    figure: Figure, colours: Mapping[str, object], labels: Mapping[str, str] | None = None
) -> None:
    """Whose colour is which, once for all panels, below them. `labels`: instead of the names."""
    shown = list(colours)[:LEGEND_MAX]
    handles = [Patch(color=colours[name], label=(labels or {}).get(name, name)) for name in shown]
    if len(colours) > len(shown):
        handles.append(Patch(color="none", label=f"and {len(colours) - len(shown)} more"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize="small")


def describe(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels, and below the axis what its own lines are, while that can be read."""
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    labels: Sequence[str] = axes.get_legend_handles_labels()[1]
    if len(labels) in range(1, 11):
        axes.legend(
            fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=min(4, len(labels))
        )


def whole_numbers(axis: object) -> None:
    """GPUs have no halves."""
    axis.set_major_locator(MaxNLocator(integer=True))  # type: ignore[attr-defined]  # matplotlib's axes are not typed here
