"""What has to be done on which host, in order, so that a cluster is as its file says. Sans-IO: facts in, steps out.

A step is done by one request to one host (`deploy/ssh/on_host/requests.py`). What a host has already makes no step, so the plan of a
cluster that is as it should be is empty, and one that was interrupted is planned again from where it is.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from deploy.ssh.carried import CarriedConfig
from deploy.ssh.facts import HostFacts, Running, Unreachable
from deploy.ssh.inventory import HostWanted, Inventory, Rank, RoleOnHost
from deploy.ssh.wheels import OwnWheel, Wheel
from fabric.keys import TRUSTED_FILE
from roles.config.hosts import DeployConfig

CLOCK_OFF_MS_MAX: Final = 2_000.0
OPEN_FILES_MIN: Final = 4_096
INSTALLED_TIMES: Final = 5
"""An installed wheel takes so many times its size, compiled code included; with room to spare."""
FREE_MIN: Final = 200 << 20
FREE_ONLINE: Final = 1 << 30
FREE_TORCH: Final = 8 << 30


class Phase(IntEnum):
    """A phase begins on all hosts when the one before is over on all."""

    PREPARE = 0
    AGENTS = 1
    SCHEDULERS = 2
    FRONTENDS = 3
    END_FRONTENDS = 4
    END_AGENTS = 5
    END_SCHEDULERS = 6
    REMOVE = 7


PHASE_OF: Final = {
    Rank.AGENT: Phase.AGENTS,
    Rank.SCHEDULER: Phase.SCHEDULERS,
    Rank.FRONTEND: Phase.FRONTENDS,
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
        """Look at the file, or at the bytes."""
        if isinstance(source, bytes):
            return cls(path, mode, source, len(source), hashlib.sha256(source).hexdigest())
        with source.open("rb") as file:
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


@dataclass(frozen=True, slots=True)
class Goods:
    """What there is to carry. `wheels`: by host, those it needs, this Tenuto's first. `keys`: every key file here.

    `key_ids`: of a key file what tells it from the one before, and is no secret.
    """

    own: OwnWheel
    wheels: Mapping[str, Sequence[Wheel]]
    config: CarriedConfig
    keys: Mapping[str, bytes]
    key_ids: Mapping[str, str]
    addresses: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """`problems` stop a host, and `warnings` do not; both by host."""

    steps: tuple[Step, ...]
    problems: Mapping[str, Sequence[str]]
    warnings: Mapping[str, Sequence[str]]
    hosts: tuple[str, ...] = ()
    scheduler_hosts: tuple[str, ...] = ()
    unreachable: frozenset[str] = field(default=frozenset())

    def has_no_scheduler(self, failed: Collection[str]) -> bool:
        """Whether none is left without these hosts."""
        return set(failed) >= set(self.scheduler_hosts)


def addresses_of(
    inventory: Inventory, written: Mapping[str, str], facts: Mapping[str, HostFacts | Unreachable]
) -> dict[str, str]:
    """Each host's: as written, else as it tells, else as others were last told; its name where nobody knows."""
    remembered: dict[str, str] = {}
    for one in facts.values():
        if isinstance(one, HostFacts):
            remembered |= one.addresses
    found = {}
    for wanted in inventory.hosts:
        host, told = wanted.host, facts[wanted.host]
        own = told.address if isinstance(told, HostFacts) else None
        found[host] = written.get(host) or own or remembered.get(host) or host
    return found


def plan_up(
    inventory: Inventory,
    facts: Mapping[str, HostFacts | Unreachable],
    goods: Goods,
    deploy: DeployConfig,
    problems: Mapping[str, Sequence[str]],
) -> Plan:
    """Steps for every host that can be reached and has no problem. `problems`: found already."""
    steps: list[Step] = []
    found: dict[str, Sequence[str]] = {}
    warnings: dict[str, Sequence[str]] = {}
    unreachable = set()
    for wanted in inventory.hosts:
        told = facts[wanted.host]
        if isinstance(told, Unreachable):
            if told.is_silent:
                unreachable.add(wanted.host)
            found[wanted.host] = [told.reason]
            continue
        its_problems = [*problems.get(wanted.host, ()), *_problems(wanted, told, goods, deploy)]
        if its_problems:
            found[wanted.host] = its_problems
        else:
            steps.extend(_HostPlan(wanted, told, goods, deploy).steps())
        its_warnings = list(_warnings(wanted, told))
        if its_warnings:
            warnings[wanted.host] = its_warnings
    steps.sort(key=lambda step: step.phase)  # stable: hosts in file order, and each one's steps in theirs
    return Plan(
        tuple(steps),
        found,
        warnings,
        tuple(one.host for one in inventory.hosts),
        inventory.scheduler_hosts,
        frozenset(unreachable),
    )


def role_script(
    wanted: HostWanted, role: RoleOnHost, facts: HostFacts, goods: Goods, deploy: DeployConfig, run: Running
) -> str:
    """What starts a role: its environment, its folder, its command. The host puts the stamp in."""
    base = facts.base
    variables = {**deploy.env, "TENUTO_RUN_DIR": facts.run_dir}
    command = [f"{base}/versions/{run.version}/bin/tenuto", *role.arguments]
    ids = " ".join(goods.key_ids[name] for name in wanted.keys)
    lines = [
        "#!/bin/sh",
        f"# {role.role_id} on {wanted.host}, as `tenuto deploy` wrote it; keys {ids or 'none'}",
        "umask 077",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        f"mkdir -p {shlex.quote(facts.run_dir)}",
        f"echo @STAMP@ > {shlex.quote(f'{facts.run_dir}/{role.role_id}.stamp')}",
        f"cd {shlex.quote(f'{base}/configs/{run.config}')} && exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


class _HostPlan:
    def __init__(self, wanted: HostWanted, facts: HostFacts, goods: Goods, deploy: DeployConfig) -> None:
        self._wanted = wanted
        self._facts = facts
        self._goods = goods
        self._deploy = deploy
        self._run = Running(goods.own.version, goods.config.name)

    def steps(self) -> Iterator[Step]:
        """In the order of their doing."""
        facts = self._facts
        has_version = self._run.version in facts.versions and facts.has_manager
        if not has_version:
            yield from self._wheels()
            yield self._environment()
        if self._run.config not in facts.configs:
            yield self._config()
        yield from self._keys()
        wanted = {role.role_id for role in self._wanted.roles}
        unwanted = sorted(set(facts.roles) - wanted)
        if unwanted:
            yield self._step(
                "stop", f"{', '.join(unwanted)}: not in the file any more", {"role_ids": unwanted}
            )
        for role in self._wanted.roles:
            yield from self._start(role)

    def _step(
        self,
        what: str,
        detail: str,
        request: Mapping[str, Any],
        files: Sequence[SentFile] = (),
    ) -> Step:
        listed = [
            {"path": file.path, "mode": file.mode, "size": file.size, "sha256": file.sha256} for file in files
        ]
        does = {"wheels": "receive", "configuration": "receive", "keys": "receive"}.get(what, what)
        own = {"do": does, **request, **({"files": listed} if does == "receive" else {})}
        return Step(self._wanted.host, Phase.PREPARE, what, detail, own, tuple(files))

    def _wheels(self) -> Iterator[Step]:
        missing = [
            wheel
            for wheel in self._goods.wheels[self._wanted.host]
            if self._facts.wheels.get(wheel.name) != wheel.size
        ]
        if missing:
            files = [
                SentFile(f"wheels/{one.name}", 0o600, one.path or one.content, one.size, one.sha256)
                for one in missing
            ]
            size = sum(wheel.size for wheel in missing)
            yield self._step("wheels", f"{counted(len(missing), 'wheel')}, {_mb(size)}", {}, files)

    def _environment(self) -> Step:
        version = self._run.version
        extras = f"[{','.join(self._wanted.extras)}]" if self._wanted.extras else ""
        is_offline = self._deploy.wheelhouse is not None
        kept = [one.version for one in (self._facts.now, self._facts.before)]
        request = {
            "version": version,
            "requirement": f"tenuto{extras}=={version}",
            "is_offline": is_offline,
            "kept": [version, *kept],
        }
        source = "the wheels it has" if is_offline else "its package index"
        return self._step("environment", f"tenuto{extras} {version}, from {source}", request)

    def _config(self) -> Step:
        name, files = self._run.config, self._goods.config.files
        sent = [SentFile.of(f"configs/{name}/{path}", content) for path, content in sorted(files.items())]
        kept = [name, self._facts.now.config, self._facts.before.config]
        request = {"complete": f"configs/{name}", "kept": kept}
        return self._step("configuration", f"{name}, {counted(len(sent), 'file')}", request, sent)

    def _keys(self) -> Iterator[Step]:
        wanted = {*self._wanted.keys, TRUSTED_FILE} if self._wanted.keys else set[str]()
        files = [
            SentFile.of(f"keys/{name}", self._goods.keys[name], 0o644 if name == TRUSTED_FILE else 0o600)
            for name in sorted(wanted)
        ]
        changed = [
            file for file in files if self._facts.keys.get(file.path.removeprefix("keys/")) != file.sha256
        ]
        unwanted = sorted(set(self._facts.keys) - wanted)
        if changed or unwanted:
            names = [file.path.removeprefix("keys/") for file in changed] + [
                f"without {name}" for name in unwanted
            ]
            request = {"removed": [f"keys/{name}" for name in unwanted]}
            yield self._step("keys", ", ".join(names), request, changed)

    def _start(self, role: RoleOnHost) -> Iterator[Step]:
        facts, run = self._facts, self._run
        script = role_script(self._wanted, role, facts, self._goods, self._deploy, run)
        stamp = facts.roles.get(role.role_id, "")
        if stamp == hashlib.sha256(script.encode()).hexdigest():
            return
        why = "starts"
        if stamp:
            changed = [
                *(["version"] if facts.now.version != run.version else []),
                *(["configuration"] if facts.now.config != run.config else []),
            ]
            why = f"starts again: another {' and '.join(changed) or 'key or environment'}"
        yield start_step(self._wanted.host, role, script, why, facts, run, self._goods.addresses)


def start_step(
    host: str,
    role: RoleOnHost,
    script: str,
    why: str,
    facts: HostFacts,
    run: Running,
    addresses: Mapping[str, str],
    *,
    is_again: bool = False,
) -> Step:
    """Start a role with that script. `is_again`: also where it runs with it already."""
    before = facts.before if facts.now == run or not facts.now.version else facts.now
    state = {
        "version": run.version,
        "config": run.config,
        "before": {"version": before.version, "config": before.config},
        "addresses": dict(addresses),
    }
    request = {"do": "start", "role_id": role.role_id, "script": script, "state": state, "is_again": is_again}
    return Step(host, PHASE_OF[role.rank], "start", f"{role.role_id} {why}", request)


def _problems(wanted: HostWanted, facts: HostFacts, goods: Goods, deploy: DeployConfig) -> Iterator[str]:
    """What has to be mended first, each with what would mend it."""
    if not facts.machine.startswith("Linux"):
        yield f"runs {facts.machine}; Tenuto needs Linux"
    if not facts.has_venv:
        yield f"its Python {facts.python} makes no environments: install python3-venv there (or set deploy.python)"
    if not facts.is_writable:
        yield f"{facts.base} cannot be written there: set deploy.directory"
    if abs(facts.clock_off_ms) > CLOCK_OFF_MS_MAX:
        ahead = "ahead of" if facts.clock_off_ms > 0 else "behind"
        yield f"its clock is {abs(facts.clock_off_ms) / 1e3:.1f} s {ahead} this host's: start an NTP client on it"
    if goods.own.version not in facts.versions:
        needed = _room_needed(wanted, goods, deploy)
        if facts.free_bytes < needed:
            yield f"{_mb(facts.free_bytes)} are free in {facts.base}; it needs {_mb(needed)}: make room there"
    for role_id, holder in facts.taken.items():
        if role_id not in facts.roles or not facts.roles[role_id]:
            yield (
                f"port {wanted.ports[role_id]} of {role_id} is taken by {holder}: end that, or choose another port"
                " (cluster.schedulers[].port, listen.client)"
            )
    if wanted.needs_driver and not facts.has_driver:
        yield "it has no NVIDIA driver, and the file gives it cuda devices: install one, or say device: emulated"
    if facts.open_files < OPEN_FILES_MIN:
        yield f"a process may open {facts.open_files} files there: allow {OPEN_FILES_MIN} or more (ulimit -Hn)"
    address, several = goods.addresses[wanted.host], len(goods.addresses) > 1
    others = [one for host, one in goods.addresses.items() if host != wanted.host]
    if several and address.startswith("127.") and not all(one.startswith("127.") for one in others):
        yield f"its address is {address}, which other hosts cannot reach: set deploy.interface, or cluster.addresses"


def _warnings(wanted: HostWanted, facts: HostFacts) -> Iterator[str]:
    if wanted.needs_mps and not facts.has_mps:
        yield "nvidia-cuda-mps-control is not there: slices share its GPUs by time"
    if facts.manager == "supervisor" and not facts.has_cron:
        yield "it has neither systemd nor cron: after a reboot, run `tenuto deploy up` again"


def _room_needed(wanted: HostWanted, goods: Goods, deploy: DeployConfig) -> int:
    if deploy.wheelhouse is None:
        return FREE_TORCH if "worker" in wanted.extras else FREE_ONLINE
    return FREE_MIN + INSTALLED_TIMES * sum(wheel.size for wheel in goods.wheels[wanted.host])


def counted(number: int, thing: str) -> str:
    """`1 wheel`, `2 wheels`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e8 else f"{size / 1e6:,.0f} MB"
