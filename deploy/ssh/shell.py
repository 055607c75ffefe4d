"""Asks hosts and does plans: threads around the cores of this package, one for each host that is being spoken to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from deploy.keys import gateway_secrets, remedy, trusted_in
from deploy.ssh.changes import plan_down, plan_restart, plan_rollback
from deploy.ssh.config_bundle import Source, carried_config
from deploy.ssh.connection import HostConnection, is_ssh_there
from deploy.ssh.deployed_cluster import ASK_LIMIT_S, DeployedCluster, Say
from deploy.ssh.facts import HostFacts, Unreachable, facts_from
from deploy.ssh.inventory import Inventory, gateway_file, inventory_of
from deploy.ssh.plan import addresses_of, plan_up
from deploy.ssh.rollout import HOSTS_AT_ONCE, Ended, Rollout
from deploy.ssh.steps import Goods, Phase, Plan, Step
from deploy.ssh.wheels import needed_wheels, own_wheel, wheels_in
from fabric.clock import MonotonicClock, WallClock
from fabric.errors import ConfigError, FabricError, PeerLost
from fabric.ids import SCHEDULER_PREFIX
from fabric.keys import TRUSTED_FILE, naming_path, read_pair
from roles.runtime.exit_codes import EXIT_FAILURE, EXIT_PARTIAL, EXIT_UNREACHABLE

FACTS_LIMIT_S: Final = 60.0
START_LIMIT_S: Final = 180.0
CARRY_LIMIT_S: Final = 3_600.0
_LIMITS_S: Final = {"receive": CARRY_LIMIT_S, "environment": CARRY_LIMIT_S, "start": START_LIMIT_S}


@dataclass(frozen=True, slots=True)
class Result:
    """How a rollout ended. `failed`: by host. `problems`: what the cluster does not serve. `is_untouched`: no role was started or ended."""

    done: Sequence[Step]
    failed: Mapping[str, str]
    status: Mapping[str, Any] | None
    problems: Sequence[str] = ()
    is_untouched: bool = False

    @property
    def exit_code(self) -> int:
        """0: all is as the file says."""
        if self.status is None:
            return EXIT_FAILURE
        return EXIT_PARTIAL if self.failed or self.problems else 0


class RolloutInterrupted(KeyboardInterrupt):
    """Ctrl-C, after what was going on has ended. `left`: what is not done."""

    def __init__(self, done: Sequence[Step], left: Sequence[Step]) -> None:
        super().__init__()
        self.done, self.left = done, left


@dataclass(slots=True)
class Deployment:
    """One file's cluster, and the connections to its hosts."""

    source: Source
    cluster: DeployedCluster

    @property
    def inventory(self) -> Inventory:
        """The file's hosts."""
        return self.cluster.inventory

    @property
    def connections(self) -> dict[str, HostConnection]:
        """To these, and to hosts that the file does not have any more."""
        return self.cluster.connections

    @classmethod
    def of(cls, path: Path) -> Deployment:
        """Read the file. Raises ConfigError for what it cannot mean."""
        if not is_ssh_there():
            raise ConfigError("there is no ssh command on this host: install an OpenSSH client")
        source = Source.of(path)
        inventory = inventory_of(source.config)
        deploy = source.config.deploy
        connections = {one.host: HostConnection(one.host, deploy) for one in inventory.hosts}
        return cls(source, DeployedCluster(source.config, inventory, connections, MonotonicClock()))

    def plan(self, forgotten: Collection[str] = ()) -> Plan:
        """What `up` has to do. `forgotten`: hosts not in the file that are not asked for any more.

        Raises ConfigError for what is missing here.
        """
        gateway = self.source.config.gateway
        secrets = gateway_secrets(gateway) if gateway.may_be_reached else {}
        facts = self.facts()
        taken_out = self._taken_out(facts, forgotten)
        goods, missing = self._goods(facts, taken_out, secrets)
        return plan_up(self.inventory, facts, goods, self.source.config.deploy, missing, taken_out)

    def plan_restart(self, only: Sequence[str]) -> Plan:
        """Every role again, or only those. Raises ConfigError for one that the file does not have."""
        self.require_roles(only)
        facts = self.facts()
        goods, _ = self._goods(facts)
        return plan_restart(self.inventory, facts, goods, self.source.config.deploy, only)

    def plan_rollback(self) -> Plan:
        """Back to what ran before the last change."""
        facts = self.facts()
        goods, _ = self._goods(facts)
        return plan_rollback(self.inventory, facts, goods, self.source.config.deploy)

    def plan_down(self) -> Plan:
        """The end of all of it."""
        facts = self.facts()
        return plan_down(self.inventory, facts, self._taken_out(facts))

    def carry_out(self, plan: Plan, say: Say, *, is_rolling: bool = False) -> Result:
        """Do what a plan says, then wait until the cluster says that it is ready.

        `is_rolling`: roles start one after the other, each when the cluster has become ready after the one before, and a node is drained before.
        """
        rollout = self._roll_out(plan, say, is_rolling=is_rolling)
        failed = {**rollout.without_gateway, **rollout.failed}
        if plan.has_no_scheduler(rollout.without_scheduler):
            return Result(rollout.done, failed, None, is_untouched=rollout.is_untouched)
        expected = self.cluster.schedulers(rollout.without_scheduler)
        status, problems = self.cluster.until_ready(rollout.failed, expected, say)
        if status is not None:
            served = sum(one["state"] == "ready" for one in status["slices"])
            say(self.cluster.active_host, f"ready: {served} of {len(status['slices'])} slices")
            endpoints, unready = self.cluster.until_gateways_serve(failed, say)
            status = {**status, "endpoints": {**status.get("endpoints", {}), **endpoints}}
            problems = [*problems, *unready]
        return Result(rollout.done, failed, status, problems)

    def tear_down(self, plan: Plan, say: Say) -> Result:
        """Do what a plan for the end says."""
        rollout = self._roll_out(plan, say, is_rolling=False)
        return Result(rollout.done, rollout.failed, {})

    def require_roles(self, role_ids: Sequence[str]) -> None:
        """Raises ConfigError for one that the file does not have."""
        known = [role.role_id for wanted in self.inventory.hosts for role in wanted.roles]
        for role_id in role_ids:
            if role_id not in known:
                raise ConfigError(f"the file has no role {role_id!r}; it has {', '.join(known)}")

    def _roll_out(self, plan: Plan, say: Say, *, is_rolling: bool) -> Rollout:
        rollout = Rollout(plan, is_rolling=is_rolling)
        totals = {host: sum(step.host == host for step in plan.steps) for host in plan.hosts}
        numbers = dict.fromkeys(plan.hosts, 0)
        done: list[Step] = []
        for host, problems in plan.problems.items():
            for problem in problems:
                say(host, problem)

        def do(step: Step) -> Ended:
            numbers[step.host] += 1
            head = f"{numbers[step.host]}/{totals[step.host]} {step.what}"
            say(step.host, f"{head}: {step.detail}")
            try:
                if step.phase is Phase.DRAIN:
                    self.cluster.drain_for_good(step.host, say)
                elif step.phase is Phase.BACK:
                    self.cluster.take_back(step.host)
                elif step.is_replacing and (is_rolling or self._is_taken_over(step)):
                    self._start_gently(step, rollout, say)
                else:
                    self._do(step, lambda what: say(step.host, f"{head}: {what}"))
            except FabricError as error:
                say(step.host, f"{head}: failed: {error}")
                return Ended(step, str(error))
            done.append(step)
            return Ended(step)

        try:
            with ThreadPoolExecutor(HOSTS_AT_ONCE, "host") as pool:
                try:
                    going: set[Future[Ended]] = {pool.submit(do, step) for step in rollout.begin()}
                    while going:
                        over, going = wait(going, return_when=FIRST_COMPLETED)
                        for future in over:
                            going |= {pool.submit(do, step) for step in rollout.handle(future.result())}
                except BaseException as error:  # the threads are waited for
                    self.cluster.stop.set()
                    if isinstance(error, KeyboardInterrupt):
                        for step in rollout.going:
                            say(step.host, f"interrupted: this ends first: {step.what}: {step.detail}")
                    raise
        except KeyboardInterrupt as error:
            left = [step for step in plan.steps if step not in done]
            raise RolloutInterrupted(done, left) from error
        for host in rollout.stay_drained:
            if self.cluster.drained.get(host):  # where nobody served, nothing was drained
                say(
                    host,
                    "stays drained; the next `tenuto deploy up` ends it, or uses it again where the file has it",
                )
        for step in rollout.left_out:
            missing = ", ".join(sorted(step.needs & rollout.failed.keys()))
            say(step.host, f"left out, as {missing} failed: {step.what}: {step.detail}")
        return rollout

    def _do(self, step: Step, on_progress: Callable[[str], None] = lambda _: None) -> None:
        limit_s = _LIMITS_S.get(step.request["do"], ASK_LIMIT_S)
        self.connections[step.host].ask(step.request, step.files, limit_s, on_progress)

    def _is_taken_over(self, step: Step) -> bool:
        """Whether another scheduler serves while this one starts again; then the next one waits until it stands by."""
        is_alone = len(self.source.config.places.schedulers) == 1
        return step.phase is Phase.SCHEDULERS and not is_alone

    def _start_gently(self, step: Step, rollout: Rollout, say: Say) -> None:
        """Without its node's slices where it is an agent; over when every slice is ready or has failed.

        Raises FabricError where it does not start, its node stays drained, or the cluster does not become ready.
        """
        if step.phase is Phase.AGENTS:
            self._start_drained(step, say)
        else:
            self._do(step)
        is_scheduler = step.phase is Phase.SCHEDULERS
        # Another one may be about to be started again because it does not come up.
        others = self.cluster.schedulers(rollout.without_scheduler)
        expected = {step.request["role_id"]} if is_scheduler else others
        status, problems = self.cluster.until_ready(rollout.failed, expected, say)
        if status is None:
            raise FabricError("; ".join(problems))

    def _start_drained(self, step: Step, say: Say) -> None:
        problems = []
        try:
            self.cluster.drain(step.host, say)
            self._do(step)
        except FabricError as error:
            problems.append(str(error))
        try:
            self.cluster.take_back(step.host)
        except FabricError as error:
            problems.append(str(error))
        if problems:
            raise FabricError("; ".join(problems))

    def _goods(
        self,
        facts: Mapping[str, HostFacts | Unreachable],
        taken_out: Collection[str] = (),
        secrets: Mapping[str, bytes] = MappingProxyType({}),
    ) -> tuple[Goods, dict[str, list[str]]]:
        """What there is to carry, and which keys are missing, by host. `secrets`: of gateways, by the key of the file that names each."""
        config = self.source.config
        own, deploy = own_wheel(), config.deploy
        keys, missing = _keys(config.security.keys, self.inventory)
        keys |= {gateway_file(key): content for key, content in secrets.items()}
        wheelhouse = [] if deploy.wheelhouse is None else wheels_in(deploy.wheelhouse)
        wheels = {
            wanted.host: needed_wheels(own, wheelhouse, wanted.extras, _beside(facts[wanted.host]))
            if wheelhouse
            else [own.wheel]
            for wanted in self.inventory.hosts
        }
        addresses = addresses_of(self.inventory, config.places.addresses, facts)
        carried = carried_config(self.source, addresses)
        # One that never answered has nothing of the cluster: its name may be a mistake.
        members = {*taken_out, *(host for host, told in facts.items() if isinstance(told, HostFacts))}
        return Goods(own, wheels, carried, keys, addresses, members), missing

    def facts(self) -> dict[str, HostFacts | Unreachable]:
        """What every host tells, or why it does not."""
        found = self._looked({wanted.host: wanted.ports for wanted in self.inventory.hosts})
        self.cluster.silent = frozenset(
            host for host, told in found.items() if isinstance(told, Unreachable) and told.is_silent
        )
        self.cluster.scheduling = frozenset(
            host
            for host, told in found.items()
            if isinstance(told, HostFacts)
            and any(role_id.startswith(SCHEDULER_PREFIX) for role_id in told.roles)
        )
        return found

    def _looked(self, ports: Mapping[str, Mapping[str, Sequence[int]]]) -> dict[str, HostFacts | Unreachable]:
        """At these hosts, with the ports that they should have, by role id."""

        def look(host: str) -> HostFacts | Unreachable:
            interface = self.source.config.deploy.interface
            request = {"do": "facts", "ports": dict(ports[host]), "interface": interface}
            asked_at_ms = WallClock().now_ms()
            try:
                told = self.connections[host].ask(request, limit_s=FACTS_LIMIT_S)
                return facts_from(told, asked_at_ms, WallClock().now_ms())
            except FabricError as error:
                return Unreachable(str(error), isinstance(error, PeerLost))

        with ThreadPoolExecutor(HOSTS_AT_ONCE, "host") as pool:
            found = dict(zip(ports, pool.map(look, ports), strict=True))
        self.cluster.drained |= {
            host: told.drained for host, told in found.items() if isinstance(told, HostFacts)
        }
        return found

    def _taken_out(
        self, facts: Mapping[str, HostFacts | Unreachable], forgotten: Collection[str] = ()
    ) -> dict[str, HostFacts | Unreachable]:
        """What hosts tell that were in the cluster when the others were told last, and are not in the file."""
        known = {host for told in facts.values() if isinstance(told, HostFacts) for host in told.addresses}
        hosts = sorted(known - set(facts) - set(forgotten))
        self.connections.update({host: HostConnection(host, self.source.config.deploy) for host in hosts})
        return self._looked({host: {} for host in hosts})


def exit_code_of(plan: Plan) -> int:
    """Of a plan as such: whether all of it can be done."""
    if not plan.problems:
        return 0
    if set(plan.unreachable) >= set(plan.hosts):
        return EXIT_UNREACHABLE
    return EXIT_FAILURE if plan.has_no_scheduler(plan.problems) else EXIT_PARTIAL


def _keys(folder: Path | None, inventory: Inventory) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    """Every key file that hosts need, and whose are missing."""
    keys: dict[str, bytes] = {}
    missing: dict[str, list[str]] = {}
    if folder is None:
        return keys, missing
    trusted = trusted_in(folder)
    with naming_path(folder / TRUSTED_FILE):
        keys[TRUSTED_FILE] = (folder / TRUSTED_FILE).read_bytes()
    for wanted in inventory.hosts:
        for name in wanted.keys:
            try:
                read_pair(folder / name)
                with naming_path(folder / name):
                    keys[name] = (folder / name).read_bytes()
            except ConfigError as error:
                principal = name.removesuffix(".key").replace("node-", "node/", 1)
                missing.setdefault(wanted.host, []).append(f"{error}{remedy(folder, principal, trusted)}")
    return keys, missing


def _beside(facts: HostFacts | Unreachable) -> Sequence[str]:
    """Distributions that a host needs beside Tenuto."""
    return () if isinstance(facts, HostFacts) and facts.manager == "systemd" else ("supervisor",)
