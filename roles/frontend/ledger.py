"""The ledger of an answered request: where its time went."""

from __future__ import annotations

from fabric.messages import Ledger, Outputs
from roles.frontend.requests import Request


def settle(request: Request, outputs: Outputs, now_ms: float) -> Ledger:
    """Where the request's time went.

    No moment counts twice: while a picture is decoded, that is what it is waiting for. From then on, `held_ms` is
    announced -> granted less what was forced; what an earlier grant that came to nothing had cost counts as forced.
    `return_ms` is the rest after the grant that the worker does not account for.
    """
    place = request.place
    ready_at_ms = request.asked_at_ms + request.preprocess_ms
    queued_at_ms = max(request.announced_at_ms, ready_at_ms)
    granted_at_ms = max(place.granted_at_ms if place is not None else 0.0, queued_at_ms)
    waited_ms = min(place.waited_ms if place is not None else 0.0, granted_at_ms - queued_at_ms)
    first_at_ms = request.first_announced_at_ms
    lost_ms = (
        max(0.0, request.announced_at_ms - max(first_at_ms, ready_at_ms)) if first_at_ms is not None else 0.0
    )
    on_worker_ms = outputs.transfer_ms + outputs.queue_ms + outputs.gpu_ms
    return Ledger(
        preprocess_ms=request.preprocess_ms,
        held_ms=granted_at_ms - queued_at_ms - waited_ms,
        waited_ms=waited_ms + lost_ms,
        transfer_ms=outputs.transfer_ms,
        queue_ms=outputs.queue_ms,
        gpu_ms=outputs.gpu_ms,
        return_ms=max(0.0, now_ms - granted_at_ms - on_worker_ms),
        total_ms=now_ms - request.asked_at_ms,
        batch_size=outputs.batch_size,
        slice_id=outputs.slice_id,
        reason=place.reason if place is not None else "",
        request_id=request.request_id,
    )
