"""Whether a request is taken on; if not, why, said so that its author can mend it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence

from msgspec import Struct

from fabric.errors import (
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    NoReplica,
    Overloaded,
    RequestError,
    TooLarge,
    WorkerLost,
    nothing_ready,
)
from fabric.ids import ModelId
from fabric.learned_margin import LearnedWay
from fabric.messages import ImagePreprocess, ModelInfo, TensorInfo, TensorSpec
from roles.frontend.events import Asked, FrontendSettings
from roles.frontend.requests import Pending
from roles.frontend.shards import Shards

# A client may have pending so many times what is free. One alone gets 8/9 of everything, and whoever comes next always
# finds room, however long its requests wait for a worker that is stuck (a dynamic threshold: Choudhury and Hahne 1998).
_TIMES_FREE = 8
# Of its budget a request may have waited to be read, at most. A frontend without enough of its host's cores gets further behind with
# every turn, until all that it reads is too late; what it refuses costs it a third of what it serves, so it catches up, and serves the next ones.
_UNREAD_SHARE = 0.3
_SUGGESTED_FROM = 64  # difflib takes tens of microseconds a name; a misspelt name should not stall the loop
_SHOWN_MAX = 100  # characters of a client's own words in an answer


class NotAdmitted(Struct, frozen=True):
    """The final answer of a request that is not taken on."""

    error: type[RequestError]
    reason: str
    retry_after_ms: float | None = None


def admit(
    asked: Asked,
    shards: Shards,
    pending: Pending,
    settings: FrontendSettings,
    now_ms: float,
    application: ModelInfo | NotAdmitted | None = None,
) -> ModelInfo | NotAdmitted:
    """What the request is for, or why it is not taken on. `application`: the one of that name, where it is of one."""
    message = asked.message
    if pending.numbered(asked.peer, message.request_no) is not None:
        return NotAdmitted(InvalidInput, f"request_no {message.request_no} of this client is still pending")
    if asked.size_bytes > settings.request_bytes_max:
        takes = f"this frontend takes at most {settings.request_bytes_max:,} a request"
        return NotAdmitted(TooLarge, f"{asked.size_bytes:,} bytes of inputs; {takes}")
    if shards.is_empty:
        return NotAdmitted(NoReplica, "this frontend has not reached a scheduler yet")
    if isinstance(application, NotAdmitted):
        return application
    info = application or shards.asked(message.model_id)
    if info is None:
        if shards.unheard:
            return NotAdmitted(NoReplica, unheard_reason(shards.unheard))
        applications = (ModelId(one.plan.name) for one in settings.applications)
        known = {*shards.models, *shards.heads, *applications}
        return NotAdmitted(ModelNotFound, _no_such_model(message.model_id, known))
    if info.heads:
        heads = _listed([head.model_id for head in info.heads])
        return NotAdmitted(InvalidInput, f"model {info.model_id!r} is asked by its heads: {heads}")
    if message.may_have_run and not info.is_idempotent:
        return NotAdmitted(
            WorkerLost,
            f"another frontend was lost with it, and model {info.model_id!r} must not run it twice",
        )
    wrong = _wrong_budget(message.budget_ms) or wrong_inputs(info, asked.specs)
    if wrong is not None:
        return NotAdmitted(InvalidInput, wrong)
    if info.replicas == 0 and application is None:  # whose stages were looked at
        coming_in_ms = shards.coming_in_ms(info.head_of or info.model_id, now_ms)
        # The scheduler knows best, and decides when it is announced.
        if coming_in_ms is None or budget_left_ms(asked, info) <= coming_in_ms:
            return NotAdmitted(NoReplica, nothing_ready(info.model_id), coming_in_ms or None)
    if asked.unread_ms > _UNREAD_SHARE * budget_of(asked, info):
        behind = f"this frontend has been {asked.unread_ms:.0f} ms behind with what its clients ask: its host is short of CPU"
        return NotAdmitted(Overloaded, behind, info.slo_ms)
    no_room = _no_room(asked, info, pending, settings)
    if no_room is not None:
        # Each of those that are pending now has its answer by then, unless it has a budget of its own.
        return NotAdmitted(Overloaded, no_room, info.slo_ms)
    if budget_left_ms(asked, info) <= 0:
        spent_ms = asked.late_ms + message.spent_ms
        return NotAdmitted(DeadlineExceeded, f"its budget was spent on the way here, {spent_ms:.1f} ms")
    return info


def is_here_already(asked: Asked, pending: Pending) -> bool:
    """Whether it is a request that is pending here, sent again: its client lost us, and then whom it sent it to meanwhile."""
    if not asked.message.may_have_run:
        return False
    same = pending.numbered(asked.peer, asked.message.request_no)
    return same is not None and same.asked_name == asked.message.model_id


def unheard_reason(shards: Sequence[int]) -> str:
    """Why a model that these shards may have is served by none."""
    return f"no shard that answers has it, and shard {', '.join(map(str, shards))} does not answer"


def budget_left_ms(asked: Asked, info: ModelInfo) -> float:
    """What is left of the budget asked for, or of the SLO."""
    return budget_of(asked, info) - asked.late_ms - asked.message.spent_ms


def budget_of(asked: Asked, info: ModelInfo) -> float:
    """The budget asked for, or the SLO."""
    asked_ms = asked.message.budget_ms
    return info.slo_ms if asked_ms is None else asked_ms


def way_kept_ms(asked: Asked, info: ModelInfo) -> float:
    """What goes by between client and us, of the budget asked for: the client must have the answer by its end.

    What a client says of its way is believed up to the part that anybody keeps back: its own host may be the slow part.
    """
    return min(asked.message.way_ms, LearnedWay.SHARE_MAX * budget_of(asked, info))


def bytes_kept(size_bytes: int, image: ImagePreprocess | None) -> int:
    """What a request's payload takes at most: a small picture's file becomes many pixels."""
    return size_bytes if image is None else max(size_bytes, 3 * image.crop * image.crop * 4)


def wrong_inputs(info: ModelInfo, specs: Sequence[TensorSpec]) -> str | None:
    """Why the model cannot take these tensors, in words; None: it can. No declared inputs: anything goes."""
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        return f"model {info.model_id!r} got the same input twice: {_listed(names)}"
    if not info.inputs:
        return None
    wanted = {tensor.name: tensor for tensor in info.inputs}
    if set(names) != set(wanted):
        return f"model {info.model_id!r} takes the inputs {_listed(list(wanted))}, got {_listed(names)}"
    image = encoded_image(info, specs)
    for spec in specs:
        if image is not None and spec.name == image.input_name:
            continue
        wrong = _wrong_tensor(wanted[spec.name], spec)
        if wrong is not None:
            return f"input {spec.name!r} of model {info.model_id!r} {wrong}"
    return None


def encoded_image(info: ModelInfo, specs: Sequence[TensorSpec]) -> ImagePreprocess | None:
    """How to decode what came: one input is a picture's file, as 1-D uint8, where the model takes pixels."""
    if info.image is None:
        return None
    for spec in specs:
        if spec.name == info.image.input_name and spec.dtype == "uint8" and len(spec.shape) == 1:
            takes_bytes = any(
                tensor.name == spec.name and _wrong_tensor(tensor, spec) is None for tensor in info.inputs
            )
            return None if takes_bytes else info.image
    return None


def _no_room(asked: Asked, info: ModelInfo, pending: Pending, settings: FrontendSettings) -> str | None:
    """Why not one more, in words; None: it fits."""
    size_bytes = bytes_kept(asked.size_bytes, encoded_image(info, asked.specs))
    free, free_bytes = settings.pending_max - len(pending), settings.pending_bytes_max - pending.size_bytes
    if free <= 0:
        return f"{len(pending)} requests are pending here"
    if size_bytes > free_bytes:
        return f"{pending.size_bytes} bytes of payload are pending here"
    own, own_bytes = pending.held_by(asked.peer)
    if own + 1 > _TIMES_FREE * free:
        return f"{own} requests of this client are pending here"
    if own_bytes + size_bytes > _TIMES_FREE * free_bytes:
        return f"{own_bytes} bytes of this client's payload are pending here"
    return None


def _no_such_model(model_id: ModelId, known: Collection[ModelId]) -> str:
    """The reason, with the name that was probably meant."""
    name = model_id[:_SHOWN_MAX]
    likely = sorted(known, key=lambda other: (abs(len(other) - len(name)), other))[:_SUGGESTED_FROM]
    close = difflib.get_close_matches(name, likely, n=1)
    return f"no model {name!r} is configured" + (f"; did you mean {close[0]!r}?" if close else "")


def _wrong_budget(budget_ms: float | None) -> str | None:
    if budget_ms is None or (math.isfinite(budget_ms) and budget_ms > 0):
        return None
    return f"budget_ms must be a finite number over 0, got {budget_ms}"


def _wrong_tensor(wanted: TensorInfo, spec: TensorSpec) -> str | None:
    fits = len(spec.shape) == len(wanted.shape) and all(
        want in (-1, have) for want, have in zip(wanted.shape, spec.shape, strict=True)
    )
    if fits and spec.dtype == wanted.dtype:
        return None
    lengths = ", ".join("any" if length == -1 else str(length) for length in wanted.shape)
    return f"must be {wanted.dtype} of shape [{lengths}], got {spec.dtype} of shape {list(spec.shape)}"


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(names) or "none"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
