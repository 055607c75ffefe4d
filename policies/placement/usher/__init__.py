"""Usher, WAO-Usher and WSM-Usher: one file per idea, `policy.py` on top."""

from policies.placement.usher.policy import Usher

__all__ = ["Usher"]
