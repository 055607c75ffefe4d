"""What a frontend has learned of each model: how long its pictures take to decode, and its answers to come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fabric.ids import ModelId
from roles.frontend.preprocess_times import PreprocessTimes
from roles.frontend.requests import Request
from roles.frontend.return_margin import ReturnMargin


class Estimates:
    """By model. `make_margin`: how it learns what to keep back of a model's budgets."""

    def __init__(self, make_margin: Callable[[], ReturnMargin]) -> None:
        self._make_margin = make_margin
        self._returns: dict[ModelId, ReturnMargin] = {}
        self._preprocess_times: dict[ModelId, PreprocessTimes] = {}

    @property
    def reserve_ms_max(self) -> float:
        """The largest reserve of a model."""
        return max((path.reserve_ms for path in self._returns.values()), default=0.0)

    @property
    def reserves_ms(self) -> Mapping[ModelId, float]:
        """What is kept back of each model's budgets for the way back."""
        return {model_id: path.reserve_ms for model_id, path in self._returns.items()}

    def return_of(self, model_id: ModelId) -> ReturnMargin:
        """The way back of its answers."""
        path = self._returns.get(model_id)
        if path is None:
            path = self._returns[model_id] = self._make_margin()
        return path

    def note_end(self, request: Request, now_ms: float) -> None:
        """Granted, and its end has come: in time, or late."""
        self.return_of(request.model_id).note_answer(
            now_ms - request.due_at_ms, request.due_at_ms - request.asked_at_ms
        )

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
