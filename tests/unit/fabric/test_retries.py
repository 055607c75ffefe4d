from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fabric.client.retries import (
    FAILURES_MAX,
    PAUSE_MS,
    RETRIES_AT_FIRST,
    RETRIES_SAVED_MAX,
    RETRY_SHARE,
    Circuit,
    RetryBudget,
)


@given(st.lists(st.booleans(), max_size=2_000))
def test_at_most_a_tenth_of_the_requests_is_sent_again(wants_retry: list[bool]) -> None:
    budget = RetryBudget()
    retries = 0
    for requests, wants in enumerate(wants_retry, 1):
        budget.note_request()
        retries += wants and budget.take()
        assert retries <= RETRIES_AT_FIRST + RETRY_SHARE * requests + 1e-6


def test_a_quiet_year_does_not_pay_for_a_storm() -> None:
    budget = RetryBudget()
    for _ in range(100_000):
        budget.note_request()
    assert sum(budget.take() for _ in range(100_000)) == RETRIES_SAVED_MAX


def test_a_frontend_that_leaves_five_in_a_row_unanswered_gets_none_for_a_second() -> None:
    circuit = Circuit()
    for _ in range(FAILURES_MAX - 1):
        circuit.note_unanswered(0.0)
    assert circuit.allows(0.0)
    circuit.note_answer()
    for _ in range(FAILURES_MAX):
        assert circuit.allows(1.0)
        circuit.note_unanswered(1.0)
    assert not circuit.allows(PAUSE_MS)


def test_one_request_tries_it_then_and_its_fate_decides() -> None:
    circuit = Circuit()
    for _ in range(FAILURES_MAX):
        circuit.note_unanswered(0.0)
    assert circuit.allows(PAUSE_MS)
    assert not circuit.allows(PAUSE_MS), "one is enough to tell"
    circuit.note_unanswered(PAUSE_MS + 100.0)
    assert not circuit.allows(2 * PAUSE_MS)
    assert circuit.allows(2 * PAUSE_MS + 100.0)
    circuit.note_answer()
    assert circuit.allows(2 * PAUSE_MS + 101.0)
