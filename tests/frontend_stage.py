"""A frontend's core that its scheduler knows, and what it told others: shared by the tests of that core."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.messages import ModelInfo, Refusal
from roles.frontend.core import FrontendCore
from roles.frontend.events import FrontendAction, FrontendSettings, Reply, Tell
from roles.runtime.core import Tick
from tests.builders import directory, frontend_settings, model_info, of_type


def linked_core(*models: ModelInfo, settings: FrontendSettings | None = None) -> FrontendCore:
    core = FrontendCore(settings or frontend_settings())
    core.handle(Tick(), 0.0)
    core.handle(directory(models or (model_info(),)), 0.0)
    return core


def told(actions: Sequence[FrontendAction]) -> list[object]:
    return [action.message for action in of_type(Tell, actions)]


def refusals(actions: Sequence[FrontendAction]) -> list[tuple[int, str]]:
    replies = [reply.message for reply in of_type(Reply, actions)]
    return [(message.request_no, message.code) for message in of_type(Refusal, replies)]
