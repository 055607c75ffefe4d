"""From a `LoaderSpec` to a model in memory, with a readable reason where that fails.

A user's model is any class with the three methods of `UserModel`; the zoo's models are wrapped to look the
same. All of this runs on the executor's thread, because building a large model takes seconds.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fabric.errors import FabricError
from fabric.messages import ImagePreprocess, LoaderSpec
from roles.gpu_worker.executors.torch_compat import declare_missing_operators

IMAGENET: Final = ImagePreprocess(
    input_name="image", resize=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
# These two draw their own initial weights with scipy, which takes minutes; torch's default draw does as well.
_NO_OWN_DRAW: Final = frozenset({"inception_v3", "googlenet"})


class LoaderError(FabricError):
    """A model cannot be loaded; says which and why."""


class UnknownModel(LoaderError):
    """No such zoo, architecture, module or class."""


class WeightsError(LoaderError):
    """The weights file is missing, broken, or of another model."""


class NotAModel(LoaderError):
    """The class lacks a method, or a method answers what it must not."""


class UserModel(Protocol):
    """What a user's class must have; it is constructed without arguments."""

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
    """A model on its device. `image` says how a frontend turns a picture into its input."""

    model: UserModel
    example: Mapping[str, Tensor]
    image: ImagePreprocess | None = None


def load_model(spec: LoaderSpec, device: torch.device) -> LoadedModel:
    """Load what the specification names. Raises LoaderError; what a user's own code raises passes through."""
    if (spec.zoo is None) == (spec.python is None):
        raise UnknownModel("a loader needs exactly one of zoo and python")
    if spec.python is not None:
        return _load_user_model(spec, spec.python, device)
    if spec.zoo != "torchvision":
        raise UnknownModel(f"there is no model zoo {spec.zoo!r}; there is: torchvision")
    return _load_torchvision(spec, device)


class Classifier:
    """A torchvision classifier: `image` float32 [3, 224, 224] -> `logits`, or `indices` and `scores`."""

    def __init__(self, net: nn.Module, top_k: int | None) -> None:
        self._net = net
        self._top_k = top_k

    def load(self, device: str) -> None:
        """Move the weights."""
        self._net.eval().to(device)

    def infer(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Logits [n, classes]; with `top_k` reduced on the device to the k best and their probabilities."""
        logits: Tensor = self._net(batch["image"])
        if self._top_k is None:
            return {"logits": logits}
        best = logits.softmax(dim=1).topk(min(self._top_k, logits.shape[1]), dim=1)
        return {"indices": best.indices, "scores": best.values}

    def example(self) -> dict[str, Tensor]:
        """A grey picture."""
        return {"image": torch.zeros(3, IMAGENET.crop, IMAGENET.crop)}


def _load_torchvision(spec: LoaderSpec, device: torch.device) -> LoadedModel:
    declare_missing_operators()
    from torchvision import models  # noqa: PLC0415  only after the declaration, and it takes seconds

    known = models.list_models(module=models)
    if spec.arch not in known:
        close = difflib.get_close_matches(spec.arch or "", known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownModel(f"torchvision has no classifier {spec.arch!r}{hint}")
    torch.manual_seed(spec.seed)
    options = {"init_weights": False} if spec.arch in _NO_OWN_DRAW else {}
    net: nn.Module = models.get_model(spec.arch, weights=None, **options)
    if spec.weights is not None:
        _put_weights(net, Path(spec.weights))
    model = Classifier(net, spec.top_k)
    model.load(str(device))
    return LoadedModel(model, model.example(), IMAGENET)


def _put_weights(net: nn.Module, path: Path) -> None:
    """From a safetensors file, or from a zip of torch's own that holds nothing but tensors."""
    if not path.is_file():
        raise WeightsError(f"there is no weights file {path}")
    is_safe = path.suffix == ".safetensors"
    if not is_safe and not is_zipfile(path):  # torch's older format is one bare pickle: not even opened
        raise WeightsError(f"{path} is truncated or not a weights file")
    try:
        weights = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError) as error:
        raise WeightsError(f"{path} is truncated or not a weights file: {error}") from error
    try:
        net.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise WeightsError(f"{path} holds the weights of another model: {error}") from error


def _load_user_model(spec: LoaderSpec, name: str, device: torch.device) -> LoadedModel:
    for option in ("arch", "weights", "top_k"):
        if getattr(spec, option) is not None:
            raise UnknownModel(f"{name} is a class of yours, which {option!r} means nothing to")
    declare_missing_operators()  # the user's module may import torchvision or transformers
    model = _construct(name)
    torch.manual_seed(spec.seed)
    model.load(str(device))
    example = model.example()
    if not isinstance(example, Mapping) or not example:
        raise NotAModel(f"{name}.example() must give a dict of tensors, not {type(example).__name__}")
    for key, value in example.items():
        if not isinstance(value, Tensor):
            raise NotAModel(f"{name}.example()[{key!r}] must be a tensor, not {type(value).__name__}")
    return LoadedModel(model, example)


def _construct(name: str) -> UserModel:
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise UnknownModel(f"{name!r} is not of the form module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UnknownModel(f"cannot import {module_name!r}: {error}") from error
    class_: Any = getattr(module, class_name, None)
    if not isinstance(class_, type):
        raise UnknownModel(f"module {module_name!r} has no class {class_name!r}")
    for method in ("load", "infer", "example"):
        if not callable(getattr(class_, method, None)):
            raise NotAModel(f"{name} has no method {method!r}; a model needs load, infer and example")
    model: UserModel = class_()
    return model
