"""Whatever anybody says to a scheduler, in whatever order: nothing raises, tables stay bounded, and who may not speak
of something changes nothing of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    Arrivals,
    Done,
    DrainAsked,
    FrontendHello,
    ModelsAdd,
    ModelSet,
    ModelSpec,
    ModelsRemove,
    NodeHello,
    PlanAsked,
    ReplicaInfo,
    RunBatch,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceStatus,
    Telemetry,
    Withdraw,
)
from policies.batching.registry import DISCIPLINES
from roles.config.cluster import PolicyChoice
from roles.config.read_config import parse_config
from roles.runtime.core import PLANNER, Heard, Lost, Send, Tick
from roles.runtime.peer_checks import OFFENDERS_MAX
from roles.scheduler.build import scheduler_core
from roles.scheduler.core import Event, SchedulerCore
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.planning.make_plan import make_plan
from roles.scheduler.settings import SchedulerSettings, settings_from
from tests.hostile import TYPES, Hostile, check_sendable

OPTIONS: dict[str, dict[str, Any]] = {"timeout": {"timeout_ms": 4}, "fixed": {"batch": 3}}
A, B, ELSEWHERE = ModelId("a"), ModelId("b"), ModelId("elsewhere")
EXEC_MS = {A: tuple(b + 5.0 for b in range(1, 9)), B: tuple(0.5 * b + 9.0 for b in range(1, 17))}
SPECS = {A: ModelSpec(A, 25.0, 8, None, EXEC_MS[A]), B: ModelSpec(B, 60.0, 16, None, EXEC_MS[B])}
NODES = (NodeId("n"), NodeId("m"))
BOOTS = tuple(Incarnation(str(number)) for number in range(3))
SLICES = {SliceId(f"{node}/gpu{k}/0"): (node, k) for node in NODES for k in range(2)}
HOSTED = dict(zip(SLICES, ((A, B), (A,), (B,), (A, B)), strict=True))
SETTINGS = SchedulerSettings(
    models=tuple(SPECS.values()),
    slices=tuple(
        (node, SliceSpec(slice_id, k, "emulated", 40.0, tuple(SPECS[one] for one in HOSTED[slice_id])))
        for slice_id, (node, k) in SLICES.items()
    ),
)
FRONTENDS = (FrontendId("f"), FrontendId("g"))
NAMES = {
    "ModelId": (A, B, ELSEWHERE),
    "SliceId": (*SLICES, SliceId("n/gpu0/1")),
    "NodeId": (*NODES, NodeId("o")),
    "FrontendId": (*FRONTENDS, FrontendId("h")),
    "Incarnation": BOOTS,
    "BatchId": tuple(map(BatchId, range(12))),
}
SPOKEN = (Done, Arrivals, Withdraw, FrontendHello, NodeHello, SliceReady, SliceChanged, Telemetry)
SPOKEN_BY_OPERATORS = (ModelsAdd, ModelsRemove, ModelSet, DrainAsked)
STRANGERS = tuple(
    PeerId(f"{role}/{boot}")
    for role in ("stranger", "worker-o-1", "node-o", "frontend-7", "client", "worker-n", "node-")
    for boot in BOOTS
)
OURS = tuple(
    PeerId(f"{role}/{boot}")
    for role in (*FRONTENDS, "node-n", "node-m", "worker-n-0", "worker-n-1", "worker-m-0", "operator")
    for boot in BOOTS
)


def core_of(batching: str) -> SchedulerCore:
    return scheduler_core(SETTINGS, PolicyChoice(batching, OPTIONS.get(batching, {})))


class Run:
    """A correct run around a core: everybody is there, requests come, batches end. `strangers` speak in between."""

    def __init__(self, core: SchedulerCore, seed: int, strangers: Hostile | None = None) -> None:
        self.core = core
        self.now_ms = 0.0
        self.sent: list[tuple[float, Send]] = []
        self.running: list[RunBatch] = []
        self._draws = random.Random(seed)
        self._seqs = dict.fromkeys((A, B), 0)
        self._strangers = strangers
        self._chances = random.Random(seed)
        for frontend_id in FRONTENDS:
            self.hear(PeerId(f"{frontend_id}/0"), FrontendHello(frontend_id, BOOTS[0], ("ipc:///f",)))
        for node in NODES:
            self.hear(PeerId(f"node-{node}/0"), NodeHello(node, BOOTS[0], (), ()))
        for slice_id in SLICES:
            self.hear(*ready(slice_id))

    def feed(self, event: Event) -> None:
        if self._strangers is not None:
            for _ in range(self._chances.choice((0, 1, 3))):
                peer = self._chances.choice(STRANGERS)
                answers = list(self.core.handle(Heard(peer, self._strangers.message()), self.now_ms))
                if self._chances.random() < 0.2:
                    answers += self.core.handle(Lost(peer, "silent"), self.now_ms)
                assert {send.peer for send in answers} <= {peer}, (
                    "only who asked, or was lost, hears something"
                )
        for send in self.core.handle(event, self.now_ms):
            check_sendable(send)
            self.sent.append((self.now_ms, send))
            if isinstance(send.message, RunBatch):
                self.running.append(send.message)

    def hear(self, peer: PeerId, message: AnyMessage) -> None:
        self.feed(Heard(peer, message))

    def wait(self, wait_ms: float) -> None:
        until_ms = self.now_ms + wait_ms
        while (at_ms := self.core.wake_at_ms) is not None and at_ms <= until_ms:
            self.now_ms = max(self.now_ms, at_ms)
            self.feed(Tick())
        self.now_ms = until_ms

    def step(self) -> None:
        kind = self._draws.random()
        if kind < 0.5:
            model_id, count = self._draws.choice((A, B)), self._draws.choice((1, 1, 2, 7))
            run = Arrivals(model_id, self._seqs[model_id], count, SPECS[model_id].slo_ms)
            self._seqs[model_id] += count
            self.hear(PeerId(f"{self._draws.choice(FRONTENDS)}/0"), run)
        elif kind < 0.8 and self.running:
            batch = self.running.pop(self._draws.randrange(len(self.running)))
            self.hear(PeerId(worker_of(batch.slice_id)), done(batch))
        else:
            self.wait(self._draws.choice((0.5, 2.0, 9.0)))


def worker_of(slice_id: SliceId) -> str:
    node, k = SLICES[slice_id]
    return f"worker-{node}-{k}/0"


def ready(slice_id: SliceId) -> tuple[PeerId, SliceReady]:
    node, k = SLICES[slice_id]
    replicas = tuple(ReplicaInfo(one, len(EXEC_MS[one]), EXEC_MS[one]) for one in HOSTED[slice_id])
    return PeerId(worker_of(slice_id)), SliceReady(slice_id, BOOTS[0], node, k, ("ipc:///w",), replicas)


def done(batch: RunBatch) -> Done:
    ran = sum(run.count for part in batch.parts for run in part.runs)
    exec_ms = EXEC_MS[batch.model_id][ran - 1]
    return Done(batch.batch_id, batch.slice_id, batch.model_id, "ok", ran, (), 0.1, 0.0, exec_ms)


@pytest.mark.parametrize("name", DISCIPLINES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_strangers_change_nothing_of_what_is_not_theirs(name: str, seed: int) -> None:
    runs = [
        Run(core_of(name), seed),
        Run(core_of(name), seed, Hostile(random.Random(seed), NAMES)),
    ]
    for run in runs:
        for _ in range(60):
            run.step()
        run.wait(200.0)
    assert runs[0].sent == runs[1].sent
    assert len(runs[1].core.offences) <= 2 * OFFENDERS_MAX


def anything(core: SchedulerCore, draws: random.Random, steps: int, types: Sequence[type]) -> None:
    """Everybody says anything, under every name, and now and then what is right."""
    hostile = Hostile(draws, NAMES)
    run = Run(core, 1)
    right: list[tuple[PeerId, AnyMessage]] = [ready(slice_id) for slice_id in SLICES]
    right += [(PeerId(f"{one}/0"), FrontendHello(one, BOOTS[0], ())) for one in FRONTENDS]
    right += [(PeerId(f"node-{node}/0"), NodeHello(node, BOOTS[0], (), ())) for node in NODES]
    right += [
        (PeerId(f"node-{node}/0"), SliceChanged(node, SliceStatus(slice_id, BOOTS[0], "lost")))
        for slice_id, (node, _) in SLICES.items()
    ]
    for _ in range(steps):
        kind = draws.random()
        if kind < 0.3:
            run.step()
        elif kind < 0.6:
            run.hear(draws.choice((*OURS, *STRANGERS)), hostile.message(types))
        elif kind < 0.9:
            peer, message = draws.choice(right)
            if run.running and draws.random() < 0.5:
                batch = draws.choice(run.running)
                peer, message = PeerId(worker_of(batch.slice_id)), done(batch)
            run.hear(peer, message if draws.random() < 0.5 else hostile.mutant(message))
        elif kind < 0.93:
            run.feed(Lost(draws.choice(OURS), "silent"))
        else:
            run.wait(draws.choice((0.0, 1.0, 20.0, 3_000.0)))
        answer_planner(run)
    run.wait(70_000.0)


def answer_planner(run: Run) -> None:
    asked = [send.message for _, send in run.sent if isinstance(send.message, PlanAsked)]
    run.sent.clear()
    for one in asked:
        run.hear(PLANNER, make_plan(one))


@pytest.mark.parametrize("name", DISCIPLINES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_is_said_under_any_name_nothing_raises(name: str, seed: int) -> None:
    core = core_of(name)
    anything(core, random.Random(seed), 150, (*TYPES, *SPOKEN * 4))
    assert core.offences.counters.total() > 0


def planned_core() -> SchedulerCore:
    """Its placement follows what happens."""
    models = [
        {"name": "a", "slo_ms": 25, "rate_rps": 20, "profile": {"alpha_ms": 1, "beta_ms": 5, "max_batch": 8}},
        {
            "name": "b",
            "slo_ms": 60,
            "rate_rps": 9,
            "profile": {"alpha_ms": 0.5, "beta_ms": 9, "max_batch": 16},
        },
    ]
    cluster = {"nodes": [{"host": str(node), "gpus": 2} for node in NODES]}
    document = {"models": models, "cluster": cluster, "placement": "symphony", "batching": "eager"}
    config = parse_config(document, Path())
    placed = config.place()
    started = settings_from(config, placed)
    planning = controller_settings(config, document, "", placed, started)
    return scheduler_core(started, config.batching, planning)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_nor_where_the_plan_follows_what_happens(seed: int) -> None:
    anything(planned_core(), random.Random(seed), 150, (*TYPES, *SPOKEN * 2, *SPOKEN_BY_OPERATORS * 6))
