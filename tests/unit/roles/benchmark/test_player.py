from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fabric.client import InferResult
from fabric.clock import MonotonicClock
from fabric.errors import DeadlineExceeded
from fabric.link import Tensor
from roles.benchmark.player import PlannedRequest, PlayedRequest, play


class Nobody:
    """Takes requests and remembers their budgets."""

    def __init__(self) -> None:
        self.budgets_ms: list[float | None] = []

    def submit(
        self, model: str, inputs: Mapping[str, Tensor], budget_ms: float | None = None
    ) -> asyncio.Future[InferResult]:
        del model, inputs
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
