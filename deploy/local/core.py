"""What `tenuto up` decides: which role starts when, which one starts again, and in what order all end.

Roles start by rank: the next rank starts when every role of the ones before serves (it has written its run
file) or is drained, so that nobody looks for a scheduler that is not there yet. A role that *ends by itself before it ever
served* has said why (a port in use, a wrong configuration), and would say it again: the whole stops with its
words. One that is killed, ends with a defect of ours, or has served starts again as `Restarts` says, until that gives up.
Once everything has been announced nobody is given up: what ends a role again and again (a full disk, no memory) can
pass, and to end the others would lose what they still serve.

Whatever an operator asks for is answered, whatever the roles do, and then the next one may ask: a drain within the role's
`stop_limit_ms` and `kill_ms`; a drain back at the role's first failure, within `serve_ms` and `kill_ms`; a rolling
restart within the limits of `RollingRestart` for each role.

Roles end in the opposite order of ranks, each rank with a time limit and then SIGKILL: frontends first, while
what they have accepted can still be answered, then the agents with their workers, the scheduler last.
"""

from __future__ import annotations

from collections.abc import Sequence

from deploy.local.events import (
    Announce,
    AnnounceEnd,
    KillRole,
    Reply,
    RoleAsked,
    RolePlan,
    RoleReported,
    RoleServes,
    Settled,
    SpawnRole,
    SupervisorAction,
    SupervisorEvent,
    SupervisorLimits,
    SupervisorOutcome,
    TerminateRole,
)
from deploy.local.role_states import NEXT, RoleState, RoleTransition, SupervisedRole
from deploy.local.rolling import Health, RollingRestart
from fabric.messages import Changed, RestartRoles, RoleDrain, RoleDrainDryRun, RoleRequest
from fabric.policy_options import suggestion
from roles.runtime.core import Tick
from roles.runtime.exit_codes import EXIT_CONFIG, EXIT_DEFECT, EXIT_FAILURE
from roles.runtime.process_events import ProcessExited, StopAsked, Warn, explaining_lines, still_drained
from roles.runtime.restarts import Restarts
from roles.runtime.time_limits import is_looked_at_late


class SupervisorCore:
    """Keeps a fixed set of roles running. Sans-IO: see `roles/runtime/core.py`."""

    def __init__(self, plans: Sequence[RolePlan], limits: SupervisorLimits | None = None) -> None:
        self._limits = limits or SupervisorLimits()
        self._roles = {plan.role_id: SupervisedRole(plan, Restarts(self._limits.restart)) for plan in plans}
        self._outcome: SupervisorOutcome | None = None
        self._is_announced = False
        self._rolling: RollingRestart | None = None
        self._asked: RoleAsked | None = None
        """Whom to answer when it is done; one change at a time."""
        self._has_begun = False
        self._stop_rank: int | None = None
        self._now_ms = 0.0
        self._actions: list[SupervisorAction] = []

    def handle(self, event: SupervisorEvent, now_ms: float) -> Sequence[SupervisorAction]:
        """Take one event; the first one, whichever it is, starts the first rank."""
        self._now_ms = now_ms
        self._has_begun = True
        match event:
            case ProcessExited(role_id, code, last_words):
                self._on_exit(self._roles[role_id], code, last_words)
            case RoleServes(role_id):
                self._on_serves(self._roles[role_id])
            case RoleAsked():
                self._on_asked(event)
            case RoleReported(role_id, health):
                self._on_reported(self._roles[role_id], health)
            case Settled(nothing_serves):
                self._on_settled(nothing_serves)
            case StopAsked():
                self._stop(SupervisorOutcome(0, ""))
            case Tick():
                self._on_tick()
        self._answer_if_done()
        if self._outcome is None:
            self._start_due()
        else:
            self._end_due()
        actions, self._actions = self._actions, []
        return actions

    @property
    def wake_at_ms(self) -> float | None:
        """The next time limit or restart; at first, now."""
        if not self._has_begun:
            return 0.0
        moments = [role.limit_at_ms for role in self._roles.values() if role.limit_at_ms is not None]
        if self._rolling is not None and self._rolling.wake_at_ms is not None:
            moments.append(self._rolling.wake_at_ms)
        return min(moments, default=None)

    @property
    def is_serving(self) -> bool:
        """Every role serves that is wanted."""
        return not any(role.is_missing for role in self._roles.values())

    @property
    def _absent(self) -> str:
        """The first role that does not serve; empty: all do."""
        away = (role_id for role_id, role in self._roles.items() if role.state is not RoleState.SERVING)
        return next(away, "")

    @property
    def drained(self) -> tuple[str, ...]:
        """The roles that an operator keeps down."""
        return tuple(role_id for role_id, role in self._roles.items() if role.is_kept_down)

    @property
    def asks(self) -> str:
        """Whose health it wants to hear of; empty: nobody's."""
        return "" if self._rolling is None else self._rolling.asks

    @property
    def is_announced(self) -> bool:
        """The start is over."""
        return self._is_announced

    @property
    def outcome(self) -> SupervisorOutcome | None:
        """How it ended; None while anything still runs."""
        is_over = all(role.state is RoleState.GONE for role in self._roles.values())
        return self._outcome if is_over else None

    # ------------------------------------------------------------ starting

    def _start_due(self) -> None:
        """Start what may start now: the lowest rank that does not serve, and restarts that are due."""
        for role in sorted(self._roles.values(), key=lambda role: role.plan.start_rank):
            lower = [other for other in self._roles.values() if other.plan.start_rank < role.plan.start_rank]
            # Only the first start waits for the lower ranks: whoever has served finds its peers by itself.
            is_held = not role.has_served and any(other.is_missing for other in lower)
            is_due = role.limit_at_ms is None or role.limit_at_ms <= self._now_ms
            if role.state is RoleState.WAITING and is_due and not role.is_kept_down:
                role.limit_at_ms = None
                if not is_held:
                    role.spawned_at_ms = self._now_ms
                    self._step(role, RoleTransition.START)
                    self._actions.append(SpawnRole(role.plan.role_id, role.plan.command))

    def _on_serves(self, role: SupervisedRole) -> None:
        if role.state is RoleState.STARTING:
            self._step(role, RoleTransition.SERVES)
            role.has_served = True
            if self._rolling is not None:
                self._rolling.serves(role.plan.role_id)

    def _on_settled(self, nothing_serves: str) -> None:
        if self.is_serving and not self._is_announced and self._outcome is None:
            if nothing_serves:
                self._stop(SupervisorOutcome(EXIT_FAILURE, f"no model can be served: {nothing_serves}"))
                return
            self._is_announced = True
            self._actions.append(Announce())

    # ------------------------------------------------------------ failing

    def _on_exit(self, role: SupervisedRole, code: int, last_words: str) -> None:
        was_overdue = role.state is RoleState.KILLED
        was_told_to_end, role.is_told_to_end = role.is_told_to_end, False
        self._step(role, RoleTransition.EXITED)
        if self._outcome is not None:
            role.state = RoleState.GONE
            role.limit_at_ms = None
            return
        if was_told_to_end:
            if self._rolling is not None:
                self._rolling.exited(role.plan.role_id)
            return
        said = _said(last_words)
        role_id = role.plan.role_id
        has_a_reason = code >= 0 and code != EXIT_DEFECT
        if has_a_reason and not role.has_served and not was_overdue:
            exit_code = EXIT_CONFIG if code == EXIT_CONFIG else EXIT_FAILURE
            self._stop(
                SupervisorOutcome(
                    exit_code, f"{role_id} did not start: {said or f'it ended with code {code}'}"
                )
            )
            return
        what = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if was_overdue:
            what = f"did not serve within {self._limits.serve_ms / 1e3:g} s"
        what = f"{role_id} {what}" + (f" ({said})" if said else "")
        # Until everything is announced a process has only been getting ready, however long it lived.
        wasted_ms = 0.0 if self._is_announced else self._now_ms - role.spawned_at_ms
        may_give_up = not self._is_announced
        role.limit_at_ms = role.restarts.note_failure(self._now_ms, wasted_ms, may_give_up=may_give_up)
        if role.limit_at_ms is None:
            count = f"{self._limits.restart.failures_max} failures in a row"
            self._stop(SupervisorOutcome(EXIT_FAILURE, f"{role_id} is given up after {count}: {what}"))
            return
        self._actions.append(Warn(f"{what}; starting it again"))
        if self._asked is not None and role is self._role_asked_back:
            reason = f"{what}; it is started again until it serves or is drained"
            self._answer(Changed(self._asked.request.request_no, "failed", reason=reason))
        if self._rolling is not None:
            self._rolling.failed(role_id, f"{what}; it is started again until it serves or is drained")

    # ------------------------------------------------------------ what an operator asks for

    @property
    def _role_asked_back(self) -> SupervisedRole | None:
        change = None if self._asked is None else self._asked.request
        return self._roles[change.role_id] if isinstance(change, RoleDrain) and change.is_back else None

    def _on_asked(self, asked: RoleAsked) -> None:
        number = asked.request.request_no
        refusal = self._refusal(asked.request)
        if refusal is not None:
            code, reason = refusal
            self._actions.append(Reply(asked.peer, Changed(number, "refused", code, reason)))
            return
        if already := self._is_so_already(asked.request):
            self._actions.append(Reply(asked.peer, Changed(number, "ok", reason=already)))
            return
        match asked.request:
            case RoleDrainDryRun() as question:
                self._actions.append(Reply(asked.peer, _done(question)))
                return
            case RoleDrain(role_id=role_id, is_back=is_back):
                role = self._roles[role_id]
                role.is_kept_down = not is_back
                if role.is_kept_down:
                    self._drain(role)
            case RestartRoles():
                plans = sorted((role.plan for role in self._roles.values()), key=lambda one: one.restart_rank)
                self._rolling = RollingRestart({plan.role_id: plan.kind for plan in plans}, self._now_ms)
        self._asked = asked

    def _refusal(self, change: RoleRequest) -> tuple[str, str] | None:
        """Code and reason; None: it can be done."""
        if self._outcome is not None:
            return "Busy", "everything ends"
        if self._asked is not None:
            return "Busy", "another change is under way"
        if isinstance(change, RestartRoles):
            if self.drained:
                return "Busy", still_drained(self.drained[0])
            return ("Busy", f"{self._absent} does not serve") if self._absent else None
        role = self._roles.get(change.role_id)
        if role is None:
            return self._no_role_of_its_own(change.role_id)
        if change.is_back or role.is_kept_down:
            return None
        if not role.has_served:
            return "Busy", f"{change.role_id} has not served yet"
        return self._nobody_stands_in(role.plan)

    def _is_so_already(self, change: RoleRequest) -> str:
        """Why there is nothing to do; empty: there is."""
        if isinstance(change, RestartRoles) or self._roles[change.role_id].is_kept_down != (
            not change.is_back
        ):
            return ""
        return f"{change.role_id} is {'not drained' if change.is_back else 'drained already'}"

    def _nobody_stands_in(self, plan: RolePlan) -> tuple[str, str] | None:
        """Why that role cannot end: nothing of what its process is for may be without one that serves."""
        left = {
            kind
            for role_id, role in self._roles.items()
            if role_id != plan.role_id and role.state is RoleState.SERVING
            for kind in role.plan.kinds
        }
        missing = [kind for kind in plan.kinds if kind not in left]
        if not missing:
            return None
        reason = f"{' and '.join(f'no {kind}' for kind in missing)} would be left"
        if plan.frontend and "frontend" in missing:
            reason += (
                f": {plan.frontend} runs in the process of {plan.role_id} and ends with it; to keep it, start the cluster by"
                " `tenuto up --apart`, or with cluster.frontends: 2"
            )
        return "InvalidConfig", reason

    def _no_role_of_its_own(self, role_id: str) -> tuple[str, str]:
        host = next((one.plan for one in self._roles.values() if one.plan.frontend == role_id), None)
        if host is None:
            return "UnknownRole", f"there is no {role_id}{suggestion(role_id, self._roles)}"
        reason = (
            f"{role_id} runs in the process of {host.role_id} and cannot be drained without it; with a process of its own, "
            "and another frontend to stand in for it, it can: start the cluster by `tenuto up --apart` with cluster.frontends: 2"
        )
        return "InvalidConfig", reason

    def _on_reported(self, role: SupervisedRole, health: Health) -> None:
        if self._rolling is None or role.state is not RoleState.SERVING:
            return
        if self._rolling.reported(role.plan.role_id, health, self._now_ms, self._absent):
            self._drain(role)

    def _drain(self, role: SupervisedRole) -> None:
        """End its process when it has finished, if there is one."""
        if role.state is RoleState.WAITING:
            role.limit_at_ms = None  # no next start
            return
        role.is_told_to_end = True
        if role.state is not RoleState.KILLED:
            self._step(role, RoleTransition.DRAIN)
            self._actions.append(TerminateRole(role.plan.role_id))

    def _answer_if_done(self) -> None:
        if self._rolling is not None:
            self._rolling.tick(self._now_ms, self._absent)
        if self._asked is None:
            return
        number = self._asked.request.request_no
        if self._outcome is not None:
            why = f": {self._outcome.reason}" if self._outcome.reason else ""
            self._answer(Changed(number, "failed", reason=f"everything ends{why}"))
        elif self._rolling is not None:
            if self._rolling.is_over:
                reason, done = self._rolling.reason, self._rolling.restarted
                self._answer(Changed(number, "failed" if reason else "ok", reason=reason, started=done))
        elif isinstance(change := self._asked.request, RoleDrain):
            role = self._roles[change.role_id]
            if role.state is (RoleState.SERVING if change.is_back else RoleState.WAITING):
                self._answer(_done(change))

    def _answer(self, answer: Changed) -> None:
        """What became of it; then something else may be asked for."""
        assert self._asked is not None, "an answer is somebody's"
        self._actions.append(Reply(self._asked.peer, answer))
        self._asked = self._rolling = None

    # ------------------------------------------------------------ ending

    def _stop(self, outcome: SupervisorOutcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._actions.append(AnnounceEnd())
            for role in self._roles.values():
                if role.state is RoleState.WAITING:
                    self._step(role, RoleTransition.END)

    def _end_due(self) -> None:
        """End the lowest stop rank that is not gone; the next one follows when it is."""
        ranks = [role.plan.stop_rank for role in self._roles.values() if role.state is not RoleState.GONE]
        if not ranks or min(ranks) == self._stop_rank:
            return
        self._stop_rank = min(ranks)
        for role in self._roles.values():
            is_next = role.plan.stop_rank == self._stop_rank
            if is_next and role.state in (RoleState.STARTING, RoleState.SERVING):
                self._step(role, RoleTransition.END)
                self._actions.append(TerminateRole(role.plan.role_id))

    def _on_tick(self) -> None:
        for role in self._roles.values():
            limit_at_ms = role.limit_at_ms
            if limit_at_ms is None or limit_at_ms > self._now_ms or role.state is RoleState.WAITING:
                continue
            if is_looked_at_late(limit_at_ms, self._now_ms):
                self._give_time(role)
                continue
            self._step(role, RoleTransition.OVERDUE)
            if role.state is RoleState.KILLED:
                self._actions.append(KillRole(role.plan.role_id))
            else:  # nothing to do about it, but two of one name would be worse than an end
                self._stop(SupervisorOutcome(EXIT_FAILURE, f"{role.plan.role_id} cannot be killed"))

    def _step(self, role: SupervisedRole, step: RoleTransition) -> None:
        role.state = NEXT[role.state, step]
        self._give_time(role)

    def _give_time(self, role: SupervisedRole) -> None:
        limits_ms = {
            RoleState.STARTING: self._limits.serve_ms,
            RoleState.DRAINING: role.plan.stop_limit_ms,
            RoleState.TERMINATING: role.plan.stop_limit_ms,
            RoleState.KILLED: self._limits.kill_ms,
        }
        limit_ms = limits_ms.get(role.state)
        role.limit_at_ms = None if limit_ms is None else self._now_ms + limit_ms


def _done(change: RoleDrain | RoleDrainDryRun) -> Changed:
    return Changed(change.request_no, "ok", started=int(change.is_back), ended=int(not change.is_back))


def _said(last_words: str) -> str:
    """The line that explains an end: the command's own message if there is one, else the last line."""
    lines = explaining_lines(last_words)
    own = [line.removeprefix("tenuto: ") for line in lines if line.startswith("tenuto: ")]
    return (own or lines or [""])[-1][-400:]
