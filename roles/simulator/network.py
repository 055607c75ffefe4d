"""The modelled network: what a message takes from one role to another.

Every one-way time is a constant plus jitter, a half-normal draw with standard deviation `jitter_ms`, never
negative. Messages of one connection do not overtake each other, as on a TCP stream. A receiver learns how
late a message is (`Heard.late_ms`), as a live link measures it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fabric.ids import PeerId

# The absolute value of a normal draw has a smaller standard deviation than the draw.
_SIGMA_PER_SD = 1 / math.sqrt(1 - 2 / math.pi)


@dataclass(slots=True, frozen=True)
class NetworkModel:
    """One-way times in ms, as the configuration's `cluster.network` has them."""

    control_ms: float = 0.0
    data_ms_per_item: float = 0.0
    result_ms: float = 0.0
    jitter_ms: float = 0.0


class KnownReturn:
    """What to keep back where nothing jitters: as a live frontend's `ReturnPath`, with nothing to learn."""

    def __init__(self, result_ms: float) -> None:
        self._result_ms = result_ms

    @property
    def reserve_ms(self) -> float:
        """What is kept back of every budget."""
        return self._result_ms

    def budget_ms(self, left_ms: float) -> float:
        """What to announce of what is left; 0 if that is too little."""
        return max(0.0, left_ms - self._result_ms)

    def slack_ms(self, left_ms: float) -> float:
        """Nothing is kept back for what is not known."""
        del left_ms
        return 0.0

    def note_batch(self, return_ms: float) -> None:
        """It took what it takes."""

    def note_answer(self, late_ms: float, budget_ms: float) -> None:
        """Late or not, the way was as long as ever."""

    def note_dropped(self, count: int) -> None:
        """Nothing was given up for a margin."""


class Network:
    """Draws delays for one run. `seed` decides them all."""

    def __init__(self, model: NetworkModel, seed: int) -> None:
        self.model = model
        self._seed = seed
        self._control_ms = model.control_ms
        self._own = random.Random(f"{seed}/network")
        self._sigma_ms = model.jitter_ms * _SIGMA_PER_SD
        self._last_at_ms: dict[tuple[PeerId, PeerId], float] = {}

    def control_at_ms(self, sender: PeerId, receiver: PeerId, sent_at_ms: float) -> float:
        """When a control message arrives; not before its predecessor on that connection."""
        at_ms = sent_at_ms + self._control_ms
        if not self._sigma_ms:
            return at_ms
        way = (sender, receiver)
        at_ms = max(at_ms + self._jitter_ms(), self._last_at_ms.get(way, -math.inf))
        self._last_at_ms[way] = at_ms
        return at_ms

    def result_at_ms(self, sent_at_ms: float) -> float:
        """When outputs reach the frontend that waits for them."""
        at_ms = sent_at_ms + self.model.result_ms
        return at_ms if self._sigma_ms == 0 else at_ms + self._jitter_ms()

    def announced_at_ms(
        self, frontend: NDArray[np.int64], sent_at_ms: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """When announcements sent at ascending moments, each by the frontend of that number, are heard."""
        at_ms = sent_at_ms + self.model.control_ms
        if self._sigma_ms == 0 or at_ms.size == 0:
            return at_ms
        for number in range(int(frontend.max()) + 1):
            own = random.Random(f"{self._seed}/network/{number}")
            # numpy's frozen stream (NEP 19), as in roles/workload/arrivals.py.
            draws = np.random.RandomState([own.getrandbits(32) for _ in range(8)])
            sent = np.flatnonzero(frontend == number)
            at_ms[sent] += np.abs(draws.standard_normal(sent.size)) * self._sigma_ms
            at_ms[sent] = np.maximum.accumulate(at_ms[sent])
        return at_ms

    def _jitter_ms(self) -> float:
        return abs(self._own.gauss(0.0, self._sigma_ms))
