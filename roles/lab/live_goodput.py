"""Goodput of a living cluster: the same bisection as in virtual time, with load that is really sent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from policies.slo import BAD_RATE_ALLOWED
from roles.benchmark.run import run_load
from roles.benchmark.share import LoadPlan, asked_of
from roles.benchmark.verdict import planned_slices
from roles.lab.goodput import Question
from roles.simulator.simulation import COOLDOWN_SLOS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LiveProbe:
    """Asks whether the cluster behind `targets` keeps every model's bad rate under 1 % at a total rate.

    `on_late` hears of a rate at which the senders themselves were too late to tell: it counts as bad.
    """

    targets: tuple[str, ...]
    processes: int
    on_late: Callable[[float, float], None]

    def __call__(self, question: Question, seed: int, total_rps: float) -> bool:
        """Send that load once."""
        workload = replace(question.workload, seed=seed).scaled(total_rps / question.total_rps)
        window = question.window(total_rps)
        cooldown_ms = COOLDOWN_SLOS * max(slo_ms for _, slo_ms in asked_of(question.config))
        plan = LoadPlan(
            question.config, workload, self.targets, window.until_ms + cooldown_ms, self.processes, 0
        )
        planned = planned_slices(question.config, question.settings)
        run = run_load(plan, window, lambda _: None, planned)
        if run.is_spoiled:
            self.on_late(total_rps, run.sender_late_p99_ms)
        return run.outcome.worst_bad_rate < BAD_RATE_ALLOWED


class InlineExecutor(Executor):
    """Does the work when it is asked to: one load at a time is all that one cluster can be asked."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `fn` now. What it raises is raised here: a cluster that is gone ends the search."""
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
