"""iGniter's interference: its latency model among the neighbours over the same model alone (section 3.1).

What slows a batch down is the launch delay that grows with the workloads on the GPU, the others' use of the L2
cache, and the clock that falls when all together want more power than there is. SMs are not shared in this
model: its slices are capped, and their shares add up to 100 % at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fabric.errors import ProfileError
from fabric.ids import ModelId
from profiles.igniter.performance_model import IgniterProfile, Resident, predict_ms
from profiles.interference.base import InterferenceLaw, Running


class IgniterInterference:
    """Coefficients by model, all for the same GPU: ProfileError where they are not."""

    covers_unlimited_slices = False

    def __init__(self, profiles: Mapping[ModelId, IgniterProfile]) -> None:
        first = next(iter(profiles.values()), None)
        for model_id, profile in profiles.items():
            if first is not None and profile.hardware != first.hardware:
                raise ProfileError(
                    f"model {model_id} has iGniter coefficients of other hardware than its neighbours"
                )
        self._profiles = profiles

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:
        """Predicted latency among the neighbours over that alone at the same share."""
        if not neighbours:
            return 1.0
        hardware = self._profiles[running.model_id].hardware
        own = self._resident(running)
        crowd = [own, *(self._resident(neighbour) for neighbour in neighbours)]
        # The fitted lines may dip a hair below what stands alone (a negative offset of the L2 use).
        return max(1.0, predict_ms(hardware, crowd)[0] / predict_ms(hardware, [own])[0])

    def _resident(self, running: Running) -> Resident:
        coefficients = self._profiles[running.model_id].coefficients
        return Resident(coefficients, running.batch_size, running.share_or_whole)


LAW = InterferenceLaw(
    need="iGniter coefficients",
    families=("igniter-v100", "igniter-t4", "thesis-v100-estimate"),
    read=lambda profile: profile if isinstance(profile, IgniterProfile) else None,
    build=lambda profiles, _: IgniterInterference(profiles),
)
