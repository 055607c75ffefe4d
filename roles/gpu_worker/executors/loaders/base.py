"""What every loader shares: the shape of a model, what comes of loading one, and what can go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from fabric.errors import FabricError
from fabric.ids import ModelId
from fabric.messages import HeadOutputs, ImagePreprocess

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoaderError(FabricError):
    """A model cannot be loaded; says which and why."""


class UnknownModel(LoaderError):
    """No such zoo, architecture, module or class."""


class WeightsError(LoaderError):
    """The weights file is missing, broken, or of another model."""


class NotAModel(LoaderError):
    """The class lacks a method, or a method answers what it must not."""


class UserModel(Protocol):
    """What a user's class must have; it is constructed without arguments, or, in ranks, with `rank` and `world_size`.

    It may also have `pre(batch)` and `post(outputs)`, which run before and after `infer`, on the device, and never
    inside a CUDA graph. What comes out in the end has a row for each request, however many `infer` is given.
    """

    def load(self, device: str) -> None:
        """Get ready on `device`, such as ``cpu`` or ``cuda:0``."""
        ...

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Inputs stacked on a first axis -> outputs with the same first axis. Inputs are reused afterwards."""
        ...

    def example(self) -> Mapping[str, Tensor]:
        """One request's inputs, without a batch axis: they define names, dtypes and shapes."""
        ...


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model on its device.

    `image` says how a frontend turns a picture into its input. `bounds` are the smallest and largest value an
    input may hold: a token the embedding does not have would break the whole CUDA context. `may_capture`: its
    batches may be padded and replayed as CUDA graphs. `heads`: what its rows are for, by number; its example has `HEAD_INPUT` then.
    """

    model: UserModel
    example: Mapping[str, Tensor]
    image: ImagePreprocess | None = None
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    may_capture: bool = False
    heads: tuple[HeadOutputs, ...] = ()
    head_bounds: Mapping[ModelId, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    """Those of each head's rows, in the order of their numbers; the model itself has none then."""
    merged: tuple[str, ...] = ()
    """The modules that run once for all heads."""
    not_merged: str = ""
    """Why the heads run one after the other; empty: they do not."""


def dtype_named(name: str) -> torch.dtype:
    """The dtype of the weights; UnknownModel where there is none of that name."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise UnknownModel(f"there is no dtype {name!r}; there is: {', '.join(DTYPES)}")
    return dtype


def reduced(logits: Tensor, top_k: int | None) -> dict[str, Tensor]:
    """`logits` [n, classes] in float32; with `top_k` reduced on the device to the k best and their probabilities."""
    if top_k is None:
        return {"logits": logits.float()}
    best = logits.float().softmax(dim=1).topk(min(top_k, logits.shape[1]), dim=1)
    return {"indices": best.indices, "scores": best.values}
