"""What the deployed cluster's own schedulers say, asked on their hosts: which one is active, whether all of it is ready."""

from __future__ import annotations

import select
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.local.shell import SETTLED_STATES, problems_of
from deploy.ssh.connection import HostConnection
from deploy.ssh.inventory import Inventory
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import scheduler_id
from fabric.messages import LeftOut, SliceReport, SliceState
from roles.config.cluster import ClusterConfig
from roles.runtime.exit_codes import EXIT_UNREACHABLE

ASK_LIMIT_S: Final = 60.0
STATUS_LIMIT_S: Final = 20.0
READY_LIMIT_MS: Final = 900_000.0
READY_EVERY_S: Final = 0.5
SAY_EVERY_MS: Final = 10_000.0

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

    def schedulers(self, failed: Collection[str]) -> set[str]:
        """Those that should be there: of hosts that nothing is wrong with."""
        places = enumerate(self.config.places.schedulers)
        return {scheduler_id(at) for at, one in places if one.host not in failed}

    def until_ready(
        self, failed: Collection[str], expected: Collection[str], say: Say
    ) -> tuple[Mapping[str, Any] | None, list[str]]:
        """Ask until every slice of a host that is in the file and not `failed` is ready or has failed, and these schedulers are active or stand by.

        What is waited for is said every now and then.
        """
        now_ms = self.clock.now_ms()
        until_ms, say_at_ms = now_ms + READY_LIMIT_MS, now_ms + SAY_EVERY_MS
        why = ""
        while now_ms < until_ms:
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
                    return status, problems_of([_report(one) for one in slices])
            now_ms = self.clock.now_ms()
            if now_ms >= say_at_ms:
                say_at_ms = now_ms + SAY_EVERY_MS
                say(self.active_host or self.inventory.scheduler_hosts[0], f"waits: {why}")
            select.select([], [], [], READY_EVERY_S)
        return None, [f"not ready within {READY_LIMIT_MS / 1e3:g} s: {why}"]

    def status(self) -> tuple[dict[str, Any] | None, str]:
        """What the active schedulers of all shards say, as one; why there is nothing.

        Raises PeerLost where no host of a scheduler can be reached.
        """
        if self.config.shards == 1:
            asked = self.ask_active(["status", "--json"])
            return asked["answer"], asked["said"]
        answers = []
        said = ""
        for host in self._scheduler_hosts():
            try:
                asked = self._ask_tenuto(host, ["status", "--json"])
            except FabricError as error:
                said = str(error)
                continue
            said = asked["said"] or said
            if asked["answer"]:
                self.active_host = host
                answers.append(asked["answer"])
        if not answers:
            return None, said
        slices = {one["slice_id"]: one for answer in answers for one in answer["slices"]}
        unsteady = [answer["plan"] for answer in answers if (answer["plan"] or {}).get("state") != "steady"]
        return {
            **answers[0],
            "slices": list(slices.values()),
            "shards": [shard for answer in answers for shard in answer["shards"]],
            "plan": (unsteady or [answers[0]["plan"]])[0],
            "endpoints": {key: one for answer in answers for key, one in answer["endpoints"].items()},
        }, ""

    def _scheduler_hosts(self) -> list[str]:
        """Where one may be, taken out of the file or not; the one that answered last first."""
        others = (host for host in self.connections if host not in self.inventory.names)  # taken out
        hosts = [one for one in (*self.inventory.scheduler_hosts, *others) if one not in self.silent]
        return sorted(hosts, key=lambda one: one != self.active_host)

    def ask_active(self, words: Sequence[str], limit_s: float = STATUS_LIMIT_S) -> dict[str, Any]:
        """What a `tenuto` command says on the host of the active scheduler: each is asked, the last known one first.

        Raises PeerLost where none of these hosts can be reached.
        """
        asked: dict[str, Any] = {}
        lost: FabricError = PeerLost("no host of a scheduler is left")
        for host in self._scheduler_hosts():
            try:
                asked = self._ask_tenuto(host, words, limit_s)
            except FabricError as error:
                lost = error
                continue
            if asked["code"] != EXIT_UNREACHABLE:
                self.active_host = host
                return asked
        if not asked:
            raise lost
        return asked

    def _ask_tenuto(self, host: str, words: Sequence[str], limit_s: float = STATUS_LIMIT_S) -> dict[str, Any]:
        request = {"do": "ask", "words": list(words), "limit_s": limit_s}
        return self.connections[host].ask(request, limit_s=limit_s + ASK_LIMIT_S)


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


def _node_of(listed: Mapping[str, Any]) -> str:
    return str(listed["slice_id"]).partition("/")[0]


def _report(listed: Mapping[str, Any]) -> SliceReport:
    try:
        left_out = tuple(LeftOut(**one) for one in listed["left_out"])
        return SliceReport(**{**listed, "models": tuple(listed["models"]), "left_out": left_out})
    except (KeyError, TypeError) as error:  # of another version than this one
        raise FabricError(f"the scheduler's status cannot be understood: {error!r}") from error
