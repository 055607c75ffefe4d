"""Models that come to a slice, and go from it, while it serves.

What is new is loaded by the device beside what runs, one model at a time, and announced when it is warm. What is wanted
no more takes no new batches from the moment that is known; it is unloaded when those it has are over. A model that cannot
be loaded, or is not loaded in time, leaves only itself out: the slice serves on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from fabric.ids import SliceId
from fabric.messages import LeftOut, Loading
from roles.gpu_worker.events import LoadModel, UnloadModel, WorkerAction
from roles.gpu_worker.executors.base import ModelLoaded
from roles.gpu_worker.peer_checks import AGENT
from roles.gpu_worker.registration import Registration
from roles.gpu_worker.slices import HostedSlice, HostedState, SideLoad
from roles.runtime.core import Send
from roles.runtime.time_limits import is_looked_at_late

LOAD_LIMIT_MS: Final = 120_000.0  # as long as an agent gives each model of a worker that serves nobody yet


class ModelChanges:
    """Of the core's own `slices`. `due_at_ms`: when a load has taken too long; None: nothing loads."""

    def __init__(self, registration: Registration, slices: Mapping[SliceId, HostedSlice]) -> None:
        self.due_at_ms: float | None = None
        self.left_out: tuple[LeftOut, ...] = ()
        """What the agent wants left out."""
        self._registration = registration
        self._slices = slices
        self._loads = 0

    def adapt(self, slice_: HostedSlice, now_ms: float) -> list[WorkerAction]:
        """Bring a slice that serves nearer to what it should host."""
        if slice_.state is not HostedState.READY:
            return []
        actions = self._let_go(slice_)
        if slice_.side_load is None:
            actions += self._begin_load(slice_, now_ms)
        if (slice_.offered, slice_.left_out) != slice_.announced:
            actions += self._registration.changed(slice_, now_ms)
        self.look_ahead()
        return actions

    def loaded(self, event: ModelLoaded, now_ms: float) -> list[WorkerAction]:
        """A load has ended; nothing if it was given up before."""
        slice_ = self._slices.get(event.slice_id)
        load = slice_.side_load if slice_ is not None else None
        if slice_ is None or load is None or load.number != event.number:
            return []
        actions = self._settle(slice_, load, event, now_ms)
        self.look_ahead()
        return actions

    def give_up_overdue(self, now_ms: float) -> list[WorkerAction]:
        """Leave out what takes too long to load."""
        actions: list[WorkerAction] = []
        for slice_ in self._slices.values():
            load = slice_.side_load
            if load is None or load.until_ms > now_ms:
                continue
            if is_looked_at_late(load.until_ms, now_ms):
                slice_.side_load = replace(load, until_ms=now_ms + LOAD_LIMIT_MS)
            else:
                reason = f"not loaded within {LOAD_LIMIT_MS / 1e3:g} s"
                event = ModelLoaded(slice_.spec.slice_id, load.number, None, reason)
                actions.append(UnloadModel(slice_.spec.slice_id, load.model.model_id))
                actions += self._settle(slice_, load, event, now_ms)
        self.look_ahead()
        return actions

    def _settle(
        self, slice_: HostedSlice, load: SideLoad, event: ModelLoaded, now_ms: float
    ) -> list[WorkerAction]:
        slice_.side_load = slice_.loading = None
        model_id = load.model.model_id
        slice_.tried[model_id] = load.model
        if event.replica is not None:
            slice_.replicas[model_id] = event.replica
        else:
            slice_.left_out += (LeftOut(slice_.spec.slice_id, model_id, event.reason),)
        to_agent = Send(AGENT, self._registration.slice_ready(slice_))
        return [to_agent, *self.adapt(slice_, now_ms)]

    def _let_go(self, slice_: HostedSlice) -> list[WorkerAction]:
        """What is wanted no more, or otherwise, and has nothing left to do."""
        actions: list[WorkerAction] = []
        slice_id, load = slice_.spec.slice_id, slice_.side_load
        if load is not None and load.model not in slice_.spec.models:
            slice_.side_load = slice_.loading = None
            actions.append(UnloadModel(slice_id, load.model.model_id))
        slice_.is_letting_go = False
        for model_id in slice_.unwanted():
            if model_id not in slice_.replicas:
                del slice_.tried[model_id]
            elif slice_.queue.has(model_id):
                slice_.is_letting_go = True
            else:
                del slice_.tried[model_id], slice_.replicas[model_id]
                actions.append(UnloadModel(slice_id, model_id))
        slice_.left_out = tuple(out for out in slice_.left_out if out.model_id in slice_.tried)
        return actions

    def _begin_load(self, slice_: HostedSlice, now_ms: float) -> list[WorkerAction]:
        slice_id = slice_.spec.slice_id
        told = {out.model_id: out for out in self.left_out if out.slice_id == slice_id}
        for model in slice_.spec.models:
            if model.model_id in slice_.tried:
                continue
            if model.model_id in told:
                slice_.tried[model.model_id] = model
                slice_.left_out += (told[model.model_id],)
                continue
            self._loads += 1
            slice_.side_load = SideLoad(model, self._loads, now_ms + LOAD_LIMIT_MS)
            slice_.loading = model.model_id
            only = replace(slice_.spec, models=(model,))
            return [Send(AGENT, Loading(slice_id, model.model_id)), LoadModel(only, self._loads)]
        return []

    def look_ahead(self) -> None:
        """To be called when a slice is gone; the others do."""
        loads = (slice_.side_load for slice_ in self._slices.values())
        self.due_at_ms = min((load.until_ms for load in loads if load is not None), default=None)
