"""What roles say after weeks: an age that no message may hold would keep back the whole answer that it is in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
import pytest

from fabric import messages
from fabric.codec import checked, encode_parcel
from fabric.ids import FrontendId, Incarnation, ModelId, PeerId
from fabric.limits import DURATION_MAX_MS
from fabric.messages import (
    AnyMessage,
    Arrivals,
    BatchesRemembered,
    Directory,
    Done,
    Dropped,
    FiguresAsked,
    FrontendHello,
    GpuInfo,
    GpuSample,
    ModelsAsked,
    NodeHello,
    Parcel,
    RecordsAsked,
    RequestsRemembered,
    RunBatch,
    SliceState,
    StatusAsked,
    StatusListed,
    Telemetry,
)
from roles.frontend.events import ClientSaid, Reply, TurnEnded
from roles.node_agent.events import GpusSampled
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.scheduler.core import SchedulerCore
from tests.builders import asked, computed, directory, grant, model_info
from tests.frontend_stage import linked_core
from tests.unit.roles.node_agent.test_daemons import Agent
from tests.unit.roles.scheduler.test_core import AGENT, FIRST, FRONTEND, MODEL, NODE, hear, of_type
from tests.unit.roles.scheduler.test_unserved import (
    DAY_MS,
    SECOND,
    core_that_lost_its_slice,
    ready,
    told,
)

OPERATOR = PeerId("operator/00000000")
NEWEST = 1 << 52
EVERY_AGE = {
    ("BatchEntry", "sent_ago_ms"),
    ("BatchEntry", "ended_ago_ms"),
    ("GpuReport", "sampled_ago_ms"),
    ("RequestRecord", "ended_ago_ms"),
    ("SliceAbsence", "began_ago_ms"),
    ("SliceAbsence", "ended_ago_ms"),
}
days = pytest.mark.parametrize("later_ms", [12 * DAY_MS, 30 * DAY_MS])


def sent(*all_sends: Iterable[object]) -> list[AnyMessage]:
    """As they leave. Raises LocalProtocolError for one that cannot."""
    found = []
    for send in chain(*all_sends):
        if isinstance(send, Send | Reply):
            encode_parcel(checked(Parcel((), send.message)))
            found.append(send.message)
    return found


def ages(message: object) -> Iterator[tuple[str, str, float]]:
    """All that is said in it of how long ago something was."""
    if isinstance(message, tuple):
        yield from chain(*map(ages, message))
    elif isinstance(message, msgspec.Struct):
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if name.endswith("_ago_ms") and value is not None:
                yield type(message).__name__, name, value
            else:
                yield from ages(value)


def scheduler_with_a_past() -> SchedulerCore:
    """A batch ran, a slice was lost, came back, and was lost again."""
    core = core_that_lost_its_slice()
    gpu = GpuInfo(0, "a100", "cuda", 40 << 30, "GPU-0")
    hear(core, AGENT, NodeHello(NODE, FIRST, (gpu,), ()), 1_200.0)
    hear(core, AGENT, Telemetry(NODE, (GpuSample(0),), ()), 1_300.0)
    ready(core, SECOND, 1_400.0)
    (run,) = of_type(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 1_000.0), 1_500.0), RunBatch)
    done = Done(run.batch_id, run.slice_id, MODEL, "ok", 1, (), 0.1, 0.1, 6.0)
    hear(core, PeerId(f"worker-local-0/{SECOND}"), done, 1_520.0)
    told(core, SliceState.LOST, 1_600.0, SECOND, "killed")
    return core


def hello(core: SchedulerCore, now_ms: float) -> Iterable[Send]:
    return hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), now_ms)


@days
def test_what_a_scheduler_says(later_ms: float) -> None:
    core = scheduler_with_a_past()
    late = sent(hello(core, later_ms), hear(core, FRONTEND, Arrivals(MODEL, 1, 1, 1_000.0), later_ms))
    assert {type(one) for one in late} >= {Directory, Dropped}
    ready(core, Incarnation("3"), later_ms)
    told(core, SliceState.LOST, later_ms + 100.0, "3", "killed")
    again = sent(
        hello(core, later_ms + 200.0), hear(core, FRONTEND, Arrivals(MODEL, 2, 1, 9.0), later_ms + 200.0)
    )
    assert {type(one) for one in again} >= {Directory, Dropped}
    core.handle(Lost(AGENT, "closed"), later_ms + 300.0)
    asked_at_ms = 2 * later_ms
    said = sent(
        hear(core, OPERATOR, StatusAsked(), asked_at_ms),
        hear(core, OPERATOR, RecordsAsked(MODEL, NEWEST), asked_at_ms),
    )
    assert [type(one) for one in said] == [StatusListed, BatchesRemembered]
    found = {(owner, name): age_ms for owner, name, age_ms in chain(*map(ages, said))}
    assert found.keys() == EVERY_AGE - {("RequestRecord", "ended_ago_ms"), ("SliceAbsence", "ended_ago_ms")}
    assert set(found.values()) == {DURATION_MAX_MS}


def test_what_ended_longer_ago_than_can_be_said_is_left_out_and_what_lasts_is_told() -> None:
    core = scheduler_with_a_past()
    ready(core, Incarnation("3"), 2_000.0)
    (remembered,) = sent(hear(core, OPERATOR, RecordsAsked(MODEL, NEWEST), 11 * DAY_MS))
    assert isinstance(remembered, BatchesRemembered)
    assert len(remembered.absences) == 2
    told(core, SliceState.LOST, 11 * DAY_MS, "3", "killed again")
    (remembered,) = sent(hear(core, OPERATOR, RecordsAsked(MODEL, NEWEST), 30 * DAY_MS))
    assert isinstance(remembered, BatchesRemembered)
    assert [(one.reason, one.began_ago_ms) for one in remembered.absences] == [
        ("killed again", DURATION_MAX_MS)
    ]


@days
def test_what_a_frontend_says(later_ms: float) -> None:
    coming = model_info("coming", replicas=0, coming_in_ms=500.0)
    core = linked_core(model_info(), coming)
    core.handle(asked(1), 10.0)
    core.handle(TurnEnded(), 10.0)
    core.handle(grant((0, 1), batch_id=1), 11.0)
    core.handle(computed(0, batch_id=1), 15.0)
    core.handle(asked(2), 20.0)
    core.handle(Tick(), 9_000.0)
    questions = (RecordsAsked(ModelId(""), NEWEST), FiguresAsked(ModelId("")), ModelsAsked())
    said = sent(*(core.handle(ClientSaid(OPERATOR, question), later_ms) for question in questions))
    assert len(said) == len(questions)
    assert isinstance(said[0], RequestsRemembered)
    assert {one.ended_ago_ms for one in said[0].requests} == {DURATION_MAX_MS}
    sent(core.handle(directory((model_info(), coming)), later_ms), core.handle(asked(3), later_ms))


@days
def test_what_a_node_agent_says(later_ms: float) -> None:
    agent = Agent()
    agent.feed(GpusSampled((GpuSample(0),)))
    agent.now_ms = later_ms
    (listed,) = sent(agent.feed(Heard(OPERATOR, StatusAsked())))
    assert [*ages(listed)] == [("GpuReport", "sampled_ago_ms", DURATION_MAX_MS)]


def test_no_other_message_says_how_long_ago_something_was() -> None:
    """Who adds one bounds it with `fabric.limits.ago_ms`, and has it said above."""
    kinds = (kind for kind in vars(messages).values() if isinstance(kind, type))
    structs = [kind for kind in kinds if issubclass(kind, msgspec.Struct)]
    found = {(one.__name__, name) for one in structs for name in one.__struct_fields__ if "_ago_" in name}
    assert found == EVERY_AGE
