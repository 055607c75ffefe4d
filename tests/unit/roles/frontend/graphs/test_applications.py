"""An application's requests in a frontend's core: one answer, one ledger, and nothing left behind."""

from __future__ import annotations

from msgspec.structs import replace

from fabric.ids import BatchId, ModelId, PeerId
from fabric.messages import (
    Arrivals,
    CancelRequest,
    Dropped,
    InputsReturned,
    ModelInfo,
    RecordsAsked,
    Refusal,
    SeqRun,
    StageResult,
    Withdraw,
)
from policies.graphs.graph import Stage
from roles.frontend.core import FrontendCore
from roles.frontend.events import (
    ClientSaid,
    InputsMade,
    InputsNotMade,
    KeepRow,
    MadeInputs,
    MakeInputs,
    Reply,
    ReplyWithAll,
    SchedulerSaid,
    WorkerSaid,
)
from roles.frontend.requests import SCHEDULER_SAYS_WITHIN_MS
from roles.runtime.core import Handle, Lost, Tick
from tests.applications_stage import SPECS, ApplicationStage, served
from tests.builders import (
    CLIENT,
    SLICE,
    asked,
    computed,
    directory,
    frontend_settings,
    grant,
    model_info,
    of_type,
    slice_info,
)


def detector() -> ApplicationStage:
    """One stage, then two side by side, of models d, c and p."""
    return ApplicationStage(
        served(
            Stage("detect", ModelId("d")),
            Stage("cars", ModelId("c"), ("detect",)),
            Stage("people", ModelId("p"), ("detect",)),
        )
    )


def run(stage: ApplicationStage, name: str, at_ms: float, batch_id: int) -> None:
    """The first request of that model is granted, and answered 10 ms later."""
    _, seq = stage.take(lambda model_id: model_id == name)
    stage.do(grant((seq, 1), batch_id=batch_id, model_id=name), at_ms)
    stage.do(computed(seq, batch_id=batch_id, model_id=name), at_ms + 10.0)


def nothing_is_left(stage: ApplicationStage) -> bool:
    counters = stage.core.counters
    return (
        counters["pending"] == counters["pending_bytes"] == counters["tasks_pending"] == 0
        and not any(stage.kept.values())
        and stage.core.wake_at_ms is None
    )


def test_every_stage_has_a_line_and_those_on_the_path_sum_to_the_whole() -> None:
    stage = detector()
    stage.ask(1, 0.0)
    stage.make(stage.job("detect"), 1, 1.0)
    run(stage, "d", 5.0, 1)  # until 15
    stage.make(stage.job("cars"), 2, 17.0)
    stage.make(stage.job("people"), 0, 18.0)
    run(stage, "c", 20.0, 2)  # until 30
    assert not stage.answers
    run(stage, "c", 30.0, 3)  # until 40
    models = stage.core.recorder.figures(ModelId(""), 40.0).models
    assert {one.model_id: one.stage_asked for one in models} == {"app": 0, "c": 2, "d": 1, "p": 0}
    assert all(one.stage_good == one.stage_asked for one in models)
    assert sum(one.asked - one.stage_asked for one in models) == 1
    assert sum(one.good - one.stage_good for one in models) == 1
    answer = stage.answers[1]
    assert [(line.stage, line.requests, line.is_on_path) for line in answer.stages] == [
        ("detect", 1, True),
        ("cars", 2, True),
        ("people", 0, False),
    ]
    detect, cars, _ = (line.ledger for line in answer.stages)
    # Its inputs took 1 ms, it was held for 4; of the 10 after the grant 6 are the worker's.
    assert (detect.preprocess_ms, detect.held_ms, detect.return_ms, detect.total_ms) == (1.0, 4.0, 4.0, 15.0)
    assert (cars.preprocess_ms, cars.held_ms, cars.return_ms, cars.total_ms) == (2.0, 13.0, 4.0, 25.0)
    assert answer.ledger.total_ms == 40.0
    assert (answer.ledger.held_ms, answer.ledger.gpu_ms, answer.ledger.preprocess_ms) == (17.0, 6.0, 3.0)
    assert answer.ledger.reason == "stages detect > cars"
    assert answer.results == (StageResult("cars", (0, 0), 1), StageResult("cars", (0, 1), 1))
    assert nothing_is_left(stage)


def test_the_line_of_a_stage_beside_the_path_is_of_its_request_that_was_answered_last() -> None:
    stage = detector()
    stage.ask(1, 0.0)
    stage.make(stage.job("detect"), 2, 0.0)
    run(stage, "d", 0.0, 1)  # until 10
    stage.make(stage.job("cars"), 1, 10.0)
    stage.make(stage.job("people"), 0, 10.0)
    run(stage, "d", 40.0, 2)  # until 50
    stage.make(stage.job("cars"), 1, 50.0)
    stage.make(stage.job("people"), 1, 50.0)
    run(stage, "c", 50.0, 3)  # the first one took from 10 to 60
    run(stage, "c", 60.0, 4)  # and this one from 50 to 70
    run(stage, "p", 70.0, 5)
    cars = stage.answers[1].stages[1]
    assert (cars.stage, cars.is_on_path, cars.ledger.total_ms) == ("cars", False, 20.0)


def test_the_answer_has_the_kept_rows_in_the_order_of_its_results() -> None:
    stage = detector()
    stage.ask(1, 0.0)
    stage.make(stage.job("detect"), 1, 0.0)
    run(stage, "d", 0.0, 1)
    stage.make(stage.job("people"), 0, 10.0)
    stage.make(stage.job("cars"), 2, 10.0)
    (_, first), (_, second) = stage.take(), stage.take()
    stage.do(grant((first, 2), model_id="c", batch_id=2), 11.0)
    actions = stage.do(computed(second, first, model_id="c", batch_id=2), 21.0)
    (reply,) = of_type(ReplyWithAll, actions)
    rows = {keep.kept: keep.row for keep in of_type(KeepRow, actions)}
    assert [rows[payload] for payload in reply.payloads] == [1, 0]


def test_a_task_that_is_given_up_refuses_the_request_and_withdraws_its_siblings() -> None:
    stage = detector()
    stage.ask(1, 0.0)
    stage.make(stage.job("detect"), 1, 0.0)
    run(stage, "d", 0.0, 1)
    stage.make(stage.job("cars"), 3, 10.0)
    _, seq = stage.take()
    stage.do(SchedulerSaid(Dropped(ModelId("c"), (SeqRun(seq, 2),), "Overloaded", "too much", 9.0)), 12.0)
    refusal = stage.refusals[1]
    assert (refusal.code, refusal.reason, refusal.retry_after_ms) == (
        "Overloaded",
        "stage cars: too much",
        9.0,
    )
    assert stage.finals == {1: 1}
    assert of_type(Withdraw, stage.told) == [Withdraw(ModelId("c"), (SeqRun(seq + 2, 1),))]
    # What was being made for it meanwhile is given back when it comes.
    stage.make(stage.job("people"), 4, 13.0)
    assert nothing_is_left(stage)
    assert stage.core.counters["tasks_refused"] == 2
    assert stage.core.counters["tasks_cancelled"] == 1
    cars = stage.core.stage_tallies[ModelId("app")]["cars"]
    assert (cars.asked, cars.answered, cars.dropped, cars.cancelled) == (3, 0, 2, 1)


def test_a_cancelled_request_and_one_whose_client_is_gone_withdraw_all_they_have() -> None:
    for end in (ClientSaid(CLIENT, CancelRequest(1)), Lost(PeerId(CLIENT), "closed")):
        stage = detector()
        stage.ask(1, 0.0)
        stage.make(stage.job("detect"), 1, 0.0)
        run(stage, "d", 0.0, 1)
        stage.make(stage.job("cars"), 2, 10.0)
        stage.do(end, 11.0)
        gone = [run for withdraw in of_type(Withdraw, stage.told) for run in withdraw.runs]
        assert sum(run.count for run in gone) == 2
        stage.make(stage.job("people"), 1, 12.0)
        assert nothing_is_left(stage)


def test_a_slice_that_is_lost_in_the_middle_of_a_graph_costs_its_request_nothing_but_time() -> None:
    stage = detector()
    stage.ask(1, 0.0)
    stage.make(stage.job("detect"), 1, 0.0)
    _, seq = stage.take()
    stage.do(grant((seq, 1), model_id="d"), 1.0)
    stage.do(directory([model_info(name) for name in "dcp"], [slice_info(incarnation="b1b1b1b1")]), 5.0)
    _, again = stage.take()
    assert again != seq
    stage.do(grant((again, 1), model_id="d", batch_id=2, incarnation="b1b1b1b1"), 6.0)
    stage.do(computed(again, model_id="d", batch_id=2), 16.0)
    stage.make(stage.job("cars"), 0, 16.0)
    stage.make(stage.job("people"), 0, 17.0)
    assert stage.finals == {1: 1}
    (detect, *_) = stage.answers[1].stages
    assert detect.ledger.waited_ms == 5.0, "what the lost try cost was forced"
    assert sum(line.ledger.total_ms for line in stage.answers[1].stages if line.is_on_path) == 17.0
    assert nothing_is_left(stage)


def test_at_its_deadline_a_request_is_refused_with_what_is_open() -> None:
    stage = detector()
    stage.ask(1, 0.0, budget_ms=50.0)
    stage.make(stage.job("detect"), 1, 0.0)
    stage.do(Tick(), 50.0)
    assert stage.refusals[1].code == "DeadlineExceeded"
    assert stage.refusals[1].reason == "no answer within the budget; still open: detect"
    assert stage.finals == {1: 1}
    assert nothing_is_left(stage)


def test_inputs_that_do_not_fit_or_cannot_be_made_are_one_error() -> None:
    stage = detector()
    stage.ask(1, 0.0)
    stage.do(InputsNotMade(stage.jobs.pop().job, "Internal", "its glue raised"), 1.0)
    assert (stage.refusals[1].code, stage.refusals[1].reason) == ("Internal", "stage detect: its glue raised")
    assert nothing_is_left(stage)


def test_a_stage_without_a_replica_is_named_before_anything_runs() -> None:
    stage = detector()
    models = [model_info(name) for name in "dc"]
    stage.do(directory([*models, replace(model_info("p"), replicas=0)]), 1.0)
    stage.ask(1, 1.0)
    assert stage.refusals[1].code == "NoReplica"
    assert stage.refusals[1].reason == (
        "stage people of application 'app': nothing that serves model 'p' is ready; why: tenuto models list"
    )
    stage.do(directory(models), 2.0)
    stage.ask(2, 2.0)
    assert stage.refusals[2].code == "ModelNotFound"
    assert nothing_is_left(stage)


def test_an_application_is_suggested_as_a_model_is() -> None:
    stage = detector()
    wrong = asked(1, "appp", specs=SPECS)
    stage.kept[wrong.payload] += 1
    stage.do(wrong, 0.0)
    assert stage.refusals[1].reason == "no model 'appp' is configured; did you mean 'app'?"


def listed(stage: ApplicationStage) -> ModelInfo:
    return next(one for one in stage.core.models if one.model_id == "app")


def test_an_application_stays_listed_and_counted_while_a_stage_has_no_replica_or_no_model() -> None:
    stage = detector()
    assert listed(stage).replicas == 1
    assert listed(stage).asks == ("d", "c", "p"), "by which an operator tells it from a model"
    stage.ask(1, 0.0)
    stage.make(stage.job("detect"), 1, 0.0)
    run(stage, "d", 0.0, 1)
    models = [model_info(name) for name in "dc"]
    for directory_ in (directory([*models, model_info("p", replicas=0)]), directory(models)):
        stage.do(directory_, 11.0)
        assert listed(stage).replicas == 0
    stage.make(stage.job("people"), 1, 12.0)
    assert stage.refusals[1].code == "ModelNotFound"
    remembered = stage.core.recorder.remembered(RecordsAsked(ModelId("app"), 1 << 40), 13.0).requests
    assert [one.outcome for one in remembered] == ["ModelNotFound"]


def test_a_stage_that_is_being_started_is_waited_for_where_the_budget_allows_it() -> None:
    stage = detector()
    coming = [model_info(name, replicas=0, coming_in_ms=ms) for name, ms in (("c", 400.0), ("p", 40.0))]
    stage.do(directory([model_info("d", replicas=3), *coming]), 0.0)
    assert (listed(stage).replicas, listed(stage).coming_in_ms) == (0, 400.0)
    stage.ask(1, 100.0, budget_ms=300.0)
    refusal = stage.refusals[1]
    assert (refusal.code, refusal.retry_after_ms) == ("NoReplica", 300.0)
    assert refusal.reason.startswith(
        "stage cars of application 'app': nothing that serves model 'c' is ready"
    )
    stage.ask(2, 100.0, budget_ms=301.0)
    stage.make(stage.job("detect"), 1, 100.0)
    assert 2 not in stage.refusals
    assert stage.take()[0] == "d"


def test_a_stage_that_a_request_may_do_without_is_missed_only_by_those_that_ask_it() -> None:
    """One is seldom asked, one comes after it alone, one is optional; each is still started, or gone."""
    for lacking in (model_info("c", replicas=0, coming_in_ms=400.0), model_info("c", replicas=0), None):
        stage = ApplicationStage(
            served(
                Stage("a", ModelId("d")),
                Stage("b", ModelId("c"), ("a",), may_be_none=True),
                Stage("after-b", ModelId("c"), ("b",)),
                Stage("extra", ModelId("c"), ("a",), is_optional=True),
            )
        )
        stage.do(directory([model_info("d"), *(() if lacking is None else (lacking,))]), 0.0)
        assert listed(stage).replicas == 0
        stage.ask(1, 0.0, budget_ms=300.0)
        stage.make(stage.job("a"), 1, 0.0)
        run(stage, "d", 0.0, 1)
        stage.make(stage.job("b"), 0, 11.0)
        stage.make(stage.job("extra"), 0, 11.0)
        assert 1 in stage.answers
        assert nothing_is_left(stage)


def test_a_join_is_needed_whatever_was_left_out_before_it() -> None:
    stage = ApplicationStage(
        served(
            Stage("a", ModelId("d")),
            Stage("b", ModelId("d"), ("a",), may_be_none=True),
            Stage("both", ModelId("c"), ("b", "a")),
        )
    )
    stage.do(directory([model_info("d"), model_info("c", replicas=0, coming_in_ms=400.0)]), 0.0)
    stage.ask(1, 0.0, budget_ms=300.0)
    assert stage.refusals[1].code == "NoReplica"


def test_the_replicas_of_an_application_are_those_of_the_needed_stage_with_the_fewest() -> None:
    stage = ApplicationStage(
        served(Stage("a", ModelId("d")), Stage("b", ModelId("c"), ("a",), is_optional=True))
    )
    for others in ([model_info("c", replicas=0)], []):
        stage.do(directory([model_info("d", replicas=3), *others]), 1.0)
        assert listed(stage).replicas == 3


def test_a_stage_whose_model_may_be_of_a_shard_that_does_not_answer_is_no_unknown_one() -> None:
    application = served(Stage("a", ModelId("d")))
    core = FrontendCore(replace(frontend_settings(shards=2), applications=(application,)))
    core.handle(Tick(), 0.0)
    core.handle(directory([model_info("other")]), 0.0)
    (refused,) = of_type(Reply, core.handle(asked(1, "app"), 1.0))
    assert isinstance(refused.message, Refusal)
    assert refused.message.code == "NoReplica"


def test_nor_is_it_for_a_request_that_is_under_way() -> None:
    application = served(Stage("a", ModelId("d")))
    core = FrontendCore(replace(frontend_settings(shards=2), applications=(application,)))
    core.handle(Tick(), 0.0)
    core.handle(directory([model_info("d")]), 0.0)
    (make,) = of_type(MakeInputs, core.handle(asked(1, "app"), 1.0))
    core.handle(directory([model_info("other")]), 2.0)
    made = [MadeInputs(Handle(7), SPECS, 256)]
    (refused,) = of_type(Reply, core.handle(InputsMade(make.job, made), 3.0))
    assert isinstance(refused.message, Refusal)
    assert refused.message.code == "NoReplica"


def test_tasks_are_announced_like_requests_and_bear_their_own_budgets() -> None:
    stage = ApplicationStage(
        served(Stage("a", ModelId("d")), Stage("b", ModelId("c"), ("a",)), rule="equal", slo_ms=100.0)
    )
    stage.ask(1, 0.0)
    stage.make(stage.job("a"), 1, 0.0)
    (arrivals,) = of_type(Arrivals, stage.told)
    assert (arrivals.model_id, arrivals.count) == ("d", 1)
    assert 45.0 <= arrivals.budget_ms + arrivals.slack_ms <= 50.0
    assert stage.core.counters["accepted"] == 1


def lone(budget_ms: float, way_ms: float = 0.0, *, is_optional: bool = False) -> tuple[ApplicationStage, int]:
    """One stage of model d, whose request was announced at 0; its number there."""
    stage = ApplicationStage(served(Stage("a", ModelId("d"), is_optional=is_optional)))
    stage.ask(1, 0.0, budget_ms, way_ms)
    stage.make(stage.job("a"), 1, 0.0)
    _, seq = stage.take()
    return stage, seq


def test_an_answer_is_sent_until_the_budget_ends_and_planned_for_the_way_before_that() -> None:
    stage, seq = lone(100.0, way_ms=20.0)
    (arrivals,) = of_type(Arrivals, stage.told)
    assert arrivals.budget_ms + arrivals.slack_ms <= 80.0
    stage.do(grant((seq, 1), model_id="d"), 1.0)
    stage.do(Tick(), 99.0)
    assert not stage.finals
    stage.do(computed(seq, model_id="d"), 99.0)
    assert 1 in stage.answers
    late, seq = lone(100.0, way_ms=20.0)
    late.do(Tick(), 100.0)
    assert late.refusals[1].code == "DeadlineExceeded"


def test_an_answer_in_part_leaves_in_time_for_its_way() -> None:
    stage, _ = lone(100.0, way_ms=20.0, is_optional=True)
    stage.do(Tick(), 79.0)
    assert 1 in stage.answers


def test_how_late_the_last_stage_was_is_learned_when_its_outputs_come() -> None:
    stage, seq = lone(50.0)
    stage.do(grant((seq, 1), model_id="d"), 1.0)
    before_ms = stage.core.margins_ms[ModelId("d")]
    stage.do(Tick(), 50.0)
    assert stage.refusals[1].code == "DeadlineExceeded"
    assert stage.core.margins_ms[ModelId("d")] == before_ms
    stage.do(computed(seq, model_id="d"), 50.5)
    assert stage.core.margins_ms[ModelId("d")] == before_ms + 0.5
    assert nothing_is_left(stage)


def test_what_is_withdrawn_before_it_is_late_teaches_nothing() -> None:
    stage, seq = lone(50.0)
    stage.do(grant((seq, 1), model_id="d"), 1.0)
    before_ms = stage.core.margins_ms[ModelId("d")]
    stage.do(ClientSaid(CLIENT, CancelRequest(1)), 20.0)
    stage.do(computed(seq, model_id="d"), 50.5)
    assert stage.core.margins_ms[ModelId("d")] == before_ms


def test_a_client_that_goes_as_the_last_optional_task_is_given_up_gets_no_answer() -> None:
    """Its model is removed and its inputs are back: at the moment at which nobody can say more of it, its client is lost."""
    for end in (ClientSaid(CLIENT, CancelRequest(1)), Lost(PeerId(CLIENT), "closed")):
        stage = ApplicationStage(
            served(
                Stage("a", ModelId("d")), Stage("b", ModelId("c"), ("a",), is_optional=True), slo_ms=1_000.0
            )
        )
        stage.ask(1, 0.0)
        stage.make(stage.job("a"), 1, 0.0)
        run(stage, "d", 0.0, 1)
        stage.make(stage.job("b"), 1, 10.0)
        _, seq = stage.take()
        stage.do(grant((seq, 1), model_id="c", batch_id=2), 11.0)
        stage.do(directory([model_info("d")]), 12.0)
        returned = InputsReturned(BatchId(2), SLICE, ModelId("c"), (seq,), "late")
        stage.do(WorkerSaid(returned), 13.0)
        stage.do(end, 13.0 + SCHEDULER_SAYS_WITHIN_MS)
        assert not stage.answers
        assert nothing_is_left(stage)
