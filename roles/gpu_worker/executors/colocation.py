"""Who shares an emulated GPU, and how much they slow each other down.

Slices of one process know of each other; those that another process of the host emulates are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from fabric.errors import ProfileError
from fabric.ids import ModelId, SliceId
from fabric.messages import ModelSpec, SliceSpec
from profiles.interference import Interference, Running, interference_named
from profiles.model import ModelProfile
from profiles.store import shipped_profile
from roles.gpu_worker.executors.base import Job


class ColocatedSlices:
    """The emulated GPUs of this process, by their numbers."""

    def __init__(self) -> None:
        self._specs: dict[SliceId, SliceSpec] = {}
        self._interference: dict[int, Interference] = {}

    def add(self, spec: SliceSpec) -> None:
        """A slice joins its GPU; ProfileError where its profiles do not fit the interference model."""
        if spec.interference is None:
            return
        there = [*(other for other in self._on(spec.gpu) if other.slice_id != spec.slice_id), spec]
        profiles = {model.model_id: _profile(model) for other in there for model in other.models}
        options = {option.name: option.value for option in spec.interference.options}
        law = interference_named(spec.interference.name, profiles, f"gpu {spec.gpu}", options)
        self._interference[spec.gpu] = law
        self._specs[spec.slice_id] = spec

    def widen(self, spec: SliceSpec) -> None:
        """A slice that is there hosts these models too; ProfileError as above."""
        there = self._specs.get(spec.slice_id, spec)
        names = {one.model_id for one in spec.models}
        former = tuple(one for one in there.models if one.model_id not in names)
        self.add(replace(spec, models=(*former, *spec.models)))

    def narrow(self, slice_id: SliceId, model_id: ModelId) -> None:
        """A slice hosts that model no more."""
        there = self._specs.get(slice_id)
        if there is not None:
            models = tuple(one for one in there.models if one.model_id != model_id)
            self._specs[slice_id] = replace(there, models=models)

    def remove(self, slice_id: SliceId) -> None:
        """A slice is gone; what it was slowed down by is kept for those that stay."""
        self._specs.pop(slice_id, None)

    def slowdown(
        self, slice_id: SliceId, model_id: ModelId, batch_size: int, running: Iterable[tuple[Job, int]]
    ) -> float:
        """The factor on the slice's own l(b), which has the cost of its share in it already.

        `running`: what runs in this process, with the sizes of the batches.
        """
        spec = self._specs.get(slice_id)
        if spec is None:
            return 1.0
        neighbours = [
            Running(job.model_id, size, other.share_percent)
            for job, size in running
            if job.slice_id != slice_id
            and (other := self._specs.get(job.slice_id)) is not None
            and other.gpu == spec.gpu
        ]
        if not neighbours:
            return 1.0
        own = Running(model_id, batch_size, spec.share_percent)
        interference = self._interference[spec.gpu]
        return interference.slowdown(own, neighbours) / interference.slowdown(own, ())

    def _on(self, gpu: int) -> Iterable[SliceSpec]:
        return (spec for spec in self._specs.values() if spec.gpu == gpu)


def _profile(model: ModelSpec) -> ModelProfile:
    if not model.profile_ref:
        raise ProfileError(f"model {model.model_id} names no shipped profile, which interference needs")
    return shipped_profile(model.profile_ref)
