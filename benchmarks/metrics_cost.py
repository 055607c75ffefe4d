"""What counting costs a request at the frontend and a batch at the scheduler, and what a page costs the loop.

python -m benchmarks.metrics_cost
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

from fabric.ids import BatchId, ModelId, NodeId, PeerId, SliceId
from fabric.messages import Done, Ledger, ModelInfo, SliceSpec
from policies.batching.base import Dispatch
from roles.frontend.recorder import RequestRecorder
from roles.frontend.requests import Request
from roles.runtime.core import Handle
from roles.runtime.metrics.page import page_of
from roles.scheduler.dispatch.recorder import BatchRecorder
from roles.scheduler.fleet import Flight, SliceRecord

MODELS = 50
REPEATS = 5


def best_us(work: Callable[[], object], number: int) -> float:
    """Of some rounds the fastest, in microseconds a call: what it costs where nobody else computes."""
    return min(timeit.repeat(work, number=number, repeat=REPEATS, timer=time.process_time)) / number * 1e6


def main() -> None:
    """Print a line for each."""
    models = [ModelId(f"model-{number}") for number in range(MODELS)]
    recorder = RequestRecorder()
    recorder.know([ModelInfo(model_id, 25.0) for model_id in models])
    request = Request(PeerId("client/1"), 1, models[0], Handle(1), 1, 1_000, 0.0, 24.0, 25.0, is_ready=True)
    ledger = Ledger(0.0, 0.0, 6.0, 0.5, 0.4, 0.1, 9.0, 0.6, 16.6, 8, SliceId("a/gpu0/0"), "frontrun")
    per_request = best_us(
        lambda: (recorder.asked(models[0], 0.0), recorder.answered(request, ledger, 16.6)), 100_000
    )
    print(f"a request at the frontend   {per_request:8.2f} us")

    per_late = best_us(lambda: recorder.answered(request, ledger, 26.0), 100_000)
    print(f"a late one, remembered      {per_late:8.2f} us")

    batches = BatchRecorder()
    record = SliceRecord(SliceSpec(SliceId("a/gpu0/0"), 0, "emulated", None, ()), NodeId("a"), 0)
    dispatch = Dispatch(SliceId("a/gpu0/0"), models[0], [], 8, 5.0, 6.0, 9.0, 0.0, "frontrun")
    flight = Flight(BatchId(1), record, models[0], (), 8, 9.0, 0.0, ())
    done = Done(BatchId(1), SliceId("a/gpu0/0"), models[0], "ok", 8, (), 0.4, 0.1, 9.0)
    per_batch = best_us(lambda: (batches.dispatched(dispatch), batches.ended(done, flight, 16.0)), 100_000)
    print(f"a batch at the scheduler    {per_batch:8.2f} us")

    snapshot = best_us(lambda: list(recorder.measured({})), 100)
    print(f"a snapshot of {MODELS} models    {snapshot:8.0f} us of the loop")
    measured = list(recorder.measured({}))
    page = best_us(lambda: page_of("frontend-0", measured), 10)
    print(f"its page                    {page:8.0f} us of another thread")


if __name__ == "__main__":
    main()
