"""When two modules compute the same: same code, same settings, same values of every weight and buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))
_NO_SETTINGS: Final = frozenset(
    {*(key for key in vars(nn.Module()) if key.startswith("_")), "_is_hf_initialized"}
)
"""Private ones of every module, and a mark of transformers that depends on the checkpoint which a module came from."""


def equal_modules(first: nn.Module, others: list[nn.Module], name: str = "") -> Iterator[str]:
    """Names of the submodules that are equal in all; never the whole model, whose head answers."""
    for child_name, child in first.named_children():
        counterparts = [dict(other.named_children()).get(child_name) for other in others]
        path = f"{name}.{child_name}" if name else child_name
        present = [one for one in counterparts if one is not None]
        if len(present) < len(others):
            continue
        if all(are_equal(child, one) for one in present):
            yield path
            yield from (f"{path}.{below}" for below, _ in child.named_modules() if below)
        elif all(_is_equal_itself(child, one) for one in present):
            yield from equal_modules(child, present, path)


def are_equal(left: nn.Module, right: nn.Module) -> bool:
    """Exactly, without any tolerance. Of settings, plain values are compared; whoever merges also tries it out."""
    return left is right or _all_the_way_down(left, right, _is_equal_itself)


def are_alike(left: nn.Module, right: nn.Module) -> bool:
    """Of the same classes with the same settings, as far as these are plain values, all the way down; weights may differ."""
    return _all_the_way_down(left, right, _is_alike_itself)


def _all_the_way_down(
    left: nn.Module, right: nn.Module, fits: Callable[[nn.Module, nn.Module], bool]
) -> bool:
    if not fits(left, right):
        return False
    mine, yours = dict(left.named_children()), dict(right.named_children())
    return list(mine) == list(yours) and all(_all_the_way_down(mine[key], yours[key], fits) for key in mine)


def _is_alike_itself(left: nn.Module, right: nn.Module) -> bool:
    """Children aside."""
    return type(left) is type(right) and _settings(left) == _settings(right)


def _is_equal_itself(left: nn.Module, right: nn.Module) -> bool:
    """Children aside."""
    mine, yours = own_tensors(left), own_tensors(right)
    return (
        _is_alike_itself(left, right)
        and mine.keys() == yours.keys()
        and all(same_tensor(mine[key], yours[key]) for key in mine)
    )


def share_equal(owner: nn.Module, other: nn.Module) -> None:
    """Wherever modules of both are equal, `other` holds the parameters of `owner` from now on. What was tied in it stays tied.

    Not the buffers: a model may write to its own while it runs.
    """
    if type(owner) is not type(other):
        return
    theirs: dict[Tensor, Tensor] = {}
    for name in equal_modules(owner, [other]):
        mine = dict(owner.get_submodule(name).named_parameters(recurse=False))
        yours = dict(other.get_submodule(name).named_parameters(recurse=False))
        theirs.update((yours[key], mine[key]) for key in mine)
    hold(other, theirs)


def hold(net: nn.Module, instead: Mapping[Tensor, Tensor]) -> None:
    """From now on it holds these tensors instead of those, wherever it does."""
    for module in net.modules():
        for key, tensor in own_tensors(module).items():
            if tensor in instead:
                setattr(module, key, instead[tensor])


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Its weights and buffers by name, those of its children aside."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """Of one shape, type and device, with the same values."""
    if left is right:
        return True
    return (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device) and torch.equal(
        left, right
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    found = {}
    for key, value in vars(module).items():
        is_plain = isinstance(value, _PLAIN)
        if isinstance(value, tuple | list) and all(isinstance(one, _PLAIN) for one in value):
            is_plain = True
        if is_plain and key not in _NO_SETTINGS:
            found[key] = value
    return found
