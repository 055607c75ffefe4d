"""Whatever comes in whatever order: every batch ends once, every live request has one fate."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.ids import SliceId
from fabric.messages import BatchFailed, Done, InputsReturned, Outputs
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import (
    BatchRan,
    Execute,
    InputsCame,
    PushOutputs,
    Recall,
    Release,
    WorkerAction,
    WorkerEvent,
)
from roles.gpu_worker.executors.base import LeftFirstStage, RejectedRow, RunFailed
from roles.runtime.core import Handle, Heard, Send, Tick
from tests.device_lines import DeviceLines
from tests.worker_builders import inputs, part, run_batch, serving_core, slice_spec

PIPELINE = "n/gpu1/0"
SLICES = ("n/gpu0/0", "n/gpu0/1", PIPELINE)
SPECS = (*map(slice_spec, SLICES[:2]), replace(slice_spec(PIPELINE), gpu=1, following=(2,)))


@dataclass
class PlannedPart:
    frontend_id: str
    requests: int
    live: frozenset[int]
    sent_at_ms: float | None  # None: never
    is_repeated: bool


@dataclass
class PlannedBatch:
    slice_id: str
    granted_at_ms: float
    start_in_ms: float
    latest_in_ms: float
    expires_in_ms: float
    parts: list[PlannedPart]
    exec_ms: float
    poison: frozenset[int]
    """Of these seqs every batch raises."""
    rejected: frozenset[int]


parts = st.builds(
    PlannedPart,
    frontend_id=st.sampled_from(["frontend-0", "frontend-1"]),
    requests=st.integers(1, 3),
    live=st.frozensets(st.integers(0, 2)),
    sent_at_ms=st.none() | st.floats(0, 100),
    is_repeated=st.booleans(),
)
batches = st.builds(
    PlannedBatch,
    slice_id=st.sampled_from(SLICES),
    granted_at_ms=st.floats(0, 100),
    start_in_ms=st.floats(0, 20),
    latest_in_ms=st.floats(0, 60),
    expires_in_ms=st.floats(0, 90),
    parts=st.lists(parts, min_size=1, max_size=3, unique_by=lambda planned: planned.frontend_id),
    exec_ms=st.floats(0.1, 30),
    poison=st.frozensets(st.integers(0, 2), max_size=2),
    rejected=st.frozensets(st.integers(0, 5), max_size=2),
)


@dataclass
class World:
    """Plays a plan against the core on virtual time, devices included."""

    core: WorkerCore = field(default_factory=lambda: serving_core(*SPECS))
    actions: list[WorkerAction] = field(default_factory=list)
    kept: set[Handle] = field(default_factory=set)
    second_free_at_ms: float = 0.0
    """The pipeline's second stage."""
    rows: Counter[tuple[int, str, int]] = field(default_factory=Counter)

    planned: Sequence[PlannedBatch] = ()

    def __post_init__(self) -> None:
        self.devices = DeviceLines(self.begin)
        self.heap: list[tuple[float, int, WorkerEvent]] = []
        self.order = count()
        self.handles = count(1_000_000)

    def plan(self, at_ms: float, event: WorkerEvent) -> None:
        heapq.heappush(self.heap, (at_ms, next(self.order), event))

    def play(self) -> None:
        while self.heap:
            at_ms, _, event = heapq.heappop(self.heap)
            while (wake_at_ms := self.core.wake_at_ms) is not None and wake_at_ms <= at_ms:
                self.hear(Tick(), wake_at_ms)
            self.hear(event, at_ms)
        for _ in range(10_000):
            wake_at_ms = self.core.wake_at_ms
            if wake_at_ms is None and not self.heap:
                return
            if self.heap and (wake_at_ms is None or self.heap[0][0] < wake_at_ms):
                at_ms, _, event = heapq.heappop(self.heap)
                self.hear(event, at_ms)
            elif wake_at_ms is not None:
                self.hear(Tick(), wake_at_ms)
        raise AssertionError("the core never comes to rest")

    def hear(self, event: WorkerEvent, now_ms: float) -> None:
        if isinstance(event, InputsCame):
            self.kept.add(event.payload)
        if isinstance(event, BatchRan | RunFailed | LeftFirstStage):
            line = self.devices.of(event.slice_id)
            if line and line[0].run.batch_id == event.batch_id and self.leaves_first(event):
                for late in self.devices.end_first(event.slice_id, now_ms):
                    self.plan(now_ms, late)
        for action in self.core.handle(event, now_ms):
            self.actions.append(action)
            match action:
                case Execute():
                    assert len(self.devices.of(action.run.slice_id)) <= 2 + (action.run.slice_id == PIPELINE)
                    self.devices.give(action, now_ms)
                case Recall(slice_id, batch_id):
                    for given_back in self.devices.recall(slice_id, batch_id):
                        self.plan(now_ms, given_back)
                case Release(payloads):
                    for handle in payloads:
                        assert handle in self.kept, "released twice, or never kept"
                        self.kept.remove(handle)
                case PushOutputs(outputs=outputs):
                    assert outputs == 0 or outputs in self.kept
                case _:
                    pass

    @staticmethod
    def leaves_first(event: BatchRan | RunFailed | LeftFirstStage) -> bool:
        """Whether it says that a slice's first GPU is free; that of a pipeline may have failed in the second stage, and been there before."""
        return event.slice_id != PIPELINE or not isinstance(event, BatchRan)

    def begin(self, execute: Execute, now_ms: float) -> None:
        run, seqs = execute.run, [piece.live_seqs for piece in execute.parts]
        assert now_ms < execute.expires_at_ms, "too late"
        plan = self.planned[run.batch_id]
        assert all(seqs), "nothing runs without a request"
        raises = any(seq in plan.poison for of_part in seqs for seq in of_part)
        ends_at_ms = now_ms + plan.exec_ms
        if run.slice_id == PIPELINE:
            first_ms = now_ms + plan.exec_ms / 2
            is_first_to_raise = raises and run.batch_id % 2 == 0
            if is_first_to_raise:
                ends_at_ms = first_ms
            else:
                ends_at_ms = max(first_ms, self.second_free_at_ms) + plan.exec_ms / 2
                self.second_free_at_ms = ends_at_ms
                self.plan(first_ms, LeftFirstStage(run.slice_id, run.batch_id))
        if raises:
            self.plan(ends_at_ms, RunFailed(run.slice_id, run.batch_id, "it raised"))
            return
        rejected = tuple(
            RejectedRow(row, "bad") for row in sorted(plan.rejected) if row < sum(map(len, seqs))
        )
        outputs = Handle(next(self.handles))
        self.kept.add(outputs)
        self.plan(ends_at_ms, BatchRan(run.slice_id, run.batch_id, outputs, rejected, plan.exec_ms, now_ms))


def is_served(message: Outputs | BatchFailed, poison: frozenset[int]) -> bool:
    return isinstance(message, Outputs) and not poison.isdisjoint(message.seqs)


NONE_CAME = PlannedPart("frontend-1", 1, frozenset(), None, is_repeated=False)
TWO_CAME = PlannedPart("frontend-0", 2, frozenset({0, 1}), 0.0, is_repeated=False)
RUN_APART_AT_ITS_END = [
    PlannedBatch(SLICES[0], 0.0, 0.0, 0.0, 0.0, [NONE_CAME], 1.0, frozenset(), frozenset()),
    PlannedBatch(SLICES[0], 0.0, 0.0, 0.0, 0.0, [TWO_CAME, NONE_CAME], 1.5, frozenset({0}), frozenset()),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(batches, min_size=1, max_size=6))
@example(RUN_APART_AT_ITS_END)
def test_every_batch_ends_once_and_every_live_request_has_one_fate(planned: list[PlannedBatch]) -> None:
    world = World(planned=planned)
    live: set[tuple[int, str, int]] = set()
    came_at_all: set[tuple[int, str, int]] = set()
    for number, batch in enumerate(planned):
        pieces = [part((0, piece.requests), frontend_id=piece.frontend_id) for piece in batch.parts]
        run = run_batch(
            *pieces,
            batch_id=number,
            slice_id=batch.slice_id,
            start_in_ms=batch.start_in_ms,
            latest_in_ms=batch.latest_in_ms,
            expires_in_ms=batch.expires_in_ms,
        )
        world.plan(batch.granted_at_ms, run)
        for place, piece in enumerate(batch.parts):
            seqs = sorted(seq for seq in piece.live if seq < piece.requests)
            live |= {(number, piece.frontend_id, seq) for seq in seqs}
            if piece.sent_at_ms is None:
                continue
            came_at_all |= {(number, piece.frontend_id, seq) for seq in seqs}
            for _ in range(2 if piece.is_repeated else 1):
                came = inputs(
                    *seqs,
                    batch_id=number,
                    number=place,
                    frontend_id=piece.frontend_id,
                    slice_id=batch.slice_id,
                )
                world.plan(piece.sent_at_ms, came)
    world.play()

    dones = Counter(
        action.message.batch_id
        for action in world.actions
        if isinstance(action, Send) and isinstance(action.message, Done)
    )
    assert dones == Counter(range(len(planned)))
    fates: Counter[tuple[int, str, int]] = Counter()
    for action in world.actions:
        match action:
            case PushOutputs(frontend_id, Outputs() | BatchFailed() as message):
                fates.update((message.batch_id, frontend_id, seq) for seq in message.seqs)
                poison = planned[message.batch_id].poison
                is_error = isinstance(message, BatchFailed) and message.code == "Internal"
                assert poison.issuperset(message.seqs) if is_error else not is_served(message, poison)
            case Send(_, Done(batch_id=batch_id, missing=missing)):
                fates.update(
                    (batch_id, piece.frontend_id, seq)
                    for piece in missing
                    for run_ in piece.runs
                    for seq in range(run_.first_seq, run_.first_seq + run_.count)
                    if (batch_id, piece.frontend_id, seq) in live
                )
            case _:
                pass
    assert fates == Counter(live)
    assert not world.kept, "every payload is released"
    told: set[tuple[int, str, int]] = set()
    for action in world.actions:
        if isinstance(action, PushOutputs):
            said = action.message
            rows = {(int(said.batch_id), str(action.frontend_id), seq) for seq in said.seqs}
            is_returned = isinstance(said, InputsReturned)
            assert is_returned or told.isdisjoint(rows), (
                "what was given back, or answered, is not answered again"
            )
            told |= rows
    assert told == came_at_all, "whatever came is answered, or given back"
    assert not any(world.devices.of(SliceId(slice_id)) for slice_id in SLICES)


@settings(max_examples=100, deadline=None)
@given(st.lists(batches, min_size=1, max_size=4))
def test_the_same_events_give_the_same_actions(planned: list[PlannedBatch]) -> None:
    histories = []
    for _ in range(2):
        core = serving_core(*SPECS)
        history: list[list[WorkerAction]] = []
        for number, batch in enumerate(planned):
            run = run_batch(part((0, 2)), batch_id=number, slice_id=batch.slice_id)
            assert isinstance(run, Heard)
            history.append(list(core.handle(run, batch.granted_at_ms)))
            wake_at_ms = core.wake_at_ms
            if wake_at_ms is not None:
                history.append(list(core.handle(Tick(), wake_at_ms)))
        histories.append(history)
    assert histories[0] == histories[1]
