"""The process that plans: whatever becomes of it, there is one answer."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence

import pytest

from fabric.messages import PlanAsked, PlanMade
from roles.config.cluster import placement_choice
from roles.runtime.core import Heard
from roles.runtime.loop.driver import Driver, Role
from roles.scheduler.planning.plan_launcher import PLAN_COMMAND, PlanLauncher, plan_limit_s
from tests.integration.proc import CLOCK, WAIT_MS
from tests.scarcity import no_descriptors

DOCUMENT = {
    "models": [{"name": "m", "slo_ms": 100, "profile": {"alpha_ms": 1, "beta_ms": 5, "max_batch": 8}}],
    "cluster": {"gpus": 1},
}
ASKED = PlanAsked(7, json.dumps(DOCUMENT), "/", (), {"m": 10.0})


class Answers:
    """Writes down what the planner says."""

    wake_at_ms: float | None = None

    def __init__(self) -> None:
        self.made: list[PlanMade] = []

    def handle(self, event: object, now_ms: float) -> Sequence[None]:
        if isinstance(event, Heard):
            assert isinstance(event.message, PlanMade)
            self.made.append(event.message)
        return ()


def answer(command: Sequence[str] = PLAN_COMMAND, limit_s: float = 60.0) -> PlanMade:
    planner, core = PlanLauncher(limit_s, command), Answers()
    driver = Driver([Role[Heard, None](core, [planner], lambda _: None)], CLOCK)
    until_ms = CLOCK.now_ms() + WAIT_MS
    try:
        planner.start(ASKED)
        driver.run(lambda: bool(core.made) or CLOCK.now_ms() > until_ms)
    finally:
        planner.close()
        driver.close()
    (made,) = core.made
    assert made.number == ASKED.number
    return made


def child(code: str) -> tuple[str, ...]:
    """A plan process that does this instead of planning."""
    return (sys.executable, "-c", textwrap.dedent(code))


def test_a_plan_is_made() -> None:
    made = answer()
    assert made.reason == ""
    assert [spec.model_id for spec in made.models] == ["m"]


def test_what_a_policy_or_a_solver_prints_is_no_part_of_the_plan() -> None:
    code = """
        import os, sys
        import roles.scheduler.planning.make_plan as planning
        plan = planning.make_plan
        def make_plan(asked, **how):
            print("progress")
            os.system("echo a solver in a process of its own")
            os.write(1, b"a solver in C")
            return plan(asked, **how)
        planning.make_plan = make_plan
        from roles.scheduler.planning.plan_process import main
        main()
    """
    assert answer(child(code)).reason == ""


def test_a_plan_process_that_began_anew_still_answers() -> None:
    """As on a host that lets it import nothing gently."""
    code = """
        from roles.runtime.idle_import import import_at_idle_priority
        import_at_idle_priority.__defaults__ = (0.0,)
        from roles.scheduler.planning.plan_process import main
        main()
    """
    assert answer(child(code)).reason == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('not a plan')", "is not a plan"),
        ("pass", "is not a plan"),
        ("import sys; sys.exit('out of luck')", "ended with code 1: out of luck"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with code -9"),
        ("import sys; sys.stderr.write('x' * 1_000_000); sys.exit(2)", "ended with code 2: xxx"),
        ("import os; os.close(0)", "is not a plan"),
        (
            "import os; from fabric.messages import Ping; from roles.runtime.journal import packed; os.write(1, packed(Ping(1)))",
            "is not a plan",
        ),
        ("import time; time.sleep(60)", "not computed within 0.5 s"),
        ("import subprocess, sys; subprocess.Popen(['sleep', '60'])", "not computed within 0.5 s"),
        (
            "import subprocess, sys; subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL); sys.exit(3)",
            "ended with code 3",
        ),
    ],
)
def test_whatever_the_process_does_there_is_an_answer_that_says_why(code: str, reason: str) -> None:
    limit_s = 0.5 if "0.5" in reason else 60.0
    assert reason in answer(child(code), limit_s).reason


def test_a_process_that_cannot_be_started_is_an_answer() -> None:
    assert "could not be started" in answer(("/nowhere/python",)).reason


def test_no_descriptors_for_a_process_are_an_answer() -> None:
    planner = PlanLauncher(60.0)
    try:
        with no_descriptors():
            planner.start(ASKED)
        (heard,) = planner.take(1, 0.0)
    finally:
        planner.close()
    assert isinstance(heard.message, PlanMade)
    assert "could not be started" in heard.message.reason
    assert "Too many open files" in heard.message.reason


@pytest.mark.parametrize(
    ("name", "options", "limit_s"),
    [
        ("symphony", {}, 60.0),
        ("ao-milp", {}, 60.0),
        ("ao-milp", {"time_limit_s": 120}, 170.0),
        ("wsm-milp", {"time_limit_s": 1}, 51.0),
    ],
)
def test_a_plan_has_the_time_of_its_solver_and_fifty_seconds(
    name: str, options: dict[str, float], limit_s: float
) -> None:
    assert plan_limit_s(placement_choice(name, options, None, 0, 1)) == limit_s
