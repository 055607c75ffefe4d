"""Why one request took as long as it did, in sentences: where its time went, what else ran, and what would have sufficed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from fabric.errors import DeadlineExceeded, NoReplica
from fabric.ids import ModelId, SliceId
from fabric.messages import BatchEntry
from roles.observability.absences import absences_of, during, gone, second_replica
from roles.observability.diagnosis import Cause, Finding
from roles.observability.remembered import AbsenceSeen, BatchSeen, RequestSeen, batch_of
from roles.observability.units import shown_ms

_WORTH = 0.01  # of a request's time: smaller parts of it are not told
_WORTH_MS = 0.05
_NAMED_MAX = 3
KEPT_BACK_MS = 1.0
"""Less of a budget is not told."""

STAGE_WORDS = {
    "preprocess_ms": "decoding its picture",
    "held_ms": "held on purpose, for a larger batch",
    "waited_ms": "waiting because it had to",
    "transfer_ms": "its inputs on the way to the worker",
    "queue_ms": "in the worker's queue",
    "gpu_ms": "running",
    "return_ms": "its outputs on the way back",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """`sentences` for people; the figures behind them for `--json`."""

    sentences: tuple[str, ...]
    alone_ms: float | None
    """What it would have taken with nothing else there; None where no run time of its model is known."""
    behind_ms: dict[str, float] = field(default_factory=dict)
    """By model and slice: how long their batches ran while it waited."""
    would_have_met: tuple[str, ...] = ()
    """Changes that would have brought it in time, each by itself."""


def explain(
    request: RequestSeen,
    batches: Sequence[BatchSeen],
    hosting: Collection[SliceId],
    lately: Sequence[Finding] = (),
    absences: Sequence[AbsenceSeen] | None = None,
) -> Explanation:
    """`batches`: of all models, as the scheduler remembers them. `hosting`: slices that host the request's model.

    `lately`: what is out of the ordinary in its model's last minute (`diagnosis.measured`). `absences`: when slices were not there; None: nobody asked.
    """
    own = batch_of(request, batches)
    behind = _behind(request, own, batches, hosting)
    run_ms = _run_alone_ms(request, own, batches)
    alone_ms = _alone_ms(request, run_ms, batches)
    met = tuple(_would_have_met(request, own, behind, alone_ms, batches))
    sentences = [
        _verdict(request),
        *_stages(request, own),
        *_competition(request, own, behind, hosting),
        *_kept_back(request, own, alone_ms),
        *_alone(request, alone_ms),
        *(_no_slice(request, hosting, absences) or _counterfactuals(request, met, run_ms)),
        *_lately(request, lately),
    ]
    return Explanation(
        tuple(sentences),
        alone_ms,
        {f"{model} on {slice_id}": ms for (model, slice_id), ms in behind.items()},
        met,
    )


Behind = dict[tuple[ModelId, SliceId], float]


def _verdict(request: RequestSeen) -> str:
    record, total = request.record, shown_ms(request.ledger.total_ms)
    who = f"Request {record.request_id or '?'} of {record.model_id}"
    budget = shown_ms(record.budget_ms)
    if request.is_good:
        return f"{who} was answered in time: after {total}, of the {budget} that it had at the frontend."
    if record.outcome == "late":
        over = shown_ms(request.ledger.total_ms - record.budget_ms)
        return f"{who} was answered too late: after {total}, {over} more than the {budget} that it had at the frontend."
    reason = f": {record.reason}" if record.reason else ""
    return f"{who} was not answered but {_ended(record.outcome)} after {total}, of the {budget} that it had{reason}."


def _ended(outcome: str) -> str:
    return "abandoned by its client" if outcome == "abandoned" else f"refused with {outcome}"


def _stages(request: RequestSeen, own: BatchSeen | None) -> Iterator[str]:
    ledger, total_ms = request.ledger, request.ledger.total_ms
    parts = [(name, getattr(ledger, name)) for name in STAGE_WORDS]
    least_ms = max(_WORTH * total_ms, _WORTH_MS)
    told = [f"{shown_ms(ms)} {STAGE_WORDS[name]}" for name, ms in parts if ms >= least_ms]
    if told:
        yield f"Its time: {', '.join(told)}."
    if request.has_run:
        why = f", which left because of '{ledger.reason}'" if ledger.reason else ""
        yield f"It ran on {ledger.slice_id} in a batch of {ledger.batch_size}{why}."
        if own is not None and own.entry.table_ms and own.entry.exec_ms > 1.15 * own.entry.table_ms:
            slower = own.entry.exec_ms / own.entry.table_ms
            yield f"That batch took {shown_ms(own.entry.exec_ms)}, {slower:.1f} times what it should ({shown_ms(own.entry.table_ms)})."
    elif own is not None:
        yield f"It was granted to {own.slice_id} in a batch of {own.entry.batch_size}, which ended '{own.entry.status}'."
    elif request.batch_id:
        yield f"It was granted to {ledger.slice_id or 'a slice'}; how its batch ended is not remembered."
    elif request.record.outcome not in ("abandoned", "Cancelled"):
        yield "No slice was given to it."
    if request.record.tries > 0:
        grants = "1 earlier grant" if request.record.tries == 1 else f"{request.record.tries} earlier grants"
        yield f"{grants} came to nothing."


def _waiting_span(request: RequestSeen, own: BatchSeen | None) -> tuple[float, float]:
    """From its receipt until its batch started; until its end where none did."""
    until_ms = request.ended_at_ms
    if request.has_run:
        ledger = request.ledger
        until_ms -= ledger.return_ms + ledger.gpu_ms
    elif own is not None:
        until_ms = min(until_ms, own.started_at_ms)
    return request.asked_at_ms + request.ledger.preprocess_ms, until_ms


def _behind(
    request: RequestSeen, own: BatchSeen | None, batches: Sequence[BatchSeen], hosting: Collection[SliceId]
) -> Behind:
    """What ran while it was forced to wait: on its slice, or on all that host its model where it never had one."""
    from_ms, until_ms = _waiting_span(request, own)
    if request.has_run:  # what it was held before was not the others' doing
        from_ms = max(from_ms, until_ms - _forced_ms(request))
    places = _places(request, own, hosting)
    behind: Behind = defaultdict(float)
    for batch in batches:
        if batch.slice_id in places and batch is not own:
            overlap_ms = batch.overlap_ms(from_ms, until_ms)
            if overlap_ms >= _WORTH_MS:
                behind[batch.model_id, batch.slice_id] += overlap_ms
    return dict(sorted(behind.items(), key=lambda one: -one[1]))


def _places(request: RequestSeen, own: BatchSeen | None, hosting: Collection[SliceId]) -> Collection[SliceId]:
    if request.has_run:
        return (request.ledger.slice_id,)
    return hosting if own is None else (own.slice_id,)


def _forced_ms(request: RequestSeen) -> float:
    ledger = request.ledger
    return ledger.waited_ms + ledger.transfer_ms + ledger.queue_ms


def _competition(
    request: RequestSeen, own: BatchSeen | None, behind: Behind, hosting: Collection[SliceId]
) -> Iterator[str]:
    if not behind:
        if not request.has_run and hosting:
            yield "No batch ran meanwhile where it could have gone."
        return
    parts = [
        f"{shown_ms(ms)} behind batches of {'its own model' if model == request.record.model_id else model} on {slice_id}"
        for (model, slice_id), ms in list(behind.items())[:_NAMED_MAX]
    ]
    more = f", and {len(behind) - _NAMED_MAX} more" if len(behind) > _NAMED_MAX else ""
    if request.has_run:
        yield f"While it waited the slice was busy with others: {', '.join(parts)}{more}."
        return
    span_ms = max(_WORTH_MS, request.ledger.total_ms)
    busy = sum(behind.values()) / span_ms / len(_places(request, own, hosting))
    yield f"Meanwhile the slices where it could have gone were busy {min(1.0, busy):.0%} of the time: {', '.join(parts)}{more}."


def _run_alone_ms(request: RequestSeen, own: BatchSeen | None, batches: Sequence[BatchSeen]) -> float | None:
    """One run at the speed that its table promises: the least of what is known for the smallest batch."""
    known = _known(request, batches)
    if not known:
        return None
    smallest = min(entry.batch_size for entry in known)
    if own is not None and own.entry.table_ms and own.entry.batch_size == smallest:
        return own.entry.table_ms
    return min(entry.table_ms for entry in known if entry.batch_size == smallest)


def _known(request: RequestSeen, batches: Sequence[BatchSeen]) -> list[BatchEntry]:
    return [
        one.entry for one in batches if one.model_id == request.record.model_id and one.entry.table_ms > 0
    ]


def _alone_ms(request: RequestSeen, run_ms: float | None, batches: Sequence[BatchSeen]) -> float | None:
    """One request, at once: a run alone, and its ways."""
    ledger = request.ledger
    if run_ms is None:
        return None
    if not request.has_run:
        ways = sorted(entry.transfer_ms for entry in _known(request, batches))
        return ledger.preprocess_ms + ways[len(ways) // 2] + run_ms
    return ledger.preprocess_ms + ledger.transfer_ms + run_ms + ledger.return_ms


def _kept_back(request: RequestSeen, own: BatchSeen | None, alone_ms: float | None) -> Iterator[str]:
    """A request is given up before its deadline: what is left then must do for lateness and the way back too."""
    if own is not None or alone_ms is None or request.record.outcome != DeadlineExceeded.code:
        return
    left_ms = request.record.budget_ms - request.ledger.total_ms
    if left_ms > alone_ms + KEPT_BACK_MS:
        yield (
            f"It had {shown_ms(left_ms)} left, of which a run alone takes {shown_ms(alone_ms)}; the rest is kept back"
            " for timers that are late here, and for its answer's way back."
        )


def _alone(request: RequestSeen, alone_ms: float | None) -> Iterator[str]:
    if alone_ms is not None and alone_ms < request.ledger.total_ms:
        yield f"Alone it would have taken {shown_ms(alone_ms)}."


def _would_have_met(
    request: RequestSeen,
    own: BatchSeen | None,
    behind: Behind,
    alone_ms: float | None,
    batches: Sequence[BatchSeen],
) -> Iterator[str]:
    """Single changes after which it would have been in time."""
    record, ledger = request.record, request.ledger
    if not request.is_bad:
        return
    budget_ms, total_ms = record.budget_ms, ledger.total_ms
    if not request.has_run:
        if alone_ms is not None and behind and alone_ms <= budget_ms:
            names = sorted({model for model, _ in behind if model != record.model_id})
            whose = f"of {' and '.join(names)}" if names else "of its own model"
            yield f"a free slice: without the batches {whose} it would have been answered after {shown_ms(alone_ms)}"
        return
    others_ms = sum(ms for (model, _), ms in behind.items() if model != record.model_id)
    own_ms = sum(behind.values()) - others_ms
    forced_ms = _forced_ms(request)
    slow_ms = own.entry.exec_ms - own.entry.table_ms if own is not None and own.entry.table_ms else 0.0
    ways = sorted(one.entry.transfer_ms for one in batches if one.has_run)
    usual_ms = ways[len(ways) // 2] if ways else ledger.transfer_ms
    changes = (
        (min(others_ms, forced_ms), "no other model's batch before it"),
        (min(own_ms, forced_ms), "no batch of its own model before it"),
        (min(sum(behind.values()), forced_ms) if others_ms and own_ms else 0.0, "no batch before it at all"),
        (ledger.held_ms, "no hold for a larger batch"),
        (slow_ms, "a run as fast as its table says"),
        (ledger.transfer_ms - usual_ms, "inputs as fast as usual"),
        (ledger.preprocess_ms, "a decoded picture from its client"),
    )
    for saved_ms, change in changes:
        if saved_ms > _WORTH_MS and total_ms - saved_ms <= budget_ms:
            yield f"{change}: {shown_ms(total_ms - saved_ms)}"


def _lately(request: RequestSeen, lately: Sequence[Finding]) -> Iterator[str]:
    if request.is_bad:
        for finding in lately[:_NAMED_MAX]:
            if finding.cause is Cause.HOST:  # a process counts that since its start
                yield f"{finding.sentence[0].upper()}{finding.sentence[1:]}."
            else:
                yield f"In the last minute: {finding.sentence}."


def _no_slice(
    request: RequestSeen, hosting: Collection[SliceId], absences: Sequence[AbsenceSeen] | None
) -> list[str]:
    """Of one that found no slice: which were gone then, and what would have helped; empty: it found one."""
    if request.record.outcome != NoReplica.code:
        return []
    if absences is None:
        why = f"tenuto explain {request.record.request_id} says which were gone"
    else:
        its = absences_of(absences, request.record.model_id, hosting)
        why = gone(during(its, request.asked_at_ms, request.ended_at_ms), hosting)
        why = why or "none had started, or what was gone then is not remembered any more"
    return [f"No slice of its model was there: {why}.", f"What would help: {second_replica(hosting)}."]


def _counterfactuals(request: RequestSeen, met: Sequence[str], run_ms: float | None) -> Iterator[str]:
    budget_ms = request.record.budget_ms
    if met:
        yield f"It would have been in time with {'; or with '.join(met)}."
    elif request.is_bad and run_ms is not None and run_ms > budget_ms:
        yield (
            f"A run alone takes {shown_ms(run_ms)} of the {shown_ms(budget_ms)} that it had:"
            " only a larger budget or a faster device would have brought it in time."
        )
    elif request.is_bad:
        yield "No single change that is known here would have brought it in time."
