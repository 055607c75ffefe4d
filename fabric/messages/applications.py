"""Answers of applications, stage by stage; and the frontend with the process that runs a user's glue."""

from __future__ import annotations

from fabric.messages.base import Listed, Message, Value
from fabric.messages.records import Ledger


class StageLine(Value, frozen=True):
    """What one stage did for a request of an application.

    Of its model `requests` were asked, `lost` of which ended without outputs. `reason`: why the stage lacks something, be it
    that none could be asked; empty: it lacks nothing. `is_on_path`: of the stages of the way
    that ended last; the `total_ms` of these sum to that of the whole. `ledger`: of the request on that way, beside it of the one that
    was answered last; its `preprocess_ms` has the making of its inputs. `is_answer`: its outputs are in the answer.
    """

    stage: str
    requests: int
    lost: int
    is_on_path: bool
    is_answer: bool
    ledger: Ledger
    reason: str = ""


class StageResult(Value, frozen=True):
    """Whose the next `tensors` of an answer are. `place`: which of those after one answer, at each stage of the way there."""

    stage: str
    place: Listed[int]
    tensors: int


class GluePart(Value, frozen=True):
    """Whose the next `tensors` are: an answer of that stage, or, without a name, the request itself."""

    stage: str
    tensors: int


class GlueAsked(Message, frozen=True, tag=90):
    """Frontend -> glue: make the inputs of a stage from these tensors. `after`: the stages before it."""

    stage: str
    after: Listed[str]
    parts: Listed[GluePart]


class GlueMade(Message, frozen=True, tag=91):
    """Glue -> frontend: the inputs of so many requests, each of so many tensors; or, with a `code`, why there are none."""

    items: Listed[int]
    code: str = ""
    reason: str = ""
