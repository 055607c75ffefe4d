"""How a plan's steps are done: a phase at a time, all hosts of it side by side, and what follows when one fails. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deploy.ssh.steps import PHASE_OF, Phase, Plan, Step

HOSTS_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Ended:
    """A step is over. `problem`: why it was not done; empty where it was."""

    step: Step
    problem: str = ""


class Rollout:
    """Call `begin` once, then `handle` for each step that ended; both say which steps to begin now.

    A host with a problem gets no further step, nor does any get one that needs that host. Without a scheduler's host nothing is started, and nothing ended for it.
    Schedulers start one after the other, so that one of them serves, and none that runs is ended after one that did not come up. After a host that could not be drained nothing
    more is done. `is_rolling`: roles start one after the other, in all of the cluster, and nothing is done after one that did not come back.
    Nothing depends on a gateway: after one that did not start only, if `is_rolling`, no other one starts.
    """

    def __init__(self, plan: Plan, at_once: int = HOSTS_AT_ONCE, *, is_rolling: bool = False) -> None:
        self._plan = plan
        self._at_once = at_once
        self._is_rolling = is_rolling
        self._waiting = [step for step in plan.steps if step.host not in plan.problems]
        self._going: list[Step] = []
        self.failed: dict[str, str] = {host: found[0] for host, found in plan.problems.items()}
        self.without_gateway: dict[str, str] = {}
        """Hosts whose gateway did not start, and why: what else they do is done."""
        self.done: list[Step] = []
        self.left_out: list[Step] = []
        """What needs a host that has failed."""
        self.is_untouched = True
        """No step was begun that starts or ends a role."""
        self._is_kept_from_draining = False
        self._drop_hopeless()

    def begin(self) -> Sequence[Step]:
        """The first steps."""
        return self._next()

    def handle(self, ended: Ended) -> Sequence[Step]:
        """What may begin now."""
        self._going.remove(ended.step)
        if ended.problem and ended.step.phase is Phase.GATEWAYS:
            self.without_gateway[ended.step.host] = ended.problem
            if self._is_rolling:
                self._waiting = [step for step in self._waiting if step.phase is not Phase.GATEWAYS]
        elif ended.problem:
            self.failed[ended.step.host] = ended.problem
            self._waiting = [step for step in self._waiting if step.host != ended.step.host]
            self._is_kept_from_draining |= ended.step.phase is Phase.DRAIN
            if self._is_kept_from_draining or (self._is_rolling and ended.step.what == "start"):
                self._waiting = []
            if ended.step.phase is Phase.SCHEDULERS:  # the one that serves would not come up either
                self._waiting = [
                    step
                    for step in self._waiting
                    if step.phase is not Phase.SCHEDULERS or not step.is_replacing
                ]
            self._drop_hopeless()
        else:
            self.done.append(ended.step)
        return self._next()

    @property
    def going(self) -> Sequence[Step]:
        """What has begun and not ended."""
        return tuple(self._going)

    @property
    def is_over(self) -> bool:
        """Nothing is going on, and nothing more will."""
        return not self._going and not self._waiting

    @property
    def stay_drained(self) -> list[str]:
        """Hosts that were drained to be ended, and whose agent was not, whatever failed."""
        ended = {step.host for step in self.done if step.phase is Phase.END_AGENTS}
        return [step.host for step in self.done if step.phase is Phase.DRAIN and step.host not in ended]

    @property
    def without_scheduler(self) -> set[str]:
        """Hosts that have failed, and those where a scheduler cannot start before another one has left."""
        waits = {
            step.host for step in self.left_out if step.phase is Phase.SCHEDULERS and step.what == "start"
        }
        return {*self.failed, *waits}

    def _next(self) -> list[Step]:
        begun = []
        phase = min((step.phase for step in (*self._going, *self._waiting)), default=Phase.PREPARE)
        is_in_turn = phase is Phase.SCHEDULERS or (self._is_rolling and phase in PHASE_OF.values())
        at_once = 1 if is_in_turn else self._at_once
        for step in tuple(self._waiting):
            is_busy = any(other.host == step.host for other in self._going)
            if step.phase == phase and not is_busy and len(self._going) < at_once:
                self._waiting.remove(step)
                self._going.append(step)
                self.is_untouched &= step.what not in ("start", "stop", "remove")
                begun.append(step)
        return begun

    def _drop_hopeless(self) -> None:
        """What needs a host that has failed; and all that is not preparation where no scheduler will serve with it."""
        left = [step for step in self._waiting if step.needs & self.failed.keys()]
        stay = {(step.host, step.phase) for step in (*self.left_out, *left) if step.what == "stop"}
        # A gateway goes on with the frontends that stay beside it.
        stay |= {(host, Phase.GATEWAYS) for host, phase in stay if phase is Phase.FRONTENDS}
        # Where the role before it has ended already, one starts whatever became of that one elsewhere.
        left = [step for step in left if step.what != "start" or (step.host, step.phase) in stay]
        self.left_out += left
        self._waiting = [step for step in self._waiting if step not in left]
        if self._plan.has_no_scheduler(self.without_scheduler):
            self._waiting = [step for step in self._waiting if step.phase is Phase.PREPARE]
