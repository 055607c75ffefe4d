"""What new slices are called, and in which order slices of a cluster are filled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from fabric.ids import NodeId, SliceId
from fabric.messages import GpuRef, NewSlice, SliceSpec

SLICES_OF_GPU = 4_096  # ids of one GPU that are told apart in a slice's rank
_DIGITS_READ = 9  # of an id that a node tells of; a longer one is only not given again


class SliceNames:
    """Ids that no slice of that GPU had before, and ranks. `gpus` in the order of the file, `there` at the start."""

    def __init__(self, gpus: Sequence[GpuRef], there: Iterable[tuple[NodeId, SliceSpec]]) -> None:
        self._place_of = {gpu: place for place, gpu in enumerate(gpus)}
        self._next: dict[GpuRef, int] = {}
        self._read: dict[GpuRef, AbstractSet[SliceId]] = {}  # what its node has, as it told last
        for node_id, spec in there:
            gpu = GpuRef(node_id, spec.gpu)
            self._next[gpu] = max(self._next.get(gpu, 0), _number(spec) + 1)

    def named(self, start: NewSlice, taken: AbstractSet[SliceId] = frozenset()) -> NewSlice:
        """The same under an id of its own. `taken`: what its node has, also what a former scheduler had just begun there.

        That is read through once, not for each start: it is another set where the node has told anew.
        """
        gpu = GpuRef(start.node_id, start.spec.gpu)
        named = f"{gpu.name}/"
        number = self._next.get(gpu, 0)
        if self._read.get(gpu) is not taken:
            self._read[gpu] = taken
            tails = (slice_id.removeprefix(named) for slice_id in taken if slice_id.startswith(named))
            numbers = (int(tail) + 1 for tail in tails if tail.isdecimal() and len(tail) <= _DIGITS_READ)
            number = max([number, *numbers])
        while SliceId(f"{named}{number}") in taken:
            number += 1
        self._next[gpu] = number + 1
        return replace(start, spec=replace(start.spec, slice_id=SliceId(f"{named}{number}")))

    def order_of(self, node_id: NodeId, spec: SliceSpec) -> int:
        """Slices that fewest models share first, then by GPU (ADR 0011).

        It depends on no other slice, so nobody's rank changes with a plan.
        """
        place = self._place_of.get(GpuRef(node_id, spec.gpu), len(self._place_of))
        by_gpu = len(spec.models) * (len(self._place_of) + 1) + place
        return by_gpu * SLICES_OF_GPU + _number(spec) % SLICES_OF_GPU


def _number(spec: SliceSpec) -> int:
    """Which of its GPU's slices it is."""
    return int(spec.slice_id.rpartition("/")[2])
