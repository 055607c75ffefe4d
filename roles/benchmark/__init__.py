"""Plays a workload at a live cluster, open loop."""
