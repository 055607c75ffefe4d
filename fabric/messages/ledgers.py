"""Where a request's time went."""

from __future__ import annotations

import msgspec

from fabric.ids import SliceId
from fabric.messages.base import Value


class Ledger(Value, frozen=True):
    """Where a request's time went, in ms. `held_ms` was chosen by the scheduler, `waited_ms` was forced on it."""

    network_ms: float = 0.0  # client -> frontend and back; filled by the client
    preprocess_ms: float = 0.0
    held_ms: float = 0.0
    waited_ms: float = 0.0
    transfer_ms: float = 0.0
    queue_ms: float = 0.0  # inputs complete on the device -> start
    gpu_ms: float = 0.0
    return_ms: float = 0.0
    total_ms: float = 0.0  # frontend receipt -> answer; the client replaces it by send -> receipt
    batch_size: int = 0
    slice_id: SliceId = SliceId("")
    reason: str = ""  # why the batch left when it did: full, frontrun, slice_free, ...
    request_id: str = ""  # by which `tenuto explain` knows it

    def seen_by_client(self, total_ms: float) -> Ledger:
        """The frontend's ledger for one who waited `total_ms` in all: the difference was the network."""
        return msgspec.structs.replace(self, network_ms=max(0.0, total_ms - self.total_ms), total_ms=total_ms)
