"""The memory torch's caching allocator would reserve for one batch after another, from what is alive when.

Rules of `c10/cuda/CUDACachingAllocator.cpp`: sizes round up to 512 bytes; up to 1 MiB come out of 2 MiB segments,
up to 10 MiB out of 20 MiB segments, larger ones get a segment of their own, rounded up to 2 MiB; the best fitting
free block is split where the rest is worth keeping (over 1 MiB in the large pool). Neighbouring free blocks join.
Segments are kept, so the sum of all is what `max_memory_reserved` shows. A context and the libraries' own work spaces
come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from profiles.estimator.graph import OperatorGraph
from profiles.gpu import MIB

ROUND_BYTES: Final = 512
SMALL_MAX_BYTES: Final = MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
MEDIUM_MAX_BYTES: Final = 10 * MIB
MEDIUM_SEGMENT_BYTES: Final = 20 * MIB
BATCHES: Final = 2
"""After the second equal batch nothing new is reserved: blocks are split as they will stay."""


@dataclass(slots=True)
class _Block:
    segment: int
    at: int
    size: int


@dataclass(slots=True)
class CachingAllocator:
    """Blocks by size class; `reserved_bytes` never falls."""

    reserved_bytes: int = 0
    _free: tuple[list[_Block], list[_Block]] = field(default_factory=lambda: ([], []))

    def allocate(self, size_bytes: int) -> _Block:
        """A block of at least that size."""
        size = max(ROUND_BYTES, -(-size_bytes // ROUND_BYTES) * ROUND_BYTES)
        is_large = size > SMALL_MAX_BYTES
        free = self._free[is_large]
        fitting = min((block for block in free if block.size >= size), key=_rank, default=None)
        if fitting is None:
            fitting = self._segment(size)
        else:
            free.remove(fitting)
        rest = fitting.size - size
        if rest >= ROUND_BYTES and (not is_large or rest > SMALL_MAX_BYTES):
            free.append(_Block(fitting.segment, fitting.at + size, rest))
            return _Block(fitting.segment, fitting.at, size)
        return fitting

    def release(self, block: _Block, *, is_large: bool) -> None:
        """Give it back; it joins free neighbours of its segment."""
        free = self._free[is_large]
        start, end = block.at, block.at + block.size
        for other in [one for one in free if one.segment == block.segment]:
            if other.at + other.size == start:
                start = other.at
            elif other.at == end:
                end = other.at + other.size
            else:
                continue
            free.remove(other)
        free.append(_Block(block.segment, start, end - start))

    def _segment(self, size: int) -> _Block:
        if size <= SMALL_MAX_BYTES:
            whole = SMALL_SEGMENT_BYTES
        elif size < MEDIUM_MAX_BYTES:
            whole = MEDIUM_SEGMENT_BYTES
        else:
            whole = -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        self.reserved_bytes += whole
        return _Block(self.reserved_bytes, 0, whole)


def reserved_bytes(graph: OperatorGraph, workspaces: Mapping[int, int] | None = None) -> tuple[int, int]:
    """What the allocator holds once batches of this graph run one after another; and for the weights alone.

    `workspaces`: bytes that a call (by index) takes beside its results while it runs.
    """
    allocator = CachingAllocator()
    for size in graph.weights_bytes:
        allocator.allocate(size)
    weights_bytes = allocator.reserved_bytes
    born: dict[int, list[int]] = {}
    dying: dict[int, list[int]] = {}
    for index, one in enumerate(graph.allocations):
        born.setdefault(one.born, []).append(index)
        dying.setdefault(len(graph.calls) if one.dies is None else one.dies, []).append(index)
    for _ in range(BATCHES):
        held = [(allocator.allocate(size), size) for size in graph.inputs_bytes]
        blocks: dict[int, _Block] = {}
        for call in range(len(graph.calls) + 1):
            for index in born.get(call, ()):
                blocks[index] = allocator.allocate(graph.allocations[index].size_bytes)
            workspace = (workspaces or {}).get(call, 0)
            if workspace:
                _give_back(allocator, allocator.allocate(workspace), workspace)
            for index in dying.get(call, ()):
                _give_back(allocator, blocks[index], graph.allocations[index].size_bytes)
        for block, size in held:
            _give_back(allocator, block, size)
    return allocator.reserved_bytes, weights_bytes


def live_peak_bytes(graph: OperatorGraph) -> int:
    """Weights, inputs and the most that was alive at once, without any rounding."""
    change = [0] * (len(graph.calls) + 2)
    for one in graph.allocations:
        change[one.born] += one.size_bytes
        if one.dies is not None:
            change[one.dies + 1] -= one.size_bytes
    return sum(graph.weights_bytes) + sum(graph.inputs_bytes) + max(_running(change))


def _running(changes: Iterable[int]) -> Iterable[int]:
    total = 0
    for change in changes:
        total += change
        yield total


def _give_back(allocator: CachingAllocator, block: _Block, size_bytes: int) -> None:
    allocator.release(block, is_large=-(-size_bytes // ROUND_BYTES) * ROUND_BYTES > SMALL_MAX_BYTES)


def _rank(block: _Block) -> tuple[int, int, int]:
    return block.size, block.segment, block.at
