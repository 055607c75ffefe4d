"""Tenuto's own placement: `policy.py` chooses among plans, the others make and judge them."""

from policies.placement.tenuto.policy import Tenuto

__all__ = ["Tenuto"]
