"""Pictures: the only room for matplotlib, which is an extra (`plots`)."""

from roles.lab.plots.answers import plot_comparison, plot_reproduction
from roles.lab.plots.loads import plot_load
from roles.lab.plots.placements import plot_placement
from roles.lab.plots.profiles import plot_profile
from roles.lab.plots.runs import plot_run

__all__ = ["plot_comparison", "plot_load", "plot_placement", "plot_profile", "plot_reproduction", "plot_run"]
