"""A model's operator graph at one batch size: its operators as they are launched, and what they allocate.

Whoever traces (`profiles/profilers/operator_graph.py`) says sizes only; what an operator costs is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator. `reads` are the earlier calls (by index) whose results it takes."""

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    size_bytes: int
    """Read and written; a broadcast or repeated input counts once."""
    options: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reads: tuple[int, ...] = ()
    is_half: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """A result's memory: taken at call `born`, given back after call `dies`; None: it outlives the batch."""

    size_bytes: int
    born: int
    dies: int | None


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Everything one batch does. `weights_bytes` and `inputs_bytes` by tensor, in the order they are made."""

    batch_size: int
    calls: Sequence[OperatorCall]
    allocations: Sequence[Allocation]
    weights_bytes: Sequence[int]
    inputs_bytes: Sequence[int]
    output_bytes: int
