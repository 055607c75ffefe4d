from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

import pytest

from fabric.client import InferResult
from fabric.clock import MonotonicClock
from fabric.errors import DeadlineExceeded
from fabric.link import Tensor
from fabric.messages import Ledger
from roles.benchmark.player import PlannedRequest, PlayedRequest, play


class Nobody:
    """Takes requests and remembers their budgets."""

    def __init__(self) -> None:
        self.budgets_ms: list[float | None] = []

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        budget_ms: float | None = None,
        priority: int | None = None,
    ) -> asyncio.Future[InferResult]:
        del model, inputs, priority
        self.budgets_ms.append(budget_ms)
        answer: asyncio.Future[InferResult] = asyncio.get_running_loop().create_future()
        answer.set_exception(DeadlineExceeded("nobody is here"))
        return answer


def test_what_the_sender_used_up_is_taken_off_the_budget_and_what_has_none_left_is_not_sent() -> None:
    client, clock = Nobody(), MonotonicClock()
    played: list[PlayedRequest] = []
    began_at_ms = clock.now_ms() - 1_000.0
    plan = [
        PlannedRequest(0.0, "late", {}, budget_ms=999.0),
        PlannedRequest(0.0, "early", {}, budget_ms=60_000.0),
        PlannedRequest(0.0, "patient", {}),
    ]
    asyncio.run(play(client, plan, began_at_ms, clock, played.append))
    early_ms, patient_ms = client.budgets_ms
    assert early_ms is not None
    assert 0 < early_ms <= 59_000.0
    assert patient_ms is None
    assert {one.planned.model: type(one.error) for one in played} == dict.fromkeys(
        ("late", "early", "patient"), DeadlineExceeded
    )


class LeapingLoop(asyncio.SelectorEventLoop):
    """Does not wait: its time leaps to the next timer."""

    def __init__(self) -> None:
        self.at_ms = 0.0
        leaping = selectors.SelectSelector()
        look = leaping.select

        def select(timeout: float | None = None) -> list[Any]:
            self.at_ms += 1e3 * (timeout or 0.0)
            return look(0)

        leaping.select = select  # type: ignore[method-assign]
        super().__init__(leaping)

    def time(self) -> float:
        return self.at_ms / 1e3

    def now_ms(self) -> float:
        return self.at_ms


class Slow:
    """Answers each request so long after it was sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop, takes_ms: float) -> None:
        self.loop = loop
        self.takes_ms = takes_ms

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        budget_ms: float | None = None,
        priority: int | None = None,
    ) -> asyncio.Future[InferResult]:
        del model, inputs, budget_ms, priority
        answer: asyncio.Future[InferResult] = self.loop.create_future()
        self.loop.call_later(self.takes_ms / 1e3, answer.set_result, InferResult({}, Ledger()))
        return answer


@pytest.mark.parametrize(
    ("takes_ms", "budget_ms", "is_answered"),
    [
        (11_000.0, 20_000.0, True),
        (599_000.0, 600_000.0, True),
        (9_000.0, 50.0, True),
        (30_000.0, 20_000.0, False),
        (9_000.0, None, True),
        (60_000.0, None, False),
    ],
)
def test_a_run_waits_for_its_answers_as_long_as_its_longest_budget(
    takes_ms: float, budget_ms: float | None, *, is_answered: bool
) -> None:
    """What is silent for longer is late, and does not end the run."""
    loop = LeapingLoop()
    played: list[PlayedRequest] = []
    plan = [PlannedRequest(0.0, "a", {}, budget_ms), PlannedRequest(5.0, "a", {}, 50.0)]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play(Slow(loop, takes_ms), plan, 0.0, loop, played.append))
        runner.run(asyncio.sleep(2 * takes_ms / 1e3))
    assert len(played) == 2
    assert [one.result is not None for one in played] == [is_answered] * 2
    assert is_answered or all(isinstance(one.error, DeadlineExceeded) for one in played)
