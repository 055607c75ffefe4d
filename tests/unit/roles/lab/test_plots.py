"""Pictures: one colour a model in every panel, whole GPU ids, no legend over data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from roles.benchmark.share import COLUMNS, STAGES, LoadRecord
from roles.benchmark.verdict import judge
from roles.config.read_config import parse_config
from roles.lab.plots.axes import LINES, model_colours
from roles.lab.plots.loads import load_figure
from roles.lab.plots.runs import run_figure
from roles.simulator.load_sweep import play_loads
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

NAMES = ("a", "b", "c")
CONFIG = parse_config(
    {
        "models": [
            {"name": name, "slo_ms": 50, "rate_rps": 100, "profile": {"alpha_ms": 1, "beta_ms": 5}}
            for name in NAMES
        ],
        "cluster": {"gpus": 3},
    },
    Path(),
)
WINDOW = Window(0.0, 2_000.0)


def drawn(axes: Any) -> set[str]:
    """The colours of all that is drawn in a panel."""
    return {to_hex(one.get_color()) for one in axes.lines} | {
        to_hex(one.get_edgecolor() if not one.get_fill() else one.get_facecolor()) for one in axes.patches
    }


def no_legend_over_data(figure: Any) -> bool:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None] + figure.legends
    assert legends
    return not any(box.overlaps(legend.get_window_extent()) for box in boxes for legend in legends)


def test_a_model_has_one_colour_in_all_panels_of_a_simulated_run() -> None:
    workload = workload_of(CONFIG)
    run = simulate(CONFIG, workload, WINDOW)
    figure = run_figure(run, play_loads(CONFIG, workload, WINDOW, lambda _: None))
    sizes, queueing, time, goodput, busy, batches = figure.axes
    wanted = {to_hex(colour) for colour in model_colours(NAMES).values()}
    assert len(wanted) == 3
    assert drawn(sizes) == drawn(queueing) == drawn(batches) == wanted
    grey = {to_hex(colour) for colour in LINES}
    assert (drawn(time) | drawn(goodput) | drawn(busy)) <= grey
    assert not wanted & grey
    assert no_legend_over_data(figure)
    assert all(tick == int(tick) for tick in batches.get_yticks())


def test_a_model_has_one_colour_in_all_panels_of_a_live_run() -> None:
    stages = [1.0] * len(STAGES)
    rows = [
        [float(place), 10.0 * number, 0.0, 20.0 + number, 1.0, 0.0, *stages]
        for place in range(len(NAMES))
        for number in range(20)
    ]
    assert len(rows[0]) == len(COLUMNS)
    figure = load_figure(judge(CONFIG, [LoadRecord(np.array(rows), ("local/gpu0/0",))], WINDOW))
    histogram, distribution, spent = figure.axes
    wanted = {to_hex(colour) for colour in model_colours(NAMES).values()}
    assert drawn(histogram) == drawn(distribution) == wanted
    assert not drawn(spent) & wanted
    assert no_legend_over_data(figure)


def test_colours_are_of_the_order_in_the_file_and_never_grey() -> None:
    many = model_colours([f"m{number}" for number in range(18)])
    assert len({to_hex(colour) for colour in many.values()}) == 18
    assert not {to_hex(colour) for colour in many.values()} & {to_hex(colour) for colour in LINES}
    assert model_colours(["m0", "m1"]) == {name: many[name] for name in ("m0", "m1")}
