"""Questions asked of the simulator and of a live cluster: goodput, comparisons, experiments of three papers."""
