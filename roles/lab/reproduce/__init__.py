"""Experiments of the papers, re-run here: `tenuto reproduce NAME`. One file a paper.

An experiment is a function without arguments that returns a `Reproduction` (`report.py`). Its module is imported
when it is run, because some need solvers and all need time.
"""

from __future__ import annotations

import importlib
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
}
"""Name to ``module:function``, in the order of the document."""


def check_name(name: str) -> None:
    """ConfigError with the closest name where there is none of that name."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"there is no experiment {name!r}{suggestion(name, EXPERIMENTS)}")


def run_experiment(name: str) -> Reproduction:
    """Run one; ConfigError where there is none of that name."""
    check_name(name)
    module, _, attribute = EXPERIMENTS[name].partition(":")
    experiment: Callable[[], Reproduction] = getattr(importlib.import_module(module), attribute)
    return experiment()
