"""What a frontend has learned of each model: how long its pictures take to decode, and its answers to come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fabric.ids import ModelId
from fabric.messages import Outputs
from roles.frontend.preprocess_times import PreprocessTimes
from roles.frontend.requests import BatchSlot, Request
from roles.frontend.return_margin import ReturnMargin

OVERDUE_MAX: Final = 4096
"""Of as many expired requests the outputs may still tell how late they were: two seconds of 2,000 a second."""


class Estimates:
    """By model. `make_margin`: how it learns what to keep back of a model's budgets."""

    def __init__(self, make_margin: Callable[[], ReturnMargin]) -> None:
        self._make_margin = make_margin
        self._returns: dict[ModelId, ReturnMargin] = {}
        self._preprocess_times: dict[ModelId, PreprocessTimes] = {}
        self._overdue: dict[tuple[ModelId, int], tuple[BatchSlot, float, float]] = {}

    @property
    def reserve_ms_max(self) -> float:
        """The largest reserve of a model."""
        return max((path.reserve_ms for path in self._returns.values()), default=0.0)

    @property
    def reserves_ms(self) -> Mapping[ModelId, float]:
        """What is kept back of each model's budgets for the way back."""
        return {model_id: path.reserve_ms for model_id, path in self._returns.items()}

    def return_of(self, model_id: ModelId) -> ReturnMargin:
        """The way back of its answers. It is kept until the model is removed: what ends after that is noted nowhere."""
        path = self._returns.get(model_id)
        if path is None:
            path = self._returns[model_id] = self._make_margin()
        return path

    def note_end(self, request: Request, now_ms: float) -> None:
        """Granted, and its answer leaves: in time, or late."""
        path = self._returns.get(request.model_id)
        if path is not None:
            path.note_answer(now_ms - request.due_at_ms, request.due_at_ms - request.asked_at_ms)

    def note_batch(self, model_id: ModelId, return_ms: float) -> None:
        """Outputs of a batch are there, and were so long on their way."""
        path = self._returns.get(model_id)
        if path is not None:
            path.note_batch(return_ms)

    def note_dropped(self, model_id: ModelId, count: int) -> None:
        """Its scheduler gave up so many requests, for want of time."""
        path = self._returns.get(model_id)
        if path is not None:
            path.note_dropped(count)

    def note_expired(self, request: Request) -> None:
        """Granted, and refused at its deadline: how late its outputs are is not known before they come, if they do."""
        assert request.place is not None, "it is granted"
        if len(self._overdue) >= OVERDUE_MAX:
            del self._overdue[next(iter(self._overdue))]
        budget_ms = request.due_at_ms - request.asked_at_ms
        self._overdue[request.model_id, request.seq] = request.place, request.due_at_ms, budget_ms

    def note_outputs(self, outputs: Outputs, now_ms: float) -> None:
        """There they are, of those that had expired too."""
        if not self._overdue:
            return
        path = self._returns.get(outputs.model_id)
        for seq in outputs.seqs:
            overdue = self._overdue.get((outputs.model_id, seq))
            if overdue is not None and overdue[0].is_of(outputs):
                del self._overdue[outputs.model_id, seq]
                if path is not None:  # else the model was removed
                    path.note_answer(now_ms - overdue[1], overdue[2])

    def note_preprocessed(self, request: Request) -> None:
        """Its picture is decoded."""
        self._preprocessing(request.model_id).note(request.preprocess_ms)

    def ready_in_ms(self, request: Request, now_ms: float) -> float:
        """How long its picture may still take: the model's p95."""
        return max(0.0, self._preprocessing(request.model_id).p95_ms - (now_ms - request.asked_at_ms))

    def forget(self, model_id: ModelId) -> None:
        """It was removed."""
        self._preprocess_times.pop(model_id, None)
        self._returns.pop(model_id, None)

    def _preprocessing(self, model_id: ModelId) -> PreprocessTimes:
        return self._preprocess_times.setdefault(model_id, PreprocessTimes())
