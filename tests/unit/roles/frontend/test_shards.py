"""A frontend with several shards: each model's requests go to one of them, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fabric.ids import ModelId
from fabric.messages import (
    LEAVING_TERM,
    Arrivals,
    Directory,
    Dropped,
    FrontendHello,
    Left,
    ModelInfo,
    Refusal,
    SeqRun,
)
from roles.frontend.core import SHARDS_WAIT_MS, FrontendCore
from roles.frontend.events import (
    FrontendAction,
    PushInputs,
    Reply,
    SchedulerLost,
    SchedulerSaid,
    Tell,
    TurnEnded,
    Unannounced,
    UseScheduler,
)
from roles.frontend.shards import Shards
from roles.runtime.core import Tick
from tests.builders import asked, directory, frontend_settings, grant, model_info, of_type, slice_info

A, B = ModelId("a"), ModelId("b")
OF_A, OF_B = model_info(A), model_info(B)
HERE, THERE = slice_info("h0/gpu0/0"), slice_info("h1/gpu0/0")


def frontend(*directories: SchedulerSaid) -> FrontendCore:
    """Linked with as many shards as there are directories."""
    core = FrontendCore(frontend_settings(shards=max(2, len(directories))))
    core.handle(Tick(), 0.0)
    for one in directories:
        core.handle(one, 0.0)
    return core


def two_shards() -> FrontendCore:
    return frontend(directory([OF_A], [HERE]), directory([OF_B], [THERE], shard=1))


def arrivals(actions: Sequence[FrontendAction]) -> list[tuple[str, int, int]]:
    """Model, first seq and shard of what is announced."""
    return [
        (tell.message.model_id, tell.message.first_seq, tell.shard)
        for tell in of_type(Tell, actions)
        if isinstance(tell.message, Arrivals)
    ]


def lefts(actions: Sequence[FrontendAction]) -> list[tuple[str, bool, int]]:
    return [
        (tell.message.model_id, tell.message.is_back, tell.shard)
        for tell in of_type(Tell, actions)
        if isinstance(tell.message, Left)
    ]


def refused(actions: Sequence[FrontendAction]) -> list[str]:
    replies = [reply.message for reply in of_type(Reply, actions)]
    return [message.code for message in of_type(Refusal, replies)]


def ask(core: FrontendCore, model_id: str, number: int = 1, now_ms: float = 1.0) -> Sequence[FrontendAction]:
    return [*core.handle(asked(number, model_id), now_ms), *core.handle(TurnEnded(), now_ms)]


def pushed(actions: Sequence[FrontendAction]) -> list[tuple[int, ...]]:
    return [push.message.live_seqs for push in of_type(PushInputs, actions)]


def test_each_shard_hears_of_its_own_models_requests_only() -> None:
    core = two_shards()
    assert arrivals(ask(core, A)) == [(A, 0, 0)]
    assert arrivals(ask(core, B, 2)) == [(B, 0, 1)]


def test_both_shards_are_told_hello_until_they_list_the_frontend() -> None:
    core = FrontendCore(frontend_settings(shards=2))
    hellos = [tell.shard for tell in of_type(Tell, core.handle(Tick(), 0.0))]
    assert hellos == [0, 1]
    core.handle(directory([OF_A], [HERE]), 1.0)
    again = of_type(Tell, core.handle(Tick(), 250.0))
    assert [(type(tell.message), tell.shard) for tell in again] == [(FrontendHello, 1)]


def test_the_loss_of_one_shard_is_not_noticed_by_the_other() -> None:
    core = two_shards()
    core.handle(SchedulerLost(shard=0), 1.0)
    assert arrivals(ask(core, A)) == []
    assert arrivals(ask(core, B, 2)) == [(B, 0, 1)]
    back = [*core.handle(directory([OF_A], [HERE]), 5.0), *core.handle(TurnEnded(), 5.0)]
    assert arrivals(back) == [(A, 0, 0)]


def test_a_lost_shards_requests_end_by_their_deadlines() -> None:
    core = two_shards()
    core.handle(SchedulerLost(shard=0), 1.0)
    ask(core, A)
    assert refused(core.handle(Tick(), 200.0)) == ["DeadlineExceeded"]


def test_a_model_that_only_an_unheard_shard_can_have_is_asked_for_again() -> None:
    core = FrontendCore(frontend_settings(shards=2))
    core.handle(directory([OF_A], [HERE]), 0.0)
    [reply] = of_type(Reply, ask(core, B))
    assert isinstance(reply.message, Refusal)
    assert (reply.message.code, reply.message.retryable) == ("NoReplica", True)
    assert "shard 1" in reply.message.reason


def test_a_model_that_no_shard_has_is_not_found() -> None:
    assert refused(ask(two_shards(), "c")) == ["ModelNotFound"]


def test_clients_are_wanted_when_all_shards_are_linked_or_one_is_down_for_long() -> None:
    core = FrontendCore(frontend_settings(shards=2))
    core.handle(directory([OF_A], [HERE]), 1.0)
    assert core.counters["is_ready"] == 0.0
    core.handle(Tick(), SHARDS_WAIT_MS)
    assert core.counters["is_ready"] == 1.0
    assert two_shards().counters["is_ready"] == 1.0


def test_a_shard_cannot_decide_about_another_ones_requests() -> None:
    core = two_shards()
    ask(core, A)
    assert pushed(core.handle(grant((0, 1), model_id=A, slice_id=THERE.slice_id, shard=1), 2.0)) == [()]
    runs = (SeqRun(0, 1),)
    assert core.handle(SchedulerSaid(Dropped(A, runs, "Overloaded", ""), shard=1), 2.0) == []
    assert pushed(core.handle(grant((0, 1), model_id=A, slice_id=HERE.slice_id), 2.0)) == [(0,)]


def test_the_standby_of_one_shard_takes_over_that_shard_alone() -> None:
    core = two_shards()
    taken = SchedulerSaid(directory([OF_B], [THERE]).message, epoch=17, scheduler=3, shard=1)
    assert of_type(UseScheduler, core.handle(taken, 2.0)) == [UseScheduler(3, 1)]
    assert arrivals(ask(core, A)) == [(A, 0, 0)]
    assert arrivals(ask(core, B, 2)) == [(B, 0, 1)]


# ---------------------------------------------------------------- a model moves


def moving(term: int = 1, replicas: int = 1) -> SchedulerSaid:
    """The new shard lists the model too."""
    return directory([OF_B, model_info(A, term=term, replicas=replicas)], [THERE], shard=1)


def test_a_model_stays_while_the_new_shard_has_no_slice_for_it() -> None:
    core = two_shards()
    assert lefts(core.handle(moving(replicas=0), 1.0)) == [(A, False, 1)], "the new shard is told so"
    assert arrivals(ask(core, A)) == [(A, 0, 0)]


def test_a_model_stays_while_the_new_shard_has_it_in_no_higher_term() -> None:
    core = two_shards()
    core.handle(moving(term=0), 1.0)
    assert arrivals(ask(core, A)) == [(A, 0, 0)]


def test_the_next_requests_go_to_the_new_shard_and_the_old_one_is_told() -> None:
    core = two_shards()
    ask(core, A)
    assert lefts(core.handle(moving(), 2.0)) == [(A, False, 0)]
    assert arrivals(ask(core, A, 2, 3.0)) == [(A, 1, 1)]
    assert pushed(core.handle(grant((0, 1), model_id=A, slice_id=HERE.slice_id), 4.0)) == [(0,)], (
        "what was announced there before is granted there"
    )


def test_what_is_still_queued_where_the_model_is_gone_goes_to_the_new_shard() -> None:
    core = two_shards()
    ask(core, A)
    core.handle(moving(), 2.0)
    dropped = SchedulerSaid(Dropped(A, (SeqRun(0, 1),), "ModelNotFound", "it was removed"))
    assert refused(core.handle(dropped, 3.0)) == []
    assert arrivals(core.handle(TurnEnded(), 3.0)) == [(A, 1, 1)]


def test_so_does_what_was_announced_there_when_its_directory_drops_the_model() -> None:
    core = two_shards()
    ask(core, A)
    core.handle(moving(), 2.0)
    assert refused(core.handle(directory([], [HERE]), 3.0)) == []
    assert arrivals(core.handle(TurnEnded(), 3.0)) == [(A, 1, 1)]
    assert core.counters["requests_moved"] == 1


def test_what_waits_for_a_model_that_is_gone_ends_at_once_also_while_a_shard_does_not_answer() -> None:
    """As what comes later does: the other shard may have it, so it is worth another try."""
    for is_said_by in (
        directory([], [HERE]),
        SchedulerSaid(Dropped(A, (SeqRun(0, 1),), "ModelNotFound", "")),
    ):
        core = two_shards()
        ask(core, A)
        core.handle(SchedulerLost(shard=1), 2.0)
        if isinstance(is_said_by.message, Dropped):
            core.handle(directory([], [HERE]), 3.0)
            assert refused(core.handle(is_said_by, 3.0)) == [], "it has its answer"
        else:
            [reply] = [one.message for one in of_type(Reply, core.handle(is_said_by, 3.0))]
            assert isinstance(reply, Refusal)
            assert (reply.code, reply.retryable) == ("NoReplica", True)
            assert "shard 1" in reply.reason
        assert refused(ask(core, A, 2, 4.0)) == ["NoReplica"]


class _Unwalked(dict[ModelId, ModelInfo]):
    """Another shard's models: they may be looked up."""

    def __iter__(self) -> Iterator[ModelId]:
        raise AssertionError("a directory of one shard costs nothing of the others' models")


def test_a_directory_costs_what_is_new_in_it_and_not_what_there_is() -> None:
    shards = Shards(frontend_settings(shards=2), 0.0)
    first, second = shards.links
    for link, info in ((first, OF_A), (second, OF_B)):
        shards.heard(link, Directory(1, (info,), (), ()), is_listed=True, now_ms=0.0)
    assert list(shards.untold()) == []
    second.known.models = _Unwalked(second.known.models)
    same, routed = shards.heard(first, Directory(2, (OF_A,), (), ()), is_listed=True, now_ms=1.0)
    assert (same.changed, same.removed, routed.moved) == ((), (), ())
    both = Directory(3, (OF_A, model_info(B, term=1)), (), ())
    _, routed = shards.heard(first, both, is_listed=True, now_ms=2.0)
    assert routed.moved == (B,)
    assert [(link.number, left.model_id) for link, left in shards.untold()] == [(1, B)]
    assert list(shards.untold()) == []


def test_one_that_the_file_gives_to_another_shard_is_asked_for_there_as_soon_as_it_is_ready() -> None:
    leaving = model_info(A, term=LEAVING_TERM)
    core = frontend(directory([OF_B], [HERE]), directory([leaving], [THERE], shard=1))
    assert arrivals(ask(core, A)) == [(A, 0, 1)]
    core.handle(directory([OF_B, model_info(A, replicas=0)], [HERE]), 2.0)
    assert arrivals(ask(core, A, 2, 3.0)) == [(A, 1, 1)], "nothing serves it there yet"
    assert lefts(core.handle(directory([OF_B, OF_A], [HERE]), 4.0)) == [(A, True, 0), (A, False, 1)]
    assert arrivals(ask(core, A, 3, 5.0)) == [(A, 2, 0)]


def test_a_frontend_that_loses_the_new_shard_is_back_at_the_old_one() -> None:
    core = two_shards()
    core.handle(moving(), 1.0)
    assert lefts(core.handle(SchedulerLost(shard=1), 2.0)) == [(A, True, 0)]
    assert arrivals(ask(core, A, now_ms=3.0)) == [(A, 0, 0)]


def test_a_shard_that_begins_anew_is_told_again_what_was_left() -> None:
    core = two_shards()
    core.handle(moving(), 1.0)
    core.handle(SchedulerLost(shard=0), 2.0)
    core.handle(Tick(), 2.0)
    assert lefts(core.handle(directory([OF_A], [HERE]), 3.0)) == [(A, False, 0)]


def test_a_leave_that_could_not_be_sent_is_told_again() -> None:
    core = two_shards()
    core.handle(moving(), 1.0)
    core.handle(Unannounced(Left(A), 0), 2.0)
    core.handle(Tick(), 2.0)
    assert lefts(core.handle(directory([OF_A], [HERE]), 3.0)) == [(A, False, 0)]


def test_what_could_not_be_announced_to_a_shard_goes_to_the_one_that_its_model_went_to_before() -> None:
    """Two runs are refused by a full queue, or one by that of a scheduler that is lost by then."""
    for lost_first in (False, True):
        core = frontend(directory([model_info(A, term=2)], [HERE]), moving())
        told = of_type(Tell, [action for number in (1, 2) for action in ask(core, A, number)])
        first, second = [tell.message for tell in told if isinstance(tell.message, Arrivals)]
        if lost_first:
            core.handle(SchedulerLost(shard=0), 2.0)
        else:
            core.handle(Unannounced(first, 0), 2.0)
            assert arrivals(core.handle(TurnEnded(), 2.0)) == [(A, 2, 1)]
        core.handle(Unannounced(second, 0), 3.0)
        again = arrivals(core.handle(TurnEnded(), 3.0))
        assert again == [(A, 2 if lost_first else 3, 1)]


def test_a_shard_that_had_it_ready_is_waited_for_and_not_one_that_has_it_not_ready_yet() -> None:
    """Both schedulers read a file that moves the model, and the new shard's is back first."""
    core = frontend(directory([OF_A], [HERE]), directory([OF_B], [THERE], shard=1))
    core.handle(SchedulerLost(shard=0), 2.0)
    core.handle(SchedulerLost(shard=1), 2.0)
    coming = model_info(A, replicas=0)
    core.handle(directory([OF_B, coming], [THERE], shard=1), 3.0)
    assert refused(found := ask(core, A, 1, 4.0)) == []
    assert arrivals(found) == [], "nobody could serve it"
    leaving = model_info(A, term=LEAVING_TERM)
    back = [*core.handle(directory([leaving], [HERE]), 5.0), *core.handle(TurnEnded(), 5.0)]
    assert [(model_id, shard) for model_id, _, shard in arrivals(back)] == [(A, 0)]


def test_a_shard_whose_slices_are_about_to_say_that_they_are_ready_comes_before_one_that_expects_none() -> (
    None
):
    """Both schedulers have read a file that moves the model, and the one that has its slices has just begun again."""
    core = frontend(directory([OF_A], [HERE]), directory([OF_B], [THERE], shard=1))
    core.handle(directory([model_info(A, replicas=0, coming_in_ms=0.0, term=LEAVING_TERM)]), 2.0)
    core.handle(directory([OF_B, model_info(A, replicas=0)], [THERE], shard=1), 3.0)
    assert refused(found := ask(core, A, 1, 4.0)) == []
    assert arrivals(found) == [(A, 0, 0)]


def test_of_two_shards_that_expect_a_slice_the_sooner_is_asked() -> None:
    core = frontend(directory([OF_A], [HERE]), directory([OF_B], [THERE], shard=1))
    core.handle(directory([model_info(A, replicas=0, coming_in_ms=0.0, term=LEAVING_TERM)]), 2.0)
    core.handle(directory([OF_B, model_info(A, replicas=0, coming_in_ms=9e6)], [THERE], shard=1), 3.0)
    assert arrivals(ask(core, A, 1, 4.0)) == [(A, 0, 0)]
