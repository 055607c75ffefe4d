"""The ledger as HTTP says it: W3C Server Timing, which browsers and tracers show. gRPC's trailing metadata has it too."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.messages import Ledger


def server_timing(ledgers: Sequence[Ledger]) -> str:
    """Of one request; of several rows that of the one that took longest. Durations are ms, as the standard says."""
    one = ledgers[0] if len(ledgers) == 1 else max(ledgers, key=lambda ledger: ledger.total_ms)
    return (
        f"total;dur={one.total_ms:.3f}, network;dur={one.network_ms:.3f}, preprocess;dur={one.preprocess_ms:.3f}, "
        f"held;dur={one.held_ms:.3f}, waited;dur={one.waited_ms:.3f}, transfer;dur={one.transfer_ms:.3f}, "
        f"queue;dur={one.queue_ms:.3f}, gpu;dur={one.gpu_ms:.3f}, return;dur={one.return_ms:.3f}, "
        f'batch;desc="{one.batch_size} on {one.slice_id}, {one.reason}"'
    )
