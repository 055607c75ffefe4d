"""Pipelines over several GPUs: the worker has the first stage, and a process for each of the others."""
