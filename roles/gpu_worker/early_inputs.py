"""Inputs that came before their RunBatch: kept for a moment, never for many bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from msgspec import Struct

from fabric.ids import BatchId, FrontendId, SliceId
from fabric.messages import Inputs, RunBatch
from roles.runtime.core import Handle

WAIT_MS = 50.0  # RunBatch and Grant leave together: 50 ms apart, one of them is lost (design section 4)
BYTES_MAX = 64 * 2**20
PARTS_MAX = 4_096  # inputs may be small, or of no request at all


_Key: TypeAlias = tuple[SliceId, BatchId, int, FrontendId]


class EarlyPart(Struct, frozen=True):
    """Inputs without a RunBatch."""

    inputs: Inputs
    payload: Handle
    size_bytes: int
    until_ms: float


class EarlyInputs:
    """A byte-bounded pool; every part waits equally long, so the first in is the first out."""

    def __init__(self, wait_ms: float = WAIT_MS, bytes_max: int = BYTES_MAX) -> None:
        self._wait_ms = wait_ms
        self._bytes_max = bytes_max
        self._bytes = 0
        self._parts: OrderedDict[_Key, EarlyPart] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parts)

    def put(self, inputs: Inputs, payload: Handle, size_bytes: int, now_ms: float) -> bool:
        """Keep a part; False: there is no room for it, or it is here already."""
        if self.has(inputs) or self._bytes + size_bytes > self._bytes_max or len(self) >= PARTS_MAX:
            return False
        self._bytes += size_bytes
        self._parts[_key(inputs)] = EarlyPart(inputs, payload, size_bytes, now_ms + self._wait_ms)
        return True

    def has(self, inputs: Inputs) -> bool:
        """Whether that part is here already."""
        return _key(inputs) in self._parts

    def take(self, run: RunBatch) -> list[EarlyPart]:
        """What has come for a batch."""
        keys = (
            (run.slice_id, run.batch_id, number, part.frontend_id) for number, part in enumerate(run.parts)
        )
        return [self._remove(key) for key in keys if key in self._parts]

    def take_expired(self, now_ms: float) -> list[EarlyPart]:
        """What has waited long enough; at infinity all."""
        expired = []
        while self._parts:
            key, part = next(iter(self._parts.items()))
            if part.until_ms > now_ms:
                break
            expired.append(self._remove(key))
        return expired

    @property
    def senders(self) -> set[FrontendId]:
        """Whose they are."""
        return {part.inputs.frontend_id for part in self._parts.values()}

    @property
    def wake_at_ms(self) -> float | None:
        """When the next part expires."""
        return next(iter(self._parts.values())).until_ms if self._parts else None

    def _remove(self, key: _Key) -> EarlyPart:
        part = self._parts.pop(key)
        self._bytes -= part.size_bytes
        return part


def _key(inputs: Inputs) -> _Key:
    """Whoever writes another frontend's name writes its place, not that of the frontend whose part it is."""
    return inputs.slice_id, inputs.batch_id, inputs.part, inputs.frontend_id
