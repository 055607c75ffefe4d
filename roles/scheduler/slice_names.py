"""What new slices are called, and in which order slices of a cluster are filled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fabric.ids import SliceId
from fabric.messages import GpuRef, NewSlice, SliceSpec, replaced
from roles.scheduler.fleet import SliceRecord

SLICES_OF_GPU = 4_096  # ids of one GPU that are told apart in a slice's rank


class SliceNames:
    """Ids that no slice of that GPU had before, and ranks. `gpus` in the order of the file."""

    def __init__(self, gpus: Sequence[GpuRef], there: Iterable[SliceRecord]) -> None:
        self._place_of = {gpu: place for place, gpu in enumerate(gpus)}
        self._next: dict[GpuRef, int] = {}
        for record in there:
            gpu = GpuRef(record.node_id, record.spec.gpu)
            record.order = self._rank(gpu, record.spec)
            self._next[gpu] = max(self._next.get(gpu, 0), _number(record.spec) + 1)

    def named(self, start: NewSlice) -> NewSlice:
        """The same under an id of its own."""
        gpu = GpuRef(start.node_id, start.spec.gpu)
        number = self._next.get(gpu, 0)
        self._next[gpu] = number + 1
        slice_id = SliceId(f"{gpu.node_id}/gpu{gpu.gpu}/{number}")
        return replaced(start, spec=replaced(start.spec, slice_id=slice_id))

    def order_of(self, start: NewSlice) -> int:
        """As at the start: those that fewest models share first, then by GPU (ADR 0011).

        It depends on no other slice, so nobody's rank changes with a plan.
        """
        return self._rank(GpuRef(start.node_id, start.spec.gpu), start.spec)

    def _rank(self, gpu: GpuRef, spec: SliceSpec) -> int:
        place = self._place_of.get(gpu, len(self._place_of))
        by_gpu = len(spec.models) * (len(self._place_of) + 1) + place
        return by_gpu * SLICES_OF_GPU + _number(spec) % SLICES_OF_GPU


def _number(spec: SliceSpec) -> int:
    """Which of its GPU's slices it is."""
    return int(spec.slice_id.rpartition("/")[2])
