"""The process behind `tenuto up`: the roles as its children, and a question to the scheduler until all is ready."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from deploy.local.core import SupervisorCore
from deploy.local.events import (
    Announce,
    AnnounceEnd,
    KillRole,
    Reply,
    RolePlan,
    RoleServes,
    Settled,
    SpawnRole,
    SupervisorAction,
    SupervisorEvent,
    SupervisorOutcome,
    TerminateRole,
)
from deploy.local.kept_up_file import KeptUpFile
from deploy.local.log_limit import LogLimit
from deploy.local.operator_link import RoleHealth, operator_link, operator_source
from fabric.clock import MonotonicClock
from fabric.ids import OPERATOR, SCHEDULER_PREFIX, new_incarnation, peer_id
from fabric.messages import ModelWarning, SliceReport, SliceState, StatusAsked, StatusListed, UnplacedInfo
from roles.node_agent.left_behind import end_what_agents_left
from roles.runtime.children import Processes
from roles.runtime.core import Heard
from roles.runtime.defects import DefectReport
from roles.runtime.loop.driver import Driver, Role
from roles.runtime.loop.local_scheduler import LocalScheduler
from roles.runtime.loop.sources import SourceOver, TimedSource
from roles.runtime.process import StopSignal, read_run_file, remove_file
from roles.runtime.process_events import Warn
from roles.runtime.run_directory import run_files
from roles.runtime.running_cluster import endpoints_in, is_active, shards_of
from roles.runtime.shard_reports import merged, shard_of

ASK_EVERY_MS = 100.0
LOOK_EVERY_MS = 50.0
SETTLED_STATES = (SliceState.READY, SliceState.FAILED)

log = logging.getLogger("tenuto")


class Started(Struct, frozen=True):
    """What `tenuto up` says when everything serves."""

    endpoints: Mapping[str, Sequence[str]]
    slices: Sequence[SliceReport]
    warnings: Sequence[ModelWarning]
    unplaced: Sequence[UnplacedInfo]


def supervise(
    plans: Sequence[RolePlan],
    run_dir: Path,
    stop: StopSignal,
    up_file: KeptUpFile,
    on_started: Callable[[Started], None],
) -> SupervisorOutcome:
    """Run these roles until told to stop or one cannot be kept running; nothing of them is left then.

    `on_started` is called once, when every role that is wanted serves and every slice is ready or has failed.
    """
    supervisor = _Supervisor(plans, run_dir, stop, up_file, on_started)
    try:
        return supervisor.run()
    finally:
        supervisor.close()


def problems_of(slices: Sequence[SliceReport]) -> list[str]:
    """What is not served as it was asked for: slices that failed, models that a slice is served without."""
    failed = [
        f"slice {one.slice_id} failed: {one.reason}" for one in slices if one.state == SliceState.FAILED
    ]
    return failed + [
        f"model {left.model_id} is not served on slice {left.slice_id}: {left.reason}"
        for one in slices
        for left in one.left_out
    ]


class RunFileWatch(TimedSource[RoleServes]):
    """Tells of a role when the living process of that name has written its run file."""

    def __init__(self, role_ids: Sequence[str], run_dir: Path, processes: Processes) -> None:
        self._role_ids = role_ids
        self._run_dir = run_dir
        self._processes = processes
        self._told: set[str] = set()  # whose present process serves
        self._flags: dict[str, tuple[str, ...]] = {}  # with which each listens where clients know it
        self._look_at_ms = 0.0

    def begins(self, role_id: str) -> Sequence[str]:
        """Its next process is started now: flags by which that listens where the one before it did, as clients know it; none where that one never served."""
        self._told.discard(role_id)
        return self._flags.pop(role_id, ())

    @property
    def wake_at_ms(self) -> float | None:
        """The next look, while a process has not written its own: mostly there is nothing to wake up for."""
        return self._look_at_ms if any(self._untold()) else None

    def _untold(self) -> Iterator[tuple[str, int]]:
        for role_id in self._role_ids:
            pid = self._processes.pid(role_id)
            if pid is not None and role_id not in self._told:
                yield role_id, pid

    def take(self, limit: int, now_ms: float) -> Sequence[RoleServes]:
        """Those that serve since the last look."""
        del limit
        self._look_at_ms = now_ms + LOOK_EVERY_MS
        serves = []
        for role_id, pid in list(self._untold()):
            found = read_run_file(self._run_dir / f"{role_id}.json")
            if found is not None and found.pid == pid:
                self._told.add(role_id)
                self._note_clients(role_id, pid)
                serves.append(RoleServes(role_id))
        return serves

    def _note_clients(self, role_id: str, pid: int) -> None:
        """A scheduler's process may have a frontend in it, with a run file of its own."""
        flags = {
            f"--{purpose}": address.partition("?")[0].removeprefix(
                "" if purpose == "client" else f"{scheme}://"
            )
            for found in run_files(self._run_dir)
            if found.pid == pid
            for purpose in ("client", "http", "grpc")
            for address in found.addresses.get(purpose, ())
            if (scheme := address.partition("://")[0]) != "ipc"
        }
        if flags:
            self._flags[role_id] = tuple(word for flag in flags.items() for word in flag)


class _Heard:
    """What the active scheduler of each shard said last."""

    def __init__(self) -> None:
        self._by_shard: dict[int, StatusListed] = {}

    def note(self, status: StatusListed) -> Settled | None:
        """All slices of all shards are ready or have failed; None: not yet."""
        self._by_shard[shard_of(status)] = status
        if len(self._by_shard) < shards_of(status):
            return None
        whole = self.whole
        if not all(report.state in SETTLED_STATES for report in whole.slices):
            return None
        is_served = any(model.replicas for model in whole.models)
        return Settled("" if is_served else "; ".join(problems_of(whole.slices)))

    @property
    def whole(self) -> StatusListed:
        """All shards as one."""
        return merged([self._by_shard[shard] for shard in sorted(self._by_shard)])


class _Readiness(SourceOver):
    """A source: asks one scheduler until every slice of the cluster is ready or has failed, then says so once.

    Then it leaves the scheduler: nothing that it says is of use any more, and each heartbeat would wake up two processes.
    """

    def __init__(self, scheduler: LocalScheduler, heard: _Heard) -> None:
        super().__init__(scheduler)
        self._heard = heard
        self._scheduler = scheduler
        self._ask_at_ms = 0.0
        self._is_settled = False

    @property
    def wake_at_ms(self) -> float | None:
        if self._is_settled:
            return None
        wake_at_ms = self._scheduler.wake_at_ms
        return self._ask_at_ms if wake_at_ms is None else min(self._ask_at_ms, wake_at_ms)

    def take(self, limit: int, now_ms: float) -> Sequence[Settled]:
        if self._is_settled:
            return ()
        settled = []
        for event in self._scheduler.take(limit, now_ms):
            if (
                isinstance(event, Heard)
                and isinstance(event.message, StatusListed)
                and is_active(event.message)
            ):
                now = self._heard.note(event.message)
                settled.extend([] if now is None else [now])
        if self._ask_at_ms <= now_ms:
            self._ask_at_ms = now_ms + ASK_EVERY_MS
            self._scheduler.send(StatusAsked())
        return settled

    def rest(self) -> None:
        """It has been heard: ask no more."""
        self._is_settled = True
        self._scheduler.leave()


class _Supervisor:
    def __init__(
        self,
        plans: Sequence[RolePlan],
        run_dir: Path,
        stop: StopSignal,
        up_file: KeptUpFile,
        on_started: Callable[[Started], None],
    ) -> None:
        clock = MonotonicClock()
        self._run_dir = run_dir
        self._up_file = up_file
        self._on_started = on_started
        self._processes = Processes()
        own = peer_id(OPERATOR, new_incarnation())
        role_ids = [plan.role_id for plan in plans if plan.role_id.startswith(SCHEDULER_PREFIX)]
        self._schedulers = [LocalScheduler(own, run_dir, clock, role_id=role_id) for role_id in role_ids]
        self._heard = _Heard()
        self._readiness = [_Readiness(scheduler, self._heard) for scheduler in self._schedulers]
        self._core = SupervisorCore(plans)
        self._watch = RunFileWatch([plan.role_id for plan in plans], run_dir, self._processes)
        self._operators = operator_link(run_dir)
        self._health = RoleHealth(run_dir, lambda: self._core.asks)
        self._role = Role[SupervisorEvent, SupervisorAction](
            self._core,
            [
                stop,
                self._processes,
                self._watch,
                *self._readiness,
                operator_source(self._operators, self._status),
                self._health,
                up_file,
                LogLimit(run_dir),
            ],
            self._perform,
        )
        self._driver = Driver([self._role], clock, on_defect=DefectReport("up", run_dir).end)

    def run(self) -> SupervisorOutcome:
        self._driver.run(lambda: self._core.outcome is not None)
        assert self._core.outcome is not None, "that is what ended the loop"
        end_what_agents_left(self._run_dir)
        return self._core.outcome

    def _status(self) -> StatusListed:
        counters = {f"operator_{name}": value for name, value in self._operators.counters.items()}
        return self._role.stats.told_in(StatusListed("up", os.getpid(), (), (), counters))

    def close(self) -> None:
        self._processes.close()
        self._driver.close()
        for scheduler in self._schedulers:
            scheduler.close()
        self._health.close()
        self._operators.close()

    def _perform(self, action: SupervisorAction) -> None:
        match action:
            case SpawnRole(role_id, command):
                self._forget_run_files(role_id)
                self._processes.spawn(role_id, (*command, *self._watch.begins(role_id)))
            case TerminateRole(role_id):
                self._processes.terminate(role_id)
            case KillRole(role_id):
                self._processes.kill(role_id)
            case Announce():
                for readiness in self._readiness:
                    readiness.rest()
                told = self._heard.whole
                unplaced = () if told.plan is None else told.plan.unplaced
                started = Started(endpoints_in(self._run_dir), told.slices, told.warnings, unplaced)
                self._on_started(started)
                self._note_drained()
            case AnnounceEnd():
                self._up_file.say(replace(self._up_file.said, is_ending=True))
            case Reply(peer, message):
                self._note_drained()
                self._operators.send(peer, message)
            case Warn(text):
                log.warning("role_restarts %s", text)

    def _note_drained(self) -> None:
        """Which roles are kept down, for `tenuto status`."""
        self._up_file.say(replace(self._up_file.said, drained=self._core.drained))

    def _forget_run_files(self, role_id: str) -> None:
        """A killed process leaves its run files; its successor's names must not stand beside a dead pid."""
        former = read_run_file(self._run_dir / f"{role_id}.json")
        if former is not None:
            for found in run_files(self._run_dir):
                if found.pid == former.pid:
                    remove_file(self._run_dir / f"{found.role_id}.json")
