"""A cluster that runs on this host, as its run directory and its schedulers show it."""

from __future__ import annotations

import select
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.clock import Clock, MonotonicClock
from fabric.errors import PeerLost
from fabric.ids import (
    AGENT_PREFIX,
    FRONTEND_PREFIX,
    GATEWAY_PREFIX,
    PAGE_ID,
    SCHEDULER_PREFIX,
    ModelId,
    PeerId,
)
from fabric.keys import Keyring
from fabric.messages import StatusListed
from fabric.operator_questions import ask_status
from roles.runtime.core import SCHEDULER
from roles.runtime.run_directory import drained_roles, run_files
from roles.runtime.shard_reports import ShardReport, merged, shard_of, shard_report

_LATE_TIMERS = "timer_late_p99_ms"
ROLE_LIMIT_MS = 1_000.0
SCHEDULER_LIMIT_MS = 2_000.0
_TOLD: Mapping[str, Sequence[str]] = {
    FRONTEND_PREFIX: ("client",),
    GATEWAY_PREFIX: ("http", "grpc"),
    SCHEDULER_PREFIX: ("control",),
    PAGE_ID: ("page",),
}
"""By whose it is: what others may want to reach."""
TAKE_OVER_LOOK_S = 0.1
ACTIVE_ELSEWHERE = "the active one is"
"""Of a command's words where schedulers stand by for one that was not asked."""
LOOK_MS = 5_000.0
"""All schedulers together have so long to answer, and one of them to take over; all other roles likewise."""
LEAST_LIMIT_MS = 100.0
"""For an answer of one, where others that are silent have used up the time for all: it may be well."""


class ProcessReport(Struct, frozen=True):
    """One role of the run directory."""

    role_id: str
    pid: int
    alive: bool
    addresses: Mapping[str, Sequence[str]]
    incarnation: str = ""
    """By which it is told from one that was started anew: in a container that has the same pid."""


class ClusterReport(Struct, frozen=True):
    """What `tenuto status` shows. `scheduler`: the active one, or all shards' as if they were one."""

    endpoints: Mapping[str, Sequence[str]]
    processes: Sequence[ProcessReport]
    scheduler: StatusListed
    counters: Mapping[str, Mapping[str, float]]
    """By role: what it counted and what its loop measured; workers too, as their agent tells it."""
    shards: Sequence[ShardReport] = ()
    active: Mapping[int, ActiveScheduler] = field(default_factory=dict)
    """By shard: who schedules it, and what that says."""
    drained_roles: Sequence[str] = ()
    """Those of the run directory that an operator keeps down."""

    @property
    def late_timers_ms(self) -> dict[str, float]:
        """How late timers were at their p99, by process."""
        return {role_id: its[_LATE_TIMERS] for role_id, its in self.counters.items() if _LATE_TIMERS in its}

    @property
    def workers(self) -> dict[str, int]:
        """The processes of this host's workers, by name."""
        return {
            worker_id: round(counters["pid"])
            for worker_id, counters in self.counters.items()
            if "pid" in counters
        }


def look(run_dir: Path, keyring: Keyring | None = None) -> ClusterReport:
    """The cluster of a run directory as its active schedulers see it. PeerLost when none answers that is.

    `keyring`: the operator's, for roles that are reached by TCP.
    """
    active = active_schedulers(run_dir, keyring)
    processes = processes_in(run_dir)
    report = _report(endpoints_in(run_dir), active)
    counters = dict(report.counters)
    clock = MonotonicClock()
    until_ms = clock.now_ms() + LOOK_MS
    for process in processes:
        if process.alive and process.role_id not in counters:
            counters |= _counters(process, _limit_ms(ROLE_LIMIT_MS, until_ms, clock), keyring)
    return replace(report, processes=processes, counters=counters, drained_roles=drained_roles(run_dir))


def is_active(scheduler: StatusListed) -> bool:
    """Whether it is the active scheduler that says how it is."""
    return scheduler.standing is None or scheduler.standing.state == "active"


def look_from_afar(addresses: Sequence[str], keyring: Keyring | None) -> ClusterReport:
    """What the schedulers at these control addresses know; see `active_at`."""
    active = active_at(addresses, keyring)
    report = _report({"control": list(addresses)}, active)
    return replace(report, shards=[one for one in report.shards if one.shard in active])


def _report(endpoints: Mapping[str, Sequence[str]], active: Mapping[int, ActiveScheduler]) -> ClusterReport:
    statuses = [one.status for one in active.values()]
    counters = {one.role_id: one.counters for one in statuses}
    shards = [
        shard_report(active[shard].status) if shard in active else ShardReport(shard, "")
        for shard in range(shards_of(statuses[0]))
    ]
    return ClusterReport(endpoints, (), merged(statuses), counters, shards, active)


def _counters(
    process: ProcessReport, limit_ms: float, keyring: Keyring | None
) -> dict[str, dict[str, float]]:
    """Its own and, of an agent, its workers'; nothing of one that ends or hangs just now."""
    addresses = process.addresses.get("control") or process.addresses.get("client")
    if not addresses:
        return {}
    try:
        listed = ask_status(addresses, limit_ms, server=PeerId(process.role_id), keyring=keyring)
    except PeerLost:
        return {}
    counters: dict[str, dict[str, float]] = {process.role_id: {}}
    for name, value in listed.counters.items():
        worker_id, _, own = name.rpartition("/")
        counters.setdefault(worker_id or process.role_id, {})[own] = value
    return counters


class ActiveScheduler(Struct, frozen=True):
    """Where one listens, and what it says."""

    addresses: Sequence[str]
    status: StatusListed


def shards_of(status: StatusListed) -> int:
    """How many shards the cluster has."""
    return 1 if status.standing is None else status.standing.shards


def active_schedulers(run_dir: Path, keyring: Keyring | None = None) -> dict[int, ActiveScheduler]:
    """Of a run directory, by shard. PeerLost where no shard has an active one on this host."""
    processes = processes_in(run_dir)
    here = [one for one in processes if one.role_id.startswith(SCHEDULER_PREFIX)]
    alive = [one.addresses.get("control", ()) for one in here if one.alive]
    if not alive:
        serving = (AGENT_PREFIX, FRONTEND_PREFIX)
        others = ", ".join(one.role_id for one in processes if one.alive and one.role_id.startswith(serving))
        where = f"no scheduler runs here, only {others}: ask on its host, or by --scheduler and --key"
        raise PeerLost(where if others else f"no cluster runs in {run_dir}")
    return _active_of(alive, keyring, str(run_dir), {one.role_id for one in here})


def active_at(addresses: Sequence[str], keyring: Keyring | None) -> dict[int, ActiveScheduler]:
    """Those at these control addresses, by shard; a single one is meant whether it is active or not.

    Raises PeerLost, and Unauthorised where the key does not permit it.
    """
    if len(addresses) == 1:
        status = ask_status(addresses[0], server=SCHEDULER, keyring=keyring)
        return {shard_of(status): ActiveScheduler(addresses, status)}
    return _active_of([(address,) for address in addresses], keyring, ", ".join(addresses))


def having(model_id: ModelId, schedulers: Mapping[int, ActiveScheduler]) -> list[int]:
    """The shards that list a model, two while it moves; the first one, which says so, where none does."""
    having = [
        own
        for own, active in schedulers.items()
        if any(model.model_id == model_id for model in active.status.models)
    ]
    return having or [*schedulers][:1]


def roomiest(schedulers: Mapping[int, ActiveScheduler], coming: Sequence[int] = ()) -> int:
    """The shard that has fewest models for its GPUs. `coming`: shards to which one more model each will come."""

    def crowd(shard: int) -> tuple[float, int]:
        status = schedulers[shard].status
        return (len(status.models) + coming.count(shard)) / max(1, len(status.gpus)), shard

    return min(schedulers, key=crowd)


def _active_of(
    alive: Sequence[Sequence[str]],
    keyring: Keyring | None,
    where: str,
    here: Collection[str] | None = None,
) -> dict[int, ActiveScheduler]:
    """By shard, the one with the highest epoch; a shard whose active scheduler is not among these is left out.

    While one takes over there is none: so they are asked again until `LOOK_MS` is over, unless none of those that are elsewhere answers, or
    the standbys know of an active one that is not `here` (None: all are elsewhere).
    """
    limit_ms = SCHEDULER_LIMIT_MS if len(alive) == 1 else ROLE_LIMIT_MS
    answers: list[tuple[Sequence[str], StatusListed]] = []
    active: dict[int, ActiveScheduler] = {}
    clock = MonotonicClock()
    until_ms = clock.now_ms() + LOOK_MS
    while True:
        answers = [
            (addresses, status)
            for addresses in alive
            if (status := _asked(addresses, _limit_ms(limit_ms, until_ms, clock), keyring))
        ]
        active = {
            shard_of(status): ActiveScheduler(addresses, status)
            for addresses, status in sorted(answers, key=lambda one: epoch_of(one[1]))
            if is_active(status)
        }
        awaited = {shard_of(one) for _, one in answers} - active.keys()
        is_told = here is not None or len(answers) == len(
            alive
        )  # else the one that they name may be about to end
        if answers and not awaited - (
            _led_elsewhere([one for _, one in answers], here) if is_told else set()
        ):
            break
        if not answers and (here is None or len(alive) == 1):
            break
        if clock.now_ms() >= until_ms:
            break
        select.select([], [], [], TAKE_OVER_LOOK_S)
    if active:
        return dict(sorted(active.items()))
    if not answers:
        raise PeerLost(f"no active scheduler answers in {where}")
    raise PeerLost(_why_none_is_active([status for _, status in answers]))


def _why_none_is_active(standbys: Sequence[StatusListed]) -> str:
    names = " and ".join(status.role_id for status in standbys)
    stand = f"{names} {'stands' if len(standbys) == 1 else 'stand'} by"
    standings = [status.standing for status in standbys if status.standing is not None]
    known = {one.active for one in standings if one.active} - {status.role_id for status in standbys}
    if known:
        active = " and ".join(sorted(known))
        return f"{stand}; {ACTIVE_ELSEWHERE} {active}: ask on its host, or by --scheduler and --key"
    agents = max((one.agents for one in standings), default=0)
    return (
        f"{stand}, and none is active: {agents // 2 + 1} of the {agents} agents have to grant it, and so many"
        " do not answer, or it is about to begin"
    )


def _led_elsewhere(answers: Sequence[StatusListed], here: Collection[str] | None) -> set[int]:
    """Shards whose standbys know of an active scheduler that is none of those that were asked."""
    asked = {one.role_id for one in answers} if here is None else here
    return {shard_of(one) for one in answers if one.standing and one.standing.active not in ("", *asked)}


def epoch_of(status: StatusListed) -> int:
    """Of its lease; 0: it needs none."""
    return 0 if status.standing is None else status.standing.epoch


def _limit_ms(limit_ms: float, until_ms: float, clock: Clock) -> float:
    return max(LEAST_LIMIT_MS, min(limit_ms, until_ms - clock.now_ms()))


def _asked(addresses: Sequence[str], limit_ms: float, keyring: Keyring | None) -> StatusListed | None:
    try:
        return ask_status(addresses, limit_ms, server=SCHEDULER, keyring=keyring)
    except PeerLost:
        return None


def processes_in(run_dir: Path) -> list[ProcessReport]:
    """Every role that has a run file there."""
    found = run_files(run_dir) if run_dir.is_dir() else []
    return [
        ProcessReport(
            run_file.role_id, run_file.pid, run_file.is_alive, run_file.addresses, run_file.incarnation
        )
        for run_file in found
    ]


def frontends_of(processes: Iterable[ProcessReport]) -> list[ProcessReport]:
    """Those among them that may answer: they live, and have said where."""
    return [
        one
        for one in processes
        if one.role_id.startswith(FRONTEND_PREFIX) and one.alive and one.addresses.get("client")
    ]


def unknown_frontends(active: Iterable[ActiveScheduler], known: Sequence[ProcessReport]) -> int:
    """How many frontends schedulers have beyond these: those of other hosts."""
    connected = max((round(one.status.counters.get("frontends", 0.0)) for one in active), default=0)
    return max(0, connected - len(known))


def endpoints_in(run_dir: Path) -> dict[str, list[str]]:
    """Where the living cluster can be reached: client, http, … of frontends and gateways, control of the scheduler, all metrics."""
    endpoints: dict[str, list[str]] = {}
    for run_file in run_files(run_dir):
        if not run_file.is_alive:
            continue
        for purpose, addresses in run_file.addresses.items():
            told = next((_TOLD[prefix] for prefix in _TOLD if run_file.role_id.startswith(prefix)), ())
            if purpose in told or purpose == "metrics":
                endpoints.setdefault(purpose, []).extend(addresses)
    return endpoints
