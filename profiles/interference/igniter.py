"""iGniter's interference: its latency model among the neighbours over the same model alone (section 3.1).

What slows a batch down is the launch delay that grows with the workloads on the GPU, the others' use of the L2
cache, and the clock that falls when all together want more power than there is. SMs are not shared in this
model: its slices are capped, and their shares add up to 100 % at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fabric.errors import ProfileError
from fabric.ids import ModelId
from profiles.igniter.coefficients import Hardware, IgniterProfile, Resident, predict_ms
from profiles.interference.base import Running
from profiles.model import ModelProfile


class IgniterInterference:
    """Needs every model to have iGniter's coefficients, all for the same GPU."""

    def __init__(self, profiles: Mapping[ModelId, ModelProfile]) -> None:
        self._profiles: dict[ModelId, IgniterProfile] = {}
        hardware: Hardware | None = None
        for model_id, profile in profiles.items():
            if not isinstance(profile, IgniterProfile):
                raise ProfileError(
                    f"model {model_id} has no iGniter coefficients ({profile.ref or profile.source}); families with them: "
                    "igniter-v100, igniter-t4, thesis-v100-estimate"
                )
            if hardware is not None and profile.hardware != hardware:
                raise ProfileError(
                    f"model {model_id} has iGniter coefficients of other hardware than its neighbours"
                )
            hardware = profile.hardware
            self._profiles[model_id] = profile

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
