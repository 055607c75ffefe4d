"""A scheduler that gave a frontend up, and the frontend that did not notice, on virtual time: what was queued is not lost."""

from __future__ import annotations

import pytest

from roles.runtime.loop.sources import REFUSED, SILENT
from tests.line_stage import Line, LineStage


@pytest.mark.parametrize("reason", [SILENT, REFUSED])
def test_a_frontend_that_was_given_up_and_says_hello_in_doubt_announces_all_again_once(reason: str) -> None:
    """One that stood still forgives itself the gap; of its first words the hello is the first that the scheduler hears."""
    stage = LineStage(Line(), (100.0,), slo_ms=60_000.0, frontends=2)
    for number in range(30):  # the slice is busy for 3 s
        stage.ask(number, 100, frontend=1)
    stage.run_until(60.0)
    stage.ask(1, 100, budget_ms=250.0)
    stage.ask(2, 100, budget_ms=30_000.0)
    stage.run_until(61.0)
    stage.give_up(stage.frontends[0], reason)
    stage.run_until(20_000.0)
    assert stage.fates[0, 1].code == "DeadlineExceeded", "by then it says hello"
    assert stage.fates[0, 2].code == "ok"
    assert stage.fates[0, 2].answered_at_ms < 4_000.0
    assert stage.scheduler.counters.batches_sent == 31, "nothing ran twice"
