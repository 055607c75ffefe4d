"""What a frontend is to do for its applications: beside its own actions, the steps below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fabric.errors import RequestError
from fabric.messages import Ledger, ModelInfo, TensorSpec
from roles.frontend.events import FrontendAction, ReplyWithAll
from roles.frontend.requests import Request


@dataclass(slots=True, frozen=True)
class AskTask:
    """Take on that task. `info`: of its model."""

    request: Request
    info: ModelInfo
    specs: Sequence[TensorSpec]


@dataclass(slots=True, frozen=True)
class CancelTask:
    """It is of no use any more."""

    request: Request


@dataclass(slots=True, frozen=True)
class AnswerRequest:
    """The application's request has its one answer; `answer` sends it."""

    request: Request
    ledger: Ledger
    answer: ReplyWithAll


@dataclass(slots=True, frozen=True)
class RefuseRequest:
    """It has none."""

    request: Request
    error: type[RequestError]
    reason: str
    retry_after_ms: float | None = None


Step = AskTask | CancelTask | AnswerRequest | RefuseRequest | FrontendAction
