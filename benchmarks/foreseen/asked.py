"""What is asked of one model: its requests, what its batches take, and how many requests may be given up."""

from __future__ import annotations

from dataclasses import dataclass

from roles.lab.scheduler_only import Moments
from roles.workload.outcomes import ROUNDING_MS


@dataclass(frozen=True)
class Asked:
    """l(b) = alpha_ms · b + beta_ms for b up to `size_max`; `arrived_at_ms` ascending."""

    arrived_at_ms: Moments
    slo_ms: float
    alpha_ms: float
    beta_ms: float
    size_max: int
    given_up_max: int

    def exec_ms(self, size: int) -> float:
        """l(b)."""
        return self.alpha_ms * size + self.beta_ms

    def span_ms(self, size: int) -> float:
        """How far apart the first and the last arrival of a batch may be: it starts after the one, and ends within the other's SLO."""
        return self.slo_ms - self.exec_ms(size) + ROUNDING_MS
