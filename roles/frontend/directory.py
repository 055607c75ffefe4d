"""What a frontend knows of the cluster: the last `Directory`, and what changed with it."""

from __future__ import annotations

from msgspec import Struct

from fabric.ids import FrontendId, Incarnation, ModelId, SliceId
from fabric.messages import Directory, ModelInfo, SliceInfo


class DirectoryChange(Struct, frozen=True):
    """From one directory to the next. A slice with a new incarnation has both gone and come."""

    gone: tuple[SliceInfo, ...]
    come: tuple[SliceInfo, ...]
    removed: tuple[ModelId, ...]
    changed: tuple[ModelId, ...]
    """Models that are new, or of which something else is said."""


class Known:
    """The cluster as last told; `is_empty` before the first directory."""

    def __init__(self) -> None:
        self.is_empty = True
        self.models: dict[ModelId, ModelInfo] = {}
        self.coming_at_ms: dict[ModelId, float] = {}
        """Of models that nothing serves: when a slice will be ready, where one is expected."""
        self._slices: dict[SliceId, SliceInfo] = {}

    def update(self, directory: Directory, now_ms: float) -> DirectoryChange:
        """Take the new directory and nothing of the old one."""
        models = {model.model_id: model for model in directory.models}
        slices = {slice_.slice_id: slice_ for slice_ in directory.slices}
        before = self._slices
        change = DirectoryChange(
            gone=tuple(old for old in before.values() if not _is_same(old, slices.get(old.slice_id))),
            come=tuple(new for new in slices.values() if not _is_same(new, before.get(new.slice_id))),
            removed=tuple(model_id for model_id in self.models if model_id not in models),
            changed=tuple(model_id for model_id, info in models.items() if self.models.get(model_id) != info),
        )
        self.models, self._slices = models, slices
        self.coming_at_ms = {
            model_id: now_ms + model.coming_in_ms
            for model_id, model in models.items()
            if model.coming_in_ms is not None
        }
        self.is_empty = False
        return change

    def has(self, slice_id: SliceId, incarnation: Incarnation) -> bool:
        """Whether that incarnation of the slice is the one that serves now."""
        known = self._slices.get(slice_id)
        return known is not None and known.incarnation == incarnation


def lists(directory: Directory, frontend_id: FrontendId, incarnation: Incarnation) -> bool:
    """Whether the scheduler that wrote it knows this incarnation of this frontend."""
    return any(
        frontend.frontend_id == frontend_id and frontend.incarnation == incarnation
        for frontend in directory.frontends
    )


def _is_same(one: SliceInfo, other: SliceInfo | None) -> bool:
    return other is not None and one.incarnation == other.incarnation and one.addresses == other.addresses
