"""What this gateway has seen of each model, as Triton's statistics extension tells it. Durations are ns there, ms here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fabric.messages import Ledger
from roles.gateway.inference import VERSION

MODELS_MAX: Final = 10_000
"""Counted by name; requests name what they like, so only models that were served get an entry."""
SHOWN_MAX: Final = 1_024
_NS_PER_MS: Final = 1e6


@dataclass(slots=True)
class Duration:
    """How often, and how long in all."""

    count: int = 0
    ms: float = 0.0

    def note(self, ms: float) -> None:
        """Once more."""
        self.count += 1
        self.ms += ms

    def as_plain(self) -> dict[str, int]:
        """As in the protocol."""
        return {"count": self.count, "ns": max(0, round(self.ms * _NS_PER_MS))}


@dataclass(slots=True)
class ModelStatistics:
    """Of one model. `success` and `fail` count inferences; `rows` those that had outputs, and stages the rows of each.

    `last_at_ms`: the time of day of the last inference.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    rows: int = 0
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    batches: dict[int, Duration] = field(default_factory=dict)
    """By size: its requests, each with the run time of its batch."""
    last_at_ms: float = 0.0

    @property
    def executions(self) -> float:
        """Batches: each request of a batch of b is 1/b of it, and the others may have come by other gateways."""
        return sum(seen.count / size for size, seen in self.batches.items())


class Statistics:
    """By model."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """By code, of all models."""
        self._models: dict[str, ModelStatistics] = {}

    def note_success(self, model: str, ledgers: Sequence[Ledger], total_ms: float, now_ms: float) -> None:
        """One inference was answered. `ledgers`: of its rows."""
        seen = self._of(model)
        if seen is None:
            return
        seen.success.note(total_ms)
        seen.rows += len(ledgers)
        seen.last_at_ms = now_ms
        for ledger in ledgers:
            seen.queue.note(ledger.held_ms + ledger.waited_ms + ledger.queue_ms)
            seen.compute_input.note(ledger.preprocess_ms + ledger.transfer_ms)
            seen.compute_infer.note(ledger.gpu_ms)
            seen.compute_output.note(ledger.return_ms)
            if ledger.batch_size > 0:
                seen.batches.setdefault(ledger.batch_size, Duration()).note(ledger.gpu_ms)

    def note_failure(self, model: str, code: str, total_ms: float, *, is_known: bool) -> None:
        """One was not."""
        self.failures[code] += 1
        seen = self._of(model) if is_known else None
        if seen is not None:
            seen.fail.note(total_ms)

    @property
    def answered(self) -> int:
        """Inferences with outputs, of all models."""
        return sum(seen.success.count for seen in self._models.values())

    @property
    def by_model(self) -> list[tuple[str, ModelStatistics]]:
        """Of each model, by name; no more than a page of metrics may have."""
        return sorted(self._models.items())[:SHOWN_MAX]

    def as_plain(self, model: str) -> dict[str, Any]:
        """`GET /v2/models/M/stats`: one element of its list."""
        seen = self._models.get(model, ModelStatistics())
        executed = round(seen.executions)
        stages = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        return {
            "name": model,
            "version": VERSION,
            "last_inference": round(seen.last_at_ms),
            "inference_count": seen.rows,
            "execution_count": max(executed, 1) if seen.rows else 0,
            "inference_stats": {stage: getattr(seen, stage).as_plain() for stage in stages},
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_infer": Duration(-(-batch.count // size), batch.ms / size).as_plain(),
                }
                for size, batch in sorted(seen.batches.items())
            ],
        }

    def _of(self, model: str) -> ModelStatistics | None:
        seen = self._models.get(model)
        if seen is None and len(self._models) < MODELS_MAX:
            seen = self._models[model] = ModelStatistics()
        return seen
