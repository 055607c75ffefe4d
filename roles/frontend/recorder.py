"""What became of a frontend's requests, counted by model.

The core tells it of each answer. Nothing here decides, and nothing is kept of a client. A page of metrics is made of the
counts when somebody asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from fabric.ids import ModelId
from fabric.messages import Ledger, ModelInfo
from roles.frontend.requests import Request
from roles.runtime.metrics import catalog
from roles.runtime.metrics.histogram import SHORT_FRACTIONS, SLO_FRACTIONS, of_slo
from roles.runtime.metrics.snapshot import MS, Measured, buckets_of

MODELS_MAX: Final = 1_024
"""Models that are counted; a configuration with more has figures of the first ones."""
ABANDONED: Final = "abandoned"
GOOD, LATE = "good", "late"
STAGES: Final = ("preprocess", "held", "waited", "transfer", "queue", "gpu", "return")


class ModelCounts:
    """Of one model at one SLO, since the frontend heard of it."""

    __slots__ = ("held", "latency", "outcomes", "slo_ms", "stages_ms", "waited")

    def __init__(self, slo_ms: float) -> None:
        self.slo_ms = slo_ms
        self.latency = of_slo(slo_ms, SLO_FRACTIONS)
        self.held = of_slo(slo_ms, SHORT_FRACTIONS)
        self.waited = of_slo(slo_ms, SHORT_FRACTIONS)
        self.stages_ms = [0.0] * len(STAGES)
        self.outcomes: Counter[str] = Counter({GOOD: 0, LATE: 0})


class RequestRecorder:
    """One frontend's; its core is the only one that tells it anything."""

    def __init__(self) -> None:
        self._models: dict[ModelId, ModelCounts] = {}

    def know(self, models: Iterable[ModelInfo]) -> None:
        """These are served. Another SLO has other buckets, so its counts begin anew."""
        former, self._models = self._models, {}
        for model in models:
            if len(self._models) == MODELS_MAX:
                break
            counts = former.get(model.model_id)
            if counts is None or counts.slo_ms != model.slo_ms:
                counts = ModelCounts(model.slo_ms)
            self._models[model.model_id] = counts

    def answered(self, request: Request, ledger: Ledger, now_ms: float) -> None:
        """A request has its outputs."""
        counts = self._models.get(request.model_id)
        if counts is None:
            return
        counts.latency.note(now_ms - request.asked_at_ms)
        counts.held.note(ledger.held_ms)
        counts.waited.note(ledger.waited_ms)
        stages_ms = counts.stages_ms
        stages_ms[0] += ledger.preprocess_ms
        stages_ms[1] += ledger.held_ms
        stages_ms[2] += ledger.waited_ms
        stages_ms[3] += ledger.transfer_ms
        stages_ms[4] += ledger.queue_ms
        stages_ms[5] += ledger.gpu_ms
        stages_ms[6] += ledger.return_ms
        counts.outcomes[GOOD if now_ms <= request.due_at_ms else LATE] += 1

    def refused(self, request: Request, code: str, reason: str, now_ms: float) -> None:
        """A request has ended without outputs."""
        del reason, now_ms
        self.turned_away(request.model_id, code)

    def turned_away(self, model_id: ModelId, code: str) -> None:
        """A request was not taken on."""
        counts = self._models.get(model_id)
        if counts is not None:
            counts.outcomes[code] += 1

    def measured(self, margins_ms: Mapping[ModelId, float]) -> Iterator[Measured]:
        """The time series of all models."""
        for model_id, counts in self._models.items():
            model = (str(model_id),)
            for outcome, count in counts.outcomes.items():
                yield Measured(catalog.REQUESTS, (model_id, outcome), count)
            yield Measured(catalog.LATENCY, model, buckets_of(counts.latency))
            yield Measured(catalog.HELD, model, buckets_of(counts.held))
            yield Measured(catalog.WAITED, model, buckets_of(counts.waited))
            for stage, total_ms in zip(STAGES, counts.stages_ms, strict=True):
                yield Measured(catalog.STAGES, (model_id, stage), total_ms * MS)
            if model_id in margins_ms:
                yield Measured(catalog.MARGIN, model, margins_ms[model_id] * MS)
