"""Which GPUs can be planned with: those whose node is there, and whose slices do not all stay dead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from fabric.ids import NodeId, PeerId, SliceId
from fabric.messages import GpuRef
from roles.scheduler.fleet import Fleet, SliceRecord

FIRST_WAIT_MS = 30_000.0  # for a node that never came: its host may still be starting
WAIT_MS = 10_000.0  # for one that was there: its agent is started again within a few seconds
REST_MS = 60_000.0  # a GPU whose slices died and stayed dead is tried again after so long


class GpuPresence:
    """Looked at about twice a second.

    A GPU is there while a slice on it is ready, or its node is there and nothing on it has died. With its node there, dead slices have
    `WAIT_MS` and as long as their start may take to come back; then the GPU rests. A node that comes back begins anew.
    `absent`: those that the plan was made without. Once they are there that is news.
    """

    def __init__(self, gpus: Iterable[GpuRef], absent: frozenset[GpuRef] = frozenset()) -> None:
        self._gpus = tuple(gpus)
        self._absent_since_ms: dict[GpuRef, float] = {}
        self._rests_until_ms: dict[GpuRef, float] = {}
        self._agents: dict[NodeId, PeerId] = {}
        """As of the last look."""
        self._came_at_ms: dict[NodeId, float] = {}
        """When the present agent of a node was first seen."""
        self._was_there: set[GpuRef] = set()
        self._was_ready: set[SliceId] = set()
        self._absent = absent

    @property
    def absent(self) -> frozenset[GpuRef]:
        """Those not to be planned with, as of the last look."""
        return self._absent

    def is_absent(self, record: SliceRecord) -> bool:
        """Whether a slice's GPUs are not all there."""
        return any(GpuRef(record.node_id, gpu) in self._absent for gpu in record.spec.gpus)

    def look(self, fleet: Fleet, now_ms: float) -> bool:
        """Take note; True when GPUs went or came."""
        by_gpu: dict[GpuRef, list[SliceRecord]] = defaultdict(list)
        for record in fleet.slices.values():
            for gpu in record.spec.gpus:
                by_gpu[GpuRef(record.node_id, gpu)].append(record)
        self._welcome(fleet, now_ms)
        absent = frozenset(
            gpu for gpu in self._gpus if self._is_absent(gpu, by_gpu.get(gpu, ()), fleet, now_ms)
        )
        self._was_ready &= fleet.slices.keys()
        is_changed = absent != self._absent
        self._absent = absent
        return is_changed

    def _welcome(self, fleet: Fleet, now_ms: float) -> None:
        """What is away on a node with a new agent has only just begun to start."""
        new = {node_id for node_id, agent in fleet.nodes.items() if agent != self._agents.get(node_id)}
        self._came_at_ms.update(dict.fromkeys(new, now_ms))
        for gpu in self._absent:
            if gpu.node_id in new:
                self._rests_until_ms.pop(gpu, None)
                self._absent_since_ms.pop(gpu, None)
        self._agents = dict(fleet.nodes)

    def _is_absent(self, gpu: GpuRef, records: Sequence[SliceRecord], fleet: Fleet, now_ms: float) -> bool:
        ready = {record.spec.slice_id for record in records if record.is_ready}
        self._was_ready |= ready
        if not ready and self._rests_until_ms.get(gpu, 0.0) > now_ms:
            return True
        has_node = gpu.node_id in fleet.nodes
        # Slices that never got ready may fail for their model's sake, and would fail anywhere.
        is_dead = bool(records) and all(record.spec.slice_id in self._was_ready for record in records)
        if ready or (has_node and not is_dead):
            self._was_there.add(gpu)
            self._absent_since_ms.pop(gpu, None)
            return False
        since_ms = self._absent_since_ms.setdefault(gpu, now_ms)
        wait_ms = WAIT_MS if gpu in self._was_there else FIRST_WAIT_MS
        if has_node:
            # An agent that starts over and over gets no new time each time.
            since_ms = max(since_ms, min(self._came_at_ms[gpu.node_id], since_ms + WAIT_MS))
            wait_ms += max(fleet.starts.may_take_ms(record.spec.slice_id) for record in records)
        if now_ms - since_ms < wait_ms:
            return gpu in self._absent
        if has_node:
            self._rests_until_ms[gpu] = now_ms + REST_MS
            del self._absent_since_ms[gpu]
        return True
