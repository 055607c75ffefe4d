"""Pictures: the only room for matplotlib, which is an extra (`plots`)."""

from roles.plots.answers import plot_comparison, plot_reproduction
from roles.plots.loads import plot_load
from roles.plots.placements import plot_placement
from roles.plots.profiles import plot_profile
from roles.plots.runs import plot_run

__all__ = ["plot_comparison", "plot_load", "plot_placement", "plot_profile", "plot_reproduction", "plot_run"]
