"""What a page keeps of the last seconds: batches and requests that ended, within bounds. Pure: moments are handed in."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fabric.ids import ModelId, SliceId
from roles.observability.remembered import BatchSeen, RequestSeen
from roles.runtime.live_figures import LiveModel

BUSY_MS: Final = 5_000.0
"""Over that long a slice's busy part is taken."""
KEPT_MS: Final = 30_000.0
BATCHES_MAX: Final = 8_192
REQUESTS_MAX: Final = 4_096
STAGES: Final = ("preprocess", "held", "waited", "transfer", "queue", "gpu", "return")


class Lately:
    """Of all models and slices."""

    def __init__(self) -> None:
        self._batches: deque[BatchSeen] = deque(maxlen=BATCHES_MAX)
        self._requests: deque[RequestSeen] = deque(maxlen=REQUESTS_MAX)
        self._from_ms: float | None = None
        self._now_ms = 0.0

    def add(
        self, batches: Iterable[BatchSeen], requests: Iterable[RequestSeen], from_ms: float, now_ms: float
    ) -> None:
        """What ended since the last time, oldest first. `from_ms`: nothing that ended after it is missing, up to `now_ms`.

        Where something between this and the last time is missing, what is busy is counted from there on only.
        """
        if self._from_ms is None or from_ms > self._now_ms:
            self._from_ms = from_ms
        self._now_ms = now_ms
        self._batches.extend(batches)
        self._requests.extend(requests)
        while self._batches and self._batches[0].ended_at_ms < now_ms - KEPT_MS:
            self._batches.popleft()
        while self._requests and self._requests[0].ended_at_ms < now_ms - KEPT_MS:
            self._requests.popleft()

    @property
    def batches(self) -> Sequence[BatchSeen]:
        """Of the last half minute, as many as are kept."""
        return list(self._batches)

    def busy(self) -> Mapping[SliceId, Mapping[ModelId, float]]:
        """By slice and model: the part of the last seconds that its batches ran."""
        until_ms = self._now_ms
        begin_ms = max(until_ms - BUSY_MS, until_ms if self._from_ms is None else self._from_ms)
        if len(self._batches) == BATCHES_MAX:
            begin_ms = max(begin_ms, self._batches[0].ended_at_ms)
        span_ms = until_ms - begin_ms
        found: defaultdict[SliceId, defaultdict[ModelId, float]] = defaultdict(lambda: defaultdict(float))
        if span_ms > 0:
            for batch in self._batches:
                ran_ms = batch.overlap_ms(begin_ms, until_ms)
                if ran_ms > 0:
                    found[batch.slice_id][batch.model_id] += ran_ms / span_ms
        return found

    def batch_means(self) -> Mapping[ModelId, float]:
        """By model: how large its batches of the last seconds were."""
        sizes: defaultdict[ModelId, list[int]] = defaultdict(list)
        for batch in self._batches:
            if batch.has_run and batch.ended_at_ms >= self._now_ms - BUSY_MS:
                sizes[batch.model_id].append(batch.entry.batch_size)
        return {model_id: sum(its) / len(its) for model_id, its in sizes.items()}

    def stages_ms(self, live: Mapping[ModelId, LiveModel]) -> Mapping[ModelId, list[float]]:
        """By model: where the time of an answered request goes, in the mean, in the order of `STAGES`.

        All late requests are remembered, and of the good ones a sample: so either kind counts by how many there were of it (`live`).
        The sample has mostly the first request of a batch, which waited longest.
        """
        sums: defaultdict[tuple[ModelId, bool], list[float]] = defaultdict(lambda: [0.0] * len(STAGES))
        counts: defaultdict[tuple[ModelId, bool], int] = defaultdict(int)
        for request in self._requests:
            if request.has_run and request.ended_at_ms >= self._now_ms - 2 * BUSY_MS:
                key = request.record.model_id, request.is_good
                counts[key] += 1
                ledger = request.ledger
                parts = (
                    ledger.preprocess_ms,
                    ledger.held_ms,
                    ledger.waited_ms,
                    ledger.transfer_ms,
                    ledger.queue_ms,
                    ledger.gpu_ms,
                    ledger.return_ms,
                )
                sums[key] = [a + b for a, b in zip(sums[key], parts, strict=True)]
        found: dict[ModelId, list[float]] = {}
        for model_id in {model_id for model_id, _ in counts}:
            own = live.get(model_id)
            weights = {
                True: 1.0 if own is None else own.goodput_rps,
                False: 1.0 if own is None else own.late / own.window_s,
            }
            weights = {kind: weight or 1e-3 for kind, weight in weights.items() if counts[model_id, kind]}
            total = sum(weights.values())
            means = [0.0] * len(STAGES)
            for kind, weight in weights.items():
                part = weight / total / counts[model_id, kind]
                means = [a + part * b for a, b in zip(means, sums[model_id, kind], strict=True)]
            found[model_id] = means
        return found
