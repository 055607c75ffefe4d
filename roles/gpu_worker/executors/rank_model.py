"""One rank of a model that a user's class computes in several processes together (tensor parallel).

Ranks meet in a process group of `torch.distributed`: gloo on CPUs, NCCL on CUDA devices. It is the default group, so that the class exchanges
by ``torch.distributed.all_reduce(partial)`` and the like. The first rank's outputs are the answer, the others' are thrown away.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, distributed

from fabric.errors import error_text
from fabric.ids import ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.gang import LOAD_WITHIN_MS, Gang
from roles.gpu_worker.executors.loaders.base import LoadedModel, LoaderError, NotAModel, UserModel
from roles.gpu_worker.executors.loaders.registry import load_model

_LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # all ranks are on one host


def load_first_rank(
    spec: LoaderSpec, device: torch.device, meeting: Path, gang: Gang, of: tuple[SliceId, ModelId]
) -> LoadedModel:
    """Load rank 0, whose every `infer` is one of all ranks. Raises what `load_model` raises, and LoaderError where another rank failed."""
    try:
        loaded = _load(spec, device, 0, meeting)
    except BaseException as error:  # users' code may raise anything
        kind, _, text = error_text(error).partition(": ")
        others = [one for one in gang.problems_of_load() if not text or text not in one]
        _part()
        if not others:
            raise
        raise LoaderError(f"{'; '.join(others)}; rank 0: {kind}: {text[:100]}") from error
    return replace(loaded, model=_FirstRank(loaded.model, gang, of))


def load_other_rank(spec: LoaderSpec, device: torch.device, rank: int, meeting: Path) -> LoadedModel:
    """Load another one, which infers when the first one does. Raises as `load_model`."""
    try:
        loaded = _load(spec, device, rank, meeting)
    except BaseException:  # as above
        _part()
        raise
    return replace(loaded, model=_OtherRank(loaded.model))


def _part() -> None:
    """Whoever waits for this rank hears that it is gone, where the process group can tell."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _load(spec: LoaderSpec, device: torch.device, rank: int, meeting: Path) -> LoadedModel:
    for variable, value in _LOOPBACK.items():
        os.environ.setdefault(variable, value)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=distributed.FileStore(str(meeting), spec.ranks),  # type: ignore[attr-defined]  # it is documented there
        rank=rank,
        world_size=spec.ranks,
        timeout=timedelta(milliseconds=LOAD_WITHIN_MS),
    )
    loaded = load_model(spec, device, rank)
    if any(hasattr(loaded.model, name) for name in ("pre", "post")):
        raise NotAModel(f"{spec.python} has pre or post, which only one rank would run; put them into infer")
    return loaded


class _FirstRank:
    def __init__(self, model: UserModel, gang: Gang, of: tuple[SliceId, ModelId]) -> None:
        self._model = model
        self._gang = gang
        self._of = of

    def load(self, device: str) -> None:
        """It is there."""

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """On all ranks at once."""
        # A copy: the buffers are filled again before the sockets have sent them.
        inputs = [NamedTensor(key, value.to("cpu", copy=True).numpy()) for key, value in batch.items()]
        self._gang.begin(*self._of, inputs)
        try:
            outputs = self._model.infer(batch)
        except BaseException as error:
            self._gang.end(error_text(error))
            raise
        self._gang.end("")
        return outputs

    def example(self) -> Mapping[str, Tensor]:
        """Of one request."""
        return self._model.example()


class _OtherRank:
    def __init__(self, model: UserModel) -> None:
        self._model = model

    def load(self, device: str) -> None:
        """It is there."""

    def infer(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nobody wants its outputs: that it has ended is all."""
        self._model.infer(batch)
        return {"ended": torch.ones(len(next(iter(batch.values()))), dtype=torch.bool)}

    def example(self) -> Mapping[str, Tensor]:
        """Of one request."""
        return self._model.example()
