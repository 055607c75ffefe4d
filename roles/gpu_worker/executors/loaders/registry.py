"""From a `LoaderSpec` to a model in memory, with a readable reason where that fails.

A user's model is any class with the three methods of `UserModel`; the zoos' models are wrapped to look the
same. All of this runs on the executor's thread, because building a large model takes seconds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.loaders.base import (
    LoadedModel,
    NotAModel,
    UnknownModel,
    UserModel,
)
from roles.gpu_worker.executors.loaders.torch_compat import declare_missing_operators
from roles.gpu_worker.executors.loaders.torchvision import load_torchvision
from roles.gpu_worker.executors.loaders.transformers import load_transformers

_ZOOS = {"torchvision": load_torchvision, "transformers": load_transformers}
_DEFAULT = LoaderSpec()


def load_model(spec: LoaderSpec, device: torch.device, rank: int = 0) -> LoadedModel:
    """Load what the specification names; where it runs in ranks, that one. Raises LoaderError; what a user's own code raises passes through."""
    if (spec.zoo is None) == (spec.python is None):
        raise UnknownModel("a loader needs exactly one of zoo and python")
    if spec.python is not None:
        return _load_user_model(spec, spec.python, device, rank)
    load = _ZOOS.get(spec.zoo or "")
    if load is None:
        raise UnknownModel(f"there is no model zoo {spec.zoo!r}; there is: {', '.join(_ZOOS)}")
    return load(spec, device)


def _load_user_model(spec: LoaderSpec, name: str, device: torch.device, rank: int) -> LoadedModel:
    for option in ("arch", "weights", "top_k", "dtype", "channels_last", "config", "from_hub"):
        if getattr(spec, option) != getattr(_DEFAULT, option):
            raise UnknownModel(f"{name} is a class of yours, which {option!r} means nothing to")
    declare_missing_operators()  # the user's module may import torchvision or transformers
    model = _construct(name, {"rank": rank, "world_size": spec.ranks} if spec.ranks else {})
    torch.manual_seed(spec.seed)
    model.load(str(device))
    example = model.example()
    if not isinstance(example, Mapping) or not example:
        raise NotAModel(f"{name}.example() must give a dict of tensors, not {type(example).__name__}")
    for key, value in example.items():
        if not isinstance(value, Tensor):
            raise NotAModel(f"{name}.example()[{key!r}] must be a tensor, not {type(value).__name__}")
    example = {key: value.detach() for key, value in example.items()}
    # A class may look at all its rows at once, or do something beside the device: only its author knows.
    return LoadedModel(model, example, may_capture=spec.cuda_graphs is True)


def _construct(name: str, arguments: Mapping[str, int]) -> UserModel:
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
    for method in ("pre", "post"):
        if not callable(getattr(class_, method, print)):
            raise NotAModel(f"{name}.{method} is no method; it may be left out")
    try:
        inspect.signature(class_).bind(**arguments)
    except (TypeError, ValueError) as error:
        wanted = (
            "with ranks in its loader it must be constructed as def __init__(self, rank, world_size)"
            if arguments
            else "without ranks in its loader it must need no arguments"
        )
        raise NotAModel(f"{name}: {wanted} ({error})") from error
    model: UserModel = class_(**arguments)
    return model
