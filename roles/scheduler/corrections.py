"""What measured times teach the scheduler: l(b) as it really is, the way of the inputs, its own lateness.

Each estimate is a mean and a deviation with a short memory, and is published only when it has moved enough to
matter: replacing a slice's table in the discipline costs more than reading one number.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.05  # weight of the newest sample: the last 20 or so count
PUBLISH_STEP = 0.05  # 5 %: the width of a speed class (design section 5)
GUARD_SAMPLES = 256
GUARD_MS_MAX = 2.0  # lateness beyond this is a stall, not a habit; a guard for it would shrink every batch


@dataclass(slots=True)
class Estimate:
    """Exponentially forgetting mean and mean absolute deviation."""

    mean: float
    deviation: float = 0.0

    def add(self, sample: float) -> None:
        """Take one measured value."""
        error = sample - self.mean
        self.mean += MEMORY * error
        self.deviation += MEMORY * (abs(error) - self.deviation)

    @property
    def high(self) -> float:
        """Mean plus one deviation, as the profile's own numbers are meant (Symphony's implementation)."""
        return self.mean + self.deviation


class SpeedCorrection:
    """How much slower (or faster) than its table a model runs on a slice."""

    __slots__ = ("_estimate", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._estimate = Estimate(1.0)

    def observe(self, measured_ms: float, table_ms: float) -> bool:
        """Note one batch against its table's l(b); True when `factor` has changed."""
        self._estimate.add(measured_ms / table_ms)
        wanted = self._estimate.high
        if abs(wanted / self.factor - 1.0) <= PUBLISH_STEP:
            return False
        self.factor = wanted
        return True


class TransferCorrection:
    """What a model's inputs take from the grant to the device, per item, on top of the configured delay."""

    __slots__ = ("_estimate", "ms_per_item")

    def __init__(self, ms_per_item: float) -> None:
        self.ms_per_item = ms_per_item
        self._estimate = Estimate(ms_per_item)

    def observe(self, transfer_ms: float, batch_size: int) -> bool:
        """Note one batch's transfer; True when `ms_per_item` has moved by 20 % and 10 µs."""
        self._estimate.add(transfer_ms / batch_size)
        wanted = self._estimate.high
        if abs(wanted - self.ms_per_item) <= max(0.01, 0.2 * self.ms_per_item):
            return False
        self.ms_per_item = wanted
        return True


class LatenessGuard:
    """The p99 of how late this scheduler's own timer fires, from its last `GUARD_SAMPLES` ticks."""

    __slots__ = ("_samples", "guard_ms")

    def __init__(self) -> None:
        self.guard_ms = 0.0
        self._samples: list[float] = []

    def observe(self, late_ms: float) -> bool:
        """Note one tick; True when `guard_ms` has a new value."""
        self._samples.append(late_ms)
        if len(self._samples) < GUARD_SAMPLES:
            return False
        self._samples.sort()
        guard_ms = min(GUARD_MS_MAX, self._samples[int(0.99 * GUARD_SAMPLES)])
        self._samples.clear()
        if guard_ms == self.guard_ms:
            return False
        self.guard_ms = guard_ms
        return True
