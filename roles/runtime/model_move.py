"""A model goes from one shard to another while it serves: what to ask of whom next, as a function of what is.

Make before break, in steps that each leave the cluster serving: the new shard loads the model; it gets a higher term there, so that
frontends go to it; the old shard forgets it when all of them have. Whoever asks for these steps may end
between any two of them. The next one who asks for the move goes on where things are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fabric.ids import ModelId
from fabric.messages import (
    ModelInfo,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    PlanRequest,
    SectionAsked,
    StatusListed,
)

STEPS_MAX: Final = 16
"""More than any move takes: somebody else changes the same model meanwhile."""


@dataclass(slots=True, frozen=True)
class Ask:
    """Ask that shard's scheduler for that, and look again."""

    shard: int
    request: PlanRequest


@dataclass(slots=True, frozen=True)
class Refuse:
    """It cannot be moved."""

    reason: str


def next_step(
    model_id: ModelId, target: int, shards: Mapping[int, StatusListed], section: str, request_no: int
) -> Ask | Refuse | None:
    """The next step towards `target`; None: the model is there and nowhere else.

    `shards`: what each one's active scheduler says now. `section`: the model's, once an old shard was asked for it.
    """
    listed = {shard: info for shard, status in shards.items() if (info := _info(model_id, status))}
    if not listed:
        return Refuse(f"no shard that answers has a model {model_id!r}")
    others = {shard: info for shard, info in listed.items() if shard != target}
    there = listed.get(target)
    if there is None:
        # The one that frontends go to: an older listing may be left of a move that was never finished.
        source = max(others, key=lambda shard: (others[shard].replicas > 0, others[shard].term))
        if not section:
            return Ask(source, SectionAsked(request_no, model_id))
        return Ask(target, ModelsAdd(request_no, json.dumps([json.loads(section)])))
    if not others:
        return None
    if there.replicas == 0:
        return Refuse(
            f"shard {target} has loaded {model_id!r} on no slice yet: it stays where it is until then"
        )
    term = max(info.term for info in others.values())
    if there.term <= term:
        return Ask(target, ModelSet(request_no, model_id, term=term + 1))
    former = min(others)
    return Ask(former, ModelsRemove(request_no, (model_id,), when_left=True, term=others[former].term))


def _info(model_id: ModelId, status: StatusListed) -> ModelInfo | None:
    return next((one for one in status.models if one.model_id == model_id), None)
