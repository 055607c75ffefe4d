"""Other plans for a cluster that is there: start roles again, go back to what ran before, end all of it. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from deploy.ssh.facts import HostFacts, Running, Unreachable
from deploy.ssh.inventory import HostWanted, Inventory, Rank, RoleOnHost
from deploy.ssh.plan import Goods, Phase, Plan, Step, role_script, start_step
from roles.config.hosts import DeployConfig

_END_OF = {
    Rank.FRONTEND: Phase.END_FRONTENDS,
    Rank.AGENT: Phase.END_AGENTS,
    Rank.SCHEDULER: Phase.END_SCHEDULERS,
}


def plan_restart(
    inventory: Inventory,
    facts: Mapping[str, HostFacts | Unreachable],
    goods: Goods,
    deploy: DeployConfig,
    only: Collection[str],
) -> Plan:
    """Start roles again as they run, whatever the file says by now. `only`: these role ids; empty: all."""

    def steps(wanted: HostWanted, told: HostFacts) -> Iterator[Step]:
        for role in wanted.roles:
            if not only or role.role_id in only:
                yield _started(wanted, role, told, goods, deploy, told.now, "starts again", is_again=True)

    return _planned(inventory, facts, steps, needs_one=True)


def plan_rollback(
    inventory: Inventory, facts: Mapping[str, HostFacts | Unreachable], goods: Goods, deploy: DeployConfig
) -> Plan:
    """Start every role as it was before the last change. A second rollback undoes the first one."""

    def steps(wanted: HostWanted, told: HostFacts) -> Iterator[Step]:
        for role in wanted.roles:
            why = f"starts again: back to {told.before.version}, configuration {told.before.config}"
            yield _started(wanted, role, told, goods, deploy, told.before, why)

    plan = _planned(inventory, facts, steps, needs_one=True)
    problems = dict(plan.problems)
    for wanted in inventory.hosts:
        told = facts[wanted.host]
        if not isinstance(told, HostFacts) or wanted.host in problems:
            continue
        before = told.before
        if not before.version:
            problems[wanted.host] = ["nothing ran before what runs now"]
        elif before.version not in told.versions or before.config not in told.configs:
            problems[wanted.host] = [
                f"{before.version} with configuration {before.config} is not there any more"
            ]
    left = tuple(step for step in plan.steps if step.host not in problems)
    return replace(plan, steps=left, problems=problems)


def plan_down(inventory: Inventory, facts: Mapping[str, HostFacts | Unreachable]) -> Plan:
    """End frontends, then agents, then schedulers, everywhere; then remove all that was made on each host."""

    def steps(wanted: HostWanted, told: HostFacts) -> Iterator[Step]:
        if not told.is_there:
            return
        for role in wanted.roles:
            if role.role_id in told.roles:
                request = {"do": "stop", "role_ids": [role.role_id]}
                yield Step(wanted.host, _END_OF[role.rank], "stop", role.role_id, request)
        yield Step(wanted.host, Phase.REMOVE, "remove", told.base, {"do": "remove"})

    return _planned(inventory, facts, steps, needs_one=False)


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
) -> Step:
    script = role_script(wanted, role, told, goods, deploy, run)
    return start_step(wanted.host, role, script, why, told, run, goods.addresses, is_again=is_again)


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
    steps.sort(key=lambda step: step.phase)
    hosts = tuple(one.host for one in inventory.hosts)
    return Plan(tuple(steps), problems, {}, hosts, inventory.scheduler_hosts, frozenset(unreachable))
