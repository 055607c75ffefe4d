"""Every history of small clusters' elections, to a depth that a suite can afford; `python -m tests.election_model` goes deeper."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import combinations

import pytest

from fabric.ids import Epoch, Incarnation, scheduler_id
from roles.node_agent.lease import LeaseGrants, LeaseRecord
from roles.runtime.epochs import LEASE_MS
from roles.scheduler.availability.election import ElectionState
from tests.election_model import NODES, Cluster, Rules, Wrong, explore, served


@pytest.mark.parametrize(
    ("rules", "depth", "states_min"),
    [
        (Rules(restarts=0, closes=0), 7, 1_000),
        (Rules(restarts=1, closes=0), 6, 1_000),
        (Rules(restarts=0, closes=1), 6, 1_000),
        (Rules(schedulers=1), 6, 500),
        (Rules(agents=1), 6, 500),
    ],
    ids=str,
)
def test_from_the_start_of_a_cluster(rules: Rules, depth: int, states_min: int) -> None:
    assert explore(Cluster(rules), depth) > states_min


@pytest.mark.parametrize(
    ("rules", "depth", "states_min"),
    [
        (Rules(restarts=0, closes=0), 7, 1_000),
        (Rules(restarts=1, closes=0), 6, 1_000),
        (Rules(restarts=0, closes=1), 6, 1_000),
        (Rules(agents=1, restarts=1, closes=1), 6, 500),
        (Rules(restarts=0, closes=0, handovers=1), 8, 1_000),
        (Rules(restarts=1, closes=0, handovers=1), 6, 1_000),
        (Rules(restarts=0, closes=1, handovers=1), 6, 1_000),
        (Rules(agents=1, restarts=0, closes=0, handovers=1), 9, 500),
    ],
    ids=str,
)
def test_from_a_cluster_that_serves(rules: Rules, depth: int, states_min: int) -> None:
    assert explore(served(rules), depth) > states_min


def test_an_agent_that_forgets_what_it_granted_is_found() -> None:
    """The model can fail: here an agent answers before it has written, and starts anew."""

    class Forgetful(Cluster):
        def _written(self, letter: object, *, is_written: bool) -> None:
            disk = self.disks[letter.agent]  # type: ignore[attr-defined]
            super()._written(letter, is_written=is_written)  # type: ignore[arg-type]
            self.disks[letter.agent] = disk  # type: ignore[attr-defined]

    with pytest.raises(Wrong, match="not on its disk"):
        explore(Forgetful(Rules(restarts=1, closes=0)), 7)


def test_a_handover_needs_no_lease_to_end() -> None:
    """Every message arrives at once: the next one is active before a lease could have ended, and the former one knows it."""
    cluster = served(Rules(restarts=0, closes=0, handovers=1))
    began_ms, former = cluster.now_ms, cluster.schedulers[0].epoch
    cluster._hand_over(0)
    (word,) = cluster.words
    cluster._told_to_take_over(word)
    while cluster.net:
        letter = min(cluster.net, key=repr)
        cluster._arrive(letter)
        if cluster.writing is not None:
            cluster._written(letter, is_written=True)
    assert [one.state for one in cluster.schedulers] == [ElectionState.STANDBY, ElectionState.ACTIVE]
    assert cluster.schedulers[1].epoch > former
    assert cluster.now_ms == began_ms


@pytest.mark.parametrize(
    "full", [set(some) for size in range(4) for some in combinations(range(3), size)], ids=str
)
def test_a_lease_that_is_held_is_renewed_whatever_disks_are_full(full: AbstractSet[int]) -> None:
    """Also while its holder asks for a higher epoch, as one agent is back with one; who may write grants that."""
    cluster = served(Rules(restarts=0, closes=0))
    former = cluster.schedulers[0].epoch
    record = LeaseRecord(Epoch(former + 1), scheduler_id(1), Incarnation("0"))
    cluster.disks[2], cluster.agents[2] = record, LeaseGrants(NODES[2], record)
    goes_on(cluster, full, 10 * LEASE_MS)
    assert cluster.owners == {(former, 0, 0)} | ({(cluster.schedulers[0].epoch, 0, 0)})
    assert (cluster.schedulers[0].epoch > former) == (len(full) < 2)


def goes_on(cluster: Cluster, full: AbstractSet[int], ms: float) -> None:
    """For so long every message arrives at once and in turn; scheduler 0 is active all the while."""
    until_ms = cluster.now_ms + ms
    while cluster.now_ms < until_ms:
        due = [number for number, one in enumerate(cluster.schedulers) if one.wake_at_ms <= cluster.now_ms]
        if cluster.net:
            letter = min(cluster.net, key=repr)
            cluster._arrive(letter)
            if cluster.writing is not None:
                cluster._written(letter, is_written=letter.agent not in full)
        elif due:
            cluster._tick_scheduler(due[0])
        else:
            moments = [one.wake_at_ms for one in cluster.schedulers]
            moments += [at_ms for one in cluster.agents if (at_ms := one.wake_at_ms) is not None]
            cluster._wait(min(moment for moment in moments if moment > cluster.now_ms))
        assert cluster.schedulers[0].state is ElectionState.ACTIVE, f"at {cluster.now_ms} ms"
