"""What has to be done on which host, in order, so that a cluster is as its file says. Sans-IO: facts in, steps out.

A step is done by one request to one host (`deploy/ssh/on_host/requests.py`). What a host has already makes no step, so the plan of a
cluster that is as it should be is empty, and one that was interrupted is planned again from where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deploy.ssh.changes import END_OF, back_steps, drain_step, homes_of, places_of, plan_leaving
from deploy.ssh.facts import HostFacts, Running, Unreachable
from deploy.ssh.inventory import HostWanted, Inventory, Rank, RoleOnHost
from deploy.ssh.problems import problems_of_host, warnings_of_election, warnings_of_host
from deploy.ssh.steps import (
    Goods,
    Phase,
    Plan,
    SentFile,
    Step,
    in_order,
    megabytes,
    ran_before,
    role_script,
    secrets_of,
    start_step,
)
from fabric.ids import FRONTEND_PREFIX, gateway_id, role_id_of_node
from fabric.keys import TRUSTED_FILE
from fabric.policy_options import counted
from roles.config.hosts import DeployConfig


def addresses_of(
    inventory: Inventory, written: Mapping[str, str], facts: Mapping[str, HostFacts | Unreachable]
) -> dict[str, str]:
    """Each host's: as written, else as it tells, else as others were last told. One that nobody knows is left out: it is found by its name."""
    remembered: dict[str, str] = {}
    for one in facts.values():
        if isinstance(one, HostFacts):
            remembered |= {host: address for host, address in one.addresses.items() if address}
    found = {}
    for wanted in inventory.hosts:
        host, told = wanted.host, facts[wanted.host]
        own = told.address if isinstance(told, HostFacts) else None
        address = written.get(host) or own or remembered.get(host)
        if address:
            found[host] = address
    return found


def plan_up(
    inventory: Inventory,
    facts: Mapping[str, HostFacts | Unreachable],
    goods: Goods,
    deploy: DeployConfig,
    problems: Mapping[str, Sequence[str]],
    taken_out: Mapping[str, HostFacts | Unreachable] | None = None,
) -> Plan:
    """Steps for every host that can be reached and has no problem. `problems`: found already.

    `taken_out`: what hosts tell that the file does not have any more.
    """
    steps: list[Step] = []
    found: dict[str, Sequence[str]] = {}
    warnings: dict[str, Sequence[str]] = {}
    unreachable = set()
    homes = homes_of(inventory)
    for wanted in inventory.hosts:
        told = facts[wanted.host]
        if isinstance(told, Unreachable):
            if told.is_silent:
                unreachable.add(wanted.host)
            found[wanted.host] = [told.reason]
            continue
        its_problems = [*problems.get(wanted.host, ()), *problems_of_host(wanted, told, goods, deploy)]
        if its_problems:
            found[wanted.host] = its_problems
        else:
            steps.extend(_HostPlan(wanted, told, goods, deploy, homes, facts).steps())
        its_warnings = [*warnings_of_host(wanted, told), *warnings_of_election(inventory, wanted)]
        if its_warnings:
            warnings[wanted.host] = its_warnings
    leaving, not_reached = plan_leaving(taken_out or {}, inventory, facts, goods)
    steps.extend(leaving)
    return Plan(
        in_order(steps),
        found | not_reached,
        warnings,
        (*(one.host for one in inventory.hosts), *(taken_out or ())),
        inventory.scheduler_hosts,
        frozenset(unreachable),
    )


class _HostPlan:
    def __init__(
        self,
        wanted: HostWanted,
        facts: HostFacts,
        goods: Goods,
        deploy: DeployConfig,
        homes: Mapping[str, str],
        all_facts: Mapping[str, HostFacts | Unreachable],
    ) -> None:
        self._wanted = wanted
        self._facts = facts
        self._goods = goods
        self._deploy = deploy
        self._run = Running(goods.own.version, goods.config.name)
        self._keys_there = goods.key_hashes
        self._homes = homes
        self._all_facts = all_facts

    def steps(self) -> Iterator[Step]:
        """In the order of their doing."""
        facts = self._facts
        if not (facts.has_installed(self._run.version, self._wanted.extras) and facts.has_manager):
            yield from self._wheels()
            yield self._environment()
        if self._run.config not in facts.configs:
            yield self._config()
        wanted = {role.role_id for role in self._wanted.roles}
        unwanted = sorted(set(facts.roles) - wanted)
        yield from self._keys(unwanted)
        for role_id in unwanted:
            yield self._stop(role_id)
        node = role_id_of_node(self._wanted.host)
        if node in unwanted and facts.roles[node]:
            yield drain_step(self._wanted.host)
        for role in self._wanted.roles:
            yield from self._start(role)
        yield from back_steps(self._wanted, facts)

    def _stop(self, role_id: str) -> Step:
        """Where it goes on elsewhere it serves here until that place is prepared."""
        phase = next(phase for prefix, phase in END_OF.items() if role_id.startswith(prefix))
        if phase is Phase.END_SCHEDULERS:
            phase = Phase.SCHEDULERS  # before one of that name starts elsewhere
        elif phase is Phase.END_FRONTENDS and any(one.rank is Rank.FRONTEND for one in self._wanted.roles):
            phase = Phase.FRONTENDS  # another one may get its port
        home = self._homes.get(role_id)
        why = "not in the file any more" if home is None else f"moves to {home}"
        stop = self._step("stop", f"{role_id}: {why}", {"role_ids": [role_id]})
        # A gateway stays for as long as a frontend beside it does, which may wait for its own next place.
        is_gateway = phase is Phase.END_GATEWAYS
        beside = [one for one in self._facts.roles if is_gateway and one.startswith(FRONTEND_PREFIX)]
        return replace(stop, phase=phase, needs=self._places_of([role_id, *beside]))

    def _places_of(self, role_ids: Collection[str]) -> frozenset[str]:
        return places_of(role_ids, self._homes, self._all_facts)

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
        missing = [wheel for wheel in self._goods.wheels[self._wanted.host] if self._facts.lacks(wheel)]
        if missing:
            files = [
                SentFile(f"wheels/{one.name}", 0o600, one.path or one.content, one.size, one.sha256)
                for one in missing
            ]
            size = sum(wheel.size for wheel in missing)
            yield self._step("wheels", f"{counted(len(missing), 'wheel')}, {megabytes(size)}", {}, files)

    def _environment(self) -> Step:
        version = self._run.version
        extras = f"[{','.join(self._wanted.extras)}]" if self._wanted.extras else ""
        is_offline = self._deploy.wheelhouse is not None
        kept = [one.version for one in (self._facts.now, self._facts.served, self._facts.before)]
        request = {
            "version": version,
            "extras": self._wanted.extras,
            "is_offline": is_offline,
            "kept": [version, *kept],
        }
        source = "the wheels it has" if is_offline else "its package index"
        return self._step("environment", f"tenuto{extras} {version}, from {source}", request)

    def _config(self) -> Step:
        name, files = self._run.config, self._goods.config.files
        sent = [SentFile.of(f"configs/{name}/{path}", content) for path, content in sorted(files.items())]
        kept = [name, *(one.config for one in (self._facts.now, self._facts.served, self._facts.before))]
        request = {"complete": f"configs/{name}", "kept": kept}
        return self._step("configuration", f"{name}, {counted(len(sent), 'file')}", request, sent)

    def _keys(self, unwanted_roles: Collection[str]) -> Iterator[Step]:
        """Those that are wanted come first of all; the others go when nothing runs with them any more, nor a rollback would start it."""
        wanted = {*self._wanted.keys, *self._wanted.secrets}
        wanted |= {TRUSTED_FILE} if self._wanted.keys else set()
        files = [
            SentFile.of(f"keys/{name}", self._goods.keys[name], 0o644 if name == TRUSTED_FILE else 0o600)
            for name in sorted(wanted)
        ]
        changed = [
            file for file in files if self._facts.keys.get(file.path.removeprefix("keys/")) != file.sha256
        ]
        if changed:
            names = [file.path.removeprefix("keys/") for file in changed]
            yield self._step("keys", ", ".join(names), {}, changed)
        before = ran_before(self._facts, self._run)  # a rollback carries nothing
        kept = secrets_of(gateway_id(self._wanted.host), before, self._facts, self._goods)
        unwanted = sorted(set(self._facts.keys) - wanted - {*kept})
        if unwanted:
            request = {"removed": [f"keys/{name}" for name in unwanted]}
            step = self._step("keys", f"without {', '.join(unwanted)}", request)
            yield replace(step, phase=Phase.REMOVE, needs=self._places_of(unwanted_roles))

    def _start(self, role: RoleOnHost) -> Iterator[Step]:
        facts, run = self._facts, self._run
        script = role_script(self._wanted, role, facts, self._goods, self._deploy, run, self._keys_there)
        why = "starts"
        if facts.roles.get(role.role_id):
            changed = [
                *(["version"] if facts.now.version != run.version else []),
                *(["configuration"] if facts.now.config != run.config else []),
            ]
            why = f"starts again: another {' and '.join(changed) or 'key or environment'}"
        is_gateway = role.rank is Rank.GATEWAY
        if is_gateway:  # the file may have none, or any free one
            ports = f"port{'s' if len(role.ports) > 1 else ''} {', '.join(map(str, role.ports))}"
            why = f"({ports}) {why}"
        step = start_step(self._wanted, role, script, why, facts, run, self._goods)
        if step is not None:
            beside = [one.role_id for one in self._wanted.roles if is_gateway and one.rank is Rank.FRONTEND]
            yield replace(step, needs=self._places_of([role.role_id, *beside]))
