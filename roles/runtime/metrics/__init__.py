"""Figures for Prometheus: what a role counts, which metrics there are, and the page that shows them."""
