"""What a frontend is to do for its applications: beside its own actions, the steps below."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from fabric.errors import RequestError
from fabric.messages import Ledger, ModelInfo, TensorSpec
from roles.frontend.events import FrontendAction, ReplyWithAll
from roles.frontend.requests import Request


class AskTask(Struct, frozen=True):
    """Take on that task. `info`: of its model."""

    request: Request
    info: ModelInfo
    specs: Sequence[TensorSpec]


class CancelTask(Struct, frozen=True):
    """It is of no use any more."""

    request: Request


class AnswerRequest(Struct, frozen=True):
    """The application's request has its one answer; `answer` sends it."""

    request: Request
    ledger: Ledger
    answer: ReplyWithAll


class RefuseRequest(Struct, frozen=True):
    """It has none."""

    request: Request
    error: type[RequestError]
    reason: str
    retry_after_ms: float | None = None


Step = AskTask | CancelTask | AnswerRequest | RefuseRequest | FrontendAction
