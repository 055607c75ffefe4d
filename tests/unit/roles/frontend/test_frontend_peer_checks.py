"""What a frontend's peers may say of whom, and what becomes of those who say more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fabric.ids import BatchId, Incarnation, PeerId, SliceId
from fabric.messages import Answer, BatchFailed, Dropped, Grant, Host, SeqRun, Stop
from roles.frontend.core import FrontendCore
from roles.frontend.events import (
    ClientSaid,
    Computed,
    Release,
    Reply,
    SchedulerSaid,
    TurnEnded,
    WorkerSaid,
)
from roles.runtime.core import Lost
from roles.runtime.peer_checks import OFFENCES_MAX
from tests.builders import CLIENT, DIGITS, SLICE, asked, computed, directory, grant, of_type
from tests.frontend_stage import linked_core, refusals
from tests.unit.roles.frontend.test_frontend_core import announced, answers, returned


def granted_core() -> FrontendCore:
    core = linked_core()
    announced(core, 2)
    core.handle(grant((0, 2), batch_id=7), 1.0)
    return core


@pytest.mark.parametrize("change", [{"slice_id": SliceId("elsewhere")}, {"batch_id": BatchId(8)}])
def test_outputs_of_what_a_request_was_not_granted_to_are_not_believed(change: dict[str, object]) -> None:
    core = granted_core()
    right = computed(0, 1, batch_id=7)
    wrong = Computed(replace(right.message, **change), right.payload, right.specs)
    assert of_type(Reply, core.handle(wrong, 2.0)) == []
    assert core.counters["offences_not_owner"] == 2
    failed = BatchFailed(right.message.batch_id, SLICE, DIGITS, (0, 1), "Internal", "broken")
    assert not core.handle(WorkerSaid(replace(failed, **change)), 2.0)
    assert core.counters["offences_not_owner"] == 4
    assert answers(core.handle(right, 3.0)) == [1, 2]


def test_a_result_of_the_worker_that_was_thought_lost_still_counts() -> None:
    core = granted_core()
    core.handle(returned((0, 2)), 2.0)
    core.handle(TurnEnded(), 2.0)
    core.handle(grant((2, 2), batch_id=9), 3.0)
    assert answers(core.handle(computed(0, 1, batch_id=7), 4.0)) == [1, 2]


def test_outputs_that_name_a_request_twice_answer_it_once() -> None:
    core = granted_core()
    assert answers(core.handle(computed(0, 0, 1, batch_id=7), 3.0)) == [1, 2]
    assert core.counters["late_results"] == 1


def test_runs_that_name_a_request_twice_mean_it_once() -> None:
    core = linked_core()
    announced(core, 3)
    runs = (SeqRun(0, 2), SeqRun(1, 2), SeqRun(0, 1))
    actions = core.handle(SchedulerSaid(Dropped(DIGITS, runs, "Overloaded", "")), 1.0)
    assert refusals(actions) == [(1, "Overloaded"), (2, "Overloaded"), (3, "Overloaded")]


def test_a_client_that_says_what_is_not_for_clients_is_not_heard_for_a_while() -> None:
    core = linked_core()
    core.handle(asked(1), 1.0)
    said = ClientSaid(CLIENT, Grant(BatchId(1), SLICE, Incarnation("0"), DIGITS, 0, (), 0, 0.0, 0.0, ""))
    for _ in range(OFFENCES_MAX - 1):
        assert not core.handle(said, 2.0)
    assert of_type(Release, core.handle(said, 2.0)), "its requests go with it"
    assert core.counters["abandoned"] == 1
    ignored = asked(2)
    assert core.handle(ignored, 3.0) == [Release(ignored.payload)]
    core.handle(asked(3, client="client/2"), 3.0)
    assert core.counters["accepted"] == 2
    assert core.counters["offences_wrong_type"] == OFFENCES_MAX


def test_of_a_client_that_is_gone_nothing_is_remembered() -> None:
    core = linked_core()
    core.handle(ClientSaid(CLIENT, Stop(0.0)), 1.0)
    assert len(core.offences) == 1
    core.handle(Lost(PeerId(CLIENT), "gone"), 2.0)
    assert len(core.offences) == 0


def test_who_cannot_be_told_from_others_is_counted_but_never_cut_off() -> None:
    core = granted_core()
    for _ in range(2 * OFFENCES_MAX):
        core.handle(WorkerSaid(Stop(0.0)), 2.0)
        core.handle(SchedulerSaid(Host("node", (), ())), 2.0)  # type: ignore[arg-type]
    assert core.counters["offences_wrong_type"] == 4 * OFFENCES_MAX
    assert core.handle(directory(), 2.0) == []
    [reply, *_] = of_type(Reply, core.handle(computed(0, 1, batch_id=7), 3.0))
    assert isinstance(reply.message, Answer)
    assert reply.peer == PeerId(CLIENT)
