"""One stage of a model that is cut over the GPUs of a pipeline, as a model of its own.

Every process of a pipeline loads the whole model into the host's memory, cuts it and keeps its own part, which alone goes to its GPU.
The first one decides where: as the user says, or by what each layer takes on its GPU, where one layer is at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from fabric.clock import Clock
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.base import Part
from roles.gpu_worker.executors.cut import CutError, Stage, Traced
from roles.gpu_worker.executors.loaders.base import LoadedModel
from roles.gpu_worker.executors.loaders.registry import load_model

_HOST: Final = torch.device("cpu")
_TRAVELS_AS: Final = {torch.bfloat16: torch.float32}  # numpy has no bfloat16; nothing is lost on the way


def load_first(spec: LoaderSpec, device: torch.device, stages: int, clock: Clock) -> tuple[LoadedModel, Part]:
    """Load and cut a model, and keep its first stage. Raises CutError where it cannot be cut so, and what `load_model` raises."""
    loaded, traced = _traced(spec)
    if spec.begin_at:
        if len(spec.begin_at) + 1 != stages:
            raise CutError(
                f"its loader says where {len(spec.begin_at) + 1} stages begin; it has {stages} GPUs"
            )
        first_layers = traced.begun_at(spec.begin_at)
    else:
        first_layers = traced.balanced(stages, clock, device)
    traced.check(traced.cut(first_layers))
    part = Part(0, first_layers, traced.digest)
    return _kept(loaded, traced, part, device), part


def load_later(spec: LoaderSpec, device: torch.device, part: Part) -> LoadedModel:
    """Load a model and keep the part that the first stage's process wants here. Raises CutError where it is another model here."""
    loaded, traced = _traced(spec)
    if traced.digest != part.digest:
        raise CutError(
            "it has other weights, or another structure, each time it is loaded; the stages of a cut model are loaded by "
            "themselves and must be of the same one: load its weights from a file, or draw them with a generator of their own"
        )
    return _kept(loaded, traced, part, device)


def _traced(spec: LoaderSpec) -> tuple[LoadedModel, Traced]:
    loaded = load_model(spec, _HOST)
    return loaded, Traced(loaded.model, loaded.example)


def _kept(loaded: LoadedModel, traced: Traced, part: Part, device: torch.device) -> LoadedModel:
    stages = traced.cut(part.first_layers)
    own = stages[part.stage]
    example = traced.example(stages[: part.stage])
    model = _StageModel(own, example)
    own.move(device)
    is_first = part.stage == 0
    kept = LoadedModel(
        model,
        model.example(),
        loaded.image if is_first else None,
        loaded.bounds if is_first else {},
        loaded.may_capture,
    )
    del traced, stages, loaded
    gc.collect()  # the other parts' weights hang in circles of graphs and modules
    return kept


class _StageModel:
    """Takes and gives tensors by name, as a whole model does; what goes between stages is of types that travel."""

    def __init__(self, stage: Stage, example: Mapping[str, Tensor]) -> None:
        self._module = stage.module  # where whoever looks for a model's weights finds them
        self._stage = stage
        self._types = {name: value.dtype for name, value in example.items()}
        self._example = {
            name: value.to(_TRAVELS_AS.get(value.dtype, value.dtype)) for name, value in example.items()
        }

    def load(self, device: str) -> None:
        """It is there."""

    def infer(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the next stage takes, or, of the last one, the model's outputs."""
        values = [batch[name].to(self._types[name]) for name in self._stage.takes]
        return dict(zip(self._stage.gives, self._stage.run(values), strict=True))

    def example(self) -> dict[str, Tensor]:
        """Of one request."""
        return dict(self._example)
