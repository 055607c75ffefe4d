"""Slices over several GPUs, pipelines and gangs: the worker has the first stage or rank, and a process for each of the others."""
