"""A model that goes to another shard: this one forgets it when every frontend has left it, and tells its section before."""

from __future__ import annotations

import json
from pathlib import Path

from fabric.ids import FrontendId, ModelId, PeerId
from fabric.messages import (
    Arrivals,
    Changed,
    Directory,
    Dropped,
    FrontendHello,
    Left,
    ModelSet,
    ModelsRemove,
    SectionAsked,
)
from roles.runtime.core import Lost
from roles.runtime.journal import replay
from roles.scheduler.planning.leaving_models import LEAVE_MS
from roles.scheduler.replay_start import about_scheduler, scheduler_from, settings_of
from tests.unit.roles.scheduler.test_controller import FIRST, FRONTEND, OPERATOR, Stage, add, model, two_nodes

SECOND = PeerId("frontend-1/00000001")
A = ModelId("a")
GONE_WHEN_LEFT = ModelsRemove(7, (A,), when_left=True)


def stage_with_two_frontends() -> Stage:
    stage = two_nodes(model("a"), model("b"))
    stage.hear(SECOND, FrontendHello(FrontendId("frontend-1"), FIRST, ("ipc:///f1",)))
    stage.run(10)
    stage.sent.clear()
    return stage


def answers(stage: Stage) -> list[tuple[str, str]]:
    found = [one.message for one in stage.sent if isinstance(one.message, Changed)]
    return [(one.status, one.code) for one in found]


def test_a_model_is_removed_when_the_last_frontend_has_left_it() -> None:
    stage = stage_with_two_frontends()
    stage.hear(OPERATOR, GONE_WHEN_LEFT)
    stage.hear(FRONTEND, Left(A))
    stage.run(1_000)
    assert answers(stage) == []
    stage.hear(SECOND, Left(A))
    stage.run(1_000)
    assert answers(stage) == [("ok", "")]
    assert "left/gpu0/0" not in stage.hosted()
    assert not [one for one in stage.sent if isinstance(one.message, Dropped)]


def test_what_is_queued_is_granted_first() -> None:
    stage = stage_with_two_frontends()
    for number in range(3):  # the first is a batch at once, the others wait for it
        stage.hear(FRONTEND, Arrivals(A, number, 1, 100.0))
    stage.hear(FRONTEND, Left(A))
    stage.hear(SECOND, Left(A))
    stage.sent.clear()
    stage.hear(OPERATOR, GONE_WHEN_LEFT)
    stage.run(30)
    assert answers(stage) == []
    assert not [
        one for one in stage.sent if isinstance(one.message, Dropped) and one.message.code == "ModelNotFound"
    ]


def test_a_frontend_that_is_gone_need_not_leave() -> None:
    stage = stage_with_two_frontends()
    stage.hear(FRONTEND, Left(A))
    stage.hear(OPERATOR, GONE_WHEN_LEFT)
    stage.take(stage.core.handle(Lost(SECOND, "silent"), stage.now_ms))
    stage.run(1_000)
    assert answers(stage) == [("ok", "")]


def test_one_that_comes_back_or_begins_anew_has_to_leave_again() -> None:
    for said in (Left(A, is_back=True), FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",))):
        stage = stage_with_two_frontends()
        stage.hear(FRONTEND, Left(A))
        stage.hear(FRONTEND, said)
        stage.hear(SECOND, Left(A))
        stage.hear(OPERATOR, GONE_WHEN_LEFT)
        stage.run(1_000)
        assert answers(stage) == []
        stage.hear(FRONTEND, Left(A))
        stage.run(1_000)
        assert answers(stage) == [("ok", "")]


def test_a_frontend_that_does_not_leave_keeps_the_model_where_it_is() -> None:
    stage = stage_with_two_frontends()
    stage.hear(FRONTEND, Left(A))
    stage.hear(OPERATOR, GONE_WHEN_LEFT)
    stage.run(LEAVE_MS + 1_000)
    (found,) = [one.message for one in stage.sent if isinstance(one.message, Changed)]
    assert (found.status, found.code) == ("refused", "Busy")
    assert "frontend-1 has not left a" in found.reason
    assert stage.code_of("a") == ""


def test_a_model_that_is_not_here_is_refused_at_once() -> None:
    stage = stage_with_two_frontends()
    stage.hear(OPERATOR, ModelsRemove(7, (ModelId("x"),), when_left=True))
    assert answers(stage) == [("refused", "UnknownModel")]


def test_a_model_that_was_moved_back_meanwhile_stays() -> None:
    """Two operators move it: each raises its term in one shard, and would have it removed in the other one's."""
    stage = stage_with_two_frontends()
    for peer in (FRONTEND, SECOND):
        stage.hear(peer, Left(A))
    stage.hear(OPERATOR, ModelSet(8, A, term=3))
    stage.sent.clear()
    stage.hear(OPERATOR, ModelsRemove(7, (A,), when_left=True, term=0))
    stage.run(1_000)
    assert answers(stage) == [("refused", "Busy")]
    assert A in {one.model_id for one in stage.status().models}
    stage.sent.clear()
    stage.hear(OPERATOR, ModelsRemove(9, (A,), when_left=True, term=3))
    stage.run(1_000)
    assert answers(stage) == [("ok", "")]


def test_other_changes_do_not_wait_for_models_that_leave() -> None:
    stage = stage_with_two_frontends()
    stage.hear(OPERATOR, GONE_WHEN_LEFT)
    stage.hear(OPERATOR, ModelSet(8, ModelId("b"), slo_ms=50.0))
    stage.run(100)
    assert answers(stage) == [("ok", "")]


def test_a_section_is_told_as_it_is_now() -> None:
    stage = stage_with_two_frontends()
    stage.hear(OPERATOR, ModelSet(8, A, slo_ms=50.0, rate_rps=70.0))
    stage.run(100)
    stage.sent.clear()
    stage.hear(OPERATOR, SectionAsked(9, A))
    section = json.loads(stage.answer().document)
    assert (section["name"], section["slo_ms"], section["rate_rps"], section["term"]) == ("a", 50.0, 70.0, 0)
    stage.sent.clear()
    stage.hear(OPERATOR, SectionAsked(9, ModelId("x")))
    assert answers(stage) == [("refused", "UnknownModel")]


def test_a_term_is_told_to_frontends_without_a_plan_and_outlives_the_scheduler() -> None:
    stage = stage_with_two_frontends()
    stage.hear(OPERATOR, ModelSet(8, A, term=3))
    stage.run(100)
    assert (answers(stage), stage.asked) == ([("ok", "")], [])
    (listed, *_) = [one.message for one in stage.sent if isinstance(one.message, Directory)]
    assert {one.model_id: one.term for one in listed.models} == {"a": 3, "b": 0}
    scheduler = stage.scheduler
    assert scheduler.controller is not None
    about = about_scheduler(scheduler.settings(), stage.batching, scheduler.controller.settings())
    settings, _, planning = settings_of(about)
    assert {one.model_id: one.term for one in settings.models} == {"a": 3, "b": 0}
    assert planning is not None
    assert [section.get("term") for section in planning.desired.sections] == [3, None]


def test_a_term_only_grows() -> None:
    stage = stage_with_two_frontends()
    stage.hear(OPERATOR, ModelSet(8, A, term=3))
    stage.sent.clear()
    stage.hear(OPERATOR, ModelSet(9, A, term=3))
    assert answers(stage) == [("refused", "InvalidConfig")]


def test_a_model_comes_with_the_term_of_its_section() -> None:
    stage = stage_with_two_frontends()
    document = add("c").document.replace('"slo_ms"', '"term": 2, "slo_ms"')
    stage.hear(OPERATOR, type(add("c"))(1, document))
    stage.run(100)
    assert {one.model_id: one.term for one in stage.status().models}[ModelId("c")] == 2


def test_a_removal_that_waited_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    stage = Stage(
        model("a"), model("b"), nodes=[{"host": "l"}, {"host": "r"}], placement="exclusive", recorded_in=path
    )
    stage.hear(OPERATOR, SectionAsked(9, A))
    stage.hear(OPERATOR, GONE_WHEN_LEFT)
    stage.hear(FRONTEND, Left(A))
    stage.run(1_000)
    assert stage.journal is not None
    stage.journal.close()
    assert replay(path, scheduler_from).difference is None
