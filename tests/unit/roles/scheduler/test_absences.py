"""When slices were away and why, as an operator is told it."""

from __future__ import annotations

from fabric.ids import Incarnation, ModelId, PeerId, SliceId
from fabric.messages import BatchesRemembered, NodeHello, RecordsAsked, SliceAbsence, SliceState
from roles.runtime.core import Lost
from roles.scheduler.absences import MODELS_TOLD_MAX, Absences
from roles.scheduler.core import SchedulerCore
from tests.unit.roles.scheduler.test_core import AGENT, MODEL, NODE, WORKER, hear, slice_id
from tests.unit.roles.scheduler.test_unserved import (
    SECOND,
    core_that_lost_its_slice,
    core_that_took_over,
    ready,
    told,
)


def absences(core: SchedulerCore, now_ms: float) -> tuple[SliceAbsence, ...]:
    (send,) = hear(core, PeerId("operator/0"), RecordsAsked(MODEL, 1 << 52), now_ms)
    assert isinstance(send.message, BatchesRemembered)
    return send.message.absences


def away(reason: str, began_ago_ms: float, ended_ago_ms: float | None = None) -> SliceAbsence:
    return SliceAbsence(slice_id(0), reason, began_ago_ms, ended_ago_ms, (MODEL,))


def test_an_operator_hears_when_a_slice_was_away_and_the_reason_that_its_agent_gave() -> None:
    core = core_that_lost_its_slice()
    ready(core, SECOND, 1_400.0)
    assert absences(core, 2_000.0) == (away("killed", 1_000.0, 600.0),)
    core.handle(Lost(PeerId(f"{WORKER.rpartition('/')[0]}/{SECOND}"), "closed"), 3_000.0)
    assert absences(core, 3_100.0)[1:] == (away("its worker is gone: closed", 100.0),)
    told(core, SliceState.LOST, 3_150.0, SECOND, "its worker was killed by signal 9")
    told(core, SliceState.STARTING, 3_160.0)
    (_, lasting) = absences(core, 3_200.0)
    assert lasting == away("its worker was killed by signal 9", 200.0)


def test_a_slice_that_drains_is_away_until_it_stays_and_one_that_never_was_ready_is_not() -> None:
    core = core_that_lost_its_slice()
    ready(core, SECOND, 1_400.0)
    told(core, SliceState.DRAINING, 2_000.0, SECOND, "its node agent stops")
    assert absences(core, 2_100.0)[1:] == (away("its node agent stops", 100.0),)
    told(core, SliceState.READY, 2_200.0, SECOND)
    assert absences(core, 2_300.0)[1:] == (away("its node agent stops", 300.0, 100.0),)
    assert not absences(core_that_took_over(), 100.0)


def test_what_was_gone_is_remembered_with_its_models_when_the_plan_has_replaced_it() -> None:
    core = core_that_lost_its_slice()
    ready(core, SECOND, 1_400.0)
    core.handle(Lost(AGENT, "closed"), 2_000.0)
    next_agent = PeerId(f"{AGENT.partition('/')[0]}/next")
    hear(core, next_agent, NodeHello(NODE, Incarnation("next"), (), ()), 2_600.0)
    lost = "its node agent is gone: closed"
    assert absences(core, 2_601.0)[1:] == (away(lost, 601.0),)
    core._fleet.now_ms = 2_650.0
    core._fleet.forget_slice(core._fleet.slices[slice_id(0)])
    assert absences(core, 2_700.0) == (away("killed", 1_700.0, 1_300.0), away(lost, 700.0, 50.0))


def test_a_slice_that_is_forgotten_while_it_serves_was_not_away() -> None:
    core = core_that_lost_its_slice()
    ready(core, SECOND, 1_400.0)
    core._fleet.forget_slice(core._fleet.slices[slice_id(0)])
    assert absences(core, 2_700.0) == (away("killed", 1_700.0, 1_300.0),)


def test_however_many_models_the_lost_slices_had_the_answer_can_be_sent() -> None:
    own = Absences()
    models = tuple(ModelId(f"m{number}") for number in range(MODELS_TOLD_MAX // 2))
    for number in range(3):
        own.begin(SliceId(f"n/gpu{number}/0"), models, "killed", float(number))
    assert [len(one.models) for one in own.listed(10.0)] == [0, len(models), len(models)], "the newest"
