"""Interference by SM utilisation, for profiles that know nothing else (docs/adr/0040-interference-sm.md).

W is the time-weighted SM utilisation of a batch on the whole GPU (thesis section 5.3.2), s its slice's share, d =
min(W, s) what it occupies at most, all as fractions of the GPU:

    own cap      1 + 2.4 (W/s - 1)            where s < W and the profile was not measured by share, else 1
    neighbours   max(Σ d, 1 + d_own Σ d_others)
    slowdown     1 + strength (own cap · neighbours - 1)

The sum is what is left when there are not enough SMs for all; the product counts moments in which two batches want
the same SMs although there are enough on average.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from fabric.ids import ModelId
from fabric.policy_options import Number
from profiles.interference.base import InterferenceLaw, Running
from profiles.model import ModelProfile

# Thesis 6.2.1 (resnet50, batch 4, W 36.26 %: 4 times as slow at 17.55 %) asks for 2.8, thesis 6.2.2 (bert, batch 4,
# W 96.82 %: 180 ms instead of 34.1 at 31.83 %) for 2.1; their fit by least squares of the logarithms.
CAP_STEEPNESS = 2.4


class SmInterference:
    """`wanted` by model; `strength` scales what a slowdown has over 1."""

    covers_unlimited_slices = True

    def __init__(self, wanted: Mapping[ModelId, WantedSms], strength: float) -> None:
        self._wanted = wanted
        self._strength = strength

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:
        """Without neighbours, what the slice's own share costs."""
        wanted = self._wanted[running.model_id].fraction(running.batch_size)
        share = running.share_or_whole / 100
        is_capped = share < wanted and not self._wanted[running.model_id].is_share_measured
        factor = 1 + CAP_STEEPNESS * (wanted / share - 1) if is_capped else 1.0
        if neighbours:
            own = min(wanted, share)
            others = sum(map(self._occupied, neighbours))
            factor *= max(1.0, own + others, 1 + own * others)
        return 1 + self._strength * (factor - 1)

    def _occupied(self, running: Running) -> float:
        wanted = self._wanted[running.model_id].fraction(running.batch_size)
        return min(wanted, running.share_or_whole / 100)


class WantedSms:
    """W by batch size, from `points` in percent: linear between profiled sizes, the nearest one outside, and it never falls.

    A larger batch launches at least as many blocks; where a table says otherwise another algorithm was chosen
    for it, and following the dip would make a capped batch faster than a smaller one. `is_share_measured`: the profile's
    run times are of each share already, so that only the neighbours cost something besides.
    """

    def __init__(self, points: Mapping[int, float], *, is_share_measured: bool = False) -> None:
        self.is_share_measured = is_share_measured
        self._batch_sizes = list(points)
        self._fractions = [percent / 100 for percent in accumulate(points.values(), max)]

    def fraction(self, batch_size: int) -> float:
        """W of a batch of that size."""
        keys, values = self._batch_sizes, self._fractions
        place = bisect_left(keys, batch_size)
        if place == 0:
            return values[0]
        if place == len(keys):
            return values[-1]
        weight = (batch_size - keys[place - 1]) / (keys[place] - keys[place - 1])
        return values[place - 1] + (values[place] - values[place - 1]) * weight


def _wanted(profile: ModelProfile) -> WantedSms | None:
    points = {
        batch_size: need.weighted_sm_percent
        for batch_size, need in sorted(profile.requirements.items())
        if need.weighted_sm_percent is not None
    }
    return WantedSms(points, is_share_measured=profile.share_percent_min > 0) if points else None


LAW = InterferenceLaw(
    need="SM utilisation",
    families=("thesis-v100", "thesis-v100-estimate"),
    read=_wanted,
    build=lambda wanted, options: SmInterference(wanted, options["strength"]),
    options={"strength": Number(1.0, maximum=10.0, is_minimum_allowed=True)},
)
