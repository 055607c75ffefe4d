"""The margin that a scheduler keeps back before a batch's last moment, because its own timer fires late (`guard_ms`)."""

from __future__ import annotations

from fabric.learned_margin import Margin

GUARD_LATE_SHARE = 0.01  # of the ticks: the guard is the p99 (design section 5)
GUARD_STEP_MS = 0.02
GUARD_MS_MAX = 5.0  # lateness beyond this is a stall, not a habit; a guard for it would shrink every batch


class LatenessGuard:
    """How late this scheduler's own timer fires but for one tick of a hundred."""

    __slots__ = ("_margin", "guard_ms")

    def __init__(self, guard_ms: float = 0.0) -> None:
        self.guard_ms = guard_ms
        self._margin = Margin(GUARD_LATE_SHARE, guard_ms)

    def observe(self, late_ms: float) -> bool:
        """Note one tick; True when `guard_ms` has a new value."""
        margin = self._margin
        margin.note(late_ms - margin.ms, GUARD_MS_MAX)
        if abs(margin.ms - self.guard_ms) <= max(GUARD_STEP_MS, 0.2 * self.guard_ms):
            return False
        self.guard_ms = margin.ms
        return True
