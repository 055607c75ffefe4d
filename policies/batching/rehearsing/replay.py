"""Plays a question: the same arrivals under each variant, on virtual time, with what is dispatched running exactly l(b)."""

from __future__ import annotations

from msgspec.structs import replace

from fabric.ids import FrontendId
from policies.batching.base import BatchDecision, Drop, RequestRun
from policies.batching.disciplines.tenuto import Tenuto
from policies.batching.rehearsing.question import BLOCK_MS, VARIANTS, Question, Rehearsed

_NOBODY = FrontendId("rehearsal")


def rehearse(question: Question) -> Rehearsed:
    """How many requests each variant lost, in each block."""
    return Rehearsed(question.number, tuple(_lost(question, number) for number in question.variants))


def _lost(question: Question, variant: int) -> tuple[int, ...]:
    discipline = Tenuto(variant=VARIANTS[variant], is_lowest_id=question.is_lowest_id)
    for one in question.models:
        discipline.add_model(one.model, 0.0)
    for slice_ in question.slices:
        discipline.add_slice(replace(slice_, free_at_ms=0.0), 0.0)
    discipline.begin_as(question)
    lost = [0] * question.blocks

    def count(decisions: list[BatchDecision]) -> None:
        for decision in decisions:
            if isinstance(decision, Drop):
                for run in decision.runs:
                    block = int((run.arrived_at_ms - question.from_ms) / BLOCK_MS)
                    if run.arrived_at_ms >= question.from_ms and block < question.blocks:
                        lost[block] += run.count

    names = [one.model.model_id for one in question.models]
    for arrival in question.arrivals:
        at_ms = arrival.at_ms
        # Exclusively: who comes at the moment a batch leaves is still in it.
        while (wake_at_ms := discipline.wake_at_ms) is not None and wake_at_ms < at_ms:
            count(list(discipline.tick(wake_at_ms)))
        run = RequestRun(_NOBODY, 0, arrival.count, at_ms + arrival.budget_ms, at_ms, arrival.span_ms)
        count(list(discipline.arrive(names[arrival.model], run, at_ms)))
    while (wake_at_ms := discipline.wake_at_ms) is not None:
        count(list(discipline.tick(wake_at_ms)))
    return tuple(lost)
