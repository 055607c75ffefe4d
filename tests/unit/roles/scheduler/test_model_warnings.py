"""What an operator is told of models that are served otherwise than one should expect."""

from __future__ import annotations

import msgspec
import pytest

from fabric.ids import OPERATOR, PeerId
from fabric.messages import ReplicaInfo, StatusAsked, StatusListed
from roles.scheduler.core import SchedulerCore
from tests.unit.roles.scheduler.test_core import EXEC_MS, MODEL, WORKER, hear, of_type, ready, serving_core

TENSORS = "it has 130 inputs a request, and a message holds 4096 tensors"


def warned(core: SchedulerCore) -> list[tuple[str, str]]:
    (listed,) = of_type(hear(core, PeerId(f"{OPERATOR}/00000009"), StatusAsked()), StatusListed)
    return [(one.model_id, one.reason) for one in listed.warnings]


def hosts(core: SchedulerCore, k: int, replica: ReplicaInfo) -> None:
    hear(core, WORKER, msgspec.structs.replace(ready(k), replicas=(replica,)))


def test_nothing_is_said_of_a_model_as_it_was_asked_for() -> None:
    assert warned(serving_core()) == []


def test_batches_that_cannot_be_as_large_as_asked_for_are_said_with_the_reason() -> None:
    core = serving_core()
    hosts(core, 0, ReplicaInfo(MODEL, 3, EXEC_MS[:3], reason=TENSORS))
    assert warned(core) == [(MODEL, f"batches of at most 3, because {TENSORS}")]


def test_where_some_slices_have_smaller_ones_their_number_is_said() -> None:
    core = serving_core(slices=3)
    hosts(core, 1, ReplicaInfo(MODEL, 3, EXEC_MS[:3], reason="no memory"))
    hosts(core, 2, ReplicaInfo(MODEL, 2, EXEC_MS[:2], reason="less memory"))
    assert warned(core) == [(MODEL, "batches of at most 2 on 2 of 3 slices, because less memory")]


@pytest.mark.parametrize(
    ("exec_ms", "slices", "words"),
    [
        (10.0, 1, ""),  # two of them fit the SLO of 20 ms
        (10.1, 1, "takes 10.1 ms of its SLO of 20 ms: one that has to wait for another may be late"),
        (10.1, 2, ""),  # of two slices one is free after half of it
        (13.4, 2, "takes 13.4 ms of its SLO of 20 ms"),
        (20.5, 2, "takes 20.5 ms, over its SLO of 20 ms: none is answered in time"),
    ],
)
def test_an_slo_that_hardly_holds_is_said(exec_ms: float, slices: int, words: str) -> None:
    core = serving_core(slices)
    for k in range(slices):
        hosts(core, k, ReplicaInfo(MODEL, 1, (exec_ms,)))
    reasons = [reason for _, reason in warned(core)]
    assert len(reasons) == bool(words)
    assert all(words in reason for reason in reasons)


def test_a_slice_that_is_gone_is_not_spoken_of() -> None:
    core = serving_core(slices=2)
    hosts(core, 1, ReplicaInfo(MODEL, 3, EXEC_MS[:3], reason=TENSORS))
    hosts(core, 1, ReplicaInfo(MODEL, 8, EXEC_MS))
    assert warned(core) == []


def test_heads_that_share_no_layers_are_said_with_the_reason() -> None:
    core = serving_core(slices=2)
    for k in range(2):
        hosts(core, k, ReplicaInfo(MODEL, 8, EXEC_MS, not_merged="their first layers differ"))
    assert warned(core) == [(MODEL, "its heads run one after the other, because their first layers differ")]
