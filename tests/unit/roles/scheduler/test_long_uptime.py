"""A host that has been up for years shows moments of which not every small difference can be told apart."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from fabric.ids import ModelId
from policies.batching.registry import DISCIPLINES
from roles.config.cluster import PolicyChoice
from tests.scheduler_stage import NODES, Cluster

A, B = ModelId("a"), ModelId("b")
OPTIONS: dict[str, dict[str, Any]] = {"timeout": {"timeout_ms": 4}, "fixed": {"max_wait_ms": 5}}
YEARS_MS = (2e11, 5e12)  # 6 and 158 of them: floats lie 3e-5 and 1e-3 ms apart


@pytest.mark.timeout(60)  # a tick that does not end is what is looked for
@pytest.mark.parametrize("name", DISCIPLINES)
@pytest.mark.parametrize("up_ms", YEARS_MS)
def test_requests_are_served_and_each_tick_ends_however_long_the_host_is_up(name: str, up_ms: float) -> None:
    on = Cluster(PolicyChoice(name, OPTIONS.get(name, {})), {A: "line", B: "long"}, (25.0, 60.0))
    on.now_ms = up_ms
    for node_id in NODES:
        on.agent_comes(node_id, knows_slices=True)
    for slice_id in sorted(on.wanted):
        on.slice_comes(slice_id)
    on.frontend_comes("f")
    (peer,) = on.frontends.values()
    draw = random.Random(7)
    for _ in range(400):
        budget_ms = draw.choice((25.0, 12.0, 7.0, 3.0))
        ready_in_ms = draw.choice((0.0, 0.0, 2.0, 9.0))
        on.arrive(peer, draw.choice((A, B)), draw.choice((1, 1, 3, 9)), budget_ms, 0.0, ready_in_ms)
        on.wait(draw.choice((0.1, 0.7, 3.0)))
    on.wait(100.0)
    fates = Counter(on.fates.values())
    assert fates.keys() <= {"ran", "dropped", "returned"}, "none is forgotten"
    assert fates["ran"] > 500
