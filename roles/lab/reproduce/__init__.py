"""Experiments of the papers, re-run here: `tenuto reproduce NAME`. One file a paper.

An experiment is a function that returns a `Reproduction` (`report.py`); where it has an argument `is_full`, what it does
otherwise is a sample. Its module is imported when it is run, because some need solvers and all need time.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping

from fabric.errors import ConfigError
from fabric.policy_options import suggestion
from roles.lab.reproduce.report import Reproduction

EXPERIMENTS: Mapping[str, str] = {
    "igniter-table-1": "roles.lab.reproduce.igniter:reproduce_igniter_table_1",
    "igniter-figures-11-13": "roles.lab.reproduce.igniter_accuracy:reproduce_igniter_figures_11_to_13",
    "igniter-figures-14-18": "roles.lab.reproduce.igniter:reproduce_igniter_figures_14_and_18",
    "igniter-figure-19": "roles.lab.reproduce.igniter:reproduce_igniter_figure_19",
    "igniter-figure-20": "roles.lab.reproduce.igniter:reproduce_igniter_figure_20",
    "igniter-figure-21": "roles.lab.reproduce.igniter:reproduce_igniter_figure_21",
    "thesis-worked-examples": "roles.lab.reproduce.thesis:worked_examples",
    "thesis-vision-observations": "roles.lab.reproduce.thesis:vision_observations",
    "thesis-language-observations": "roles.lab.reproduce.thesis:language_observations",
    "thesis-rate-observations": "roles.lab.reproduce.thesis:rate_observations",
    "thesis-filling": "roles.lab.reproduce.thesis:filling",
    "thesis-figure-6-1": "roles.lab.reproduce.thesis_figures:figure_6_1",
    "thesis-figure-6-10": "roles.lab.reproduce.thesis_figures:figure_6_10",
    "thesis-figure-6-15": "roles.lab.reproduce.thesis_figures:figure_6_15",
    "gpulet-schedulability": "roles.lab.reproduce.gpulet:schedulability",
    "gpulet-throughput": "roles.lab.reproduce.gpulet:slo_preserved_throughput",
    "gpulet-figure-14": "roles.lab.reproduce.gpulet_violations:figure_14",
    "gpulet-applications": "roles.lab.reproduce.gpulet_applications:figures_12_to_14",
    "symphony-table-2": "roles.lab.reproduce.symphony.batch_sizes:table_2",
    "symphony-figure-2": "roles.lab.reproduce.symphony.load:figure_2",
    "symphony-figure-5": "roles.lab.reproduce.symphony.deferral:figure_5",
    "symphony-figure-6": "roles.lab.reproduce.symphony.deferral:figure_6",
    "symphony-figure-7": "roles.lab.reproduce.symphony.deferral:figure_7",
    "symphony-figure-9": "roles.lab.reproduce.symphony.systems:figure_9",
    "symphony-figure-10": "roles.lab.reproduce.symphony.systems:figure_10",
    "symphony-figure-11": "roles.lab.reproduce.symphony.systems:figure_11",
    "symphony-figure-13": "roles.lab.reproduce.symphony.load:figure_13",
    "symphony-figure-14": "roles.lab.reproduce.symphony.load:figure_14",
    "symphony-figure-15": "roles.lab.reproduce.symphony.changing:figure_15",
    "symphony-figure-16": "roles.lab.reproduce.symphony.changing:figure_16",
    "usher-figures-3-7": "roles.lab.reproduce.usher:figures_3_and_7",
    "usher-figures-6-16": "roles.lab.reproduce.usher:figures_6_and_16",
}
"""Name to ``module:function``, in the order of the document."""


def check_name(name: str) -> None:
    """ConfigError with the closest name where there is none of that name."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"there is no experiment {name!r}{suggestion(name, EXPERIMENTS)}")


def run_experiment(name: str, *, is_full: bool = False) -> Reproduction:
    """Run one, in full if asked and if it is sampled otherwise; ConfigError where there is none of that name."""
    check_name(name)
    module, _, attribute = EXPERIMENTS[name].partition(":")
    experiment: Callable[..., Reproduction] = getattr(importlib.import_module(module), attribute)
    is_sampled = "is_full" in inspect.signature(experiment).parameters
    return experiment(is_full=is_full) if is_sampled else experiment()
