"""What measured times teach the scheduler: l(b) as it really is, and the way of the inputs.

Each estimate is a mean and a deviation with a short memory, and is published only when it has moved enough to
matter: replacing a slice's table in the discipline costs more than reading one number.

A stall may teach so much that no budget lasts for a batch any more, and then nothing runs that would teach anything better. So what is
above the assumed value is halved (`forget`) while requests are dropped and no batch ends (`untried.py`).
"""

from __future__ import annotations

MEMORY = 0.05  # weight of the newest sample: the last 20 or so count
PUBLISH_STEP = 0.05  # 5 %: the width of a speed class (design section 5)
HEADROOM = 0.01  # a slowdown is said with so much on top, so that its last bits need no new tables
SPREADS = 2.0  # mean absolute deviations: about the p90 of what ways on a loaded host look like
SIZE_VAR_MIN = 0.25  # batches of (nearly) one size say nothing about a slope
ROUNDING = 1e-6
FACTOR_MIN, FACTOR_MAX = 1e-3, 1e6  # whatever a worker says it measured, what is made of it can be divided by
PATIENCE_MAX = 16
LATE_FACTOR = 2.0
LATE_IN_A_ROW = 3
LONG_TIMES = 4.0  # of a way as it was to be expected, spread included, and …
LONG_MS = 2.0  # … so much more: what takes longer is a stall
WAY_STEP = 0.2
GUESS_SAMPLES = 4
KNOWN_SAMPLES = 64  # from here on a guess of 5 ms is less than 0.2 ms of the mean
WAY_STEP_MS = 0.02


class SpeedCorrection:
    """How much slower (or faster) than its table a model runs on a slice."""

    __slots__ = ("_deviation", "_forgotten", "_is_fresh", "_looks", "_mean", "_patience", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._mean = 1.0
        self._deviation = 0.0
        self._is_fresh = True
        self._forgotten: tuple[float, float] | None = None  # mean and deviation as they were measured
        self._looks = 0
        self._patience = 1  # calls of `forget` for each time that it does

    def observe(self, measured_ms: float, table_ms: float) -> bool:
        """Note one batch against its table's l(b); True when `factor` has changed."""
        self._is_fresh = True
        ratio = measured_ms / table_ms
        if not FACTOR_MIN <= ratio <= FACTOR_MAX:
            ratio = min(FACTOR_MAX, max(FACTOR_MIN, ratio))
        if self._forgotten is not None:
            self._tried(ratio)
        error = ratio - self._mean
        self._mean += MEMORY * error
        self._deviation += MEMORY * (abs(error) - self._deviation)
        # Mean plus one deviation, as the profile's own numbers are meant (Symphony's implementation).
        wanted = self._mean + self._deviation
        # A batch that was held until its last moment is late by whatever its run time was underestimated by, so
        # slower is believed at once; faster can wait until it matters.
        if wanted > self.factor + ROUNDING:
            self.factor = wanted * (1.0 + HEADROOM)
        elif wanted < self.factor * (1.0 - PUBLISH_STEP):
            self.factor = wanted
        else:
            return False
        return True

    def forget(self) -> bool:
        """Halve what is above the table, unless a batch ended since the last call; True when `factor` has changed."""
        is_fresh, self._is_fresh = self._is_fresh, False
        self._looks = 0 if is_fresh else self._looks + 1
        if self._looks < self._patience or self.factor <= 1.0 + PUBLISH_STEP:
            return False
        self._looks = 0
        self._forgotten = self._forgotten or (self._mean, self._deviation)
        self._mean = min(self._mean, (1.0 + self._mean) / 2)
        self._deviation /= 2
        self.factor = (1.0 + self.factor) / 2
        return True

    def _tried(self, ratio: float) -> None:
        """A batch ran on half a belief: it was right to forget, or the slice is that slow and is tried less often."""
        assert self._forgotten is not None, "something was forgotten"
        if ratio > self.factor:
            self._mean, self._deviation = self._forgotten
            self._patience = min(2 * self._patience, PATIENCE_MAX)
        else:
            self._patience = 1
        self._forgotten = None


class WayCorrection:
    """What it takes from a decision until a model's inputs are at the device: `fixed_ms` + `ms_per_item` · b.

    A least-squares line through the last batches (forgetting as `SpeedCorrection` does), lifted by `SPREADS`
    deviations of what they scattered around it: a batch sent too late loses a deadline, one sent a little too
    early loses nothing. Starts as the configured `ms_per_item` and a guess of the fixed part, which counts as
    `GUESS_SAMPLES` samples.
    """

    __slots__ = (
        "_assumed_ms",
        "_cov",
        "_is_fresh",
        "_late_in_a_row",
        "_long_in_a_row",
        "_samples",
        "_size",
        "_size_var",
        "_spread",
        "_way",
        "fixed_ms",
        "ms_per_item",
    )

    def __init__(self, ms_per_item: float, fixed_ms: float = 0.0) -> None:
        self.fixed_ms = fixed_ms
        self.ms_per_item = ms_per_item
        self._size = 1.0
        self._way = fixed_ms + ms_per_item
        self._size_var = 1.0
        self._cov = ms_per_item  # of the line it starts on: slope = cov / var
        self._spread = 0.0
        self._samples = GUESS_SAMPLES
        self._late_in_a_row = self._long_in_a_row = 0
        self._assumed_ms = fixed_ms + ms_per_item
        self._is_fresh = True

    @property
    def known_ms(self) -> float:
        """What one request's way takes at a good moment: its mean less what it scatters, 0 as long as too few batches were seen.

        The mean alone is, on a busy host, one of its stalls.
        """
        if self._samples < GUESS_SAMPLES + KNOWN_SAMPLES:
            return 0.0
        return max(0.0, self._way - self.ms_per_item * (self._size - 1.0) - self._spread)

    def forget(self) -> bool:
        """Halve what one request's way is above the assumed, unless one was seen since the last call; True when the line has moved."""
        is_fresh, self._is_fresh = self._is_fresh, False
        excess_ms = self.fixed_ms + self.ms_per_item - self._assumed_ms
        if is_fresh or excess_ms <= WAY_STEP_MS:
            return False
        share = 1.0 - excess_ms / (2.0 * (excess_ms + self._assumed_ms))
        self.fixed_ms *= share
        self.ms_per_item *= share
        self._way *= share
        self._cov *= share
        self._spread *= share
        return True

    def observe_late(self, waited_ms: float, batch_size: int) -> bool:
        """Note a batch whose inputs had not come after so long; True when the line has moved by enough to matter.

        How much longer they would have taken nobody knows. It counts as `LATE_FACTOR` times as long, as a
        retransmission's timer goes: less, and a line that is much too low would be climbed in small steps. But only
        where nothing comes in time any more: a single stall, taken so, would make every batch small for a while.
        """
        self._late_in_a_row += 1
        self._is_fresh = True
        if self._late_in_a_row < LATE_IN_A_ROW:
            return False
        return self._take(LATE_FACTOR * waited_ms, batch_size)

    def observe(self, way_ms: float, batch_size: int) -> bool:
        """Note one batch's way; True when the line has moved by enough to matter.

        One that took far longer than was to be expected is a stall, such as a first batch has: it counts as far as that would go, unless
        the next ones are as long.
        """
        self._late_in_a_row = 0
        self._is_fresh = True
        longest_ms = LONG_TIMES * (self.fixed_ms + self.ms_per_item * batch_size) + LONG_MS
        self._long_in_a_row = self._long_in_a_row + 1 if way_ms > longest_ms else 0
        if 0 < self._long_in_a_row < LATE_IN_A_ROW:
            way_ms = longest_ms
        return self._take(way_ms, batch_size)

    def _take(self, way_ms: float, batch_size: int) -> bool:
        if not self._spread and abs(way_ms - self.fixed_ms - self.ms_per_item * batch_size) < ROUNDING:
            return False  # on a line that nothing was ever off: all there is to learn in a simulated network
        self._samples += 1
        weight = max(MEMORY, 1.0 / self._samples)  # a plain mean at first: the first batches count fully
        size_error = batch_size - self._size
        error_ms = way_ms - self._way
        self._size += weight * size_error
        self._way += weight * error_ms
        self._size_var += weight * (size_error * size_error - self._size_var)
        self._cov += weight * (size_error * error_ms - self._cov)
        slope = max(0.0, self._cov / self._size_var) if self._size_var > SIZE_VAR_MIN else self.ms_per_item
        # Nobody's inputs take less than none. A slope beyond that, once learned from a stall, makes all batches small,
        # and from batches of one size no slope would ever be learned again.
        steepest = self._way / self._size
        slope = min(slope, steepest)
        offset_ms = self._way - slope * self._size
        self._spread += weight * (abs(way_ms - offset_ms - slope * batch_size) - self._spread)
        fixed_ms = max(0.0, offset_ms + SPREADS * self._spread)
        if self.ms_per_item > (1.0 + WAY_STEP) * steepest:
            self.fixed_ms, self.ms_per_item = fixed_ms, slope
            return True
        for size in (1.0, self._size):
            before_ms = self.fixed_ms + self.ms_per_item * size
            moved_ms = abs(fixed_ms + slope * size - before_ms)
            if moved_ms > max(WAY_STEP_MS, WAY_STEP * before_ms):
                self.fixed_ms, self.ms_per_item = fixed_ms, slope
                return True
        return False
