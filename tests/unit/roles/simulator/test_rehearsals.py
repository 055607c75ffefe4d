"""Rehearsals through the scheduler's core: asked as messages, and the same again in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fabric.messages import RehearsalAsked, RehearsalMade
from roles.config.read_config import parse_config
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.scheduler.build import scheduler_core
from roles.scheduler.core import SchedulerCore
from roles.scheduler.settings import settings_from
from roles.simulator.fast_world import FastWorld
from roles.simulator.simulation import hardware_of
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import workload_of

DOCUMENT = {
    "models": [
        {
            "name": name,
            "slo_ms": 40,
            "rate_rps": 330,
            "profile": {"alpha_ms": 1, "beta_ms": 8, "max_batch": 16},
        }
        for name in "abc"
    ],
    "cluster": {"gpus": 2},
}


class Recorded:
    """A core whose events and actions are written down."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.entries: list[tuple[Heard | Lost | Tick, float, list[Send]]] = []

    def handle(self, event: Heard | Lost | Tick, now_ms: float) -> Sequence[Send]:
        actions = self.core.handle(event, now_ms)
        self.entries.append((event, now_ms, list(actions)))
        return actions

    @property
    def wake_at_ms(self) -> float | None:
        return self.core.wake_at_ms


def test_what_was_rehearsed_is_in_the_journal_and_a_replay_gives_the_same() -> None:
    config = parse_config(DOCUMENT, Path())
    settings = settings_from(config)
    recorded = Recorded(scheduler_core(settings, config.batching))
    arrived = workload_of(config).arrivals(4_000.0)
    traffic = [
        ModelTraffic(model.model_id, model.slo_ms, at_ms)
        for model, at_ms in zip(config.models, arrived, strict=True)
    ]
    FastWorld(recorded, hardware_of(config, seed=1), traffic).run()
    asked = [
        send for _, _, sent in recorded.entries for send in sent if isinstance(send.message, RehearsalAsked)
    ]
    made = [
        event.message
        for event, _, _ in recorded.entries
        if isinstance(event, Heard) and isinstance(event.message, RehearsalMade)
    ]
    assert asked
    assert [one.number for one in made] == [send.message.number for send in asked]  # type: ignore[union-attr]
    again = scheduler_core(settings, config.batching)
    for event, now_ms, actions in recorded.entries:
        assert list(again.handle(event, now_ms)) == actions
