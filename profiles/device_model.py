"""The one device model: what a slice takes for a batch. Emulated workers sleep it, the simulator adds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fabric.errors import ProfileError
from fabric.ids import ModelId
from profiles.gpu import GENERIC
from profiles.interference import Interference, NoInterference, Running
from profiles.model import ModelProfile


class DeviceModel:
    """One GPU of one type: the profiles of its models, and how neighbours disturb each other."""

    def __init__(
        self,
        profiles: Mapping[ModelId, ModelProfile],
        interference: Interference | None = None,
        gpu_type: str = GENERIC.gpu_type,
    ) -> None:
        self._profiles = profiles
        self._gpu_type = gpu_type
        self._interference = interference or NoInterference()
        self._tables: dict[tuple[ModelId, float | None], tuple[float, ...]] = {}

    @property
    def interference(self) -> Interference:
        """How neighbours disturb each other."""
        return self._interference

    def exec_ms(self, running: Running, neighbours: Sequence[Running] = ()) -> float:
        """Run time in ms of a batch that starts now, beside what runs on the GPU's other slices.

        Raises ProfileError where the model's profile is missing or silent.
        """
        profile_ms = self._profile(running.model_id).exec_ms(running.batch_size, running.share_percent)
        return profile_ms * self._interference.slowdown(running, neighbours)

    def exec_table(self, model_id: ModelId, share_percent: float | None = None) -> tuple[float, ...]:
        """l(b) without neighbours at index b - 1: what the scheduler is told before anything was measured."""
        key = (model_id, share_percent)
        table = self._tables.get(key)
        if table is None:
            table = self._profile(model_id).exec_table(share_percent)
            factors = [
                self._interference.slowdown(Running(model_id, batch_size, share_percent), ())
                for batch_size in range(1, len(table) + 1)
            ]
            if any(factor != 1.0 for factor in factors):
                table = tuple(ms * factor for ms, factor in zip(table, factors, strict=True))
            self._tables[key] = table
        return table

    def _profile(self, model_id: ModelId) -> ModelProfile:
        profile = self._profiles.get(model_id)
        if profile is None:
            raise ProfileError(without_profile(model_id, self._gpu_type))
        return profile


def without_profile(model_id: ModelId, gpu_type: str) -> str:
    """Of a model that cannot be played or emulated on that type of GPU: what is missing, and how to get it."""
    return (
        f"model {model_id} has no profile for GPU type {gpu_type}: measure one on such a device with "
        f"`tenuto profile {model_id} --file FILE --device cuda` (or cpu), and give the model "
        "profile: {ref: …} with the file that it writes"
    )
