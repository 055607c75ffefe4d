"""The queue of runs: order, cutting, dropping, withdrawing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import FrontendId
from policies.batching.base import RequestRun
from policies.batching.run_queue import RunQueue, cut, tight_count


def run(
    first_seq: int, count: int, deadline_at_ms: float, span_ms: float = 0.0, frontend: str = "f"
) -> RequestRun:
    return RequestRun(FrontendId(frontend), first_seq, count, deadline_at_ms, 0.0, span_ms)


def seqs(runs: list[RequestRun]) -> list[int]:
    return [seq for run in runs for seq in range(run.first_seq, run.first_seq + run.count)]


def test_requests_leave_by_deadline_and_equal_ones_in_the_order_they_came() -> None:
    queue = RunQueue()
    assert queue.push(run(1, 2, 30.0)) == 0
    assert queue.push(run(3, 1, 40.0)) == 1
    assert queue.push(run(4, 1, 20.0)) == 0
    assert queue.push(run(5, 1, 30.0)) == 2
    assert queue.count == 5
    assert seqs(queue.pop(5)) == [4, 1, 2, 5, 3]
    assert queue.count == 0


def test_a_run_is_cut_and_the_rest_stays() -> None:
    queue = RunQueue()
    queue.push(run(1, 5, 10.0, span_ms=1.0))
    assert queue.pop(2) == [run(1, 2, 10.0, span_ms=0.25)]
    assert list(queue.runs) == [run(3, 3, 10.5, span_ms=0.5)]
    assert queue.count == 3


def test_both_pieces_of_a_run_that_is_cut_keep_its_slack() -> None:
    whole = run(1, 5, 10.0)
    whole.slack_ms = 2.0
    assert (cut(whole, 2).slack_ms, whole.slack_ms) == (2.0, 2.0)


def test_popping_more_than_there_is_takes_what_there_is() -> None:
    queue = RunQueue()
    queue.push(run(1, 3, 10.0))
    assert seqs(queue.pop(7)) == [1, 2, 3]
    assert queue.count == 0


def test_the_rest_of_a_cut_run_takes_its_place_by_deadline() -> None:
    queue = RunQueue()
    queue.push(run(1, 3, 10.0, span_ms=1.0))
    queue.push(run(10, 1, 10.2))
    assert seqs(queue.pop(1)) == [1]
    assert seqs(queue.pop(3)) == [10, 2, 3]


def test_what_is_left_of_the_last_run_moves_the_tail() -> None:
    """A tighter arrival must not be appended behind it by a caller who looks at the tail only."""
    queues = (RunQueue(), RunQueue())
    for queue in queues:
        queue.push(run(0, 5, 10.0, span_ms=1.0))
    queues[0].pop(3)
    queues[1].drop_before(10.5)
    for queue in queues:
        assert queue.runs[-1].deadline_at_ms > 10.0
        assert queue.tail_at_ms >= queue.runs[-1].deadline_at_ms
    queues[0].withdraw(FrontendId("f"), [(3, 1)])
    assert queues[0].tail_at_ms == queues[0].runs[-1].deadline_at_ms == 11.0


def test_dropping_takes_exactly_those_due_before_the_moment() -> None:
    queue = RunQueue()
    queue.push(run(1, 2, 9.0))
    queue.push(run(3, 5, 10.0, span_ms=1.0))
    assert seqs(queue.drop_before(10.5)) == [1, 2, 3, 4]
    assert list(queue.runs) == [run(5, 3, 10.5, span_ms=0.5)]
    assert queue.drop_before(10.5) == []


def test_counting_the_tight_ones_of_a_run() -> None:
    five = run(1, 5, 10.0, span_ms=1.0)
    assert [tight_count(five, at_ms) for at_ms in (10.0, 10.1, 10.25, 10.3, 11.0, 11.1)] == [0, 1, 1, 2, 4, 5]
    assert tight_count(run(1, 3, 10.0), 10.001) == 3


def test_taking_behind_skipped_runs_leaves_them() -> None:
    queue = RunQueue()
    for first in range(1, 6):
        queue.push(run(first, 2, 10.0 * first))
    assert [taken.first_seq for taken in queue.pop_after(2, 3)] == [3, 4]
    assert [(left.first_seq, left.count) for left in queue.runs] == [(1, 2), (2, 2), (5, 1), (5, 2)]
    assert queue.count == 7


def test_withdrawing_cuts_out_the_middle_of_a_run_of_that_frontend_only() -> None:
    queue = RunQueue()
    queue.push(run(1, 10, 10.0, span_ms=0.9))
    queue.push(run(1, 10, 10.0, frontend="g"))
    assert queue.withdraw(FrontendId("f"), [(4, 3)]) == 3
    assert queue.count == 17
    left = [run for run in queue.runs if run.frontend_id == "f"]
    assert seqs(left) == [1, 2, 3, 7, 8, 9, 10]
    assert [run.deadline_at_ms for run in left] == pytest.approx([10.0, 10.6])
    assert queue.withdraw(FrontendId("f"), [(4, 3)]) == 0


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=8),
    st.lists(st.integers(1, 6), max_size=10),
)
def test_withdrawing_many_spans_is_withdrawing_each(spans: list[tuple[int, int]], counts: list[int]) -> None:
    queue, first = RunQueue(), 0
    for count in counts:
        queue.push(run(first, count, 10.0 + first, span_ms=0.5))
        queue.push(run(first, count, 10.0 + first, frontend="g"))
        first += count
    gone = {seq for start, count in spans for seq in range(start, start + count)}
    assert queue.withdraw(FrontendId("f"), spans) == len(gone & set(range(first)))
    left = [one for one in queue.runs if one.frontend_id == "f"]
    assert sorted(seqs(left)) == sorted(set(range(first)) - gone)
    assert queue.count == first + sum(one.count for one in left)
    assert [one.deadline_at_ms for one in queue.runs] == sorted(one.deadline_at_ms for one in queue.runs)


def test_a_message_of_many_spans_costs_one_look_at_the_queue() -> None:
    class Counted(RequestRun):
        looks = 0

        def __getattribute__(self, name: str) -> object:
            if name == "frontend_id":
                Counted.looks += 1
            return super().__getattribute__(name)

    queue = RunQueue()
    for seq in range(1_000):
        queue.push(Counted(FrontendId("f"), seq, 1, 10.0 + seq, 0.0))
    Counted.looks = 0
    assert queue.withdraw(FrontendId("f"), [(2 * seq, 1) for seq in range(400)]) == 400
    assert Counted.looks == 1_000


def test_cutting_keeps_every_deadline_in_a_long_random_life() -> None:
    draw = random.Random(7)
    for _ in range(200):
        count, span_ms = draw.randint(2, 60), draw.choice((0.0, 0.4, 1.0))
        whole = run(1, count, 50.0, span_ms)
        due = [50.0 + span_ms * place / (count - 1) for place in range(count)]
        while whole.count > 1:
            piece = cut(whole, draw.randint(1, whole.count - 1))
            assert piece.deadline_at_ms == pytest.approx(due[piece.first_seq - 1])
            assert piece.deadline_at_ms + piece.span_ms == pytest.approx(
                due[piece.first_seq + piece.count - 2]
            )
        assert whole.deadline_at_ms == pytest.approx(due[-1])
        assert whole.span_ms == pytest.approx(0.0)
