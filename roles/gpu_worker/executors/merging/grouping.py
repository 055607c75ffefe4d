"""Which models could be heads of one model, found out by loading them one after the other.

Of each group the first model is kept to compare others with, so that never more is in memory than one of each kind and the one that is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fabric.errors import error_text
from fabric.ids import ModelId
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.hosted import signature
from roles.gpu_worker.executors.loaders.base import LoadedModel, LoaderError
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.merging.base import CannotMerge, Member
from roles.gpu_worker.executors.merging.equality import share_equal
from roles.gpu_worker.executors.merging.heads import net_of, only, outputs_of, run_of
from roles.gpu_worker.executors.merging.prefix import leading


@dataclass(slots=True)
class CouldBeHeads:
    """Models with equal inputs and kinds of outputs, whose first `layers` modules are equal. Bytes are of weights and buffers."""

    models: list[ModelId]
    layers: int
    apart_bytes: int
    together_bytes: int

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "models": list(self.models),
            "equal_leading_layers": self.layers,
            "apart_bytes": self.apart_bytes,
            "together_bytes": self.together_bytes,
        }


@dataclass(slots=True)
class _Kind:
    group: CouldBeHeads
    takes_and_gives: object
    member: Member


def possible_heads(
    models: Iterable[tuple[ModelId, LoaderSpec]],
) -> tuple[list[CouldBeHeads], dict[ModelId, str]]:
    """Groups of two and more, and why a model could not be looked at."""
    kinds: list[_Kind] = []
    left_out: dict[ModelId, str] = {}
    cpu = torch.device("cpu")
    for model_id, loader in models:
        try:
            loaded = load_model(loader, cpu)
            member = Member(only(net_of(loaded), str(model_id)), run_of(loaded), loaded.example)
            with torch.inference_mode():
                _sort_in(kinds, model_id, member, _takes_and_gives(loaded, cpu))
        except (LoaderError, CannotMerge) as error:
            left_out[model_id] = str(error)
        except Exception as error:  # noqa: BLE001  # a user's own code may raise anything, and the others are looked at
            left_out[model_id] = error_text(error)
    return [kind.group for kind in kinds if len(kind.group.models) > 1], left_out


def held_bytes(nets: Sequence[nn.Module], but: Iterable[int] = ()) -> int:
    """Of their weights and buffers, each storage once, without those at `but`."""
    return sum(size for place, size in _storages(nets).items() if place not in but)


def _sort_in(kinds: list[_Kind], model_id: ModelId, member: Member, takes_and_gives: object) -> None:
    whole = held_bytes([member.net])
    for kind in kinds:
        owner = kind.member
        if kind.takes_and_gives != takes_and_gives or type(owner.net) is not type(member.net):
            continue
        layers = len(leading(owner.net, [member.net], owner))
        if layers:
            share_equal(owner.net, member.net)
            group = kind.group
            group.models.append(model_id)
            group.layers = min(group.layers, layers) if len(group.models) > 2 else layers
            group.apart_bytes += whole
            group.together_bytes += held_bytes([member.net], _storages([owner.net]))
            return
    kinds.append(_Kind(CouldBeHeads([model_id], 0, whole, whole), takes_and_gives, member))


def _takes_and_gives(loaded: LoadedModel, device: torch.device) -> object:
    """What heads of one model have in common."""
    outputs = outputs_of(loaded, device)
    return signature(loaded.example), [(info.name, info.dtype, len(info.shape)) for info in outputs]


def _storages(nets: Sequence[nn.Module]) -> Mapping[int, int]:
    return {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for net in nets
        for one in _tensors(net)
    }


def _tensors(net: nn.Module) -> Iterator[torch.Tensor]:
    yield from net.parameters()
    yield from net.buffers()
