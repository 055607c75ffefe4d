"""What a plan is made of: steps, each one request to one host, in phases; and what starts a role there."""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from deploy.ssh.config_bundle import CarriedConfig
from deploy.ssh.facts import HostFacts, Running
from deploy.ssh.inventory import HostWanted, Rank, RoleOnHost
from deploy.ssh.on_host.system import own_directory
from deploy.ssh.wheels import OwnWheel, Wheel
from fabric.keys import key_file, naming_path
from roles.config.hosts import DeployConfig


class Phase(IntEnum):
    """A phase begins on all hosts when the one before is over on all."""

    PREPARE = 0
    DRAIN = 1
    UNITS = 2
    AGENTS = 3
    SCHEDULERS = 4
    FRONTENDS = 5
    GATEWAYS = 6
    BACK = 7
    END_GATEWAYS = 8
    END_FRONTENDS = 9
    END_AGENTS = 10
    END_SCHEDULERS = 11
    REMOVE = 12
    FORGET = 13


PHASE_OF: Final = {
    Rank.AGENT: Phase.AGENTS,
    Rank.SCHEDULER: Phase.SCHEDULERS,
    Rank.FRONTEND: Phase.FRONTENDS,
    Rank.GATEWAY: Phase.GATEWAYS,
}


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file for a host, by its path there. `source`: it, or where it lies here."""

    path: str
    mode: int
    source: Path | bytes
    size: int
    sha256: str

    @classmethod
    def of(cls, path: str, source: Path | bytes, mode: int = 0o600) -> SentFile:
        """Look at the file, or at the bytes. Raises ConfigError where it cannot be read."""
        if isinstance(source, bytes):
            return cls(path, mode, source, len(source), hashlib.sha256(source).hexdigest())
        with naming_path(source), source.open("rb") as file:
            return cls(
                path, mode, source, source.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
            )


@dataclass(frozen=True, slots=True)
class Step:
    """One request to one host. `what` and `detail` are for people; nothing secret is in them."""

    host: str
    phase: Phase
    what: str
    detail: str
    request: Mapping[str, Any]
    files: tuple[SentFile, ...] = ()
    is_replacing: bool = False
    """A process that runs now ends for it."""
    needs: frozenset[str] = frozenset()
    """Hosts without which it is not done: a role that it ends goes on there, one whose place it takes does, or they have to be ended before."""


@dataclass(frozen=True, slots=True)
class Goods:
    """What there is to carry. `wheels`: by host, those it needs, this Tenuto's first. `keys`: every key file here, and what gateways read.

    `addresses`: of the file's hosts, as far as they are known; `members`: hosts where something of the cluster is or may be, in the file or not.
    """

    own: OwnWheel
    wheels: Mapping[str, Sequence[Wheel]]
    config: CarriedConfig
    keys: Mapping[str, bytes]
    addresses: Mapping[str, str]
    members: Collection[str] = ()

    @property
    def key_hashes(self) -> dict[str, str]:
        """Of every key file here, as hosts tell those of theirs."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.keys.items()}


@dataclass(frozen=True, slots=True)
class Plan:
    """`problems` stop a host, and `warnings` do not; both by host. `scheduler_hosts`: one of them has to be done; none where all is to end."""

    steps: tuple[Step, ...]
    problems: Mapping[str, Sequence[str]]
    warnings: Mapping[str, Sequence[str]]
    hosts: tuple[str, ...] = ()
    scheduler_hosts: tuple[str, ...] = ()
    unreachable: frozenset[str] = frozenset()

    def has_no_scheduler(self, failed: Collection[str]) -> bool:
        """Whether one has to be done, and none is left without these hosts."""
        return bool(self.scheduler_hosts) and set(failed) >= set(self.scheduler_hosts)


@dataclass(frozen=True, slots=True)
class RoleScript:
    """What starts a role. `stamp` names all that the role reads: a process that was started with the same one need not start again."""

    text: str
    stamp: str

    @property
    def sha256(self) -> str:
        """Of the file on the host."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def role_script(
    wanted: HostWanted,
    role: RoleOnHost,
    facts: HostFacts,
    goods: Goods,
    deploy: DeployConfig,
    run: Running,
    keys: Mapping[str, str],
) -> RoleScript:
    """Its environment, its folder, its command; as it starts, it writes down its stamp. `keys`: a hash of each key file that its host has by then."""
    base = facts.base
    variables = {**deploy.env, "TENUTO_RUN_DIR": facts.run_dir}
    command = [f"{base}/versions/{run.version}/bin/tenuto", *role.arguments]
    key = "none" if role.principal is None else keys.get(key_file(role.principal), "none")[:16]
    views = _views_of(run, facts, goods)
    lines = [
        "#!/bin/sh",
        f"# {role.role_id} on {wanted.host}, as `tenuto deploy` wrote it; key {key}",
        f"# of its configuration it reads {views.get(role.role_id, 'all')}",
        "umask 077",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        own_directory(facts.run_dir),
        f"echo @STAMP@ > {shlex.quote(f'{facts.run_dir}/{role.role_id}.stamp')}",
        f"cd {shlex.quote(f'{base}/configs/{run.config}')} && exec {shlex.join(command)}",
    ]
    draft = "\n".join(lines) + "\n"
    # The folder's name is another one after each change of the file; what of it concerns this role is in the line above.
    named = draft.replace(run.config, "@CONFIG@") if role.role_id in views else draft
    stamp = hashlib.sha256(named.encode()).hexdigest()
    return RoleScript(draft.replace("@STAMP@", stamp), stamp)


def is_unknown(role: RoleOnHost, run: Running, facts: HostFacts, goods: Goods) -> bool:
    """Of a gateway, whether that configuration has none: it is not the file's present one, or was carried by a Tenuto that did not deploy any."""
    return role.rank is Rank.GATEWAY and role.role_id not in _views_of(run, facts, goods)


def secrets_of(role_id: str, run: Running, facts: HostFacts, goods: Goods) -> Sequence[str]:
    """What a gateway reads beside that configuration, as it is called in its host's keys folder; nothing where that has no such gateway."""
    return _views_of(run, facts, goods).get(role_id, "").split()[1:]


def ran_before(facts: HostFacts, run: Running) -> Running:
    """What a host is to go back to, once it was told to run that."""
    return facts.before if facts.served in (run, Running()) else facts.served


def _views_of(run: Running, facts: HostFacts, goods: Goods) -> Mapping[str, str]:
    """By role id, what tells what each reads of that configuration."""
    return goods.config.views if run.config == goods.config.name else facts.views.get(run.config, {})


def start_step(
    wanted: HostWanted,
    role: RoleOnHost,
    script: RoleScript,
    why: str,
    facts: HostFacts,
    run: Running,
    goods: Goods,
    *,
    is_again: bool = False,
) -> Step | None:
    """Start a role with that script; only put it there where that is what runs; None: so it is. `is_again`: start it in any case."""
    is_running = not is_again and facts.roles.get(role.role_id) == script.stamp
    if is_running and facts.scripts.get(role.role_id) == script.sha256:
        return None
    before = ran_before(facts, run)
    state = {
        "version": run.version,
        "config": run.config,
        "before": {"version": before.version, "config": before.config},
        "addresses": remembered(facts, goods),
        "roles": [one.role_id for one in wanted.roles if not is_unknown(one, run, facts, goods)],
    }
    request = {
        "do": "start",
        "role_id": role.role_id,
        "script": script.text,
        "stamp": script.stamp,
        "state": state,
        "is_again": is_again,
    }
    if is_running:
        detail = f"{role.role_id} goes on; configuration {run.config} has the same for it"
        return Step(wanted.host, Phase.UNITS, "unit", detail, request)
    is_replacing = bool(facts.roles.get(role.role_id))
    detail = f"{role.role_id} {why}"
    return Step(wanted.host, PHASE_OF[role.rank], "start", detail, request, is_replacing=is_replacing)


def remembered(facts: HostFacts, goods: Goods) -> dict[str, str]:
    """What a host is to know of the cluster's hosts, those that left included: the address of each, empty where that is not known."""
    return {**dict.fromkeys(goods.members, ""), **facts.addresses, **goods.addresses}


def megabytes(size: float) -> str:
    """`1.5 MB`."""
    return f"{size / 1e6:,.1f} MB" if size < 1e8 else f"{size / 1e6:,.0f} MB"


def in_order(steps: Iterable[Step]) -> tuple[Step, ...]:
    """By phase; of hosts in the order given, and each one's steps in theirs.

    Schedulers that end go first: one that moves between hosts of the file would run twice. One that moves off a host that left the file does,
    until that host is ended; so does one whose end failed, until the next run ends it, as agents look for it where it is to be by now, and
    without it there nobody might serve. The others go by number. Those that are replaced go before new ones, the
    first one last: it is the active one as a rule, so there is one take-over. A new one is told the plan by one that knows of it.
    """

    def place(step: Step) -> tuple[Phase, float]:
        if step.phase is not Phase.SCHEDULERS or step.what == "stop":
            return step.phase, -math.inf
        number = int(step.request["role_id"].rpartition("-")[2])
        return step.phase, -1 - number if step.is_replacing else number

    return tuple(sorted(steps, key=place))
