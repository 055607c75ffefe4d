"""Usher, WAO-Usher and WSM-Usher: one file per idea, `policy.py` on top."""

from policies.placement.usher.policy import OPTIONS, Usher

__all__ = ["OPTIONS", "Usher"]
