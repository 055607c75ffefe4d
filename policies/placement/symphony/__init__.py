"""Symphony's placement: every model everywhere, or sub-clusters of GPUs (OSDI 2024, section 4.4)."""
