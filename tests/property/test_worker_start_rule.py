"""A worker starts and ends each batch when a plain reading of the rules says so, with the requests that it says."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from fabric.ids import BatchId, SliceId
from fabric.messages import Done, Part, PreemptBatch
from roles.gpu_worker.events import Abort, BatchRan, Execute, InputsCame, Recall, WorkerEvent
from roles.gpu_worker.executors.base import RunAborted, RunFailed
from roles.runtime.core import SCHEDULER, Handle, Heard, Send, Tick
from tests.references.start_rule import (
    ABORT_MS,
    TOLERANCE_MS,
    Ended,
    EventHeard,
    InputsHeard,
    PreemptHeard,
    RunHeard,
    Started,
    StartRule,
)
from tests.worker_builders import BOOT, inputs, part, run_batch, serving_core, slice_spec

HISTORIES = 400
SLICES = ("node-0/gpu0/0", "node-0/gpu0/1")
FRONTENDS = ("frontend-0", "frontend-1", "frontend-2")
SAME_MS = 1e-6
SHORTEST_MS = 0.5
DEAF_MS = 0.9 * SHORTEST_MS


def random_history(seed: int, rough: float = 0.5) -> list[tuple[EventHeard, float]]:
    """Events as a worker hears them, and how late each Run is by then. All at random floats: nothing ties."""
    rng = random.Random(seed)
    span_ms = rng.choice((30.0, 100.0, 400.0))
    is_rough = rng.random() < rough  # inputs that are lost, late, wrong, large; batches that are preempted
    history: list[tuple[EventHeard, float]] = []
    for number in range(rng.randint(1, 14)):
        slice_id = rng.choice(SLICES[: rng.choice((1, 2))])
        at_ms, late_ms = rng.uniform(0, span_ms), rng.choice((0.0, rng.uniform(0, 3)))
        start_in_ms = rng.choice((0.0, rng.uniform(0, 15)))
        latest_in_ms = start_in_ms + rng.choice((0.0, rng.uniform(0, 15)))
        expires_in_ms = latest_in_ms + rng.choice((0.0, rng.uniform(0, 30)))
        sent_at_ms = at_ms - late_ms
        fails = is_rough and rng.random() < 0.1  # with one request: larger batches are run again in halves
        parts = tuple(
            (frontend, tuple(range(first, first + (1 if fails else rng.randint(1, 4)))))
            for frontend in rng.sample(FRONTENDS, 1 if fails else rng.randint(1, 3))
            for first in [rng.randint(0, 50)]
        )
        run = RunHeard(
            at_ms,
            number,
            slice_id,
            sent_at_ms + start_in_ms,
            sent_at_ms + latest_in_ms,
            sent_at_ms + expires_in_ms,
            parts,
            rng.uniform(SHORTEST_MS, 20),
            fails,
        )
        history.append((run, late_ms))
        for place, (frontend, seqs) in enumerate(parts):
            if is_rough and rng.random() < 0.15:
                continue
            off_ms = rng.uniform(-70, 40) if is_rough and rng.random() < 0.3 else rng.uniform(-2, 8)
            live = tuple(seq for seq in seqs if rng.random() < rng.choice((1.0, 1.0, 0.6, 0.0)))
            came = InputsHeard(
                max(0.0, at_ms + off_ms),
                number,
                slice_id,
                place,
                frontend,
                live,
                rng.choice((100, 100, 30 * 2**20)) if is_rough else 100,
            )
            history.append((came, 0.0))
            if is_rough and rng.random() < 0.3:
                history.append((wrong_inputs(rng, came), 0.0))
        if is_rough and rng.random() < 0.2:
            history.append((PreemptHeard(at_ms + rng.uniform(0, 30), number, slice_id), 0.0))
    return sorted(history, key=lambda one: one[0].at_ms)


def wrong_inputs(rng: random.Random, right: InputsHeard) -> InputsHeard:
    """The same again, or such as do not belong there; nothing of it may count."""
    at_ms = max(0.0, right.at_ms + rng.uniform(-5, 20))
    return rng.choice(
        (
            replace(right, at_ms=max(at_ms, right.at_ms + 0.1)),
            replace(right, at_ms=at_ms, part=7),
            replace(right, at_ms=at_ms, frontend="frontend-9"),
            replace(right, at_ms=at_ms, live=(*right.live, 99)),
            replace(right, at_ms=at_ms, is_for_another_incarnation=True),
        )
    )


@dataclass
class OnDevice:
    """What a slice's device has: each with the rows it was given, its last use, and the moment at which it ends, once it has begun."""

    run: RunHeard
    rows: tuple[tuple[str, tuple[int, ...]], ...]
    expires_at_ms: float
    ends_at_ms: float = 0.0
    is_stopped: bool = False


class Played:
    """The same, heard by a worker's core that is woken when it asks to be, and at `ticks_at_ms` for nothing.

    Its devices run what they are given one after the other. The core hears of an end up to `deaf_ms` late.
    """

    def __init__(
        self, history: list[tuple[EventHeard, float]], ticks_at_ms: Sequence[float] = (), deaf_ms: float = 0.0
    ) -> None:
        self.log: list[Started | Ended] = []
        self.ahead = 0
        """Batches that were given to a device that was not free."""
        self._core = serving_core(*map(slice_spec, SLICES))
        self._runs = {event.number: event for event, _ in history if isinstance(event, RunHeard)}
        self._heap: list[tuple[float, int, WorkerEvent | OnDevice]] = []
        self._order = count()
        self._sender: dict[Handle, str] = {}
        self._devices: dict[str, list[OnDevice]] = {slice_id: [] for slice_id in SLICES}
        self._rng, self._deaf_ms = random.Random(str(deaf_ms)), deaf_ms
        for event, late_ms in history:
            message = heard(event, late_ms)
            if isinstance(message, InputsCame):
                self._sender[message.payload] = message.inputs.frontend_id
            self._plan(event.at_ms, message)
        for at_ms in ticks_at_ms:
            self._plan(at_ms, Tick())

    def play(self) -> list[Started | Ended]:
        """All of it. A moment of the past for which the core asks is now."""
        now_ms = 0.0
        while True:
            wake_at_ms = self._core.wake_at_ms
            if wake_at_ms is not None and (not self._heap or max(now_ms, wake_at_ms) < self._heap[0][0]):
                now_ms = max(now_ms, wake_at_ms)
                self._hear(Tick(), now_ms)
            elif self._heap:
                now_ms, _, event = heapq.heappop(self._heap)
                if not isinstance(event, OnDevice):
                    self._hear(event, now_ms)
                elif event.ends_at_ms == now_ms:  # else it was stopped before
                    self._end(event, now_ms)
            else:
                return self.log

    def _plan(self, at_ms: float, event: WorkerEvent | OnDevice) -> None:
        heapq.heappush(self._heap, (at_ms, next(self._order), event))

    def _hear(self, event: WorkerEvent, now_ms: float) -> None:
        for action in self._core.handle(event, now_ms):
            match action:
                case Execute(run, parts, expires_at_ms):
                    rows = tuple((self._sender[one.payload], one.live_seqs) for one in parts)
                    has = self._devices[run.slice_id]
                    has.append(OnDevice(self._runs[run.batch_id], rows, expires_at_ms))
                    if len(has) == 1:
                        self._begin(has, now_ms)
                    else:
                        self.ahead += 1
                case Abort(slice_id, batch_id) | Recall(slice_id, batch_id):
                    self._take_back(slice_id, batch_id, now_ms, may_stop=isinstance(action, Abort))
                case Send(_, Done() as done):
                    self.log.append(ended(done, now_ms))
                case _:
                    pass

    def _begin(self, has: list[OnDevice], now_ms: float) -> None:
        """The first of them, unless nobody wants it any more."""
        while has and has[0].expires_at_ms <= now_ms:
            self._plan(now_ms, RunAborted(SliceId(has[0].run.slice_id), BatchId(has.pop(0).run.number)))
        if has:
            first = has[0]
            self.log.append(Started(now_ms, first.run.number, first.rows))
            first.ends_at_ms = now_ms + first.run.exec_ms
            self._plan(first.ends_at_ms, first)

    def _end(self, one: OnDevice, now_ms: float) -> None:
        slice_id, batch_id = SliceId(one.run.slice_id), BatchId(one.run.number)
        self._devices[slice_id].remove(one)
        event: WorkerEvent
        if one.is_stopped:
            event = RunAborted(slice_id, batch_id)
        elif one.run.fails:
            event = RunFailed(slice_id, batch_id, "it raised")
        else:
            began_at_ms = now_ms - one.run.exec_ms
            event = BatchRan(slice_id, batch_id, Handle(10**6 + batch_id), (), one.run.exec_ms, began_at_ms)
        self._begin(self._devices[slice_id], now_ms)
        self._plan(now_ms + self._rng.uniform(0.0, self._deaf_ms), event)

    def _take_back(self, slice_id: str, batch_id: int, now_ms: float, *, may_stop: bool) -> None:
        has = self._devices[slice_id]
        for place, one in enumerate(has):
            if one.run.number == batch_id and place:
                has.remove(one)
                self._plan(now_ms, RunAborted(SliceId(slice_id), BatchId(batch_id)))
            elif one.run.number == batch_id and may_stop and now_ms + ABORT_MS < one.ends_at_ms:
                one.ends_at_ms, one.is_stopped = now_ms + ABORT_MS, True
                self._plan(one.ends_at_ms, one)


def heard(event: EventHeard, late_ms: float) -> WorkerEvent:
    """The message, as it comes."""
    if isinstance(event, RunHeard):
        sent_at_ms = event.at_ms - late_ms
        return run_batch(
            *(part((seqs[0], len(seqs)), frontend_id=frontend) for frontend, seqs in event.parts),
            batch_id=event.number,
            slice_id=event.slice_id,
            start_in_ms=event.start_at_ms - sent_at_ms,
            latest_in_ms=event.latest_at_ms - sent_at_ms,
            expires_in_ms=event.expires_at_ms - sent_at_ms,
            late_ms=late_ms,
        )
    if isinstance(event, PreemptHeard):
        return Heard(SCHEDULER, PreemptBatch(BatchId(event.number), SliceId(event.slice_id)))
    return inputs(
        *event.live,
        batch_id=event.number,
        number=event.part,
        frontend_id=event.frontend,
        slice_id=event.slice_id,
        incarnation="0ddba115" if event.is_for_another_incarnation else BOOT,
        size_bytes=event.size_bytes,
    )


def ended(done: Done, now_ms: float) -> Ended:
    """The end as the scheduler hears it."""
    missing = tuple((str(one.frontend_id), seqs_of(one)) for one in done.missing)
    has_run = done.exec_ms > 0 or done.status == "failed"
    times_ms = (done.transfer_ms, done.queue_ms) if has_run else ()
    return Ended(now_ms, done.batch_id, done.status, done.ran, missing, *times_ms)


def seqs_of(one: Part) -> tuple[int, ...]:
    return tuple(seq for run in one.runs for seq in range(run.first_seq, run.first_seq + run.count))


def in_order(log: list[Started | Ended]) -> list[Started | Ended]:
    """By time; what one moment brings to several batches may come in any order."""
    return sorted(log, key=lambda one: (round(one.at_ms, 4), one.number, isinstance(one, Ended)))


def same(one: Started | Ended, other: Started | Ended) -> bool:
    if isinstance(one, Started) and isinstance(other, Started):
        return replace(one, at_ms=other.at_ms) == other and abs(one.at_ms - other.at_ms) < SAME_MS
    if isinstance(one, Ended) and isinstance(other, Ended):
        times_ms = [
            (one.at_ms, other.at_ms),
            (one.transfer_ms, other.transfer_ms),
            (one.queue_ms, other.queue_ms),
        ]
        is_same = replace(one, at_ms=0.0, transfer_ms=0.0, queue_ms=0.0) == replace(
            other, at_ms=0.0, transfer_ms=0.0, queue_ms=0.0
        )
        return is_same and all(abs(left - right) < SAME_MS for left, right in times_ms)
    return False


def test_every_batch_starts_and_ends_as_the_rules_say() -> None:
    seen: Counter[str] = Counter()
    for seed in range(HISTORIES):
        history = random_history(seed)
        reference = StartRule()
        reference.play([event for event, _ in history])
        rng = random.Random(f"{seed}/ticks")
        played = Played(history, [rng.uniform(0, 500) for _ in range(rng.choice((0, 20)))])
        ours, theirs = played.play(), in_order(reference.log)
        seen["handed over ahead"] += played.ahead
        wrong = [pair for pair in zip(theirs, in_order(ours), strict=False) if not same(*pair)]
        assert not wrong, f"history {seed}: reference {wrong[0][0]}, ours {wrong[0][1]}"
        assert len(theirs) == len(ours), f"history {seed}"
        seen.update(one.status if isinstance(one, Ended) else "started" for one in theirs)
        seen["ran with parts missing"] += sum(
            isinstance(one, Ended) and one.ran > 0 and bool(one.missing) for one in theirs
        )
    assert all(
        seen[what] >= 20
        for what in (
            "started",
            "ok",
            "failed",
            "expired",
            "preempted",
            "ran with parts missing",
            "handed over ahead",
        )
    ), seen


def test_a_device_that_ends_unheard_goes_on_at_once_with_what_may_start() -> None:
    """The loop hears of ends late, but before the next one. No batch starts that may not, and the device waits only where nothing complete could go."""
    gaps = 0
    for seed in range(HISTORIES):
        history = random_history(seed, rough=0.0)
        log = Played(history, deaf_ms=DEAF_MS).play()
        assert {one.number for one in log if isinstance(one, Ended)} == {
            event.number for event, _ in history if isinstance(event, RunHeard)
        }
        for slice_id in SLICES:
            gaps += look_at(Line([event for event, _ in history], log, slice_id))
    assert gaps >= 200


@dataclass
class Line:
    """What was heard for a slice, and what it did: who could have started at a moment."""

    heard: list[EventHeard]
    log: list[Started | Ended]
    slice_id: str

    def next(self, at_ms: float) -> RunHeard | None:
        """By ADR 0020, of what had been heard by then and had not left the line."""
        left = {
            one.number
            for one in self.log
            if one.at_ms < at_ms or (isinstance(one, Ended) and one.at_ms == at_ms)
        }
        line = sorted(
            (
                run
                for run in self.heard
                if isinstance(run, RunHeard)
                and run.slice_id == self.slice_id
                and run.at_ms <= at_ms < run.expires_at_ms + TOLERANCE_MS
                and run.number not in left
                and not (self.is_complete(run, at_ms) and not self.live(run, at_ms))
            ),
            key=lambda run: (run.start_at_ms, run.number),
        )
        able = [
            run
            for run in line
            if (self.is_complete(run, at_ms) and (run is line[0] or run.start_at_ms <= at_ms))
            or (self.live(run, at_ms) and run.latest_at_ms <= at_ms)
        ]
        return able[0] if able else None

    def came(self, run: RunHeard, at_ms: float) -> list[InputsHeard]:
        """Its inputs."""
        return [
            one
            for one in self.heard
            if isinstance(one, InputsHeard) and one.number == run.number and one.at_ms <= at_ms
        ]

    def is_complete(self, run: RunHeard, at_ms: float) -> bool:
        return len(self.came(run, at_ms)) == len(run.parts)

    def live(self, run: RunHeard, at_ms: float) -> list[int]:
        return [seq for one in self.came(run, at_ms) for seq in one.live]


def look_at(line: Line) -> int:
    """Each start against the rule at that moment; how many of them were at the very end of the run before."""
    runs = {run.number: run for run in line.heard if isinstance(run, RunHeard)}
    starts = [
        one for one in line.log if isinstance(one, Started) and runs[one.number].slice_id == line.slice_id
    ]
    at_once, free_at_ms = 0, 0.0
    for one in sorted(starts, key=lambda start: start.at_ms):
        assert one.at_ms >= free_at_ms, "two at a time"
        assert line.next(one.at_ms) is runs[one.number], f"{one} is not the next one"
        if free_at_ms:
            could_go = line.next(free_at_ms - SAME_MS)
            if could_go is not None and line.is_complete(could_go, free_at_ms - SAME_MS):
                assert one.at_ms == free_at_ms, f"{one} was handed over, and waited from {free_at_ms}"
                at_once += 1
        free_at_ms = one.at_ms + runs[one.number].exec_ms
        (ended,) = (end for end in line.log if isinstance(end, Ended) and end.number == one.number)
        waited_ms = ended.transfer_ms + ended.queue_ms
        assert abs(waited_ms - (one.at_ms - runs[one.number].at_ms)) < SAME_MS, "as long as until its start"
    return at_once
