"""What a frontend does when slices, or other frontends, are lost, and when it ends itself."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fabric.errors import nothing_ready
from fabric.ids import BatchId, ModelId, PeerId
from fabric.messages import (
    Answer,
    Arrivals,
    Dropped,
    HeadInfo,
    ModelsAsked,
    ModelsListed,
    Ping,
    Refusal,
    Returned,
    SeqRun,
    Unready,
)
from roles.frontend.core import FrontendCore
from roles.frontend.drain import DRAIN_MS_MAX, UNDERWAY_MS
from roles.frontend.events import Asked, ClientSaid, Release, Reply, SchedulerSaid, TurnEnded
from roles.frontend.return_margin import ReturnPath
from roles.runtime.core import Lost, Tick
from roles.runtime.process_events import StopAsked
from tests.builders import (
    BOOT,
    CLIENT,
    DIGITS,
    asked,
    computed,
    directory,
    frontend_settings,
    grant,
    model_info,
    of_type,
    slice_info,
)
from tests.frontend_stage import linked_core, refusals, told

# ---------------------------------------------------------------- models on their way, and frontends that were lost


def test_a_request_waits_for_a_slice_that_is_ready_before_its_budget_ends() -> None:
    coming = replace(model_info(replicas=0), coming_in_ms=50.0)
    core = linked_core(coming)
    assert refusals(core.handle(asked(1, budget_ms=49.0), 0.0)) == [(1, "NoReplica")]
    assert refusals(core.handle(asked(2, budget_ms=60.0), 0.0)) == []
    assert len(of_type(Arrivals, told(core.handle(TurnEnded(), 0.0)))) == 1, "the scheduler has it"
    assert refusals(core.handle(asked(3, budget_ms=60.0), 20.0)) == [], "20 ms of the start have passed"
    assert refusals(core.handle(asked(4, budget_ms=29.0), 20.0)) == [(4, "NoReplica")]


def test_one_who_cannot_wait_for_the_slice_hears_when_it_is_there() -> None:
    core = linked_core(replace(model_info(replicas=0), coming_in_ms=50.0))
    reply = refusal_of(core, 20.0, 10.0)
    assert (reply.code, reply.reason, reply.retry_after_ms) == ("NoReplica", nothing_ready(DIGITS), 40.0)
    core = linked_core(model_info(replicas=0))
    assert refusal_of(core, 20.0, 0.0).retry_after_ms is None, "nothing is coming, as far as is known"


def test_clients_are_told_how_long_it_is_from_now_until_a_slice_is_ready() -> None:
    coming = replace(model_info(replicas=0), coming_in_ms=50.0)
    vision = replace(coming, model_id=ModelId("vision"), heads=(HeadInfo(ModelId("cats"), 50.0),))
    core = linked_core(coming, vision, model_info("there"), model_info("none", replicas=0))
    for now_ms, left_ms in ((0.0, 50.0), (49.0, 1.0), (50.0, None), (9e9, None)):
        (reply,) = of_type(Reply, core.handle(ClientSaid(CLIENT, ModelsAsked()), now_ms))
        assert isinstance(reply.message, ModelsListed)
        told_ms = {str(info.model_id): info.coming_in_ms for info in reply.message.models}
        assert told_ms == {DIGITS: left_ms, "cats": left_ms, "there": None, "none": None}
    assert len(of_type(Release, core.handle(asked(1, budget_ms=1.0), 9e9))) == 0, "the scheduler knows best"


@pytest.mark.parametrize(("code", "is_blamed"), [("NoReplica", False), ("DeadlineExceeded", True)])
def test_for_want_of_a_slice_no_margin_is_to_blame(
    code: str, is_blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blamed: list[int] = []
    monkeypatch.setattr(ReturnPath, "note_dropped", lambda _, count: blamed.append(count))
    core = linked_core()
    core.handle(asked(1), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(SchedulerSaid(Dropped(DIGITS, (SeqRun(0, 1),), code, "none")), 1.0)
    assert bool(blamed) is is_blamed


def refusal_of(core: FrontendCore, budget_ms: float, now_ms: float) -> Refusal:
    (reply,) = of_type(Reply, core.handle(asked(1, budget_ms=budget_ms), now_ms))
    assert isinstance(reply.message, Refusal)
    return reply.message


def test_what_another_frontend_spent_of_a_budget_is_spent() -> None:
    core = linked_core(model_info(slo_ms=100.0))
    again = asked(1)
    again = replace(again, message=replace(again.message, spent_ms=40.0))
    core.handle(again, 0.0)
    core.handle(TurnEnded(), 0.0)
    assert refusals(core.handle(Tick(), 59.9)) == []
    assert refusals(core.handle(Tick(), 60.0)) == [(1, "DeadlineExceeded")]
    late = asked(2, budget_ms=30.0)
    late = replace(late, message=replace(late.message, spent_ms=31.0))
    assert refusals(core.handle(late, 61.0)) == [(2, "DeadlineExceeded")]


def test_what_must_not_run_twice_is_not_taken_from_a_frontend_that_was_lost() -> None:
    core = linked_core(replace(model_info(), is_idempotent=False))
    again = asked(1)
    again = replace(again, message=replace(again.message, may_have_run=True))
    assert refusals(core.handle(again, 0.0)) == [(1, "WorkerLost")]
    never_sent = asked(2)
    never_sent = replace(never_sent, message=replace(never_sent.message, spent_ms=1.0))
    assert refusals(core.handle(never_sent, 0.0)) == [], "it only waited for a connection"


def sent_again(request_no: int = 1, model_id: str = DIGITS) -> Asked:
    """By a client that had lost its frontend with it."""
    again = asked(request_no, model_id)
    return replace(again, message=replace(again.message, may_have_run=True))


@pytest.mark.parametrize("is_idempotent", [True, False])
@pytest.mark.parametrize("is_granted", [True, False])
def test_what_is_sent_again_and_still_here_is_answered_once(is_idempotent: bool, is_granted: bool) -> None:
    """Its client lost us by silence, then the frontend that it went to: it is the request that we have."""
    core = linked_core(replace(model_info(), is_idempotent=is_idempotent))
    core.handle(asked(1), 0.0)
    core.handle(TurnEnded(), 0.0)
    again = sent_again()
    if is_granted:
        core.handle(grant((0, 1)), 1.0)
    assert core.handle(again, 2.0) == [Release(again.payload)]
    assert told(core.handle(TurnEnded(), 2.0)) == []
    if not is_granted:
        core.handle(grant((0, 1)), 3.0)
    (answer,) = of_type(Reply, core.handle(computed(0), 4.0))
    assert isinstance(answer.message, Answer)
    assert answer.message.request_no == 1
    assert core.counters["pending"] == 0


def test_another_request_under_a_pending_ones_number_is_its_clients_fault() -> None:
    core = linked_core(model_info(), replace(model_info(), model_id=ModelId("other")))
    core.handle(asked(1), 0.0)
    assert refusals(core.handle(asked(1), 1.0)) == [(1, "InvalidInput")], "never sent before"
    assert refusals(core.handle(sent_again(model_id="other"), 1.0)) == [(1, "InvalidInput")]


def test_what_must_not_run_twice_is_announced_again_only_if_it_has_not_run() -> None:
    core = linked_core(replace(model_info(), is_idempotent=False))
    for number in (1, 2):
        core.handle(asked(number), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1), batch_id=1), 1.0)
    core.handle(grant((1, 1), batch_id=2), 1.0)
    returned = Returned(BatchId(1), ModelId(DIGITS), (SeqRun(0, 1),), "its slice was late")
    assert refusals(core.handle(SchedulerSaid(returned), 2.0)) == [], "it has not run"
    gone = directory([replace(model_info(), is_idempotent=False)], slices=[slice_info("other")])
    assert refusals(core.handle(gone, 3.0)) == [(2, "WorkerLost")]


def test_what_comes_back_of_a_model_that_was_removed_is_refused_at_once() -> None:
    core = linked_core()
    for number in (1, 2):
        core.handle(asked(number), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1), batch_id=1), 1.0)
    core.handle(grant((1, 1), batch_id=2), 1.0)
    assert refusals(core.handle(directory([]), 2.0)) == [], "what its worker has it may finish"
    returned = Returned(BatchId(1), ModelId(DIGITS), (SeqRun(0, 1),), "its slice was late")
    assert refusals(core.handle(SchedulerSaid(returned), 3.0)) == [(1, "ModelNotFound")]
    assert refusals(core.handle(directory([], slices=[]), 4.0)) == [(2, "ModelNotFound")]
    assert core.counters["pending"] == 0


# ---------------------------------------------------------------- the end, in order


def test_a_frontend_without_a_scheduler_wants_no_requests() -> None:
    core = FrontendCore(frontend_settings())
    [reply] = of_type(Reply, core.handle(ClientSaid(CLIENT, Ping(3)), 0.0))
    assert reply.message == Unready(BOOT)


def test_a_frontend_that_stops_tells_its_clients_and_answers_what_it_has() -> None:
    core = linked_core(model_info(slo_ms=1_000.0))
    core.handle(ClientSaid(CLIENT, Ping(1)), 0.0)
    gone = PeerId("client/gone")
    core.handle(ClientSaid(gone, Ping(1)), 0.0)
    core.handle(Lost(gone, "closed"), 1.0)
    core.handle(asked(1), 2.0)
    assert not core.is_drained(1e9)
    [reply] = core.handle(StopAsked(), 10.0)
    assert reply == Reply(CLIENT, Unready(BOOT))
    assert core.handle(StopAsked(), 11.0) == []
    assert core.wake_at_ms == 10.0 + UNDERWAY_MS
    assert refusals(core.handle(asked(2), 12.0)) == [], "it left its client before that heard"
    core.handle(TurnEnded(), 12.0)
    core.handle(grant((0, 2)), 13.0)
    core.handle(Tick(), 10.0 + UNDERWAY_MS)
    assert not core.is_drained(10.0 + UNDERWAY_MS), "two answers are missing"
    core.handle(computed(0, 1), 300.0)
    assert core.is_drained(300.0)


def test_a_frontend_that_has_nothing_waits_for_what_is_underway_to_it() -> None:
    core = linked_core()
    core.handle(StopAsked(), 10.0)
    assert not core.is_drained(10.0 + UNDERWAY_MS - 1)
    assert core.is_drained(10.0 + UNDERWAY_MS)


def test_the_end_is_bounded_whatever_is_pending() -> None:
    core = linked_core(model_info(slo_ms=1e6))
    core.handle(asked(1), 0.0)
    core.handle(StopAsked(), 10.0)
    core.handle(Tick(), 10.0 + UNDERWAY_MS)
    assert core.wake_at_ms == 10.0 + DRAIN_MS_MAX
    assert core.is_drained(10.0 + DRAIN_MS_MAX)
