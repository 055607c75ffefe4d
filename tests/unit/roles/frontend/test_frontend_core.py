"""One frontend's core on virtual time: every request ends once, in time or with a reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fabric.ids import BatchId, Incarnation, ModelId, PeerId
from fabric.messages import (
    Answer,
    Arrivals,
    BatchFailed,
    CancelRequest,
    Dropped,
    FrontendHello,
    Inputs,
    InputsReturned,
    ModelsAsked,
    ModelsListed,
    Ping,
    Pong,
    Refusal,
    Returned,
    SeqRun,
    StatusAsked,
    TensorInfo,
    TensorSpec,
    Withdraw,
)
from roles.frontend.core import FrontendCore
from roles.frontend.estimates import OVERDUE_MAX
from roles.frontend.events import (
    ClientSaid,
    DropSlice,
    FrontendAction,
    FrontendEvent,
    OpenSlice,
    Preprocess,
    Preprocessed,
    PreprocessFailed,
    PushInputs,
    Release,
    Reply,
    Report,
    SchedulerLost,
    SchedulerSaid,
    TurnEnded,
    Unannounced,
    Unpushed,
    WorkerSaid,
)
from roles.frontend.return_margin import less_return
from roles.runtime.core import Lost, Tick
from tests.builders import (
    BOOT,
    CLIENT,
    DIGITS,
    IMAGENET,
    SLICE,
    WORKER_BOOT,
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


def answers(actions: Sequence[FrontendAction]) -> list[int]:
    replies = [reply.message for reply in of_type(Reply, actions)]
    return [message.request_no for message in of_type(Answer, replies)]


def pushed(actions: Sequence[FrontendAction]) -> list[Inputs]:
    return [push.message for push in of_type(PushInputs, actions)]


def dropped(*runs: tuple[int, int], code: str = "Overloaded") -> SchedulerSaid:
    return SchedulerSaid(Dropped(DIGITS, tuple(SeqRun(*run) for run in runs), code, "early drop"))


def returned(*runs: tuple[int, int], batch_id: int = 1) -> SchedulerSaid:
    return SchedulerSaid(Returned(BatchId(batch_id), DIGITS, tuple(SeqRun(*run) for run in runs), "late"))


def announced(core: FrontendCore, count: int, now_ms: float = 0.0, first_no: int = 1) -> None:
    for number in range(first_no, first_no + count):
        assert core.handle(asked(number), now_ms) == []
    core.handle(TurnEnded(), now_ms)


# ---------------------------------------------------------------- the way of a request


def test_a_lone_request_is_announced_with_its_budget_less_the_return_path() -> None:
    core = linked_core()
    core.handle(asked(late_ms=4.0), 10.0)
    [arrivals] = told(core.handle(TurnEnded(), 10.0))
    assert isinstance(arrivals, Arrivals)
    assert (arrivals.first_seq, arrivals.count, arrivals.span_ms, arrivals.ready_in_ms) == (0, 1, 0.0, 0.0)
    assert arrivals.budget_ms == pytest.approx(less_return(96.0, 1.0), abs=0.01)
    assert not core.has_gathered
    assert core.wake_at_ms == 10.0 + 96.0


def test_a_granted_request_is_pushed_and_its_output_row_answers_it() -> None:
    core = linked_core()
    first, second = asked(1), asked(2)
    core.handle(first, 0.0)
    core.handle(second, 0.0)
    core.handle(TurnEnded(), 0.0)
    [push] = of_type(PushInputs, core.handle(grant((0, 2), waited_ms=5.0), 20.0))
    assert push.payloads == (first.payload, second.payload)
    assert push.names == ("image",)
    assert push.message.live_seqs == (0, 1)
    outputs = computed(0, 1, transfer_ms=2.0, queue_ms=3.0, gpu_ms=4.0)
    actions = core.handle(outputs, 30.0)
    replies = of_type(Reply, actions)
    assert [(reply.payload, reply.row) for reply in replies] == [(outputs.payload, 0), (outputs.payload, 1)]
    assert [action.payload for action in of_type(Release, actions)] == [
        first.payload,
        second.payload,
        outputs.payload,
    ]
    ledger = replies[0].message.ledger  # type: ignore[union-attr]
    assert (ledger.held_ms, ledger.waited_ms, ledger.transfer_ms, ledger.queue_ms) == (15.0, 5.0, 2.0, 3.0)
    assert (ledger.gpu_ms, ledger.return_ms, ledger.total_ms, ledger.batch_size) == (4.0, 1.0, 30.0, 2)
    assert (ledger.slice_id, ledger.reason) == (SLICE, "frontrun")
    assert core.wake_at_ms is None
    assert core.counters["pending"] == core.counters["pending_bytes"] == 0


def test_a_turns_requests_are_one_run_unless_their_budgets_spread_over_a_millisecond() -> None:
    core = linked_core()
    for number, budget_ms in enumerate((50.0, 50.6, 49.8, 80.0)):
        core.handle(asked(number, budget_ms=budget_ms), 0.0)
    runs = of_type(Arrivals, told(core.handle(TurnEnded(), 0.0)))
    assert [(run.first_seq, run.count) for run in runs] == [(0, 3), (3, 1)]
    tightest_ms, loosest_ms = less_return(49.8, 1.0), less_return(50.6, 1.0)
    assert runs[0].budget_ms == pytest.approx(tightest_ms)
    assert runs[0].span_ms == pytest.approx(loosest_ms - tightest_ms)


def test_seqs_are_dense_per_model() -> None:
    core = linked_core(model_info("a"), model_info("b"))
    for number, model_id in enumerate("aba"):
        core.handle(asked(number, model_id), 0.0)
    runs = of_type(Arrivals, told(core.handle(TurnEnded(), 0.0)))
    assert [(run.model_id, run.first_seq, run.count) for run in runs] == [("a", 0, 2), ("b", 0, 1)]


def served(core: FrontendCore, number: int, at_ms: float, return_ms: float) -> None:
    """Request `number`, with the seq before it, is asked at `at_ms` and computed in 6 ms."""
    announced(core, 1, at_ms, first_no=number)
    core.handle(grant((number - 1, 1)), at_ms)
    assert answers(core.handle(computed(number - 1), at_ms + 6.0 + return_ms)) == [number]


def budget_announced_ms(core: FrontendCore, now_ms: float, way_ms: float = 0.0) -> float:
    core.handle(asked(1_000 + int(now_ms), way_ms=way_ms), now_ms)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), now_ms)))
    return run.budget_ms


def test_a_slow_return_path_is_kept_back_from_later_budgets() -> None:
    core = linked_core()
    for number in range(1, 40):
        served(core, number, 1_000.0 * number, return_ms=20.0)
    assert budget_announced_ms(core, 40_000.0) == pytest.approx(80.0, abs=0.5)  # 20 of 100 ms


def test_an_answer_that_is_late_for_its_client_is_sent_and_widens_what_is_kept_back() -> None:
    core = linked_core()
    before_ms = budget_announced_ms(core, 0.0)
    core.handle(grant((0, 1)), 0.0)
    core.handle(computed(0), 7.0)
    announced_ms = 10.0
    core.handle(asked(7, way_ms=10.0), announced_ms)
    core.handle(TurnEnded(), announced_ms)
    core.handle(grant((1, 1)), announced_ms)
    # Due at 90, as the client's way takes 10 ms; its budget ends at 100.
    assert answers(core.handle(computed(1), announced_ms + 92.0)) == [7]
    assert budget_announced_ms(core, 200.0) < before_ms - 2.0


@pytest.mark.parametrize(
    ("outputs_after_ms", "kept_more_ms"),
    [(None, 0.0), (0.1, 1.2), (5.0, 12.0), (40.0, 0.0)],  # 40: no margin would have saved it
)
def test_a_request_that_expires_on_a_worker_widens_what_is_kept_back_by_how_late_its_outputs_are(
    outputs_after_ms: float | None, kept_more_ms: float
) -> None:
    core = linked_core()
    for number in range(12):
        at_ms = 200.0 * number
        budget_announced_ms(core, at_ms)
        before_ms = core.margins_ms[DIGITS] if number else 1.0
        core.handle(grant((number, 1), batch_id=number), at_ms)
        core.handle(Tick(), at_ms + 100.0)
        assert core.margins_ms[DIGITS] == before_ms
        if outputs_after_ms is not None:
            late = computed(number, batch_id=number, transfer_ms=0.0, queue_ms=0.0, gpu_ms=100.0)
            core.handle(late, at_ms + 100.0 + outputs_after_ms)
    assert core.counters["refused_DeadlineExceeded"] == 12
    assert core.margins_ms[DIGITS] - 1.0 == pytest.approx(kept_more_ms)


def test_only_the_batch_that_a_request_was_granted_to_tells_how_late_it_was() -> None:
    core = linked_core()
    before_ms = budget_announced_ms(core, 0.0)
    core.handle(grant((0, 1), batch_id=1), 0.0)
    core.handle(Tick(), 100.0)
    core.handle(computed(0, batch_id=2), 103.0)
    assert budget_announced_ms(core, 200.0) == before_ms
    core.handle(computed(0, batch_id=1), 303.0)  # far too late, and told once
    core.handle(computed(0, batch_id=1), 303.0)
    assert budget_announced_ms(core, 400.0) == before_ms


def test_how_late_outputs_are_is_remembered_for_so_many_requests_at_most() -> None:
    core = linked_core()
    for number in range(OVERDUE_MAX + 1):
        core.handle(asked(number), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, OVERDUE_MAX + 1)), 0.0)
    core.handle(Tick(), 100.0)
    assert len(core._estimates._overdue) == OVERDUE_MAX


def test_what_is_asked_again_after_its_due_moment_is_announced_with_nothing_left() -> None:
    core = linked_core()
    core.handle(asked(1, way_ms=25.0), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1)), 0.0)
    core.handle(returned((0, 1)), 80.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 80.0)))
    assert run.budget_ms == 0.0


def test_a_run_has_one_priority() -> None:
    core = linked_core()
    for number, priority in enumerate((None, 3, None, 0, 3)):
        core.handle(asked(number, priority=priority), 0.0)
    runs = [one for one in told(core.handle(TurnEnded(), 0.0)) if isinstance(one, Arrivals)]
    assert [(run.priority, run.count) for run in runs] == [(None, 2), (3, 2), (0, 1)]
    core.handle(grant((runs[1].first_seq, 2)), 1.0)
    core.handle(returned((runs[1].first_seq, 2)), 2.0)
    [again] = told(core.handle(TurnEnded(), 2.0))
    assert isinstance(again, Arrivals)
    assert (again.priority, again.count) == (3, 2)


def test_a_refusal_says_when_to_come_again_and_no_margin_is_to_blame_for_it() -> None:
    core = linked_core(settings=frontend_settings(pending_max=2))
    announced(core, 2)
    [reply] = of_type(Reply, core.handle(asked(3), 0.0))
    assert isinstance(reply.message, Refusal)
    assert (reply.message.code, reply.message.retry_after_ms) == ("Overloaded", 100.0)
    told_so = SchedulerSaid(Dropped(DIGITS, (SeqRun(0, 2),), "Overloaded", "its share", 250.0))
    replies = [one.message for one in of_type(Reply, core.handle(told_so, 1.0))]
    assert [one.retry_after_ms for one in replies if isinstance(one, Refusal)] == [250.0, 250.0]


def test_runs_are_cut_by_when_requests_are_due_not_by_when_their_budgets_end() -> None:
    core = linked_core()
    core.handle(asked(1, way_ms=10.0), 0.0)
    core.handle(asked(2, budget_ms=95.0), 0.0)
    runs = of_type(Arrivals, told(core.handle(TurnEnded(), 0.0)))
    assert [run.count for run in runs] == [1, 1]
    assert runs[0].budget_ms < runs[1].budget_ms
    assert all(run.span_ms >= 0.0 for run in runs)


# ---------------------------------------------------------------- refused at the door


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (asked(model_id="digitz"), "ModelNotFound", "did you mean 'digits'"),
        (asked(budget_ms=float("nan")), "InvalidInput", "budget_ms"),
        (asked(budget_ms=0.0), "InvalidInput", "budget_ms"),
        (asked(budget_ms=float("inf")), "InvalidInput", "budget_ms"),
        (asked(specs=()), "InvalidInput", "image"),
        (asked(specs=(TensorSpec("picture", "float32", (1, 8, 8)),)), "InvalidInput", "picture"),
        (
            asked(specs=(TensorSpec("image", "float64", (1, 8, 8)),)),
            "InvalidInput",
            "must be float32 of shape [1, 8, 8], got float64 of shape [1, 8, 8]",
        ),
        (
            asked(specs=(TensorSpec("image", "float32", (8, 8)),)),
            "InvalidInput",
            "[1, 8, 8], got float32 of shape [8, 8]",
        ),
        (asked(specs=(TensorSpec("image", "uint8", (99,)),)), "InvalidInput", "float32"),
        (asked(specs=(TensorSpec("image", "float32", (1, 8, 8)),) * 2), "InvalidInput", "twice"),
        (asked(size_bytes=1 + (64 << 20)), "TooLarge", "67,108,864"),
        (asked(budget_ms=5.0, late_ms=5.0), "DeadlineExceeded", "5.0 ms"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(request_: object, code: str, words: str) -> None:
    core = linked_core()
    actions = core.handle(request_, 0.0)  # type: ignore[arg-type]
    assert refusals(actions) == [(1, code)]
    [reply] = of_type(Reply, actions)
    assert isinstance(reply.message, Refusal)
    assert words in reply.message.reason
    assert len(of_type(Release, actions)) == 1
    assert core.counters["pending"] == 0


def test_any_length_is_a_shape_and_no_declared_inputs_take_anything() -> None:
    tokens = model_info("bert", inputs=(TensorInfo("ids", "int64", (-1,)),))
    core = linked_core(tokens, model_info("emulated", inputs=()))
    assert core.handle(asked(1, "bert", specs=(TensorSpec("ids", "int64", (37,)),)), 0.0) == []
    assert core.handle(asked(2, "emulated", specs=(TensorSpec("x", "bool", ()),)), 0.0) == []
    assert core.handle(asked(3, "emulated", specs=()), 0.0) == []


def test_without_a_ready_replica_the_refusal_is_immediate() -> None:
    core = FrontendCore(frontend_settings())
    assert refusals(core.handle(asked(), 0.0)) == [(1, "NoReplica")]
    core = linked_core(model_info(replicas=0))
    assert refusals(core.handle(asked(), 0.0)) == [(1, "NoReplica")]


def test_a_request_number_cannot_be_pending_twice_for_one_client() -> None:
    core = linked_core()
    core.handle(asked(7), 0.0)
    assert refusals(core.handle(asked(7), 0.0)) == [(7, "InvalidInput")]
    assert core.handle(asked(7, client="client/2"), 0.0) == []
    assert core.counters["accepted"] == 2


def test_pending_requests_and_their_bytes_are_bounded() -> None:
    core = linked_core(settings=frontend_settings(pending_max=2))
    core.handle(asked(1), 0.0)
    core.handle(asked(2), 0.0)
    assert refusals(core.handle(asked(3), 0.0)) == [(3, "Overloaded")]
    core = linked_core(settings=frontend_settings(pending_bytes_max=300))
    core.handle(asked(1), 0.0)
    assert refusals(core.handle(asked(2), 0.0)) == [(2, "Overloaded")]


def test_a_frontend_that_is_behind_refuses_what_waited_too_long_to_be_read() -> None:
    """Of 100 ms, or of the budget asked for: who has more time may wait longer."""
    core = linked_core()

    def behind(number: int, unread_ms: float, budget_ms: float | None = None) -> Sequence[FrontendAction]:
        return core.handle(replace(asked(number, budget_ms=budget_ms), unread_ms=unread_ms), 0.0)

    assert refusals(behind(1, 29.0)) == []
    [refusal] = of_type(Refusal, [reply.message for reply in of_type(Reply, behind(2, 31.0))])
    assert (refusal.request_no, refusal.code, refusal.retry_after_ms) == (2, "Overloaded", 100.0)
    assert "31 ms behind" in refusal.reason
    assert refusals(behind(3, 31.0, budget_ms=200.0)) == []
    assert core.counters["accepted"] == 2


@pytest.mark.parametrize("limits", [{"pending_max": 10}, {"pending_bytes_max": 10 * 256}])
def test_a_client_whose_requests_pile_up_leaves_room_for_the_others(limits: dict[str, int]) -> None:
    core = linked_core(settings=frontend_settings(**limits))
    answers = [refusals(core.handle(asked(number), 0.0)) for number in range(10)]
    assert answers == [[]] * 9 + [[(9, "Overloaded")]]
    assert refusals(core.handle(asked(1, client="client/2"), 0.0)) == []
    core.handle(ClientSaid(PeerId("client/2"), CancelRequest(1)), 1.0)
    core.handle(ClientSaid(PeerId(CLIENT), CancelRequest(3)), 1.0)
    assert refusals(core.handle(asked(11), 2.0)) == []
    core.handle(Lost(PeerId(CLIENT), "gone"), 3.0)
    assert core.counters["pending"] == core.counters["pending_bytes"] == 0
    assert refusals(core.handle(asked(12), 4.0)) == []


# ---------------------------------------------------------------- deadlines and cancels


def test_the_deadline_is_answered_even_if_nobody_else_is_there_and_a_later_result_is_counted() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 10.0)
    assert refusals(core.handle(Tick(), 100.0)) == [(1, "DeadlineExceeded")]
    actions = core.handle(computed(0), 101.0)
    assert of_type(Reply, actions) == []
    assert len(of_type(Release, actions)) == 1
    assert core.counters["late_results"] == 1


def test_a_result_after_the_deadline_is_late_even_if_the_timer_has_not_been_looked_at() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 10.0)
    actions = core.handle(computed(0), 100.0)
    assert refusals(actions) == [(1, "DeadlineExceeded")]
    assert answers(actions) == []


def test_cancelled_requests_are_left_out_of_the_batch() -> None:
    core = linked_core()
    announced(core, 5)
    actions = core.handle(ClientSaid(CLIENT, CancelRequest(2)), 1.0)
    assert refusals(actions) == [(2, "Cancelled")]
    assert told(actions) == []
    [inputs] = pushed(core.handle(grant((0, 5)), 2.0))
    assert inputs.live_seqs == (0, 2, 3, 4)
    assert core.handle(ClientSaid(CLIENT, CancelRequest(2)), 3.0) == []


def test_the_dead_are_withdrawn_when_they_are_half_of_their_run() -> None:
    core = linked_core()
    announced(core, 4)
    assert told(core.handle(ClientSaid(CLIENT, CancelRequest(2)), 1.0)) == []
    [withdraw] = told(core.handle(ClientSaid(CLIENT, CancelRequest(4)), 1.0))
    assert withdraw == Withdraw(DIGITS, (SeqRun(1, 1), SeqRun(3, 1)))
    [withdraw] = told(core.handle(ClientSaid(CLIENT, CancelRequest(1)), 1.0))
    assert withdraw == Withdraw(DIGITS, (SeqRun(0, 1),))


def test_a_batch_of_the_dead_is_still_told_to_its_worker() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(ClientSaid(CLIENT, CancelRequest(1)), 1.0)
    [inputs] = pushed(core.handle(grant((0, 1)), 2.0))
    assert inputs.live_seqs == ()


def test_the_requests_of_a_client_that_is_gone_are_forgotten() -> None:
    core = linked_core()
    announced(core, 2)
    actions = core.handle(Lost(CLIENT, "unroutable"), 1.0)
    assert of_type(Reply, actions) == []
    assert len(of_type(Release, actions)) == 2
    assert core.counters["abandoned"] == 2
    assert core.wake_at_ms is None


def test_ten_thousand_cancelled_requests_with_endless_budgets_do_not_stay_in_memory() -> None:
    core = linked_core()
    for number in range(10_000):
        core.handle(asked(number, budget_ms=1e9), 0.0)
        core.handle(ClientSaid(CLIENT, CancelRequest(number)), 0.0)
        core.handle(TurnEnded(), 0.0)
    assert len(core._pending._deadlines._heap) < 3_000


# ---------------------------------------------------------------- what others say of a batch


def test_a_drop_is_refused_with_its_code() -> None:
    core = linked_core()
    announced(core, 3)
    actions = core.handle(dropped((0, 1), (2, 1)), 1.0)
    assert refusals(actions) == [(1, "Overloaded"), (3, "Overloaded")]
    assert told(actions) == []


def test_a_failed_batch_is_refused_with_its_code_and_reason() -> None:
    core = linked_core()
    announced(core, 2)
    core.handle(grant((0, 2)), 1.0)
    failed = BatchFailed(BatchId(1), SLICE, DIGITS, (0, 1), "Internal", "the model raised")
    assert refusals(core.handle(WorkerSaid(failed), 2.0)) == [(1, "Internal"), (2, "Internal")]


def inputs_returned(*seqs: int) -> WorkerSaid:
    return WorkerSaid(InputsReturned(BatchId(1), SLICE, DIGITS, seqs, "its batch did not come"))


def test_what_becomes_of_inputs_that_are_back_is_for_the_scheduler_to_say_that_granted_them() -> None:
    core = linked_core()
    announced(core, 3)
    core.handle(grant((0, 3)), 10.0)
    core.handle(inputs_returned(0, 1, 2), 11.0)
    assert told(core.handle(TurnEnded(), 11.0)) == []
    core.handle(returned((0, 1)), 12.0)
    core.handle(grant((1, 1), batch_id=2), 12.0)
    assert refusals(core.handle(dropped((2, 1)), 12.0)) == [(3, "Overloaded")]
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 12.0)))
    assert (run.first_seq, run.count) == (3, 1)
    assert answers(core.handle(computed(1, batch_id=2), 13.0)) == [2]


@pytest.mark.parametrize("is_known_before", [True, False])
def test_inputs_that_are_back_are_announced_to_the_next_scheduler(*, is_known_before: bool) -> None:
    core = linked_core()
    announced(core, 2)
    core.handle(grant((0, 1)), 10.0)
    core.handle(grant((1, 1), batch_id=2), 10.0)
    events: list[FrontendEvent] = [inputs_returned(0), replace(directory(), epoch=2)]
    for event in events if is_known_before else reversed(events):
        core.handle(event, 13.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 14.0)))
    assert (run.first_seq, run.count) == (2, 1)
    assert answers(core.handle(computed(1, batch_id=2), 15.0)) == [2], "it runs on"


def test_a_request_of_a_stopped_batch_waits_for_its_scheduler_which_has_it_queued() -> None:
    core = linked_core()
    core.handle(asked(1, budget_ms=1_000.0), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1)), 10.0)
    stopped = InputsReturned(BatchId(1), SLICE, DIGITS, (0,), "a larger one", is_stopped=True)
    core.handle(WorkerSaid(stopped), 11.0)
    core.handle(Tick(), 300.0)
    assert told(core.handle(TurnEnded(), 300.0)) == []
    [inputs] = pushed(core.handle(grant((0, 1), batch_id=2), 301.0))
    assert inputs.live_seqs == (0,)
    core.handle(WorkerSaid(replace(stopped, batch_id=BatchId(2))), 302.0)
    core.handle(replace(directory(), epoch=2), 303.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 304.0)))
    assert (run.first_seq, run.count) == (1, 1), "the next one knows nothing of it"


def test_a_scheduler_that_has_begun_anew_with_us_says_nothing_of_what_it_granted_before() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 1.0)
    core.handle(directory(lists_frontend=False), 10.0)
    core.handle(directory(), 11.0)
    core.handle(inputs_returned(0), 12.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 12.0)))
    assert (run.first_seq, run.count) == (1, 1)


def test_inputs_that_are_back_wait_100_ms_for_the_word_of_their_scheduler() -> None:
    """It may never come: it was dropped on its way, or who should say it has forgotten the batch."""
    core = linked_core()
    core.handle(asked(1, budget_ms=1_000.0), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1)), 10.0)
    for at_ms in (11.0, 50.0):
        core.handle(inputs_returned(0, 0, 7, -1), at_ms)
    assert core.wake_at_ms == 111.0
    core.handle(Tick(), 111.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 111.0)))
    assert (run.first_seq, run.count) == (1, 1)
    assert core.wake_at_ms == pytest.approx(1_000.0, abs=5.0)
    assert core.counters["inputs_returned"] == 4
    assert "late_results" not in core.counters
    assert told(core.handle(returned((0, 1)), 112.0)) == [], "too late: it has another seq"


def test_inputs_that_are_back_were_not_run_whatever_becomes_of_their_slice() -> None:
    once = replace(model_info(), is_idempotent=False)
    core = linked_core(once)
    announced(core, 2)
    core.handle(grant((0, 2)), 1.0)
    core.handle(inputs_returned(0), 2.0)
    gone = directory((once,), (slice_info(incarnation="next"),))
    assert refusals(core.handle(gone, 3.0)) == [(2, "WorkerLost")]


def test_the_way_back_is_not_measured_by_what_never_ran() -> None:
    core = linked_core()
    margins = set()
    for number in range(12):
        at_ms = 200.0 * number
        core.handle(asked(number + 1), at_ms)
        core.handle(TurnEnded(), at_ms)
        core.handle(grant((number, 1), batch_id=number + 1), at_ms)
        back = InputsReturned(BatchId(number + 1), SLICE, DIGITS, (number,), "late")
        core.handle(WorkerSaid(back), at_ms + 90.0)
        assert refusals(core.handle(Tick(), at_ms + 100.0)) == [(number + 1, "DeadlineExceeded")]
        margins.add(core.margins_ms[DIGITS])
    assert len(margins) == 1


def test_inputs_that_are_back_are_announced_again_to_a_scheduler_that_was_silent() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 10.0)
    core.handle(inputs_returned(0), 11.0)
    core.handle(directory(lists_frontend=False), 13.0)
    said = [*told(core.handle(directory(), 14.0)), *told(core.handle(TurnEnded(), 14.0))]
    assert [one.runs for one in of_type(Withdraw, said)] == [(SeqRun(0, 1),)], "it may have queued it again"
    assert [(run.first_seq, run.count) for run in of_type(Arrivals, said)] == [(1, 1)]


def test_a_returned_request_is_announced_again_with_what_is_left() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 10.0)
    core.handle(returned((0, 1)), 30.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 30.0)))
    assert (run.first_seq, run.count) == (1, 1)
    assert run.budget_ms == pytest.approx(less_return(70.0, 1.0), abs=0.1)
    core.handle(grant((1, 1), batch_id=2, waited_ms=1.0), 40.0)
    assert refusals(core.handle(returned((1, 1), batch_id=2), 50.0)) == []
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 50.0)))
    assert (run.first_seq, run.count) == (2, 1)
    assert run.budget_ms == pytest.approx(less_return(50.0, 1.0), abs=0.1)


def test_a_request_with_time_left_is_announced_again_after_16_returns_and_refused_after_the_next() -> None:
    core = linked_core()
    announced(core, 1)
    for number in range(16):
        core.handle(grant((number, 1), batch_id=number + 1), number + 0.5)
        assert core.handle(returned((number, 1), batch_id=number + 1), number + 1.0) == []
        [run] = of_type(Arrivals, told(core.handle(TurnEnded(), number + 1.0)))
        assert (run.first_seq, run.count) == (number + 1, 1)
    core.handle(grant((16, 1), batch_id=17), 16.5)
    assert refusals(core.handle(returned((16, 1), batch_id=17), 17.0)) == [(1, "Overloaded")]
    assert core.counters["announced_again"] == 16


def test_late_batches_leave_a_request_its_one_try_after_a_loss() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 1.0)
    core.handle(returned((0, 1)), 2.0)
    core.handle(TurnEnded(), 2.0)
    core.handle(grant((1, 1), batch_id=2), 3.0)
    assert refusals(core.handle(directory(slices=[slice_info("other")]), 4.0)) == [], "the first loss"
    core.handle(TurnEnded(), 4.0)
    core.handle(grant((2, 1), batch_id=3, slice_id="other"), 5.0)
    assert refusals(core.handle(directory(slices=[]), 6.0)) == [(1, "WorkerLost")]


def test_time_lost_on_a_batch_that_did_not_run_counts_as_forced() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 10.0)
    core.handle(returned((0, 1)), 30.0)
    core.handle(TurnEnded(), 30.0)
    core.handle(grant((1, 1), batch_id=2), 40.0)
    [reply] = of_type(Reply, core.handle(computed(1, batch_id=2), 50.0))
    ledger = reply.message.ledger  # type: ignore[union-attr]
    assert (ledger.held_ms, ledger.waited_ms, ledger.total_ms) == (10.0, 30.0, 50.0)


def test_the_result_of_a_lost_worker_still_answers_if_it_comes_first() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 1.0)
    core.handle(directory(slices=[]), 2.0)
    core.handle(TurnEnded(), 2.0)
    actions = core.handle(computed(0), 3.0)
    assert answers(actions) == [1]
    assert told(actions) == [Withdraw(DIGITS, (SeqRun(1, 1),))]
    assert of_type(Reply, core.handle(computed(1), 4.0)) == []


def test_outputs_of_the_wrong_number_of_rows_are_an_error_of_the_model() -> None:
    core = linked_core()
    announced(core, 2)
    core.handle(grant((0, 2)), 1.0)
    wrong = computed(0, 1, specs=[TensorSpec("scores", "float32", (1, 10))])
    assert refusals(core.handle(wrong, 2.0)) == [(1, "Internal"), (2, "Internal")]


def test_results_of_requests_that_were_never_granted_are_not_believed() -> None:
    core = linked_core()
    announced(core, 1)
    assert of_type(Reply, core.handle(computed(0), 1.0)) == []
    assert core.counters["late_results"] == 1


def test_a_refused_push_gives_its_requests_back_once() -> None:
    core = linked_core()
    announced(core, 1)
    [inputs] = pushed(core.handle(grant((0, 1)), 1.0))
    core.handle(Unpushed(inputs), 1.0)
    core.handle(TurnEnded(), 1.0)
    [inputs] = pushed(core.handle(grant((1, 1)), 2.0))
    assert refusals(core.handle(Unpushed(inputs), 2.0)) == [(1, "Overloaded")]


def test_a_batch_with_more_tensors_than_a_message_holds_goes_as_far_as_it_fits() -> None:
    """Of a model that declares no inputs: nobody but the requests themselves says how many there are."""
    core = linked_core(model_info(inputs=()))
    specs = [TensorSpec(f"x{number}", "uint8", (1,)) for number in range(130)]
    for number in range(1, 33):
        core.handle(asked(number, specs=specs), 0.0)
    core.handle(TurnEnded(), 0.0)
    [inputs] = pushed(core.handle(grant((0, 32)), 1.0))
    assert inputs.live_seqs == tuple(range(31))
    [again] = told(core.handle(TurnEnded(), 1.0))
    assert isinstance(again, Arrivals)
    assert (again.first_seq, again.count) == (32, 1)


@pytest.mark.parametrize("code", ["TooLarge", "Internal"])
def test_what_can_never_be_pushed_is_refused_with_the_reason(code: str) -> None:
    core = linked_core()
    announced(core, 1)
    [inputs] = pushed(core.handle(grant((0, 1)), 1.0))
    core.handle(Unpushed(inputs, code, "header of Inputs has 2000000 bytes"), 1.0)
    core.handle(TurnEnded(), 1.0)
    [inputs] = pushed(core.handle(grant((1, 1)), 2.0))
    assert refusals(core.handle(Unpushed(inputs, code, "header"), 2.0)) == [(1, code)]


def test_what_cannot_be_announced_waits_for_a_scheduler_that_lists_this_frontend() -> None:
    core = linked_core()
    core.handle(asked(1), 0.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 0.0)))
    assert core.handle(Unannounced(run), 0.0) == []
    assert len(of_type(FrontendHello, told(core.handle(Tick(), 1.0)))) == 1
    core.handle(directory(), 2.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 2.0)))
    assert (run.first_seq, run.count) == (1, 1)


def test_requests_that_bring_another_number_of_tensors_do_not_share_a_part() -> None:
    core = linked_core(model_info(inputs=()))
    core.handle(asked(1, specs=()), 0.0)
    core.handle(asked(2), 0.0)
    core.handle(TurnEnded(), 0.0)
    [inputs] = pushed(core.handle(grant((0, 2)), 1.0))
    assert inputs.live_seqs == (0,)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 1.0)))
    assert (run.first_seq, run.count) == (2, 1)


def test_a_grant_of_runs_without_end_costs_no_more_than_what_is_pending() -> None:
    core = linked_core()
    announced(core, 2)
    [inputs] = pushed(core.handle(grant((0, 1 << 50)), 1.0))
    assert inputs.live_seqs == (0, 1)


def test_of_several_grants_only_the_newest_counts() -> None:
    """The scheduler stopped the batch for a larger one, and grants its requests again."""
    core = linked_core()
    core.handle(directory(slices=[slice_info(), slice_info("other")]), 0.0)
    announced(core, 2)
    core.handle(grant((0, 2), batch_id=1), 1.0)
    [inputs] = pushed(core.handle(grant((0, 2), batch_id=2, slice_id="other"), 5.0))
    assert (inputs.batch_id, inputs.slice_id, inputs.live_seqs) == (2, "other", (0, 1))
    assert core.handle(directory(slices=[slice_info("other")]), 6.0) == [DropSlice(SLICE, WORKER_BOOT)]
    assert answers(core.handle(computed(0, 1, batch_id=1), 6.5)) == []
    assert core.counters["late_results"] == 2
    assert answers(core.handle(computed(0, 1, batch_id=2, slice_id="other"), 7.0)) == [1, 2]
    assert core.counters.get("offences_not_owner", 0) == 0


def test_a_batch_that_was_stopped_says_nothing_of_its_requests_any_more() -> None:
    core = linked_core()
    announced(core, 2)
    [former] = pushed(core.handle(grant((0, 2), batch_id=1), 1.0))
    core.handle(grant((0, 2), batch_id=2), 5.0)
    failed = BatchFailed(BatchId(1), SLICE, DIGITS, (0, 1), "Internal", "stopped")
    assert core.handle(WorkerSaid(failed), 6.0) == []
    assert core.counters["late_results"] == 2, "it did nothing wrong"
    assert core.counters.get("offences_not_owner", 0) == 0
    assert core.handle(Unpushed(former), 6.0) == []
    assert core.handle(SchedulerSaid(Returned(BatchId(1), DIGITS, (SeqRun(0, 2),), "")), 6.0) == []
    assert answers(core.handle(computed(0, 1, batch_id=2), 7.0)) == [1, 2]


def test_requests_of_a_stopped_batch_that_get_no_other_one_are_refused_at_once() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1), batch_id=1), 1.0)
    dropped = Dropped(DIGITS, (SeqRun(0, 1),), "DeadlineExceeded", "could no longer finish")
    assert refusals(core.handle(SchedulerSaid(dropped), 9.0)) == [(1, "DeadlineExceeded")]


# ---------------------------------------------------------------- the directory


def test_slices_are_opened_and_dropped_as_the_directory_says() -> None:
    core = FrontendCore(frontend_settings())
    assert of_type(OpenSlice, core.handle(directory(), 0.0)) == [
        OpenSlice(SLICE, WORKER_BOOT, ("tcp://127.0.0.1:2",))
    ]
    assert core.handle(directory(), 1.0) == []
    actions = core.handle(directory(slices=[slice_info(incarnation="b1b1b1b1")]), 2.0)
    assert of_type(DropSlice, actions) == [DropSlice(SLICE, WORKER_BOOT)]
    assert of_type(OpenSlice, actions) == [OpenSlice(SLICE, Incarnation("b1b1b1b1"), ("tcp://127.0.0.1:2",))]


def test_requests_of_a_lost_slice_are_announced_once_more_and_then_refused() -> None:
    core = linked_core()
    announced(core, 2)
    core.handle(grant((0, 1)), 1.0)
    core.handle(directory(slices=[slice_info(incarnation="b1b1b1b1")]), 2.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 2.0)))
    assert (run.first_seq, run.count) == (2, 1)
    core.handle(grant((2, 1), incarnation="b1b1b1b1"), 3.0)
    assert refusals(core.handle(directory(slices=[]), 4.0)) == [(1, "WorkerLost")]


def test_what_is_said_of_a_former_seq_does_not_touch_the_request_that_runs_under_its_new_one() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 1.0)
    core.handle(directory(slices=[slice_info(incarnation="b1b1b1b1")]), 2.0)
    core.handle(TurnEnded(), 2.0)
    core.handle(grant((1, 1), incarnation="b1b1b1b1"), 3.0)
    failed = BatchFailed(BatchId(1), SLICE, DIGITS, (0,), "Internal", "of the lost worker")
    for stale in (returned((0, 1)), dropped((0, 1)), WorkerSaid(failed)):
        assert core.handle(stale, 4.0) == []
    assert answers(core.handle(computed(1), 5.0)) == [1]


def test_of_a_request_that_lost_two_workers_nothing_is_kept() -> None:
    core = linked_core()
    announced(core, 1)
    for batch_id, seq in ((1, 0), (2, 1)):
        core.handle(grant((seq, 1), batch_id=batch_id), 1.0)
        core.handle(directory(slices=[]), 2.0)
        core.handle(TurnEnded(), 2.0)
        core.handle(directory(), 3.0)
    assert len(core._pending) == 0
    assert not core._pending._by_seq


def test_a_request_without_the_time_for_another_try_says_that_its_worker_was_lost() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(grant((0, 1)), 1.0)
    core.handle(directory(slices=[]), 90.0)
    core.handle(TurnEnded(), 90.0)
    assert refusals(core.handle(dropped((1, 1), code="DeadlineExceeded"), 91.0)) == [(1, "WorkerLost")]


def test_a_grant_for_an_incarnation_that_is_gone_is_not_pushed() -> None:
    core = linked_core()
    announced(core, 1)
    actions = core.handle(grant((0, 1), incarnation="00000000"), 1.0)
    assert pushed(actions) == []
    assert core.has_gathered


def test_requests_of_a_removed_model_are_refused_but_what_runs_may_finish() -> None:
    core = linked_core()
    announced(core, 2)
    core.handle(grant((0, 1)), 1.0)
    assert refusals(core.handle(directory(models=[model_info("other")]), 2.0)) == [(2, "ModelNotFound")]
    assert answers(core.handle(computed(0), 3.0)) == [1]


def test_nothing_is_kept_of_a_model_that_was_removed_however_what_it_ran_ends() -> None:
    dropped = Dropped(ModelId(DIGITS), (SeqRun(0, 1),), "DeadlineExceeded", "too late")
    for last in (computed(0), SchedulerSaid(dropped)):
        core = linked_core()
        announced(core, 1)
        [_] = pushed(core.handle(grant((0, 1)), 1.0))
        assert list(core.margins_ms) == [DIGITS]
        core.handle(directory(models=[model_info("other")]), 2.0)
        core.handle(last, 3.0)
        assert not core.margins_ms, last


# ---------------------------------------------------------------- the scheduler comes and goes


def test_hello_is_said_until_the_directory_lists_this_frontend() -> None:
    core = FrontendCore(frontend_settings())
    assert core.wake_at_ms == 0.0
    assert len(of_type(FrontendHello, told(core.handle(Tick(), 0.0)))) == 1
    core.handle(directory(lists_frontend=False), 10.0)
    said_at_ms = []
    for _ in range(7):
        at_ms = core.wake_at_ms
        assert at_ms is not None
        assert len(of_type(FrontendHello, told(core.handle(Tick(), at_ms)))) == 1
        said_at_ms.append(at_ms)
    assert said_at_ms == [20.0, 60.0, 140.0, 300.0, 550.0, 800.0, 1050.0]  # soon, then four times a second
    core.handle(directory(), 1060.0)
    assert core.wake_at_ms is None


def test_while_the_scheduler_is_lost_requests_wait_and_are_announced_on_its_return() -> None:
    core = linked_core()
    announced(core, 2)
    core.handle(grant((0, 1)), 1.0)
    core.handle(SchedulerLost(), 10.0)
    assert len(of_type(FrontendHello, told(core.handle(Tick(), 10.0)))) == 1
    assert core.handle(asked(3), 20.0) == []
    assert not core.has_gathered
    actions = core.handle(directory(), 50.0)
    assert told(actions) == [Withdraw(DIGITS, (SeqRun(1, 1),))]
    runs = of_type(Arrivals, told(core.handle(TurnEnded(), 50.0)))
    assert [(run.first_seq, run.count) for run in runs] == [(2, 1), (3, 1)]
    assert [run.budget_ms for run in runs] == pytest.approx(
        [less_return(50.0, 1.0), less_return(70.0, 1.0)], abs=0.1
    )
    assert answers(core.handle(computed(0), 51.0)) == [1]


def test_while_the_scheduler_is_lost_deadlines_are_still_answered() -> None:
    core = linked_core()
    core.handle(SchedulerLost(), 0.0)
    core.handle(asked(1), 1.0)
    while (at_ms := core.wake_at_ms) is not None and at_ms < 101.0:
        assert refusals(core.handle(Tick(), at_ms)) == [], "it says hello"
    assert core.wake_at_ms == 101.0
    assert refusals(core.handle(Tick(), 101.0)) == [(1, "DeadlineExceeded")]


def test_a_directory_without_this_frontend_means_that_the_scheduler_forgot_it() -> None:
    core = linked_core()
    announced(core, 1)
    core.handle(directory(lists_frontend=False), 10.0)
    assert len(of_type(FrontendHello, told(core.handle(Tick(), 10.0)))) == 1
    core.handle(directory(), 11.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 11.0)))
    assert run.first_seq == 1


def test_a_request_that_expires_in_the_schedulers_queue_makes_the_frontend_introduce_itself_again() -> None:
    core = linked_core()
    announced(core, 1, now_ms=1_000.0)
    actions = core.handle(Tick(), 1_100.0)
    assert refusals(actions) == [(1, "DeadlineExceeded")]
    assert len(of_type(FrontendHello, told(actions))) == 1


# ---------------------------------------------------------------- pictures

PICTURE = (TensorSpec("input", "uint8", (5_000,)),)
VISION = model_info(
    "resnet50", inputs=(TensorInfo("input", "float32", (3, 224, 224)),), image=IMAGENET, slo_ms=200.0
)


def test_a_picture_is_decoded_beside_the_hold() -> None:
    core = linked_core(VISION)
    request = asked(1, "resnet50", specs=PICTURE)
    [action] = core.handle(request, 0.0)
    assert action == Preprocess(request.payload, IMAGENET)
    assert core.counters["pending_bytes"] == 3 * 224 * 224 * 4
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 0.0)))
    assert run.ready_in_ms == 10.0
    core.handle(Preprocessed(request.payload), 7.0)
    [push] = of_type(PushInputs, core.handle(grant((0, 1), model_id="resnet50"), 20.0))
    assert push.payloads == (request.payload,)
    [reply] = of_type(Reply, core.handle(computed(0, model_id="resnet50"), 30.0))
    assert reply.message.ledger.preprocess_ms == 7.0  # type: ignore[union-attr]
    core.handle(asked(2, "resnet50", specs=PICTURE), 40.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 40.0)))
    assert run.ready_in_ms == 7.0


def test_a_grant_that_comes_before_the_pixels_is_missed_and_announced_again_when_they_are_there() -> None:
    core = linked_core(VISION)
    request = asked(1, "resnet50", specs=PICTURE)
    core.handle(request, 0.0)
    core.handle(TurnEnded(), 0.0)
    [inputs] = pushed(core.handle(grant((0, 1), model_id="resnet50"), 5.0))
    assert inputs.live_seqs == ()
    assert not core.has_gathered
    core.handle(Preprocessed(request.payload), 30.0)
    [run] = of_type(Arrivals, told(core.handle(TurnEnded(), 30.0)))
    assert (run.first_seq, run.ready_in_ms) == (1, 0.0)


def test_what_is_no_picture_is_refused_and_a_cancelled_one_is_of_no_interest_any_more() -> None:
    core = linked_core(VISION)
    broken, cancelled = asked(1, "resnet50", specs=PICTURE), asked(2, "resnet50", specs=PICTURE)
    core.handle(broken, 0.0)
    core.handle(cancelled, 0.0)
    failed = PreprocessFailed(broken.payload, "InvalidInput", "not a picture")
    assert refusals(core.handle(failed, 1.0)) == [(1, "InvalidInput")]
    core.handle(ClientSaid(CLIENT, CancelRequest(2)), 2.0)
    assert core.handle(Preprocessed(cancelled.payload), 3.0) == []


@pytest.mark.parametrize("failed_at_ms", [100.0, 200.0, 250.0])
def test_a_broken_picture_is_told_as_such_though_its_budget_was_too_short(failed_at_ms: float) -> None:
    """The scheduler gave it up while it was decoded, or its deadline comes in the same turn."""
    core = linked_core(VISION)
    request = asked(1, "resnet50", specs=PICTURE)
    core.handle(request, 0.0)
    core.handle(TurnEnded(), 0.0)
    dropped = Dropped(ModelId("resnet50"), (SeqRun(0, 1),), "DeadlineExceeded", "too late")
    assert refusals(core.handle(SchedulerSaid(dropped), 1.0)) == []
    failed = PreprocessFailed(request.payload, "InvalidInput", "not a picture")
    assert refusals(core.handle(failed, failed_at_ms)) == [(1, "InvalidInput")]
    assert core.counters["pending"] == 0


def test_a_good_picture_that_was_given_up_is_refused_when_it_is_decoded_or_its_deadline_comes() -> None:
    core = linked_core(VISION)
    requests = [asked(number, "resnet50", specs=PICTURE) for number in (1, 2)]
    for request in requests:
        core.handle(request, 0.0)
    core.handle(TurnEnded(), 0.0)
    dropped = Dropped(ModelId("resnet50"), (SeqRun(0, 2),), "DeadlineExceeded", "too late")
    assert refusals(core.handle(SchedulerSaid(dropped), 1.0)) == []
    [reply] = of_type(Reply, core.handle(Preprocessed(requests[0].payload), 30.0))
    assert (reply.message.code, reply.message.reason) == ("DeadlineExceeded", "too late")  # type: ignore[union-attr]
    assert told(core.handle(TurnEnded(), 30.0)) == []
    [reply] = of_type(Reply, core.handle(Tick(), 200.0))
    assert (reply.message.code, reply.message.reason) == ("DeadlineExceeded", "too late")  # type: ignore[union-attr]


def test_where_the_budget_ends_with_the_picture_still_undecoded_the_answer_says_so() -> None:
    core = linked_core(VISION)
    core.handle(asked(1, "resnet50", specs=PICTURE), 0.0)
    [reply] = of_type(Reply, core.handle(Tick(), 200.0))
    assert reply.message.reason == "its picture was still being decoded when its budget ended"  # type: ignore[union-attr]


def test_a_drop_that_protects_a_batch_does_not_wait_for_the_picture() -> None:
    core = linked_core(VISION)
    core.handle(asked(1, "resnet50", specs=PICTURE), 0.0)
    core.handle(TurnEnded(), 0.0)
    dropped = Dropped(ModelId("resnet50"), (SeqRun(0, 1),), "Overloaded", "too many")
    assert refusals(core.handle(SchedulerSaid(dropped), 1.0)) == [(1, "Overloaded")]


def test_time_in_which_a_picture_is_decoded_is_neither_held_nor_waited() -> None:
    core = linked_core(VISION)
    request = asked(1, "resnet50", specs=PICTURE)
    core.handle(request, 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(Preprocessed(request.payload), 30.0)
    core.handle(grant((0, 1), model_id="resnet50", waited_ms=3.0), 35.0)
    [reply] = of_type(Reply, core.handle(computed(0, model_id="resnet50"), 45.0))
    ledger = reply.message.ledger  # type: ignore[union-attr]
    assert (ledger.preprocess_ms, ledger.held_ms, ledger.waited_ms) == (30.0, 2.0, 3.0)


def test_a_grant_that_a_picture_missed_is_neither_held_nor_waited() -> None:
    core = linked_core(VISION)
    request = asked(1, "resnet50", specs=PICTURE)
    core.handle(request, 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1), model_id="resnet50"), 5.0)
    core.handle(Preprocessed(request.payload), 30.0)
    core.handle(TurnEnded(), 30.0)
    core.handle(grant((1, 1), model_id="resnet50", batch_id=2), 36.0)
    [reply] = of_type(Reply, core.handle(computed(1, model_id="resnet50", batch_id=2), 45.0))
    ledger = reply.message.ledger  # type: ignore[union-attr]
    assert (ledger.preprocess_ms, ledger.held_ms, ledger.waited_ms) == (30.0, 6.0, 0.0)


def test_pictures_and_ready_requests_do_not_share_a_run() -> None:
    core = linked_core(VISION)
    core.handle(asked(1, "resnet50", specs=PICTURE), 0.0)
    core.handle(asked(2, "resnet50", specs=(TensorSpec("input", "float32", (3, 224, 224)),)), 0.0)
    runs = of_type(Arrivals, told(core.handle(TurnEnded(), 0.0)))
    assert [(run.first_seq, run.ready_in_ms) for run in runs] == [(0, 0.0), (1, 10.0)]


# ---------------------------------------------------------------- questions


def test_clients_may_ask_for_models_signs_of_life_and_status() -> None:
    core = linked_core()
    [reply] = of_type(Reply, core.handle(ClientSaid(CLIENT, ModelsAsked()), 0.0))
    assert reply.message == ModelsListed((model_info(),))
    [reply] = of_type(Reply, core.handle(ClientSaid(CLIENT, Ping(3)), 0.0))
    assert reply.message == Pong(3, incarnation=BOOT)
    operator = PeerId("operator/1")
    assert core.handle(ClientSaid(operator, StatusAsked()), 0.0) == [Report(operator)]
    assert core.handle(ClientSaid(CLIENT, StatusAsked()), 0.0) == []
    assert core.offences.counters["offences_not_owner"] == 1
    other = PeerId("client/2")
    assert core.handle(ClientSaid(other, CancelRequest(1)), 0.0) == []
