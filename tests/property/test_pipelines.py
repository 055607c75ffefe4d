"""Whatever a pipeline's stages do, in whatever order: each request has one fate, and in the end each stage has what is wanted, and no more.

Models come and go while batches are under way, loads fail or end when nobody wants them any more, stages raise or lack memory.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline_stage import PipelineWorker


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 600))
def test_each_request_has_one_fate_and_each_stage_what_is_wanted(seed: int, steps: int) -> None:
    worker = PipelineWorker(random.Random(seed))
    for _ in range(steps):
        worker.step()
    worker.finish()


def test_much_has_happened_by_then() -> None:
    worker = PipelineWorker(random.Random(3))
    for _ in range(6_000):
        worker.step()
    worker.finish()
    counters = worker.core.counters
    assert counters["batches_ran"] > 50
    for name in ("batches_failed", "runs_apart", "batches_expired", "batch_sizes_shrunk", "batches_refused"):
        assert counters[name], name
