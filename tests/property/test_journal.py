"""Whatever a scheduler went through: its journal, played into a fresh core, gives the same actions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    Arrivals,
    Done,
    FrontendHello,
    ModelSpec,
    NodeHello,
    Part,
    Ping,
    ReplicaInfo,
    RunBatch,
    SeqRun,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceStatus,
    StatusAsked,
    Withdraw,
)
from policies.batching.base import Delay
from policies.batching.registry import DISCIPLINES
from roles.config.cluster import PolicyChoice
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.runtime.journal import Journal, Recorded, replay
from roles.scheduler.build import scheduler_core
from roles.scheduler.replay_start import about_scheduler, scheduler_from
from roles.scheduler.settings import SchedulerSettings

OPTIONS: dict[str, dict[str, Any]] = {"timeout": {"timeout_ms": 4}, "fixed": {"batch": 3}}
A, B = ModelId("a"), ModelId("b")
EXEC_MS = {A: tuple(b + 5.0 for b in range(1, 9)), B: tuple(0.5 * b + 9.0 for b in range(1, 17))}
SLO_MS = {A: 25.0, B: 60.0}
NODE, AGENT = NodeId("n"), PeerId("node-n/1")
FRONTENDS = (PeerId("f/1"), PeerId("g/1"))
SLICES = (SliceId("n/gpu0/0"), SliceId("n/gpu1/0"), SliceId("n/gpu2/0"))
HOSTED = ((A, B), (A,), (A, B))
SPECS = {model_id: ModelSpec(model_id, SLO_MS[model_id], len(EXEC_MS[model_id])) for model_id in (A, B)}
SETTINGS = SchedulerSettings(
    models=tuple(SPECS.values()),
    slices=tuple(
        (NODE, SliceSpec(slice_id, k, "emulated", 40.0, tuple(SPECS[one] for one in HOSTED[k])))
        for k, slice_id in enumerate(SLICES)
    ),
    delay=Delay(0.25, 0.01),
    priorities={B: 1},
    hints={(SLICES[0], A): (4, 2.0)},
    guard_ms=0.5,
    transfer_ms=1.0,
)


class Recording:
    """A scheduler that is recorded, and what a history can be drawn from."""

    def __init__(self, batching: PolicyChoice, path: Path) -> None:
        self.journal = Journal(path, about_scheduler(SETTINGS, batching))
        self.core = Recorded(scheduler_core(SETTINGS, batching), self.journal)
        self.now_ms = 0.0
        self.running: list[RunBatch] = []
        self.next_seq = 0
        self.boots = 0
        self.workers = {slice_id: PeerId("") for slice_id in SLICES}
        self.actions = 0

    def take(self, actions: list[Send]) -> None:
        self.actions += len(actions)
        self.running.extend(send.message for send in actions if isinstance(send.message, RunBatch))

    def hear(self, peer: PeerId, message: AnyMessage, late_ms: float = 0.0) -> None:
        self.take(list(self.core.handle(Heard(peer, message, late_ms), self.now_ms)))

    def wait(self, wait_ms: float) -> None:
        until_ms = self.now_ms + wait_ms
        while (at_ms := self.core.wake_at_ms) is not None and at_ms <= until_ms:
            self.now_ms = max(self.now_ms, at_ms)
            self.take(list(self.core.handle(Tick(), self.now_ms)))
        self.now_ms = until_ms

    def ready(self, k: int) -> None:
        self.boots += 1
        replicas = tuple(ReplicaInfo(one, len(EXEC_MS[one]), EXEC_MS[one]) for one in HOSTED[k])
        boot = Incarnation(str(self.boots))
        self.workers[SLICES[k]] = worker = PeerId(f"worker-n-{k}/{boot}")
        self.hear(worker, SliceReady(SLICES[k], boot, NODE, k, ("ipc:///w",), replicas))

    def arrive(self, which: int, model_id: ModelId, count: int, budget: float, late_ms: float) -> None:
        run = Arrivals(model_id, self.next_seq, count, SLO_MS[model_id] * budget, 0.5, 3.0 * (count == 2))
        self.next_seq += count
        self.hear(FRONTENDS[which], run, late_ms)

    def end(self, which: int, status: str, slower: float) -> None:
        if not self.running:
            return
        batch = self.running.pop(which % len(self.running))
        ran = sum(run.count for part in batch.parts for run in part.runs) if status == "ok" else 0
        missing: tuple[Part, ...] = () if ran else batch.parts
        exec_ms = EXEC_MS[batch.model_id][max(0, ran - 1)] * slower
        done = Done(
            batch.batch_id, batch.slice_id, batch.model_id, status, ran, missing, slower, 0.0, exec_ms
        )
        self.hear(self.workers[batch.slice_id], done, 0.125)


Step = Callable[[Recording], None]
frontends, slices = st.integers(0, 1), st.integers(0, 2)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind = draw(st.sampled_from(("arrive",) * 8 + ("wait",) * 6 + ("end",) * 4 + ("ready", "rare")))
    if kind == "arrive":
        which, model_id = draw(frontends), draw(st.sampled_from((A, A, B)))
        count, budget = draw(st.sampled_from((1, 1, 1, 2, 7))), draw(st.sampled_from((1.0, 1.0, 0.6, 0.1)))
        late_ms = draw(st.sampled_from((0.0, 0.25)))
        return lambda on: on.arrive(which, model_id, count, budget, late_ms)
    if kind == "wait":
        wait_ms = draw(st.sampled_from((0.0, 0.5, 2.0, 9.0, 70.0, 3000.0)))
        return lambda on: on.wait(wait_ms)
    if kind == "end":
        which, status = (
            draw(st.integers(0, 9)),
            draw(st.sampled_from(("ok", "ok", "ok", "failed", "expired"))),
        )
        slower = draw(st.sampled_from((1.0, 1.0, 1.3, 0.8)))
        return lambda on: on.end(which, status, slower)
    if kind == "ready":
        k = draw(slices)
        return lambda on: on.ready(k)
    k, which = draw(slices), draw(frontends)
    again = FrontendHello(FrontendId("fg"[which]), Incarnation("1"), ())
    successor = FrontendHello(FrontendId("fg"[which]), Incarnation("2"), ())
    gone = SliceStatus(SLICES[k], Incarnation("1"), "lost", "its process ended")
    rare: tuple[Step, ...] = (
        lambda on: on.hear(FRONTENDS[which], again),
        lambda on: on.hear(PeerId(f"{'fg'[which]}/2"), successor),
        lambda on: on.hear(AGENT, SliceChanged(NODE, gone)),
        lambda on: on.hear(AGENT, NodeHello(NODE, Incarnation("1"), (), ())),
        lambda on: on.hear(FRONTENDS[which], Withdraw(A, (SeqRun(max(0, on.next_seq - 2), 2),))),
        lambda on: on.hear(FRONTENDS[which], StatusAsked()),
        lambda on: on.hear(FRONTENDS[which], Ping(7)),
        lambda on: on.take(list(on.core.handle(Lost(on.workers[SLICES[k]], "silent"), on.now_ms))),
    )
    return draw(st.sampled_from(rare))


@pytest.mark.parametrize("name", DISCIPLINES)
@settings(deadline=None)
@given(history=st.lists(steps(), max_size=60))
def test_a_journal_replays_to_the_same_actions(name: str, history: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        on = Recording(PolicyChoice(name, OPTIONS.get(name, {})), path)
        for which, peer in enumerate(FRONTENDS):
            on.hear(peer, FrontendHello(FrontendId("fg"[which]), Incarnation("1"), ()))
        on.hear(AGENT, NodeHello(NODE, Incarnation("1"), (), ()))
        for k in range(3):
            on.ready(k)
        for step in history:
            step(on)
        on.wait(100.0)
        on.journal.close()
        played = replay(path, scheduler_from)
        assert played.difference is None
        assert played.actions == on.actions
        assert not played.is_cut
