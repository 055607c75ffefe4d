"""Whatever anybody says to a frontend, in whatever order: nothing raises, nothing is kept, and requests have their
one answer; who is not asked about something changes nothing of it."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    BatchFailed,
    Directory,
    Dropped,
    Grant,
    Infer,
    Outputs,
    Returned,
    SeqRun,
    TensorSpec,
)
from roles.frontend.core import FrontendCore
from roles.frontend.events import (
    Asked,
    ClientSaid,
    Computed,
    FrontendAction,
    FrontendEvent,
    Preprocess,
    Preprocessed,
    PushInputs,
    Release,
    Reply,
    Report,
    SchedulerSaid,
    Tell,
    TurnEnded,
    WorkerSaid,
)
from roles.runtime.core import Handle, Lost, Tick
from roles.runtime.peer_checks import OFFENDERS_MAX
from tests.builders import BOOT, FRONTEND, IMAGENET, directory, frontend_settings, model_info, slice_info
from tests.hostile import TYPES, Hostile, check_sendable
from tests.property.test_frontend import IMAGE, World

STRANGERS = tuple(PeerId(f"stranger/{number}") for number in range(4))
SPECS = (
    (),
    (TensorSpec("image", "float32", (1, 8, 8)),),
    (TensorSpec("input", "uint8", (1_000,)),),
    (TensorSpec("input", "float32", (2, 10)), TensorSpec("other", "bool", ())),
)
MODELS = (
    model_info("digits", slo_ms=50.0),
    model_info("anything", slo_ms=20.0, inputs=()),
    model_info("vision", slo_ms=200.0, inputs=(IMAGE,), image=IMAGENET),
)
NAMES = {
    "ModelId": (*(model.model_id for model in MODELS), ModelId("unknown")),
    "SliceId": (SliceId("s0"), SliceId("s1"), SliceId("nowhere")),
    "Incarnation": (Incarnation("0"), BOOT),
    "BatchId": tuple(map(BatchId, range(4))),
    "FrontendId": (FRONTEND, FrontendId("other")),
}
FOREIGN = {**NAMES, "BatchId": tuple(map(BatchId, range(5_000, 5_004)))}


class WithStrangers(World):
    """The same run, in which strangers speak before everything that happens."""

    def __init__(self, seed: int) -> None:
        self._hostile = Hostile(random.Random(seed), FOREIGN)
        self._chances = random.Random(seed)
        self._foreign = count(1 << 40)
        super().__init__(random.Random(seed))

    def _feed(self, event: FrontendEvent, asking: tuple[tuple[PeerId, int], Handle] | None = None) -> None:
        for _ in range(self._chances.choice((0, 1, 2))):
            said = self._said()
            for action in self.core.handle(said, self.now_ms):
                is_theirs = isinstance(action, Reply | Report) and action.peer in STRANGERS
                if not is_theirs and not (isinstance(said, Computed) and action == Release(said.payload)):
                    self._check(action)  # a deadline that has come by now
        super()._feed(event, asking)

    def _said(self) -> FrontendEvent:
        kind = self._chances.random()
        if kind < 0.4:
            return ClientSaid(self._chances.choice(STRANGERS), self._hostile.message(TYPES[1:]))
        if kind < 0.6:
            return WorkerSaid(self._hostile.message([one for one in TYPES if one is not Outputs]))
        handle = Handle(next(self._foreign))
        return Computed(self._hostile.message((Outputs,)), handle, self._chances.choice(SPECS))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_strangers_change_nothing_of_what_is_not_theirs(seed: int) -> None:
    worlds = World(random.Random(seed)), WithStrangers(seed)
    for world in worlds:
        for _ in range(250):
            world.step()
        world.finish()
    assert worlds[0].codes == worlds[1].codes
    assert worlds[1].core.offences.counters.total() > worlds[0].core.offences.counters.total()
    assert len(worlds[1].core.offences) <= 2 * OFFENDERS_MAX


class Anything:
    """Everybody says anything, also under the names that count."""

    def __init__(self, draws: random.Random) -> None:
        self.core = FrontendCore(frontend_settings(pending_max=100))
        self.now_ms = 0.0
        self.kept: Counter[Handle] = Counter()
        self._draws = draws
        self._hostile = Hostile(draws, NAMES)
        self._handles = count(1)
        self._decoding: list[Handle] = []
        self._pushed: list[Outputs] = []
        self._announced: list[Grant] = []
        slices = [slice_info("s0", "0"), slice_info("s1", "0")]
        self._right = directory(MODELS, slices, lists_frontend=True)
        self.feed(self._right)

    def step(self) -> None:
        draws, hostile = self._draws, self._hostile
        kind = draws.random()
        client = PeerId(f"client/{draws.randrange(5)}")
        specs = draws.choice(SPECS)
        if kind < 0.35:
            infer = Infer(draws.randrange(50), draws.choice(MODELS).model_id)
            asked = infer if draws.random() < 0.7 else hostile.message((Infer,))
            late_ms, size = draws.choice((0.0, 5.0)), draws.choice((1, 900))
            self.feed(Asked(client, asked, late_ms, self._handle(), specs, size))
        elif kind < 0.4:
            self.feed(ClientSaid(client, hostile.message(TYPES[1:])))
        elif kind < 0.65:
            others = hostile.message((Directory, *(Dropped, Returned) * 4, *TYPES))
            self.feed(SchedulerSaid(self._nearly(self._announced, Grant) if draws.random() < 0.7 else others))
        elif kind < 0.7:
            self.feed(self._right)
        elif kind < 0.8:
            self.feed(Computed(self._nearly(self._pushed, Outputs), self._handle(), specs))
        elif kind < 0.85:
            self.feed(
                WorkerSaid(hostile.message([BatchFailed] * 40 + [one for one in TYPES if one is not Outputs]))
            )
        elif kind < 0.87:
            self.feed(Lost(client, "gone"))
        elif kind < 0.9 and self._decoding:
            self.feed(Preprocessed(self._decoding.pop()))
        elif kind < 0.95:
            self.wait(draws.choice((0.1, 3.0, 30.0)))
        if self.core.has_gathered:
            self.feed(TurnEnded())

    def _nearly(self, right: list[Any], kind: type) -> Any:
        """What is right, or nearly, or not at all."""
        if not right or self._draws.random() < 0.1:
            return self._hostile.message((kind,))
        message = self._draws.choice(right[-5:])
        return message if self._draws.random() < 0.7 else self._hostile.mutant(message)

    def wait(self, wait_ms: float) -> None:
        until_ms = self.now_ms + wait_ms
        while (at_ms := self.core.wake_at_ms) is not None and at_ms <= until_ms:
            self.now_ms = max(self.now_ms, at_ms)
            self.feed(Tick())
        self.now_ms = until_ms

    def finish(self) -> None:
        self.now_ms += 3e9  # beyond every deadline
        self.feed(Tick())
        counters = self.core.counters
        assert counters["pending"] == counters["pending_bytes"] == 0
        ended = sum(counters.get(name, 0) for name in ("answers", "refusals", "abandoned"))
        assert counters.get("accepted", 0) == ended
        assert not +self.kept, "every payload is released"

    def feed(self, event: FrontendEvent) -> None:
        for action in self.core.handle(event, self.now_ms):
            check_sendable(action)
            self._check(action)

    def _check(self, action: FrontendAction) -> None:
        match action:
            case Release(payload):
                assert self.kept[payload] == 1, "a payload is released once"
                self.kept[payload] = 0
            case Preprocess(payload):
                self._decoding.append(payload)
            case Tell(Arrivals(model_id, first_seq, count)):
                slice_id, runs = (
                    self._draws.choice((SliceId("s0"), SliceId("s1"))),
                    (SeqRun(first_seq, count),),
                )
                batch_id, boot = BatchId(self._draws.randrange(4)), Incarnation("0")
                self._announced.append(
                    Grant(batch_id, slice_id, boot, model_id, 0, runs, count, 0.0, 0.0, "")
                )
            case PushInputs(one):
                seqs = one.live_seqs
                self._pushed.append(
                    Outputs(one.batch_id, one.slice_id, one.model_id, seqs, len(seqs), 0.0, 0.0, 0.0)
                )
            case Reply(payload=payload):
                assert not payload or self.kept[payload], "what is answered is there"
            case _:
                pass

    def _handle(self) -> Handle:
        handle = Handle(next(self._handles))
        self.kept[handle] = 1
        return handle


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_is_said_under_any_name_nothing_raises(seed: int) -> None:
    run = Anything(random.Random(seed))
    for _ in range(250):
        run.step()
    run.finish()
