"""Models that move between shards under load, with every role's real core on a virtual clock: no request is refused for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fabric.ids import ModelId, PeerId
from fabric.link import Received
from fabric.messages import (
    Arrivals,
    Changed,
    FrontendHello,
    Left,
    PlanRequest,
    StatusAsked,
    StatusListed,
)
from roles.config.read_config import parse_config
from roles.config.shards import shard_document
from roles.runtime.core import Core, Heard, Lost, Send, Tick
from roles.runtime.model_move import Ask, next_step
from roles.scheduler.build import scheduler_core
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.settings import settings_from
from roles.simulator.full_world import BOOT_MS, FullWorld
from roles.simulator.hardware import scheduler_peer
from roles.simulator.simulation import hardware_of, shard_settings
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import workload_of

OPERATOR = PeerId("operator/00000001")
UNTIL_MS = 900.0
ASK_EVERY_MS = 5.0
SLO_MS = 100.0


def document(shards: int, frontends: int, jitter_ms: float) -> dict[str, Any]:
    """Four models, so lightly loaded that only a move could make a request late."""
    profile = {"alpha_ms": 1.0, "beta_ms": 5.0, "max_batch": 16}
    return {
        "models": [
            {"name": f"m{at}", "slo_ms": SLO_MS, "rate_rps": 60, "profile": profile, "shard": at % shards}
            for at in range(4)
        ],
        "cluster": {
            "shards": shards,
            "frontends": frontends,
            "nodes": [{"host": f"h{at}", "gpus": 2} for at in range(shards)],
            "network": {"control_ms": 0.3, "result_ms": 0.2, "jitter_ms": jitter_ms},
        },
    }


class Watched:
    """A shard's core, and what its frontends say of which request."""

    def __init__(self, core: Core[Heard | Lost | Tick, Send], shard: int, announced: dict[Any, int]) -> None:
        self._core = core
        self._shard = shard
        self._announced = announced
        self._left: defaultdict[PeerId, set[ModelId]] = defaultdict(set)

    @property
    def wake_at_ms(self) -> float | None:
        return self._core.wake_at_ms

    def handle(self, event: Heard | Lost | Tick, now_ms: float) -> Sequence[Send]:
        if isinstance(event, Heard):
            match event.message:
                case Arrivals(model_id, first_seq, count):
                    assert model_id not in self._left[event.peer], "it had left"
                    for seq in range(first_seq, first_seq + count):
                        key = event.peer, model_id, seq
                        assert key not in self._announced, "a request is announced to one shard, once"
                        self._announced[key] = self._shard
                case Left(model_id, is_back):
                    left = self._left[event.peer]
                    (left.discard if is_back else left.add)(model_id)
                case FrontendHello():
                    self._left[event.peer].clear()
        return self._core.handle(event, now_ms)


class Operator:
    """Takes one step of a move after the other, as `tenuto models move` does."""

    def __init__(self, world: FullWorld, shards: int, moves: Sequence[tuple[float, ModelId, int]]) -> None:
        self.done: list[ModelId] = []
        self._world = world
        self._shards = shards
        self._moves = list(moves)
        self._statuses: dict[int, StatusListed] = {}
        self._section = ""
        self._numbers = 0
        self._asked: PlanRequest | None = None
        self._shard_of = {scheduler_peer(shard): shard for shard in range(shards)}
        self._link = world.connect(world.control, OPERATOR, self._hear)
        if moves:
            world.after(moves[0][0] - BOOT_MS, self._look)

    def _look(self) -> None:
        self._statuses.clear()
        for shard in range(self._shards):
            self._link.send(scheduler_peer(shard), StatusAsked())

    def _hear(self, received: Received) -> None:
        match received.message:
            case StatusListed() as status:
                self._statuses[self._shard_of[received.peer]] = status
                if len(self._statuses) == self._shards and self._asked is None:
                    self._step()
            case Changed() as answer:
                assert answer.status == "ok", answer
                self._section = answer.document or self._section
                self._asked = None
                self._world.after(ASK_EVERY_MS, self._look)

    def _step(self) -> None:
        _, model_id, target = self._moves[0]
        self._numbers += 1
        step = next_step(model_id, target, self._statuses, self._section, self._numbers)
        if isinstance(step, Ask):
            self._asked = step.request
            self._link.send(scheduler_peer(step.shard), step.request)
            return
        assert step is None, step
        self.done.append(model_id)
        self._section = ""
        self._moves.pop(0)
        if self._moves:
            self._world.after(max(0.0, self._moves[0][0] - self._world.clock.now_ms()), self._look)


@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(
    shards=st.integers(2, 3),
    frontends=st.integers(1, 3),
    jitter_ms=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1_000),
    moves=st.lists(
        st.tuples(st.floats(50.0, 300.0), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=3
    ),
)
def test_models_move_between_shards_and_no_request_is_refused(
    shards: int, frontends: int, jitter_ms: float, seed: int, moves: list[tuple[float, int, int]]
) -> None:
    written = document(shards, frontends, jitter_ms)
    config = parse_config(written, Path())
    workload = workload_of(config, seed)
    traffic = [
        ModelTraffic(model.model_id, model.slo_ms, arrived_at_ms)
        for model, arrived_at_ms in zip(config.models, workload.arrivals(UNTIL_MS), strict=True)
    ]
    announced: dict[Any, int] = {}
    whole = settings_from(config)
    cores = []
    for shard in range(shards):
        own = config.of_shard(shard)
        placed = own.place()
        started = shard_settings(whole, config, shard)
        planning = controller_settings(own, shard_document(written, config, shard), "", placed, started)
        cores.append(Watched(scheduler_core(started, config.batching, planning), shard, announced))
    world = FullWorld(cores, hardware_of(config, seed), traffic)
    wanted = [(at_ms, ModelId(f"m{at}"), target % shards) for at_ms, at, target in sorted(moves)]
    operator = Operator(world, shards, wanted)
    world.run()

    assert operator.done == [model_id for _, model_id, _ in wanted]
    assert sum(world.dropped.values()) == 0, "none is refused"
    for one in traffic:
        took_ms = one.finished_at_ms - one.arrived_at_ms
        assert not np.isnan(took_ms).any(), "each has its result"
        assert (took_ms <= SLO_MS + 1e-6).all(), "in time"
    last = {model_id: target for _, model_id, target in wanted}
    for model_id, target in last.items():
        seqs: dict[PeerId, tuple[int, int]] = {}
        for (peer, model, seq), shard in announced.items():
            if model == model_id:
                seqs[peer] = max(seqs.get(peer, (-1, -1)), (seq, shard))
        assert {shard for _, shard in seqs.values()} == {target}, "the newest requests go where it is now"
