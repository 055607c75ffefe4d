"""Other plans for a cluster that is there: start roles again, go back to what ran before, end all of it. Sans-IO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from deploy.ssh.facts import HostFacts, Running, Unreachable
from deploy.ssh.inventory import HostWanted, Inventory, RoleOnHost
from deploy.ssh.steps import (
    Goods,
    Phase,
    Plan,
    Step,
    in_order,
    is_unknown,
    remembered,
    role_script,
    secrets_of,
    start_step,
)
from fabric.ids import (
    AGENT_PREFIX,
    FRONTEND_PREFIX,
    GATEWAY_PREFIX,
    SCHEDULER_PREFIX,
    gateway_id,
    role_id_of_node,
)
from roles.config.hosts import DeployConfig

END_OF: Final = {
    GATEWAY_PREFIX: Phase.END_GATEWAYS,
    FRONTEND_PREFIX: Phase.END_FRONTENDS,
    AGENT_PREFIX: Phase.END_AGENTS,
    SCHEDULER_PREFIX: Phase.END_SCHEDULERS,
}
"""When roles of a kind end."""

_PUT_BACK: Final = "put the former file back and run `tenuto deploy up`"
_STAYS: Final = "is not in the file any more, and what is on it stays"


def plan_restart(
    inventory: Inventory,
    facts: Mapping[str, HostFacts | Unreachable],
    goods: Goods,
    deploy: DeployConfig,
    only: Collection[str],
) -> Plan:
    """Start roles again with the version and the configuration that their host was told to run last, whatever the file says by now.

    `only`: these role ids; empty: all.
    """

    def steps(wanted: HostWanted, told: HostFacts) -> Iterator[Step]:
        for role in wanted.roles:
            if (not only or role.role_id in only) and not is_unknown(role, told.now, told, goods):
                yield from _started(
                    wanted, role, told, goods, deploy, told.now, "starts again", is_again=True
                )
        yield from back_steps(wanted, told)

    plan = _planned(inventory, facts, steps, needs_one=True)
    problems = dict(plan.problems)
    for wanted in inventory.hosts:
        told = facts[wanted.host]
        for role in wanted.roles:
            if role.role_id not in only or wanted.host in problems or isinstance(told, Unreachable):
                continue
            if is_unknown(role, told.now, told, goods):
                problems[wanted.host] = [f"{role.role_id} is not on it yet: run `tenuto deploy up` first"]
    return replace(plan, problems=problems)


def plan_rollback(
    inventory: Inventory, facts: Mapping[str, HostFacts | Unreachable], goods: Goods, deploy: DeployConfig
) -> Plan:
    """Start every role as it was before the last change, whether that has reached its host or not. A second rollback undoes the first one."""
    known = {host: told for host, told in facts.items() if isinstance(told, HostFacts)}
    target = _ran_before(list(known.values()))

    def steps(wanted: HostWanted, told: HostFacts) -> Iterator[Step]:
        if target is None:
            return
        for role in wanted.roles:
            if is_unknown(role, target, told, goods):
                if role.role_id in told.roles:
                    detail = f"{role.role_id}: configuration {target.config} has none"
                    yield Step(wanted.host, Phase.END_GATEWAYS, "stop", detail, _stop(role.role_id))
                continue
            why = f"starts again: back to {target.version}, configuration {target.config}"
            yield from _started(wanted, role, told, goods, deploy, target, why)
        yield from back_steps(wanted, told)

    plan = _planned(inventory, facts, steps, needs_one=True)
    problems = dict(plan.problems)
    for wanted in inventory.hosts:
        told = known.get(wanted.host)
        if told is None or wanted.host in problems or told.now == target:
            continue
        if told.before == Running() or (target is None and told.before == told.now):
            problems[wanted.host] = ["nothing ran before what runs now"]
        elif target is None:
            problems[wanted.host] = [
                "hosts do not agree on what ran before: run `tenuto deploy up` with the file that is right"
            ]
        elif target.version not in told.versions or target.config not in told.configs:
            problems[wanted.host] = [
                f"{target.version} with configuration {target.config} is not there any more"
            ]
        elif gone := {*secrets_of(gateway_id(wanted.host), target, told, goods)} - told.keys.keys():
            problems[wanted.host] = [
                f"{', '.join(sorted(gone))}, which its gateway read before, is not there any more: {_PUT_BACK}"
            ]
    steps_left = tuple(step for step in plan.steps if step.host not in problems)
    warnings = {
        wanted.host: [f"{gateway_id(wanted.host)} ran before and is not in the file: {_PUT_BACK}"]
        for wanted in inventory.hosts
        if target is not None and wanted.gateway is None and (told := known.get(wanted.host)) is not None
        if secrets_of(gateway_id(wanted.host), target, told, goods)
    }
    return replace(plan, steps=steps_left, problems=problems, warnings=warnings)


def plan_down(
    inventory: Inventory,
    facts: Mapping[str, HostFacts | Unreachable],
    taken_out: Mapping[str, HostFacts | Unreachable] | None = None,
) -> Plan:
    """End gateways, then frontends, agents and schedulers, everywhere; then remove all that was made on each host.

    `taken_out`: what hosts tell that the file does not have any more.
    """
    found = _planned(inventory, facts, lambda wanted, told: _ends(wanted.host, told), needs_one=False)
    steps, problems = list(found.steps), dict(found.problems)
    for host, told in (taken_out or {}).items():
        if isinstance(told, Unreachable):
            problems[host] = [f"{_STAYS}: {told.reason}"]
        else:
            steps.extend(_ends(host, told))
    hosts = (*found.hosts, *(taken_out or ()))
    return replace(found, steps=in_order(steps), problems=problems, hosts=hosts, scheduler_hosts=())


def plan_leaving(
    taken_out: Mapping[str, HostFacts | Unreachable],
    inventory: Inventory,
    facts: Mapping[str, HostFacts | Unreachable],
    goods: Goods,
) -> tuple[list[Step], dict[str, list[str]]]:
    """Hosts that the file does not have any more: drained while all serve, ended when nobody asks for them, then forgotten by the others.

    The problems of those that cannot be reached come second; the others do not forget those.
    """
    steps: list[Step] = []
    problems: dict[str, list[str]] = {}
    homes = homes_of(inventory)
    needed = set(taken_out)
    for host, told in taken_out.items():
        if isinstance(told, Unreachable):
            problems[host] = [f"{_STAYS}: {told.reason} (`tenuto deploy up --forget {host}`: ask no more)"]
            continue
        if told.roles.get(role_id_of_node(host)):
            steps.append(drain_step(host))
        moved_to = places_of(told.roles, homes, facts)
        needed |= moved_to
        steps.extend(replace(step, needs=moved_to) for step in _ends(host, told))
    if problems:
        return steps, problems
    for wanted in inventory.hosts:
        told = facts[wanted.host]
        known = remembered(told, goods) if isinstance(told, HostFacts) else {}
        gone = sorted(known.keys() - inventory.names)
        if gone:
            left = {host: address for host, address in known.items() if host in inventory.names}
            request = {"do": "note", "state": {"addresses": left}}
            step = Step(wanted.host, Phase.FORGET, "forget", ", ".join(gone), request)
            steps.append(replace(step, needs=frozenset(needed)))
    return steps, problems


def homes_of(inventory: Inventory) -> dict[str, str]:
    """The host of each role, by role id."""
    return {role.role_id: wanted.host for wanted in inventory.hosts for role in wanted.roles}


def places_of(
    role_ids: Iterable[str], homes: Mapping[str, str], facts: Mapping[str, HostFacts | Unreachable]
) -> frozenset[str]:
    """Hosts without which these do not run where they should: theirs, and those of the roles of their kind that have to leave these first, as for their ports."""
    left, known = [*role_ids], set[str]()
    while left:
        role_id = left.pop()
        home = homes.get(role_id)
        if home is None or role_id in known:
            continue
        known.add(role_id)
        told = facts[home]
        if isinstance(told, HostFacts) and role_id not in told.roles:
            kind = role_id.partition("-")[0]
            left += [one for one in told.roles if one.partition("-")[0] == kind and homes.get(one) != home]
    return frozenset(homes[role_id] for role_id in known)


def back_steps(wanted: HostWanted, told: HostFacts) -> Iterator[Step]:
    """Of a node that a rolling change drained and, since it was interrupted or failed, did not take back."""
    if told.drained and role_id_of_node(wanted.host) in {role.role_id for role in wanted.roles}:
        detail = f"{', '.join(told.drained)}: drained for a change that came to no end; it is used again"
        yield Step(wanted.host, Phase.BACK, "back", detail, {"do": "back", "drained": list(told.drained)})


def _ran_before(hosts: Sequence[HostFacts]) -> Running | None:
    """What most hosts that the last change has reached ran before; None where that cannot be told.

    Those that it has not reached still run what others ran before.
    """
    befores = {told.before for told in hosts}
    found = Counter(told.before for told in hosts if told.now not in befores)
    del found[Running()]
    (first, most), (_, next_most) = [*found.most_common(2), (Running(), 0), (Running(), 0)][:2]
    return first if most > next_most else None


def drain_step(host: str) -> Step:
    """Of a node that the file does not have any more."""
    detail = "its node is not in the file any more: its slices move to others"
    return Step(host, Phase.DRAIN, "drain", detail, {"do": "drain"})


def _stop(role_id: str) -> Mapping[str, object]:
    return {"do": "stop", "role_ids": [role_id]}


def _ends(host: str, told: HostFacts) -> Iterator[Step]:
    """Of everything on a host."""
    if not told.is_there:
        return
    for prefix, phase in END_OF.items():
        for role_id in sorted(told.roles):
            if role_id.startswith(prefix):
                yield Step(host, phase, "stop", role_id, _stop(role_id))
    yield Step(host, Phase.REMOVE, "remove", told.base, {"do": "remove"})


def _started(
    wanted: HostWanted,
    role: RoleOnHost,
    told: HostFacts,
    goods: Goods,
    deploy: DeployConfig,
    run: Running,
    why: str,
    *,
    is_again: bool = False,
) -> Iterator[Step]:
    script = role_script(wanted, role, told, goods, deploy, run, told.keys)
    step = start_step(wanted, role, script, why, told, run, goods, is_again=is_again)
    if step is not None:
        yield step


def _planned(
    inventory: Inventory,
    facts: Mapping[str, HostFacts | Unreachable],
    steps_of: Callable[[HostWanted, HostFacts], Iterator[Step]],
    *,
    needs_one: bool,
) -> Plan:
    """`needs_one`: a host without any of it is a problem."""
    steps: list[Step] = []
    problems: dict[str, list[str]] = {}
    unreachable = set()
    for wanted in inventory.hosts:
        told = facts[wanted.host]
        if isinstance(told, Unreachable):
            problems[wanted.host] = [told.reason]
            if told.is_silent:
                unreachable.add(wanted.host)
        elif needs_one and not told.now.version:
            problems[wanted.host] = ["nothing of this cluster is on it: run `tenuto deploy up` first"]
        else:
            steps.extend(steps_of(wanted, told))
    hosts = tuple(one.host for one in inventory.hosts)
    return Plan(in_order(steps), problems, {}, hosts, inventory.scheduler_hosts, frozenset(unreachable))
