"""Random weights by a seed, without torch's own generators: what is served meanwhile may draw from those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Seeded(TorchDispatchMode):
    """What this thread draws on the CPU within it is what would be drawn after `torch.manual_seed(seed)`.

    `torch.fork_rng` would not do: it puts the state of the whole process aside, for all threads.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Each operation, with the generator if it draws."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and _device_of(args, kwargs).type == "cpu":
            func = _with_generator(func)
            kwargs.setdefault("generator", self._generator)
        return func(*args, **kwargs)


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Weights that are read from a file are described on the device `meta` first, where nothing is drawn."""
    if args and isinstance(args[0], Tensor):
        return args[0].device
    return torch.device(kwargs.get("device") or "cpu")


def _with_generator(func: OpOverload) -> OpOverload:
    """`randn` and its like take a generator in an overload of its own."""
    if any(argument.name == "generator" for argument in func._schema.arguments):  # noqa: SLF001  there is no public way
        return func
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"  # noqa: SLF001  as above
    found: OpOverload = getattr(func.overloadpacket, name)
    return found
