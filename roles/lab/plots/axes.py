"""What the pictures' axes have in common."""

from __future__ import annotations

from matplotlib.axes import Axes


def describe(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels, and a legend while it can be read."""
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(axes.get_legend_handles_labels()[1]) in range(1, 11):
        axes.legend(fontsize="small")
