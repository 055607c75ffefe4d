"""AlpaServe's placement: groups of GPUs, models cut into a stage a GPU of their group (`policy.py`)."""

from policies.placement.alpaserve.policy import OPTIONS, AlpaServe

__all__ = ["OPTIONS", "AlpaServe"]
