"""When to rehearse, on what, and which variant is used: what a discipline that rehearses keeps.

While nobody loses by waiting nothing is recorded or asked, and the planned holds are used: they are what spends least of the users'
latency. Once some do, the last seconds of arrivals are played under the variants, again and again, until nothing is lost any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fabric.ids import ModelId
from policies.batching.base import NEVER_MS, BatchSlice, RequestRun
from policies.batching.rehearsing.evidence import Evidence
from policies.batching.rehearsing.question import (
    BLOCK_MS,
    PLANNED,
    VARIANTS,
    Arrival,
    Question,
    Rehearsed,
    RehearsedModel,
    Variant,
)

BEGIN_LOST, END_LOST = (
    0.0005,
    0.0001,
)  # of the requests lose by waiting: from where on it is worth rehearsing, and no longer
EVERY_MS = 1000.0  # at first, and after each change; then ever more seldom, up to …
EVERY_MS_MAX = 4000.0
_SELDOMER = 1.5
BACK_MS = 2500.0  # so far back arrivals are played, or …
RUNS_MAX = 8192  # … so many runs of them: what a rehearsal costs is bounded by this, at any rate
HOSTED_MAX = 20_000  # models on slices: more take longer to describe than to play
RUN_TIMES_MAX = 250_000  # of all that slices host differently: 2 MB of a message, which takes the process some 10 ms to write
SETTLING_SLOS = 2.0  # of the longest: so long queues take to fill that begin empty
BLOCKS_MIN = 2  # fewer are not worth a rehearsal
TRUSTED_MS = 10_000.0  # without a rehearsal, a variant stays in use …
REMEMBERED_MS = 30_000.0  # … and what was found of all is remembered
HOPELESS_EVERY = 4  # rehearsals: so often a variant is tried that was much worse


class Rehearsals:
    """Of one discipline. It says whether to record, and what to ask; it is told the outcome."""

    def __init__(self) -> None:
        self.is_recording = False
        self.due_at_ms = NEVER_MS
        """Of the next question; inf: nothing is recorded, or an answer is waited for."""
        self._heard: deque[tuple[float, ModelId, int, float, float]] = deque(maxlen=RUNS_MAX)
        self._evidence = Evidence(len(VARIANTS))
        self._current = VARIANTS.index(PLANNED)
        self._number = 0
        self._every_ms = EVERY_MS
        self._asked: Question | None = None
        self._judged_until_ms = -NEVER_MS
        self._judged_at_ms = -NEVER_MS

    @property
    def variant(self) -> Variant:
        """The one in use."""
        return VARIANTS[self._current]

    def follow(self, lost_share: float, now_ms: float) -> None:
        """So many of the requests lose by waiting: begin to rehearse, or end it.

        What cannot be rehearsed any more, for a model with a longer SLO has come, or nobody answers, is not used for long.
        """
        if now_ms - self._judged_at_ms > TRUSTED_MS:
            self._current = VARIANTS.index(PLANNED)
        if self.is_recording:
            if lost_share < END_LOST:
                self.is_recording = False
                self.due_at_ms = NEVER_MS
                self._heard.clear()
                self._current = VARIANTS.index(PLANNED)
        elif lost_share >= BEGIN_LOST:
            self.is_recording = True
            self._judged_until_ms = now_ms
            self._every_ms = EVERY_MS
            if self._asked is None:
                self.due_at_ms = now_ms + EVERY_MS

    def note(self, model_id: ModelId, run: RequestRun, now_ms: float) -> None:
        """A run arrived, and is taken on. Of its budget all may have gone by on the way."""
        budget_ms = max(0.0, run.deadline_at_ms - now_ms)
        self._heard.append((now_ms, model_id, run.count, budget_ms, run.span_ms))

    def question(
        self,
        models: Sequence[RehearsedModel],
        slices: Callable[[], tuple[BatchSlice, ...]],
        lost_share: float,
        now_ms: float,
        *,
        is_lowest_id: bool = True,
    ) -> Question | None:
        """What to rehearse, if it is due and there is enough of it."""
        if now_ms < self.due_at_ms:
            return None
        self.due_at_ms = now_ms + self._every_ms
        heard = self._heard
        while heard and heard[0][0] < now_ms - BACK_MS:
            heard.popleft()
        if not heard or not models:
            return None
        from_ms = heard[0][0]
        settled_ms = SETTLING_SLOS * max(one.model.slo_ms for one in models)
        # Each block counts once, however often it is played.
        counted_ms = max(from_ms + settled_ms, self._judged_until_ms)
        blocks = int((now_ms - counted_ms) / BLOCK_MS)
        if blocks < BLOCKS_MIN:
            return None
        given = slices()
        if not _can_be_told(given):
            return None
        index_of = {one.model.model_id: index for index, one in enumerate(models)}
        arrivals = tuple(
            Arrival(at_ms - from_ms, index_of[model_id], count, budget_ms, span_ms)
            for at_ms, model_id, count, budget_ms, span_ms in heard
            if model_id in index_of
        )
        if now_ms - self._judged_at_ms > REMEMBERED_MS:
            self._evidence = Evidence(len(VARIANTS))
        self._number += 1
        variants = tuple(
            one
            for one in range(len(VARIANTS))
            if self._number % HOPELESS_EVERY == 0 or not self._evidence.is_hopeless(one, self._current)
        )
        self._judged_until_ms = now_ms
        self._asked = Question(
            self._number,
            tuple(models),
            given,
            lost_share,
            arrivals,
            variants,
            counted_ms - from_ms,
            blocks,
            is_lowest_id,
        )
        self.due_at_ms = NEVER_MS
        return self._asked

    def judge(self, answer: Rehearsed, now_ms: float) -> bool:
        """Take the outcome; True: another variant is used from now on."""
        asked = self._asked
        if asked is None or answer.number != asked.number:
            return False
        self._asked = None
        if self.is_recording:
            self.due_at_ms = now_ms + self._every_ms
        if len(answer.lost) != len(asked.variants):
            return False
        self._judged_at_ms = now_ms
        self._evidence.add(asked.variants, answer.lost)
        before = self._current
        if self.is_recording:
            self._current = self._evidence.better_than(before, asked.variants)
        is_other = self._current != before
        self._every_ms = EVERY_MS if is_other else min(EVERY_MS_MAX, _SELDOMER * self._every_ms)
        return is_other


def _can_be_told(slices: Sequence[BatchSlice]) -> bool:
    """Whether a question about them takes no longer to describe than it is worth. What several host alike is told once."""
    if sum(len(slice_.hosted) for slice_ in slices) > HOSTED_MAX:
        return False
    kinds = {id(slice_.hosted): slice_.hosted for slice_ in slices}.values()
    return sum(len(one.exec_ms) + len(one.interval_ms) for hosted in kinds for one in hosted) <= RUN_TIMES_MAX
