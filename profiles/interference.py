"""Slowdown of slices that share one GPU, behind one small protocol.

A slowdown is a factor on the solo run time l(b) at the slice's own share, 1 when nothing disturbs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fabric.errors import ProfileError
from fabric.ids import ModelId

INTERFERENCE_NAMES = ("none", "igniter", "gpulet", "sm")
"""What a configuration may name (design section 10); `available_interference` says what is built."""


@dataclass(frozen=True, slots=True)
class Running:
    """A batch on a slice: the model, its size, and the slice's share (None: no limit)."""

    model_id: ModelId
    batch_size: int
    share_percent: float | None = None


class Interference(Protocol):
    """How much the neighbours on the same GPU slow a batch down."""

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:
        """The factor on l(b), 1 or more; 1 without neighbours."""
        ...


class NoInterference:
    """Slices of one GPU do not disturb each other."""

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:  # noqa: ARG002  the protocol's
        """Always 1."""
        return 1.0


_MODELS: Mapping[str, Callable[[], Interference]] = {"none": NoInterference}


def available_interference() -> tuple[str, ...]:
    """The names that `interference_named` can build."""
    return tuple(_MODELS)


def interference_named(name: str) -> Interference:
    """The interference model of that name; ProfileError where there is none, never a silent `none`."""
    build = _MODELS.get(name)
    if build is None:
        raise ProfileError(
            f"there is no interference model {name!r} here; available: {', '.join(available_interference())}"
        )
    return build()
