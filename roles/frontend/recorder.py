"""What became of a frontend's requests: counted by model, and some of them remembered, as a flight recorder does.

The core tells it of each answer. Nothing here decides, and nothing of a client or its payload is kept. A page of metrics is
made of the counts when somebody asks for it. Late and refused requests are always remembered, of the others one every
`SAMPLE_MS`, as many as there is room for: the newest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice, takewhile
from operator import attrgetter
from typing import Final, NamedTuple

from fabric.errors import DeadlineExceeded, Internal, NoReplica, Overloaded, WorkerLost
from fabric.ids import BatchId, ModelId, SliceId
from fabric.limits import ago_ms
from fabric.messages import (
    FiguresListed,
    Ledger,
    ModelFigures,
    ModelInfo,
    RecordsAsked,
    RequestRecord,
    RequestsRemembered,
)
from roles.frontend.arrival_bins import ARRIVAL_BIN_MS, BAD_BIN_MS, MinuteBins
from roles.frontend.last_seconds import LastSeconds
from roles.frontend.requests import LATE_RETURNS_MAX, TRIES_MAX, Request
from roles.runtime.metrics import catalog
from roles.runtime.metrics.histogram import SHORT_FRACTIONS, SLO_FRACTIONS, of_slo
from roles.runtime.metrics.snapshot import MS, Measured, buckets_of

MODELS_MAX: Final = 1_024
"""Models that are counted; a configuration with more has figures of the first ones."""
ABANDONED: Final = "abandoned"
GOOD, LATE = "good", "late"
UNSERVED: Final = (NoReplica.code, WorkerLost.code)
"""Refused for want of a slice."""
REFUSED_BY_US: Final = (*UNSERVED, DeadlineExceeded.code, Overloaded.code, Internal.code)
"""Each is shown as 0 from the beginning: Prometheus sees no increase where a series begins."""
STAGES: Final = ("preprocess", "held", "waited", "transfer", "queue", "gpu", "return")
SAMPLE_MS: Final = 20.0
REMEMBERED_MAX: Final = 16_384
"""Requests in all: each model's part of them, half for those that were not good. Some 700 bytes each."""
REMEMBERED_MIN: Final = 8
RECORDS_MAX: Final = 512
"""In one answer."""
FIGURES_MAX: Final = 128
"""Models in one answer: half a millisecond's work."""
REASON_CHARS_MAX: Final = 200
NO_BATCH: Final = BatchId(0)


class _Ended(NamedTuple):
    number: int
    request_id: str
    model_id: ModelId
    outcome: str
    reason: str
    ended_at_ms: float
    budget_ms: float
    ledger: Ledger
    batch_id: BatchId
    tries: int


_number = attrgetter("number")


class ModelCounts:
    """Of one model at one SLO, since the frontend heard of it."""

    __slots__ = (
        "arrivals",
        "asked",
        "bad",
        "bad_lately",
        "good",
        "held",
        "last_seconds",
        "latency",
        "outcomes",
        "sample_at_ms",
        "slo_ms",
        "stage_asked",
        "stage_good",
        "stage_seconds",
        "stages_ms",
        "unserved_lately",
        "waited",
    )

    def __init__(self, slo_ms: float) -> None:
        self.slo_ms = slo_ms
        self.latency = of_slo(slo_ms, SLO_FRACTIONS)
        self.held = of_slo(slo_ms, SHORT_FRACTIONS)
        self.waited = of_slo(slo_ms, SHORT_FRACTIONS)
        self.stages_ms = [0.0] * len(STAGES)
        self.asked = 0
        """Taken on or turned away."""
        self.stage_asked = self.stage_good = 0
        """Of these and of the good ones: what stages of applications asked, and no client."""
        self.outcomes: Counter[str] = Counter(dict.fromkeys((GOOD, LATE, *REFUSED_BY_US), 0))
        self.arrivals = MinuteBins(ARRIVAL_BIN_MS)
        self.bad_lately = MinuteBins(BAD_BIN_MS)
        self.unserved_lately = MinuteBins(BAD_BIN_MS)
        """Of them those that found no slice, or lost theirs."""
        self.bad: deque[_Ended] = deque()
        self.good: deque[_Ended] = deque()
        self.sample_at_ms = -1e18
        self.last_seconds = LastSeconds()
        self.stage_seconds = LastSeconds()

    def copy(self, now_ms: float) -> None:
        """As they are before anything is counted of the second that begins."""
        self.last_seconds.copy(now_ms, self.asked, self.outcomes, self.latency.counts)
        self.stage_seconds.copy(now_ms, self.stage_asked, {GOOD: self.stage_good}, ())

    def refused(self, code: str, now_ms: float) -> bool:
        """One more with that code; whether that is no fault of its client's."""
        self.outcomes[code] += 1
        if code in catalog.CLIENT_FAULTS:
            return False
        self.bad_lately.note(now_ms)
        if code in UNSERVED:
            self.unserved_lately.note(now_ms)
        return True


class RequestRecorder:
    """One frontend's; its core is the only one that tells it anything."""

    def __init__(self) -> None:
        self._models: dict[ModelId, ModelCounts] = {}
        self._number = 0
        self._kept_max = REMEMBERED_MIN

    def know(self, models: Iterable[ModelInfo]) -> None:
        """These are served. Another SLO has other buckets, so its counts begin anew."""
        former, self._models = self._models, {}
        for model in models:
            if len(self._models) == MODELS_MAX:
                break
            counts = former.get(model.model_id)
            if counts is None or counts.slo_ms != model.slo_ms:
                counts = ModelCounts(model.slo_ms)
            self._models[model.model_id] = counts
        self._kept_max = max(REMEMBERED_MIN, REMEMBERED_MAX // 2 // max(1, len(self._models)))

    def asked(self, model_id: ModelId, now_ms: float, *, is_of_stage: bool = False) -> None:
        """A request was taken on."""
        counts = self._models.get(model_id)
        if counts is None:
            return
        if now_ms >= counts.last_seconds.next_at_ms:
            counts.copy(now_ms)
        counts.asked += 1
        counts.stage_asked += is_of_stage
        counts.arrivals.note(now_ms)

    def answered(self, request: Request, ledger: Ledger, now_ms: float) -> None:
        """A request has its outputs."""
        counts = self._models.get(request.model_id)
        if counts is None:
            return
        if now_ms >= counts.last_seconds.next_at_ms:
            counts.copy(now_ms)
        counts.latency.note(now_ms - request.asked_at_ms)
        counts.held.note(ledger.held_ms)
        counts.waited.note(ledger.waited_ms)
        stages_ms = counts.stages_ms
        stages_ms[0] += ledger.preprocess_ms
        stages_ms[1] += ledger.held_ms
        stages_ms[2] += ledger.waited_ms
        stages_ms[3] += ledger.transfer_ms
        stages_ms[4] += ledger.queue_ms
        stages_ms[5] += ledger.gpu_ms
        stages_ms[6] += ledger.return_ms
        if now_ms > request.due_at_ms:
            counts.outcomes[LATE] += 1
            counts.bad_lately.note(now_ms)
            self._keep(counts.bad, request, LATE, "", ledger, now_ms)
            return
        counts.outcomes[GOOD] += 1
        counts.stage_good += request.task is not None
        if now_ms >= counts.sample_at_ms:
            counts.sample_at_ms = now_ms + SAMPLE_MS
            self._keep(counts.good, request, GOOD, "", ledger, now_ms)

    def refused(self, request: Request, code: str, reason: str, now_ms: float) -> None:
        """A request has ended without outputs."""
        counts = self._models.get(request.model_id)
        if counts is None:
            return
        if now_ms >= counts.last_seconds.next_at_ms:
            counts.copy(now_ms)
        counts.refused(code, now_ms)
        announced_at_ms = request.first_announced_at_ms
        granted_at_ms = now_ms if request.place is None else request.place.granted_at_ms
        ledger = Ledger(
            preprocess_ms=request.preprocess_ms,
            waited_ms=0.0 if announced_at_ms is None else granted_at_ms - announced_at_ms,
            total_ms=now_ms - request.asked_at_ms,
            slice_id=SliceId("") if request.place is None else request.place.slice_id,
            request_id=request.request_id,
        )
        self._keep(counts.bad, request, code, reason[:REASON_CHARS_MAX], ledger, now_ms)

    def _keep(
        self,
        kept: deque[_Ended],
        request: Request,
        outcome: str,
        reason: str,
        ledger: Ledger,
        now_ms: float,
    ) -> None:
        self._number += 1
        while len(kept) >= self._kept_max:
            kept.popleft()
        place = request.place or request.former_place
        ended = _Ended(
            self._number,
            request.request_id,
            request.model_id,
            outcome,
            reason,
            now_ms,
            request.due_at_ms - request.asked_at_ms,
            ledger,
            NO_BATCH if place is None else place.batch_id,
            LATE_RETURNS_MAX - request.late_returns_left + TRIES_MAX - request.tries_left,
        )
        kept.append(ended)

    def turned_away(self, model_id: ModelId, code: str, now_ms: float) -> None:
        """A request was not taken on. Unless that is its client's fault, it came and was refused like any other."""
        counts = self._models.get(model_id)
        if counts is None:
            return
        if now_ms >= counts.last_seconds.next_at_ms:
            counts.copy(now_ms)
        counts.asked += 1
        if counts.refused(code, now_ms):
            counts.arrivals.note(now_ms)

    def remembered(self, asked: RecordsAsked, now_ms: float) -> RequestsRemembered:
        """What an operator asks for, newest first."""
        counts = self._models.get(asked.model_id)
        newest_first = merge(*self._kept(asked), key=_number, reverse=True)
        requests = tuple(
            RequestRecord(
                one.number,
                one.request_id,
                one.model_id,
                one.outcome,
                one.reason,
                ago_ms(now_ms, one.ended_at_ms),
                max(0.0, one.budget_ms),
                one.ledger,
                one.batch_id,
                max(0, one.tries),
            )
            for one in islice(newest_first, RECORDS_MAX)
        )
        if counts is None:
            return RequestsRemembered(requests)
        arrivals, bad = counts.arrivals.listed(now_ms), counts.bad_lately.listed(now_ms)
        newest, unserved = counts.arrivals.number(now_ms), counts.unserved_lately.listed(now_ms)
        return RequestsRemembered(
            requests, arrivals, ARRIVAL_BIN_MS, sum(bad), newest, sum(unserved), bad, unserved
        )

    def figures(self, after: ModelId, now_ms: float) -> FiguresListed:
        """How models fare now, by name, those that come after one."""
        names = sorted(model_id for model_id in self._models if model_id > after)
        return FiguresListed(
            tuple(self._figures(model_id, now_ms) for model_id in names[:FIGURES_MAX]),
            has_more=len(names) > FIGURES_MAX,
        )

    def _figures(self, model_id: ModelId, now_ms: float) -> ModelFigures:
        counts = self._models[model_id]
        lately = counts.last_seconds.until(now_ms, counts.asked, counts.outcomes, counts.latency.counts)
        stages = counts.stage_seconds.until(now_ms, counts.stage_asked, {GOOD: counts.stage_good}, ())
        refused = {code: float(count) for code, count in lately.outcomes.items() if code not in (GOOD, LATE)}
        return ModelFigures(
            model_id,
            counts.slo_ms,
            lately.window_ms,
            lately.asked,
            lately.outcomes.get(GOOD, 0),
            lately.outcomes.get(LATE, 0),
            refused,
            counts.latency.bounds,
            lately.latencies,
            stages.asked,
            stages.outcomes.get(GOOD, 0),
        )

    def _kept(self, asked: RecordsAsked) -> Iterator[Iterator[_Ended]]:
        """Those that fit, each deque newest first: no more of them is looked at than an answer has."""
        models: Sequence[ModelCounts]
        if asked.model_id:
            models = [self._models[asked.model_id]] if asked.model_id in self._models else []
        else:
            models = list(self._models.values())
        for counts in models:
            for kept in (counts.bad,) if asked.bad_only else (counts.bad, counts.good):
                yield (
                    one
                    for one in takewhile(lambda one: one.number > asked.after, reversed(kept))
                    if one.number < asked.before and asked.request_id in ("", one.request_id)
                )

    def measured(self, margins_ms: Mapping[ModelId, float]) -> Iterator[Measured]:
        """The time series of all models."""
        for model_id, counts in self._models.items():
            model = (str(model_id),)
            for outcome, count in counts.outcomes.items():
                yield Measured(catalog.REQUESTS, (model_id, outcome), count)
            yield Measured(catalog.LATENCY, model, buckets_of(counts.latency))
            yield Measured(catalog.HELD, model, buckets_of(counts.held))
            yield Measured(catalog.WAITED, model, buckets_of(counts.waited))
            for stage, total_ms in zip(STAGES, counts.stages_ms, strict=True):
                yield Measured(catalog.STAGES, (model_id, stage), total_ms * MS)
            if model_id in margins_ms:
                yield Measured(catalog.MARGIN, model, margins_ms[model_id] * MS)
