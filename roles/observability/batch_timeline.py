"""The last seconds of a running cluster as a picture: Chrome's trace events, which Perfetto opens.

A row for each slice with its batches, as `tenuto simulate --trace` writes them, and a row for each model with the requests
that were remembered: all that were late or refused, and some of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from roles.observability.remembered import BatchSeen, RequestSeen

_REQUESTS_PID = 1


def write_timeline(path: Path, batches: Sequence[BatchSeen], requests: Sequence[RequestSeen]) -> int:
    """Write what was seen, moments from the first one on; the number of events."""
    events = list(_events(batches, requests))
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, events)))
        file.write("\n]}\n")
    return len(events)


def _events(batches: Sequence[BatchSeen], requests: Sequence[RequestSeen]) -> Iterator[dict[str, object]]:
    starts = [one.started_at_ms for one in batches] + [one.asked_at_ms for one in requests]
    zero_ms = min(starts, default=0.0)
    gpus = {gpu: number for number, gpu in enumerate(sorted({one.gpu for one in batches}), _REQUESTS_PID + 1)}
    rows = {slice_id: row for row, slice_id in enumerate(sorted({one.slice_id for one in batches}), 1)}
    for gpu, pid in gpus.items():
        yield _name("process_name", pid, 0, f"GPU {gpu}")
    for slice_id, row in rows.items():
        yield _name("thread_name", gpus[slice_id.rpartition("/")[0]], row, slice_id)
    for batch in sorted(batches, key=lambda one: one.started_at_ms):
        entry = batch.entry
        if batch.ended_at_ms > batch.started_at_ms:
            yield {
                "ph": "X",
                "name": f"{entry.model_id} x{entry.batch_size}",
                "cat": entry.model_id,
                "pid": gpus[batch.gpu],
                "tid": rows[batch.slice_id],
                "ts": round((batch.started_at_ms - zero_ms) * 1000, 3),
                "dur": round(entry.exec_ms * 1000, 3),
                "args": {
                    "model": entry.model_id,
                    "batch_size": entry.batch_size,
                    "slice": entry.slice_id,
                    "status": entry.status,
                    "reason": entry.reason,
                    "planned_ms": round(entry.planned_ms, 3),
                    "sent_before_ms": round(batch.started_at_ms - batch.sent_at_ms, 3),
                },
            }
    models = {model: row for row, model in enumerate(sorted({one.record.model_id for one in requests}), 1)}
    if models:
        yield _name("process_name", _REQUESTS_PID, 0, "requests")
    for model, row in models.items():
        yield _name("thread_name", _REQUESTS_PID, row, model)
    for number, request in enumerate(sorted(requests, key=lambda one: one.asked_at_ms)):
        record = request.record
        # Requests of one model overlap: nestable asynchronous events, each with a number of its own.
        common = {
            "cat": record.model_id,
            "name": f"{record.model_id} {record.outcome}",  # viewers make a row of each name
            "id": number,
            "pid": _REQUESTS_PID,
            "tid": models[record.model_id],
        }
        args = {"request_id": record.request_id, "reason": record.reason, "slice": record.ledger.slice_id}
        yield {"ph": "b", **common, "ts": round((request.asked_at_ms - zero_ms) * 1000, 3), "args": args}
        yield {"ph": "e", **common, "ts": round((request.ended_at_ms - zero_ms) * 1000, 3)}


def _name(kind: str, pid: int, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": row, "args": {"name": name}}
