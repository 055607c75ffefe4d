"""The small parts of a frontend: runs of seqs, measured times, the table of a request's life."""

from __future__ import annotations

import numpy as np
import pytest

from fabric.ids import ModelId
from fabric.link import NamedTensor
from fabric.messages import SeqRun, Withdraw
from roles.frontend.admission import budget_left_ms, way_kept_ms
from roles.frontend.announced_runs import AnnouncedRun, coded
from roles.frontend.preprocess_times import PreprocessTimes
from roles.frontend.requests import NEXT, RequestState, RequestTransition
from roles.frontend.return_margin import ReturnPath, less_return
from roles.frontend.tensor_lists import kept_row
from tests.builders import asked, model_info


@pytest.mark.parametrize(
    ("seqs", "runs"),
    [
        ([], ()),
        ([5], (SeqRun(5, 1),)),
        ([3, 1, 2, 0], (SeqRun(0, 4),)),
        ([7, 9, 8, 2], (SeqRun(2, 1), SeqRun(7, 3))),
    ],
)
def test_seqs_are_run_length_coded(seqs: list[int], runs: tuple[SeqRun, ...]) -> None:
    assert coded(seqs) == runs


def test_a_run_tells_of_its_dead_at_every_halving() -> None:
    model_id = ModelId("m")
    run = AnnouncedRun(model_id, left=8)
    told = [run.note_dead(seq) for seq in range(8)]
    assert [withdraw is not None for withdraw in told] == [
        *(False, False, False, True),
        *(False, True, True, True),
    ]
    assert told[3] == Withdraw(model_id, (SeqRun(0, 4),))


def test_granted_requests_make_the_dead_a_larger_share() -> None:
    run = AnnouncedRun(ModelId("m"), left=8)
    assert run.note_dead(7) is None
    for _ in range(5):
        run.note_left()
    assert run.note_dead(6) is not None


def test_what_is_kept_back_is_the_mean_way_of_outputs_and_a_margin() -> None:
    returns = ReturnPath()
    for _ in range(200):
        returns.note_batch(4.0)
    assert returns.reserve_ms == pytest.approx(4.0, abs=0.01)
    returns.note_answer(0.5, budget_ms=100.0)
    assert returns.reserve_ms == pytest.approx(4.5, abs=0.01)
    for _ in range(1_000):
        returns.note_answer(-1.0, budget_ms=100.0)
    assert returns.reserve_ms == pytest.approx(4.0, abs=0.01)


def test_requests_dropped_for_want_of_time_narrow_the_margin_sooner_than_answers() -> None:
    answered, dropped = ReturnPath(), ReturnPath()
    for returns in (answered, dropped):
        for _ in range(3):
            returns.note_answer(1.0, budget_ms=100.0)
    for _ in range(50):
        answered.note_answer(-1.0, budget_ms=100.0)
    dropped.note_dropped(50)
    assert dropped.reserve_ms < answered.reserve_ms


def test_what_is_kept_back_beyond_the_mean_is_slack() -> None:
    returns = ReturnPath()
    for _ in range(200):
        returns.note_batch(2.0)
    assert returns.budget_ms(100.0) == 91.0  # a tenth at least of what is beyond 10 ms
    assert returns.slack_ms(100.0) == pytest.approx(7.0, abs=0.01)
    for _ in range(12):
        returns.note_answer(1.0, budget_ms=100.0)
    assert returns.budget_ms(100.0) == pytest.approx(86.0, abs=0.01)
    assert returns.slack_ms(100.0) == pytest.approx(12.0, abs=0.01)
    assert returns.slack_ms(0.0) == 0.0


def test_of_a_budget_at_most_a_quarter_is_kept_back() -> None:
    assert less_return(100.0, 14.5) == 85.5
    assert less_return(100.0, 0.0) == 91.0
    assert less_return(25.0, 0.0) == 23.5
    assert less_return(8.0, 0.0) == 8.0
    assert less_return(8.0, 4.0) == 6.0
    assert less_return(-1.0, 4.0) == 0.0


def test_the_preprocessing_time_is_the_p95_of_the_last_ones() -> None:
    times = PreprocessTimes()
    assert times.p95_ms == 10.0
    for took_ms in [1_000.0] * 10 + list(range(1, 65)):
        times.note(took_ms)
    assert times.p95_ms == 61.0


def test_every_stage_leads_to_an_answer_and_an_answer_leads_nowhere() -> None:
    for stage in RequestState:
        if stage is RequestState.ANSWERED:
            assert not any(left is stage for left, _ in NEXT)
        else:
            assert NEXT[stage, RequestTransition.ANSWER] is RequestState.ANSWERED


def test_the_way_of_the_client_is_not_ours_to_spend_up_to_a_quarter() -> None:
    info = model_info(slo_ms=100.0)
    assert way_kept_ms(asked(way_ms=3.0), info) == 3.0
    assert way_kept_ms(asked(way_ms=90.0), info) == 25.0
    assert way_kept_ms(asked(budget_ms=40.0, way_ms=90.0), info) == 10.0


def test_what_is_left_of_a_budget_is_what_its_way_to_us_did_not_take() -> None:
    info = model_info(slo_ms=100.0)
    assert budget_left_ms(asked(late_ms=1.0), info) == 99.0
    assert budget_left_ms(asked(budget_ms=40.0, way_ms=3.0, late_ms=1.0), info) == 39.0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("row_bytes", [16, 1 << 20])
def test_a_row_that_is_kept_holds_no_more_memory_than_is_counted(rows: int, row_bytes: int) -> None:
    batch = np.frombuffer(bytes(rows * row_bytes), np.uint8).reshape(rows, row_bytes)
    (kept,) = kept_row([NamedTensor("y", batch)], rows - 1)
    assert kept.array.nbytes == row_bytes
    assert not kept.array.flags.writeable
    whole = kept.array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    assert whole.nbytes == row_bytes
