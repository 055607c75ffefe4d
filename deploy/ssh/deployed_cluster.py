"""What the deployed cluster's own schedulers say, asked on their hosts: which one is active, whether all of it is ready."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.local.shell import SETTLED_STATES, problems_of
from deploy.ssh.connection import HostConnection
from deploy.ssh.inventory import Inventory
from deploy.ssh.rollout import HOSTS_AT_ONCE
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import scheduler_id
from fabric.messages import LeftOut, SliceReport, SliceState, UnplacedInfo
from roles.cli.cluster_tables import unplaced_line
from roles.config.cluster import ClusterConfig
from roles.node_agent.events import AgentLimits
from roles.runtime.exit_codes import (
    EXIT_CONFIG,
    EXIT_FAILURE,
    EXIT_NOT_STARTED,
    EXIT_PARTIAL,
    EXIT_UNREACHABLE,
)
from roles.runtime.operator_request import ANSWER_LIMIT_MS, NOT_KNOWN
from roles.runtime.running_cluster import ACTIVE_ELSEWHERE

ASK_LIMIT_S: Final = 60.0
STATUS_LIMIT_S: Final = 20.0
DRAIN_LIMIT_S: Final = ANSWER_LIMIT_MS / 1e3 + 60.0  # the command gives up before we do, and says why
DRAIN_TRIES: Final = 5
READY_LIMIT_MS: Final = 900_000.0
"""Anew whenever one more slice is ready than ever; and longer where slices have several models."""
READY_EVERY_S: Final = 0.5
SAY_EVERY_MS: Final = 10_000.0
GATEWAY_LIMIT_MS: Final = 30_000.0
"""Of one whose frontends serve: it connects to them again every now and then."""

_TAKES_EFFECT: Final = (0, EXIT_PARTIAL)
_NOBODY_SERVES: Final = (EXIT_UNREACHABLE, EXIT_NOT_STARTED)
_NOTHING_DONE: Final = (EXIT_CONFIG, EXIT_FAILURE, *_NOBODY_SERVES)
_UNKNOWN: Final = "UnknownGpu"
Say = Callable[[str, str], None]
"""A line about a host."""


@dataclass(slots=True)
class DeployedCluster:
    """One file's cluster, by the `tenuto` commands of its schedulers' hosts."""

    config: ClusterConfig
    inventory: Inventory
    connections: dict[str, HostConnection]
    clock: MonotonicClock
    active_host: str = ""
    """Of the scheduler that answered last."""
    silent: frozenset[str] = frozenset()
    """Hosts that could not be reached when they were looked at last: they are not asked."""
    scheduling: frozenset[str] = frozenset()
    """Hosts on which a scheduler was when they were looked at last, whether the file has one there or not."""
    drained: dict[str, Sequence[str]] = field(default_factory=dict)
    """By host, what of its node is out of use for a change, this one or one before, as is noted there."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Nothing is waited for any more."""

    def schedulers(self, failed: Collection[str]) -> set[str]:
        """Those that should be there: of hosts that nothing is wrong with."""
        places = enumerate(self.config.places.schedulers)
        return {scheduler_id(at) for at, one in places if one.host not in failed}

    def until_ready(
        self, failed: Collection[str], expected: Collection[str], say: Say
    ) -> tuple[Mapping[str, Any] | None, list[str]]:
        """Ask until every slice of a host that is in the file and not `failed` is ready or has failed, and these schedulers are active or stand by.

        The problems are those of these slices, and models without a place. What is waited for is said every now and then.
        """
        now_ms = self.clock.now_ms()
        since_ms, limit_ms, say_at_ms = now_ms, READY_LIMIT_MS, now_ms + SAY_EVERY_MS
        why, ready_max = "", 0
        while now_ms < since_ms + limit_ms:
            try:
                status, said = self.status()
            except PeerLost as error:
                return None, [str(error)]
            there = self.inventory.names - set(failed)
            slices = [one for one in (status or {}).get("slices", ()) if _node_of(one) in there]
            why = said or "the scheduler does not answer"
            if status is not None:
                # The plan waits for what cannot come, for minutes, and then goes without it.
                others = [one for one in status["slices"] if _node_of(one) not in there]
                is_for_others = any(one["state"] == SliceState.STARTING for one in others)
                why = _awaited(status, slices, expected, is_plan_settled=is_for_others)
                if not why:
                    return status, [*problems_of([_report(one) for one in slices]), *_unplaced(status)]
            now_ms = self.clock.now_ms()
            ready = sum(one["state"] == SliceState.READY for one in slices)
            if ready > ready_max:
                ready_max, since_ms = ready, now_ms
            for one in slices:
                limit_ms = max(limit_ms, READY_LIMIT_MS + AgentLimits().further_load_ms(len(one["models"])))
            if now_ms >= say_at_ms:
                say_at_ms = now_ms + SAY_EVERY_MS
                say(self.active_host or self.inventory.scheduler_hosts[0], f"waits: {why}")
            if self.stop.wait(READY_EVERY_S):
                return None, [f"was not waited for any longer: {why}"]
        return None, [f"nothing more became ready within {limit_ms / 1e3:g} s: {why}"]

    def until_gateways_serve(
        self, failed: Collection[str], say: Say
    ) -> tuple[dict[str, list[str]], list[str]]:
        """Ask until every gateway of a host that has not failed is ready. By protocol, where they are; then what is wrong with the others."""
        there = [one for one in self.inventory.hosts if one.host not in failed]
        role_ids = {one.host: one.gateway.role_id for one in there if one.gateway is not None}
        with ThreadPoolExecutor(HOSTS_AT_ONCE, "host") as pool:
            try:
                found = list(pool.map(self._until_gateway_serves, role_ids, role_ids.values()))
            except BaseException:  # the threads are waited for
                self.stop.set()
                raise
        endpoints: dict[str, list[str]] = {}
        for (host, role_id), (addresses, _) in zip(role_ids.items(), found, strict=True):
            for protocol in ("http", "grpc"):
                for address in addresses.get(protocol, ()):
                    endpoints.setdefault(protocol, []).append(address)
                    say(host, f"{role_id} serves {address}")
        return endpoints, [problem for _, problem in found if problem]

    def _until_gateway_serves(self, host: str, role_id: str) -> tuple[Mapping[str, Sequence[str]], str]:
        """Its addresses, none where there is to be no such gateway; or why it does not become ready."""
        until_ms = self.clock.now_ms() + GATEWAY_LIMIT_MS
        while True:
            try:
                addresses, why = self._gateway_at(host, role_id)
            except FabricError as error:  # the host may be busy
                addresses, why = {}, str(error)
            if not why or self.clock.now_ms() > until_ms or self.stop.wait(READY_EVERY_S):
                return addresses, why and f"{role_id}: is not ready: {why}"

    def _gateway_at(self, host: str, role_id: str) -> tuple[Mapping[str, Sequence[str]], str]:
        """Its addresses; or why it is not ready. Neither where its host's configuration has none. Raises FabricError."""
        said = str(self._ask_tenuto(host, ["health", "--json"])["said"])
        if f"{role_id} " in said:
            return {}, said
        for one in self.connections[host].ask({"do": "run_files"}, limit_s=ASK_LIMIT_S)["run_files"]:
            if one["role_id"] == role_id:
                return one["addresses"], ""
        told = self.connections[host].ask({"do": "facts", "ports": {}}, limit_s=ASK_LIMIT_S)
        return {}, "it has not come up" if role_id in told["roles"] else ""

    def status(self) -> tuple[dict[str, Any] | None, str]:
        """What the active schedulers of all shards say, as one; why there is nothing. A shard of which none answers is listed without a scheduler.

        Raises PeerLost where no host of a scheduler can be reached.
        """
        try:
            asked = self.ask_active(["status", "--json"])
        except PeerLost:
            raise
        except FabricError as error:  # another one may take over yet
            return None, str(error)
        if not asked["answer"]:
            return None, asked["said"]
        answers = [asked["answer"]]
        for host in self._scheduler_hosts()[1:]:  # the first one has just answered
            if not _silent_shards(_shards_of(answers)):
                break
            with contextlib.suppress(FabricError):
                answer = self._ask_tenuto(host, ["status", "--json"])["answer"]
                answers += [answer] if answer else []
        shards = _shards_of(answers)
        if len(answers) == 1:
            return {**answers[0], "shards": shards}, ""
        slices = {one["slice_id"]: one for answer in answers for one in answer["slices"]}
        plans = [answer["plan"] or {} for answer in answers]
        unsteady = [plan for plan in plans if plan.get("state") != "steady"]
        listed = {
            key: [one for plan in plans for one in plan.get(key, ())] for key in ("unplaced", "drained")
        }
        return {
            **answers[0],
            "slices": list(slices.values()),
            "gpus": [gpu for answer in answers for gpu in answer.get("gpus", ())],
            "shards": shards,
            "plan": {**(unsteady or plans)[0], **listed},
            "endpoints": {key: one for answer in answers for key, one in answer["endpoints"].items()},
        }, ""

    def _scheduler_hosts(self) -> list[str]:
        """Where one may be, taken out of the file or not; the one that answered last first."""
        others = (
            host for host in self.connections if host not in self.inventory.names or host in self.scheduling
        )
        known = dict.fromkeys((*self.inventory.scheduler_hosts, *others))
        hosts = [one for one in known if one not in self.silent]
        return sorted(hosts, key=lambda one: one != self.active_host)

    def ask_active(self, words: Sequence[str], limit_s: float = STATUS_LIMIT_S) -> dict[str, Any]:
        """What a `tenuto` command says on a host where a scheduler is active, with shards one that knows what is asked about: each is asked, the last known one first.

        Raises PeerLost where none of these hosts can be reached, FabricError where one may have begun with it and was not heard to end,
        or an active one may be where nobody was asked.
        """
        answers: list[dict[str, Any]] = []
        hosts = self._scheduler_hosts()
        lost: FabricError | None = None if hosts else PeerLost("no host of a scheduler is left")
        for host in hosts:
            try:
                asked = self._ask_tenuto(host, words, limit_s)
            except FabricError as error:
                lost = type(error)(f"{host}: {error}")
                continue
            if NOT_KNOWN in asked["said"]:
                lost = FabricError(f"{host}: {asked['said']}")
                continue
            if not _serves_nothing(asked):
                self.active_host = host
                return asked
            answers.append(asked)
        if lost is not None:  # that others stand by says nothing of the active one
            raise FabricError(str(lost)) if answers else lost
        unknown = next((one for one in answers if one["code"] not in _NOBODY_SERVES), None)
        if unknown is not None:
            return unknown
        said = next((one["said"] for one in answers if ACTIVE_ELSEWHERE in one["said"]), "")
        if said or self.silent:
            silent = f"{', '.join(sorted(self.silent))} cannot be asked" if self.silent else ""
            raise FabricError("; ".join(filter(None, (said or answers[-1]["said"], silent))))
        return answers[-1]

    def ask_to_drain(self, where: str, *words: str) -> dict[str, Any]:
        """What the command says of a node, or of a GPU. Raises as `ask_active` does, and FabricError where a shard that does not answer may have it."""
        drained: dict[str, Any] = {}
        for _ in range(DRAIN_TRIES):
            drained = self.ask_active(["drain", where, *words, "--json"], DRAIN_LIMIT_S)
            if drained["code"] != EXIT_FAILURE or "NotActive" not in drained["said"]:
                break  # else another scheduler took over in the middle of it
        if _UNKNOWN in drained["said"]:
            status, said = self.status()
            if status is None:
                raise FabricError(f"whether {where} is in use is not known: {said}")
            _require_all_shards(status, where)
        return drained

    def drain(self, host: str, say: Say) -> None:
        """Take a host's node out of use for a change, without what an operator keeps out of it. Why something cannot be is said.

        It is noted there first, and so taken back by a later deploy where this one comes to no end. Raises FabricError where it is not
        known what is in use, or what became of it.
        """
        for where in self.drained.get(host) or self._in_use(host):
            noted = self.drained.get(host, ())
            self._note_drained(host, {*noted, where})
            asked = self.ask_to_drain(where)
            if asked["code"] in _NOTHING_DONE:
                say(host, f"not drained before: {asked['said'] or 'it cannot be'}")
                self._note_drained(host, noted)  # a change before this one may have drained it
            elif asked["code"] not in _TAKES_EFFECT:
                raise FabricError(f"whether {where} is drained is not known: {_end_of(asked)}")

    def drain_for_good(self, host: str, say: Say) -> None:
        """Take out of use the node of a host that the file does not have any more.

        What is in use of it is noted there first, and so used again where the file has the host again before it has ended. Raises FabricError
        where its slices did not move, or that is not known; where nobody serves, or knows it, there is nothing to move.
        """
        noted = self.drained.get(host, ())
        try:
            in_use = self._in_use(host)
        except FabricError:  # an operator may have drained it: nothing is noted as ours that may not be
            asked = self.ask_active(["status", "--json"])
            if asked["code"] not in _NOBODY_SERVES:
                raise
            say(host, f"not drained: {asked['said']}")
            return
        self._note_drained(host, {*noted, *in_use})
        asked = self.ask_to_drain(host)
        if asked["code"] in _NOTHING_DONE:
            self._note_drained(host, noted)
        if _serves_nothing(asked):
            say(host, f"not drained: {asked['said']}")
        elif asked["code"] not in _TAKES_EFFECT:
            raise FabricError(
                f"could not be drained: {_end_of(asked)}; no role was started or ended, run it again when it can be"
            )

    def take_back(self, host: str) -> None:
        """Use again what was drained for a change, as far as it is still there. Raises FabricError where some of it stays drained."""
        for where in self.drained.get(host, ()):
            asked = self.ask_to_drain(where, "--back")
            if asked["code"] not in _TAKES_EFFECT and _UNKNOWN not in asked["said"]:
                # Not by hand: what is noted would stay so, and what an operator drains later be used again.
                raise FabricError(f"{where} stays drained: {_end_of(asked)}; run it again")
            self._note_drained(host, {*self.drained[host]} - {where})

    def _in_use(self, host: str) -> Sequence[str]:
        """Its node, or those of its GPUs that are not drained where others are; nothing of one that has no GPU there.

        Raises FabricError where no scheduler says it, or one that does not answer may have it.
        """
        status, said = self.status()
        if status is None:
            raise FabricError(f"cannot be drained: {said or 'the scheduler does not answer'}")
        plan = status.get("plan") or {}
        drained = {one["gpu"] for one in plan.get("drained", ()) if one["node_id"] == host}
        gpus = sum(one["node_id"] == host for one in status.get("gpus", ()))
        if not gpus:
            _require_all_shards(status, host)
        elif not drained:
            return [host]
        return [f"{host}/gpu{gpu}" for gpu in range(gpus) if gpu not in drained]

    def _note_drained(self, host: str, drained: Collection[str]) -> None:
        request = {"do": "note", "state": {"drained": sorted(drained)}}
        self.connections[host].ask(request, limit_s=ASK_LIMIT_S)
        self.drained[host] = sorted(drained)

    def _ask_tenuto(self, host: str, words: Sequence[str], limit_s: float = STATUS_LIMIT_S) -> dict[str, Any]:
        request = {"do": "ask", "words": list(words), "limit_s": limit_s}
        return self.connections[host].ask(request, limit_s=limit_s + ASK_LIMIT_S)


def _serves_nothing(asked: Mapping[str, Any]) -> bool:
    """Whether `ask_to_drain` says that nobody serves, or that nobody has what was to be drained."""
    return asked["code"] in _NOBODY_SERVES or _UNKNOWN in asked["said"]


def _shards_of(answers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each shard once: those of the first answer's active schedulers first, those without an active one last."""
    listed = [one for answer in answers for one in answer.get("shards") or ()]
    shards: dict[int, Mapping[str, Any]] = {}
    for one in sorted(listed, key=lambda one: not one["scheduler"]):
        shards.setdefault(one["shard"], one)
    return list(shards.values())


def _silent_shards(shards: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(one["shard"]) for one in shards if not one["scheduler"]]


def _require_all_shards(status: Mapping[str, Any], where: str) -> None:
    """Raises FabricError where a shard may have it of which no active scheduler answers."""
    if silent := _silent_shards(status["shards"]):
        raise FabricError(
            f"whether {where} is in use is not known: no active scheduler of shard {', '.join(silent)} answers"
        )


def _end_of(asked: Mapping[str, Any]) -> str:
    return asked["said"] or f"the command ended with code {asked['code']}"


def _awaited(
    status: Mapping[str, Any],
    slices: Sequence[Mapping[str, Any]],
    expected: Collection[str],
    *,
    is_plan_settled: bool,
) -> str:
    """What is not ready yet; empty: all is. `is_plan_settled`: as far as these slices go, whatever it says itself."""
    unready = [one["slice_id"] for one in slices if one["state"] not in SETTLED_STATES]
    if unready or not slices:
        return f"{', '.join(unready[:5]) or 'slices'} are not ready"
    plan = status.get("plan") or {"state": "steady"}
    if plan["state"] != "steady" and not is_plan_settled:
        return f"the plan is {plan['state']}"
    shards = status.get("shards") or ()
    standing = status.get("scheduling") or {"standbys": ()}
    there = {one["scheduler"] for one in shards} | {one for shard in shards[1:] for one in shard["standbys"]}
    there |= {one["scheduler_id"] for one in standing["standbys"] if one["has_plan"]}
    missing = sorted(set(expected) - there)
    return f"{', '.join(missing)}: neither active nor standing by with the plan" if missing else ""


def _unplaced(status: Mapping[str, Any]) -> list[str]:
    plan = status.get("plan") or {}
    try:
        return [
            unplaced_line(UnplacedInfo(one["model_id"], one["rate_rps"], one["reason"]))
            for one in plan.get("unplaced", ())
        ]
    except (KeyError, TypeError) as error:  # of another version than this one
        raise FabricError(f"the scheduler's status cannot be understood: {error!r}") from error


def _node_of(listed: Mapping[str, Any]) -> str:
    return str(listed["slice_id"]).partition("/")[0]


def _report(listed: Mapping[str, Any]) -> SliceReport:
    try:
        left_out = tuple(LeftOut(**one) for one in listed["left_out"])
        return SliceReport(**{**listed, "models": tuple(listed["models"]), "left_out": left_out})
    except (KeyError, TypeError) as error:  # of another version than this one
        raise FabricError(f"the scheduler's status cannot be understood: {error!r}") from error
