"""torchvision's classifiers, with random weights or those of a local file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fabric.errors import error_text
from fabric.messages import ImagePreprocess, LoaderSpec
from profiles.profilers.memory import is_out_of_memory
from roles.gpu_worker.executors.loaders.base import (
    LoadedModel,
    UnknownModel,
    WeightsError,
    dtype_named,
    reduced,
)
from roles.gpu_worker.executors.loaders.seeded import Seeded
from roles.gpu_worker.executors.loaders.torch_compat import declare_missing_operators

IMAGENET: Final = ImagePreprocess(
    input_name="image", resize=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
# These two draw their own initial weights with scipy, which takes minutes; torch's default draw does as well.
_NO_OWN_DRAW: Final = frozenset({"inception_v3", "googlenet"})
_CALIBRATION_BATCH: Final = 4


class Classifier:
    """A torchvision classifier: `image` float32 [3, 224, 224] -> `logits`, or `indices` and `scores`.

    The image is cast on the device, so what is sent there stays float32 whatever `dtype` the weights have.
    """

    def __init__(
        self, net: nn.Module, top_k: int | None, dtype: torch.dtype, layout: torch.memory_format
    ) -> None:
        self._net = net
        self._top_k = top_k
        self._dtype = dtype
        self._layout = layout

    def load(self, device: str) -> None:
        """Move the weights."""
        self._net.eval().to(device=device, dtype=self._dtype)
        if self._layout is torch.channels_last:
            self._net.to(memory_format=self._layout)  # type: ignore[call-overload]  # torch's stubs know it with a device only

    def infer(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Logits [n, classes], or the k best."""
        image = batch["image"].to(dtype=self._dtype)
        if self._layout is torch.channels_last:
            image = image.contiguous(memory_format=self._layout)
        logits: Tensor = self._net(image)
        return reduced(logits, self._top_k)

    def example(self) -> dict[str, Tensor]:
        """A grey picture."""
        return {"image": torch.zeros(3, IMAGENET.crop, IMAGENET.crop)}


def load_torchvision(spec: LoaderSpec, device: torch.device) -> LoadedModel:
    """A classifier of the zoo. Raises UnknownModel and WeightsError."""
    declare_missing_operators()
    from torchvision import models  # noqa: PLC0415  only after the declaration, and it takes seconds

    known = models.list_models(module=models)
    if spec.arch not in known:
        close = difflib.get_close_matches(spec.arch or "", known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownModel(f"torchvision has no classifier {spec.arch!r}{hint}")
    options = {"init_weights": False} if spec.arch in _NO_OWN_DRAW else {}
    with Seeded(spec.seed):
        net: nn.Module = models.get_model(spec.arch, weights=None, **options)
    if spec.weights is not None:
        _put_weights(net, Path(spec.weights))
    else:
        _calibrate(net.eval().to(device), spec.seed)
    layout = torch.channels_last if spec.channels_last else torch.contiguous_format
    model = Classifier(net, spec.top_k, dtype_named(spec.dtype), layout)
    model.load(str(device))
    return LoadedModel(model, model.example(), IMAGENET, may_capture=spec.cuda_graphs is not False)


def _calibrate(net: nn.Module, seed: int) -> None:
    """Measure the statistics of batch norms on one batch of noise, as training would have left them.

    Untouched they are 0 and 1: then nothing is normalised, and a ResNet-152 of random weights answers logits of 1e8,
    which float16 does not hold.
    """
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    noise = torch.randn(
        (_CALIBRATION_BATCH, 3, IMAGENET.crop, IMAGENET.crop), generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        net(noise.to(next(net.parameters()).device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def _put_weights(net: nn.Module, path: Path) -> None:
    """From a safetensors file, or from a zip of torch's own that holds nothing but tensors."""
    if not path.is_file():
        raise WeightsError(f"there is no weights file {path}")
    weights = _read(path)
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise WeightsError(f"{path} holds no tensors by name: save the model's state_dict()")
    try:
        net.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise WeightsError(f"{path} holds the weights of another model: {error}") from error


def _read(path: Path) -> object:
    is_safe = path.suffix == ".safetensors"
    if not is_safe and not is_zipfile(path):  # torch's older format is one bare pickle: not even opened
        raise WeightsError(f"{path} is truncated or not a weights file")
    if not is_safe and _is_script(path):
        raise WeightsError(f"{path} is a TorchScript program: save the model's state_dict()")
    try:
        return load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file may raise anything in its reader
        if is_out_of_memory(error):
            raise
        if "Weights only load failed" in str(error):  # torch goes on with the advice to trust the file
            raise WeightsError(
                f"{path} holds a whole pickled model, or other objects: save the model's state_dict()"
            ) from error
        raise WeightsError(f"{path} is truncated or not a weights file: {error_text(error)}") from error


def _is_script(path: Path) -> bool:
    try:
        with ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except BadZipFile:  # torch says what is wrong with it
        return False
