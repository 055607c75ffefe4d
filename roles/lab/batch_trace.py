"""Batches as a picture: Chrome's trace event format, which chrome://tracing and Perfetto open.

One row per slice, grouped by GPU, one bar per batch from its start to its end, so that the staggered pattern
of deferred batches can be seen. Every line of the file is one event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fabric.ids import SliceId
from roles.workload.outcomes import BatchRecord


def write_trace(path: Path, batches: Iterable[BatchRecord], slices: Sequence[SliceId]) -> None:
    """Write every batch, in the order given; rows in the order of `slices`."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(_events(batches, slices)):
            file.write(",\n" if number else "\n")
            file.write(json.dumps(event))
        file.write("\n]}\n")


def _events(batches: Iterable[BatchRecord], slices: Sequence[SliceId]) -> Iterator[dict[str, object]]:
    rows = {slice_id: row for row, slice_id in enumerate(slices)}
    named: set[SliceId] = set()
    for batch in batches:
        place = {"pid": batch.gpu, "tid": rows[batch.slice_id]}
        if batch.slice_id not in named:
            named.add(batch.slice_id)
            yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"GPU {batch.gpu}"}}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": batch.slice_id}}
        yield {
            "ph": "X",
            "name": f"{batch.model_id} x{batch.batch_size}"
            if batch.batch_size
            else f"{batch.model_id} cut off",
            "cat": batch.model_id,
            **place,
            "ts": round(batch.started_at_ms * 1000, 3),
            "dur": round((batch.finished_at_ms - batch.started_at_ms) * 1000, 3),
            "args": {
                "model": batch.model_id,
                "batch_size": batch.batch_size,
                "slice": batch.slice_id,
                "sent_at_ms": round(batch.sent_at_ms, 6),
                "started_at_ms": round(batch.started_at_ms, 6),
                "finished_at_ms": round(batch.finished_at_ms, 6),
            },
        }
