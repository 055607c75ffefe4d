"""A discipline's question as a message, the answer to one, and that answer as the discipline takes it.

Live `make_rehearsal` runs in a process of its own, simulated at once.
"""

from __future__ import annotations

from fabric.messages import (
    RehearsalAsked,
    RehearsalMade,
    RehearsalModel,
    RehearsalReplica,
    RehearsalRun,
    RehearsalSlice,
)
from policies.batching.base import BatchModel, BatchSlice, Delay, HostedModel
from policies.batching.rehearsing.question import Arrival, Question, Rehearsed, RehearsedModel
from policies.batching.rehearsing.replay import rehearse


def asked_of(question: Question) -> RehearsalAsked:
    """The question as a message: what several slices host alike is in it once."""
    kinds: dict[int, tuple[HostedModel, ...]] = {}
    for slice_ in question.slices:
        kinds.setdefault(id(slice_.hosted), slice_.hosted)
    places = {key: place for place, key in enumerate(kinds)}
    return RehearsalAsked(
        question.number,
        tuple(_told(one) for one in question.models),
        tuple(
            tuple(
                RehearsalReplica(one.model_id, tuple(one.exec_ms), tuple(one.interval_ms)) for one in hosted
            )
            for hosted in kinds.values()
        ),
        tuple(
            RehearsalSlice(slice_.slice_id, slice_.order, places[id(slice_.hosted)])
            for slice_ in question.slices
        ),
        question.lost_share,
        tuple(
            RehearsalRun(one.at_ms, one.model, one.count, one.budget_ms, one.span_ms)
            for one in question.arrivals
        ),
        question.variants,
        question.from_ms,
        question.blocks,
        question.is_lowest_id,
    )


def make_rehearsal(asked: RehearsalAsked) -> RehearsalMade:
    """Play it."""
    made = rehearse(_question(asked))
    return RehearsalMade(made.number, made.lost)


def rehearsed_of(made: RehearsalMade) -> Rehearsed:
    """The answer for the discipline; without an outcome if there is none."""
    return Rehearsed(made.number, made.lost)


def _told(one: RehearsedModel) -> RehearsalModel:
    model = one.model
    return RehearsalModel(
        model.model_id,
        model.slo_ms,
        model.delay.control_ms,
        model.delay.data_ms_per_item,
        model.priority,
        one.rate_rps,
        one.lost_share,
        one.openings_ms,
        one.expected_ms,
        one.is_over_share,
    )


def _question(asked: RehearsalAsked) -> Question:
    models = tuple(
        RehearsedModel(
            BatchModel(one.model_id, one.slo_ms, Delay(one.control_ms, one.data_ms_per_item), one.priority),
            one.rate_rps,
            one.lost_share,
            one.openings_ms,
            one.expected_ms,
            one.is_over_share,
        )
        for one in asked.models
    )
    kinds = [
        tuple(HostedModel(one.model_id, one.exec_ms, interval_ms=one.interval_ms) for one in kind)
        for kind in asked.kinds
    ]
    slices = tuple(BatchSlice(one.slice_id, one.order, kinds[one.kind]) for one in asked.slices)
    runs = tuple(Arrival(run.at_ms, run.model, run.count, run.budget_ms, run.span_ms) for run in asked.runs)
    return Question(
        asked.number,
        models,
        slices,
        asked.lost_share,
        runs,
        asked.variants,
        asked.from_ms,
        asked.blocks,
        asked.is_lowest_id,
    )
