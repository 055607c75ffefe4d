"""The process that rehearses: whatever becomes of it, there is one answer to each question."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

import pytest

from fabric.ids import FrontendId, ModelId, SliceId
from fabric.messages import ModelSpec, RehearsalMade
from policies.batching.base import BatchModel, BatchSlice, Delay, HostedModel, RequestRun
from policies.batching.registry import make_discipline
from policies.batching.rehearsing.question import VARIANTS, Arrival, Question, RehearsedModel
from policies.batching.rehearsing.rehearsals import RUN_TIMES_MAX, Rehearsals
from roles.runtime.core import REHEARSER, Heard
from roles.runtime.journal import packed, unpacked
from roles.runtime.loop.driver import Driver, Role
from roles.scheduler.core import SchedulerCore
from roles.scheduler.rehearsing.make_rehearsal import asked_of, make_rehearsal
from roles.scheduler.rehearsing.rehearsal_launcher import REHEARSAL_COMMAND, RehearsalLauncher
from roles.scheduler.settings import SchedulerSettings
from tests.integration.proc import CLOCK, WAIT_MS

HOSTED = (HostedModel(ModelId("m"), tuple(2.0 * size + 8.0 for size in range(1, 20))),)
QUESTION = Question(
    7,
    (
        RehearsedModel(
            BatchModel(ModelId("m"), 25.0, Delay(0.1, 0.01)), 600.0, 0.02, 3.0, 4.0, is_over_share=True
        ),
    ),
    tuple(BatchSlice(SliceId(f"s{order}"), order, HOSTED) for order in range(2)),
    0.02,
    tuple(Arrival(1.5 * number, 0, 1, 24.0, 0.0) for number in range(400)),
    tuple(range(len(VARIANTS))),
    50.0,
    4,
    is_lowest_id=False,
)


class Answers:
    """Writes down what the rehearser says."""

    wake_at_ms: float | None = None

    def __init__(self) -> None:
        self.made: list[RehearsalMade] = []

    def handle(self, event: object, now_ms: float) -> Sequence[None]:
        if isinstance(event, Heard):
            assert isinstance(event.message, RehearsalMade)
            self.made.append(event.message)
        return ()


def answers(
    questions: int = 1, command: Sequence[str] = REHEARSAL_COMMAND, limit_s: float = 60.0
) -> list[RehearsalMade]:
    rehearser, core = RehearsalLauncher(limit_s, command), Answers()
    driver = Driver([Role[Heard, None](core, [rehearser], lambda _: None)], CLOCK)
    until_ms = CLOCK.now_ms() + WAIT_MS
    try:
        for number in range(questions):
            rehearser.start(asked_of(QUESTION))
            driver.run(lambda number=number: len(core.made) > number or CLOCK.now_ms() > until_ms)  # type: ignore[misc]
    finally:
        rehearser.close()
        driver.close()
    assert [made.number for made in core.made] == [QUESTION.number] * questions
    return core.made


def child(code: str) -> tuple[str, ...]:
    """A process that does this instead of rehearsing."""
    return (sys.executable, "-c", textwrap.dedent(code))


def test_one_process_answers_what_is_asked_and_what_is_asked_next() -> None:
    here = make_rehearsal(asked_of(QUESTION))
    assert sum(map(sum, here.lost)) > 0
    assert answers(2) == [here, here]


def test_a_question_comes_as_it_was_asked() -> None:
    asked = asked_of(QUESTION)
    assert len(asked.kinds) == 1, "both slices host the same"
    assert unpacked(packed(asked)) == asked


def heard(slices: tuple[BatchSlice, ...], *, late_every: int = 1_000_000) -> Question | None:
    """What is asked after 1.5 s of arrivals, of which some have spent their budget on the way."""
    rehearsals = Rehearsals()
    rehearsals.follow(0.01, 0.0)
    for number in range(1_500):
        budget_ms = 24.0 if (number + 1) % late_every else -0.3
        run = RequestRun(FrontendId("f"), number, 1, number + budget_ms, float(number))
        rehearsals.note(ModelId("m"), run, float(number))
    return rehearsals.question(QUESTION.models, lambda: slices, 0.02, 1_500.0)


def test_runs_whose_budget_has_ended_on_their_way_can_be_asked_about() -> None:
    found = heard(QUESTION.slices, late_every=50)
    assert found is not None
    asked = asked_of(found)
    assert unpacked(packed(asked)) == asked
    assert min(run.budget_ms for run in asked.runs) == 0.0


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_is_asked_fits_a_message_however_large_the_cluster(is_shared: bool) -> None:
    """What many slices host alike is said once."""
    models = [HostedModel(ModelId(f"m{number}"), (0.123456,) * 512) for number in range(37)]
    for slices in (1, 10, 100, 1_000):
        alike = tuple(models)
        found = heard(
            tuple(
                BatchSlice(SliceId(f"s{order}"), order, alike if is_shared else tuple(models))
                for order in range(slices)
            )
        )
        is_small = is_shared or 37 * 512 * slices <= RUN_TIMES_MAX
        assert (found is not None) == (is_small and 37 * slices <= 20_000)
        if found is not None:
            packed(asked_of(found))


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(3)",
        "import sys; sys.stdin.buffer.read(4)",
        "import sys; sys.stdout.buffer.write((3).to_bytes(4) + b'abc')",
        "import sys; sys.stdout.buffer.write((9).to_bytes(4) + b'abc')",
    ],
)
def test_a_process_that_fails_is_an_answer_without_an_outcome(code: str) -> None:
    for made in answers(2, child(code)):
        assert made.lost == ()
        assert made.reason


def test_a_process_that_hangs_is_ended() -> None:
    (made,) = answers(1, child("import time; time.sleep(600)"), limit_s=0.3)
    assert "0.3 s" in made.reason


def test_a_command_that_is_none_is_an_answer_too() -> None:
    (made,) = answers(1, ("/nowhere/at/all",))
    assert "could not be started" in made.reason


def test_how_often_it_was_rehearsed_and_how_often_in_vain_is_counted() -> None:
    core = SchedulerCore(
        SchedulerSettings((ModelSpec(ModelId("m"), 25.0, 4),), ()), make_discipline("tenuto", {})
    )
    core.handle(Heard(REHEARSER, RehearsalMade(1, ((0,),))), 1.0)
    core.handle(Heard(REHEARSER, RehearsalMade(2, reason="the rehearser ended")), 2.0)
    assert (core.counters.rehearsals, core.counters.rehearsals_failed) == (2, 1)
