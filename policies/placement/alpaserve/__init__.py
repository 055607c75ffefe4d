"""AlpaServe's placement: groups of GPUs, models cut into a stage a GPU of their group (`policy.py`)."""

from policies.placement.alpaserve.policy import AlpaServe

__all__ = ["AlpaServe"]
