"""What a frontend says of inputs that a worker may read after their request has its end: nothing else is to lie there yet."""

from __future__ import annotations

import numpy as np
import pytest

from fabric.clock import VirtualClock
from fabric.ids import BatchId
from fabric.link import NamedTensor
from fabric.messages import Answer, CancelRequest, Dropped, Refusal, Returned, SeqRun
from fabric.shared_memory import LENT_MS, Arena
from fabric.tensors import share
from policies.graphs.graph import Stage
from roles.frontend.core import FrontendCore
from roles.frontend.events import Asked, ClientSaid, FrontendEvent, Release, Reply, SchedulerSaid, TurnEnded
from roles.runtime.core import Lost, Tick
from roles.runtime.payloads import Payloads
from tests.applications_stage import ApplicationStage, served
from tests.builders import CLIENT, DIGITS, asked, computed, directory, grant, model_info, of_type
from tests.frontend_stage import linked_core

FIRST = (SeqRun(0, 1),)


def announced() -> tuple[FrontendCore, Asked]:
    """One request, of the seq 0."""
    core, event = linked_core(), asked(1, budget_ms=1_000.0)
    core.handle(event, 0.0)
    core.handle(TurnEnded(), 0.0)
    return core, event


def may_be_read(core: FrontendCore, request: Asked, end: FrontendEvent, now_ms: float) -> tuple[bool, bool]:
    """As the client hears it with the end, and as the payload is released."""
    actions = core.handle(end, now_ms)
    (released,) = [one for one in of_type(Release, actions) if one.payload == request.payload]
    told = [reply.message for reply in of_type(Reply, actions)]
    (said,) = [message for message in told if isinstance(message, Answer | Refusal)]
    return said.may_be_read, released.may_be_read


ENDS: dict[str, tuple[FrontendEvent, float]] = {
    "refused": (Tick(), 1_000.0),
    "cancelled": (ClientSaid(CLIENT, CancelRequest(1)), 5.0),
    "dropped": (SchedulerSaid(Dropped(DIGITS, FIRST, "Overloaded", "too much")), 5.0),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_granted", [True, False])
def test_of_a_request_that_ends_without_outputs_a_worker_may_read_what_was_granted(
    end: str, is_granted: bool
) -> None:
    core, request = announced()
    if is_granted:
        core.handle(grant((0, 1)), 1.0)
    assert may_be_read(core, request, *ENDS[end]) == (is_granted, is_granted)


def test_of_one_whose_client_is_gone_too() -> None:
    core, request = announced()
    core.handle(grant((0, 1)), 1.0)
    assert of_type(Release, core.handle(Lost(CLIENT, "closed"), 2.0)) == [Release(request.payload, True)]


def test_who_has_answered_has_read_but_not_another_that_has_it_too() -> None:
    core, request = announced()
    core.handle(grant((0, 1)), 1.0)
    assert may_be_read(core, request, computed(0), 9.0) == (False, False)
    core, request = announced()
    core.handle(grant((0, 1)), 1.0)
    core.handle(SchedulerSaid(Returned(BatchId(1), DIGITS, FIRST, "late")), 2.0)
    core.handle(TurnEnded(), 2.0)
    core.handle(grant((1, 1), batch_id=2), 3.0)
    assert may_be_read(core, request, computed(0), 9.0) == (True, True), "the batch 2 has it"


def test_of_an_application_s_request_as_long_as_a_stage_is_open_that_was_granted() -> None:
    """What it brought may be that stage's input."""

    def begun() -> ApplicationStage:
        stage = ApplicationStage(served(Stage("a", DIGITS), Stage("b", DIGITS, is_optional=True)))
        stage.do(directory([model_info()]), 0.0)
        stage.ask(1, 0.0, budget_ms=100.0)
        for name in "ab":
            stage.make(stage.job(name), 1, 0.0)
        return stage

    stage = begun()
    stage.do(ClientSaid(CLIENT, CancelRequest(1)), 1.0)
    assert not stage.refusals[1].may_be_read
    for is_all in (True, False):
        stage = begun()
        (_, first), (_, second) = stage.take(), stage.take()
        stage.do(grant((first, 2)), 1.0)
        stage.do(computed(*((first, second) if is_all else (first,))), 9.0)
        stage.do(Tick(), 100.0)
        assert stage.answers[1].may_be_read is not is_all


def test_what_is_released_so_is_lent_for_a_moment() -> None:
    clock = VirtualClock(0.0)
    arena = Arena(1 << 20, clock)
    payloads = Payloads(1 << 30)
    for is_lent in (False, True):
        tensor = NamedTensor("x", np.full(1 << 20, 7, np.uint8))
        assert share(tensor, arena), "all of it, as nothing was lent"
        handle = payloads.put([tensor])
        assert handle is not None
        del tensor
        payloads.release(handle, may_be_read=is_lent)
    assert arena.put(memoryview(b"x")) is None
    clock.advance(LENT_MS)
    assert arena.put(memoryview(b"x")) is not None
