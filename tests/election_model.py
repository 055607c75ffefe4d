"""Every history of a small cluster's elections: the real cores of agents' leases and of schedulers, step by step.

A state is the cores, what is on the agents' disks, and the messages under way. From each state every step is taken: any
message arrives (in any order; one that never does is lost), what it makes an agent write is written or is not, an
agent or a scheduler starts anew, the active scheduler hands over to another, a connection is closed, time goes on to the next moment of any core, and a scheduler
that is due ticks (or does not yet: it is stopped, or slow; an agent that is late is one whose messages are). States that
differ only in the hour, or in which agent is which, are one.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fabric.clock import MonotonicClock
from fabric.ids import Incarnation, NodeId, PeerId, peer_id, role_id_of_node, scheduler_id
from fabric.messages import LeaseAsked, LeaseReport
from roles.node_agent.lease import NO_LEASE, KeepLease, LeaseGrants, LeaseKept, LeaseRecord
from roles.runtime.core import Send
from roles.runtime.epochs import EPOCH_MAX, HELD_MS
from roles.scheduler.availability.election import (
    Election,
    ElectionAction,
    ElectionState,
    Electorate,
    EpochTaken,
    LeaseLapsed,
)

NODES = tuple(NodeId(name) for name in "abc")
CLOCK = MonotonicClock()


@dataclass(frozen=True, slots=True)
class Rules:
    """How large the model is. `closes`: connections may be closed while both ends live."""

    schedulers: int = 2
    agents: int = 3
    restarts: int = 1
    closes: int = 1
    handovers: int = 0
    under_way_max: int = 12


@dataclass(frozen=True, slots=True)
class Letter:
    """A message to an agent from a scheduler, or back; ends are numbers, with the incarnation that is meant."""

    agent: int
    agent_born: int
    scheduler: int
    scheduler_born: int
    message: LeaseAsked | LeaseReport
    of: int = 0
    """The epoch in the header of what a scheduler sends."""


@dataclass(frozen=True, slots=True)
class Word:
    """A `TakeOver` under way: to which process of which scheduler."""

    scheduler: int
    scheduler_born: int
    epoch: int


class Wrong(AssertionError):
    """What may never be."""


class Cluster:
    """One state. `clone` it, then take one step."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now_ms = 0.0
        nodes = NODES[: rules.agents]
        self.electorate = Electorate(frozenset(nodes), rules.schedulers)
        self.agents = [LeaseGrants(node) for node in nodes]
        self.disks: list[LeaseRecord] = [NO_LEASE] * rules.agents
        self.writing: LeaseRecord | None = None
        self.agents_born = [0] * rules.agents
        self.obeyed = [0] * rules.agents
        """Whose commands each agent's workers take: they outlive it."""
        self.told = [0] * rules.agents
        """The highest epoch that each agent ever said it granted."""
        self.schedulers = [self._election(number, 0) for number in range(rules.schedulers)]
        self.schedulers_born = [0] * rules.schedulers
        self.net: frozenset[Letter] = frozenset()
        self.owners: frozenset[tuple[int, int, int]] = frozenset()
        """Epochs that were active, and the scheduler's number and incarnation."""
        self.restarts_left = rules.restarts
        self.closes_left = rules.closes
        self.handovers_left = rules.handovers
        self.words: frozenset[Word] = frozenset()
        self.has_closed = False
        for agent in range(rules.agents):
            for scheduler in range(rules.schedulers):
                self._greet(agent, scheduler)

    def clone(self) -> Cluster:
        """The same, of which nothing changes this one."""
        new = copy.copy(self)
        new.agents = [copy.copy(agent) for agent in self.agents]
        new.schedulers = [_cloned(one) for one in self.schedulers]
        for name in ("disks", "agents_born", "obeyed", "told", "schedulers_born"):
            setattr(new, name, list(getattr(self, name)))
        return new

    # ------------------------------------------------------------ steps

    def steps(self) -> Iterator[tuple[str, Cluster]]:
        """What may happen next, and what it leads to."""
        for letter in self.net:
            if self._is_for_the_living(letter):
                new = self._after(Cluster._arrive, letter)
                if new.writing is not None:
                    failed = new.clone()
                    failed._written(letter, is_written=False)
                    yield f"cannot be written: {letter}", failed
                    new._written(letter, is_written=True)
                yield f"arrives: {letter}", new
        for word in self.words:
            if word.scheduler_born == self.schedulers_born[word.scheduler]:
                yield f"arrives: {word}", self._after(Cluster._told_to_take_over, word)
        moments = [one.wake_at_ms for one in self.schedulers]
        moments += [at_ms for one in self.agents if (at_ms := one.wake_at_ms) is not None]
        later = [at_ms for at_ms in moments if self.now_ms < at_ms < math.inf]
        if later:
            yield f"it is {min(later):.0f} ms", self._after(Cluster._wait, min(later))
        for number, one in enumerate(self.schedulers):
            if one.wake_at_ms <= self.now_ms:
                yield f"scheduler {number} ticks", self._after(Cluster._tick_scheduler, number)
        for number, one in enumerate(self.schedulers):
            if self.handovers_left and one.state is ElectionState.ACTIVE and not one.is_leaving:
                yield f"scheduler {number} hands over", self._after(Cluster._hand_over, number)
            if one.is_leaving and not self.restarts_left:
                yield f"scheduler {number} ends", self._after(Cluster._restart_scheduler, number)
        if self.restarts_left:
            for agent in range(len(self.agents)):
                yield f"agent {agent} starts anew", self._after(Cluster._restart_agent, agent)
            for number in range(len(self.schedulers)):
                yield f"scheduler {number} starts anew", self._after(Cluster._restart_scheduler, number)
        if self.closes_left:
            for agent in range(len(self.agents)):
                for number in range(len(self.schedulers)):
                    name = f"the connection of agent {agent} and scheduler {number} is closed"
                    yield name, self._after(Cluster._close, agent, number)

    def _after(self, step: object, *arguments: object) -> Cluster:
        new = self.clone()
        step(new, *arguments)  # type: ignore[operator]
        return new

    def _arrive(self, letter: Letter) -> None:
        self.net -= {letter}
        agent, number, message = letter.agent, letter.scheduler, letter.message
        if isinstance(message, LeaseAsked):
            lease = self._begun(agent)
            if letter.of == lease.epoch:
                self.obeyed[agent] = lease.epoch
            done = lease.asked(message, self.now_ms)
            if isinstance(done, KeepLease):
                self.writing = done.record
            elif done is not None:
                self._report(agent, number, done)
        else:
            peer = self._peer(agent)
            self._act(number, self.schedulers[number].heard(peer, message, self.now_ms))

    def _written(self, letter: Letter, *, is_written: bool) -> None:
        record, self.writing = self.writing, None
        assert record is not None
        if is_written:
            self.disks[letter.agent] = record
        lease = self._begun(letter.agent)
        report = lease.kept(LeaseKept(record, is_written), self.now_ms)
        if is_written and not lease.is_handed_over:
            self.obeyed[letter.agent] = lease.epoch
        if report is None:
            return
        self._report(letter.agent, letter.scheduler, report)
        if is_written:
            for number in set(range(len(self.schedulers))) - {letter.scheduler}:
                self._greet(letter.agent, number)

    def _wait(self, until_ms: float) -> None:
        self.now_ms = until_ms
        for agent in range(len(self.agents)):
            if self._begun(agent).tick(until_ms):
                self._report_to_all(agent)

    def _tick_scheduler(self, number: int) -> None:
        self._act(number, self.schedulers[number].tick(self.now_ms))

    def _restart_agent(self, agent: int) -> None:
        self.restarts_left -= 1
        self.agents_born[agent] += 1
        self.agents[agent] = LeaseGrants(NODES[agent], self.disks[agent])
        for number in range(len(self.schedulers)):
            self._greet(agent, number)

    def _hand_over(self, number: int) -> None:
        """To the next one; the process stays until it ends, or is started anew."""
        self.handovers_left -= 1
        one, heir = self.schedulers[number], (number + 1) % len(self.schedulers)
        one.leave(scheduler_id(heir))
        self.words |= {Word(heir, self.schedulers_born[heir], one.epoch)}

    def _told_to_take_over(self, word: Word) -> None:
        self.words -= {word}
        self._act(word.scheduler, self.schedulers[word.scheduler].take_over(word.epoch, self.now_ms))

    def _restart_scheduler(self, number: int) -> None:
        self.restarts_left -= not self.schedulers[number].is_leaving
        self.schedulers_born[number] += 1
        self.schedulers[number] = self._election(number, self.schedulers_born[number])
        for agent in range(len(self.agents)):
            self._greet(agent, number)

    def _close(self, agent: int, number: int) -> None:
        """Both ends notice, and it is opened again: what was on its way by it is lost."""
        self.closes_left -= 1
        self.has_closed = True
        self.net = frozenset(one for one in self.net if (one.agent, one.scheduler) != (agent, number))
        if self._begun(agent).closed(scheduler_id(number)):
            self._report_to_all(agent)
        self._act(number, self.schedulers[number].lost(self._peer(agent), self.now_ms))
        self._greet(agent, number)

    # ------------------------------------------------------------ what they say

    def _election(self, number: int, born: int) -> Election:
        one = Election(number, Incarnation(str(born)), self.electorate)
        one.plan_epoch = EPOCH_MAX  # each has the newest plan: they go by their numbers
        return one

    def _begun(self, agent: int) -> LeaseGrants:
        lease = self.agents[agent]
        lease.begin(self.now_ms)
        return lease

    def _peer(self, agent: int) -> PeerId:
        return peer_id(role_id_of_node(NODES[agent]), Incarnation(str(self.agents_born[agent])))

    def _greet(self, agent: int, number: int) -> None:
        self._report(agent, number, self._begun(agent).report(self.now_ms))

    def _report_to_all(self, agent: int) -> None:
        for number in range(len(self.schedulers)):
            self._greet(agent, number)

    def _report(self, agent: int, number: int, report: LeaseReport) -> None:
        self.told[agent] = max(self.told[agent], report.epoch)
        self._post(agent, number, report)

    def _act(self, number: int, actions: object) -> None:
        for action in actions:  # type: ignore[attr-defined]
            self._act_one(number, action)

    def _act_one(self, number: int, action: ElectionAction) -> None:
        match action:
            case Send(peer, message):
                assert isinstance(message, LeaseAsked)
                for agent in range(len(self.agents)):
                    if self._peer(agent) == peer:
                        self._post(agent, number, message)
            case EpochTaken(epoch):
                self._took(number, epoch)
            case LeaseLapsed():
                pass

    def _post(self, agent: int, number: int, message: LeaseAsked | LeaseReport) -> None:
        of = self.schedulers[number].epoch if isinstance(message, LeaseAsked) else 0
        letter = Letter(agent, self.agents_born[agent], number, self.schedulers_born[number], message, of)
        if len(self.net) < self.rules.under_way_max:  # else it is lost
            self.net |= {letter}

    def _is_for_the_living(self, letter: Letter) -> bool:
        return (
            letter.agent_born == self.agents_born[letter.agent]
            and letter.scheduler_born == self.schedulers_born[letter.scheduler]
        )

    # ------------------------------------------------------------ what must hold

    def _took(self, number: int, epoch: int) -> None:
        own = (epoch, number, self.schedulers_born[number])
        # Without a standby a process that starts anew may be granted what its former one had, by an agent that this one
        # never reached; the former has ended then, as there is one process of a scheduler at a time.
        same = 3 if self.electorate.has_standby else 2
        if any(other[:same] != own[:same] and other[0] == epoch for other in self.owners):
            raise Wrong(f"epoch {epoch} had been another's: {self.owners}")
        if not self.has_closed and self.electorate.has_standby and any(o[0] > epoch for o in self.owners):
            raise Wrong(f"epoch {epoch} comes after a higher one: {self.owners}")
        self.owners |= {own}
        at_least = sum(disk.epoch >= epoch for disk in self.disks)
        if at_least < self.electorate.needed:
            raise Wrong(f"epoch {epoch} is active, and on the disks of {at_least} agents")

    def check(self, former: Cluster) -> None:
        """Raise Wrong where this state may not be, or may not follow from `former`."""
        active = [
            number
            for number, one in enumerate(self.schedulers)
            if one.state is ElectionState.ACTIVE and self.now_ms < one.lapses_at_ms
        ]
        for agent, lease in enumerate(self.agents):
            if lease.epoch < former.agents[agent].epoch:
                raise Wrong(f"the epoch of agent {agent} fell")
            if self.disks[agent].epoch < max(self.told[agent], lease.epoch):
                raise Wrong(f"agent {agent} granted what is not on its disk")
            if not former.obeyed[agent] <= self.obeyed[agent] <= lease.epoch:
                raise Wrong(
                    f"workers of agent {agent} obey {self.obeyed[agent]} after {former.obeyed[agent]}"
                )
            commanders = [n for n in active if self.schedulers[n].epoch == self.obeyed[agent]]
            if len(commanders) > 1:
                raise Wrong(f"schedulers {commanders} command the workers of agent {agent}")
        staying = [number for number in active if not self.schedulers[number].is_leaving]
        if not self.has_closed and self.electorate.has_standby and len(staying) > 1:
            raise Wrong(f"schedulers {staying} are active")
        for number in active:
            rivals = [n for n in active if self._reach(n) >= self.electorate.needed]
            if len(rivals) > 1 and self.electorate.has_standby:
                raise Wrong(f"schedulers {rivals} have a majority each, {number} too")

    def _reach(self, number: int) -> int:
        """Agents whose workers take that scheduler's commands."""
        return self.obeyed.count(self.schedulers[number].epoch)

    @property
    def key(self) -> object:
        """Equal for states that nobody can tell apart by what happens from here on."""
        now_ms = self.now_ms
        letters: list[list[object]] = [[] for _ in self.agents]
        for one in self.net:
            if self._is_for_the_living(one):
                letters[one.agent].append((one.scheduler, one.of, *_said(one.message)))
        agents = [
            (
                lease.record,
                _since(lease._until_ms, now_ms),
                lease._is_known_free,
                self.disks[number] == lease.record,
                self.told[number],
                self.obeyed[number],
                frozenset(letters[number]),
                tuple(self._seen(one, number) for one in self.schedulers),
            )
            for number, lease in enumerate(self.agents)
        ]
        schedulers = tuple(
            (
                one.state,
                one.epoch,
                one._asking,
                one._in_place_of,
                one.is_leaving,
                *(_since(at_ms, now_ms) for at_ms in _moments(one)),
            )
            for one in self.schedulers
        )
        limits = (self.restarts_left, self.closes_left, self.handovers_left, self.has_closed)
        words = frozenset(
            one for one in self.words if one.scheduler_born == self.schedulers_born[one.scheduler]
        )
        born = tuple(self.schedulers_born)
        return frozenset(Counter(agents).items()), schedulers, self.owners, words, born, limits

    def _seen(self, one: Election, number: int) -> object:
        """What a scheduler knows of an agent."""
        agent = one._agents.get(NODES[number])
        if agent is None:
            return None
        asks = tuple((no, max(at_ms - self.now_ms, -HELD_MS)) for no, at_ms in agent.asks)
        held_ms = _since(agent.held_until_ms, self.now_ms)
        is_here = agent.peer == self._peer(number)
        return (
            is_here,
            agent.epoch,
            agent.holder_id,
            agent.incarnation,
            agent.is_free,
            held_ms,
            agent.number,
            asks,
        )


def served(rules: Rules) -> Cluster:
    """Scheduler 0 is active, and nothing is under way."""
    cluster = Cluster(rules)
    while cluster.net or any(one.wake_at_ms <= cluster.now_ms for one in cluster.schedulers):
        following = dict(cluster.steps())
        name = min(name for name in following if name.startswith(("arrives", "scheduler 0 ticks")))
        cluster = following[name]
    assert cluster.schedulers[0].state is ElectionState.ACTIVE
    return cluster


def explore(start: Cluster, depth: int) -> int:
    """Every state that is at most so many steps away from the start; how many there are. Raises Wrong with the way there."""
    seen: set[object] = {start.key}
    layer: list[tuple[Cluster, tuple[object, ...]]] = [(start, ())]
    for _ in range(depth):
        following: list[tuple[Cluster, tuple[object, ...]]] = []
        for state, way in layer:
            try:
                for name, new in state.steps():
                    new.check(state)
                    key = hash(new.key)
                    if key not in seen:
                        seen.add(key)
                        following.append((new, (*way, name)))
            except Wrong as wrong:
                raise Wrong("\n".join([str(wrong), "after:", *map(str, way)])) from wrong
        layer = following
        if not layer:
            break
    return len(seen)


def _cloned(election: Election) -> Election:
    new = copy.copy(election)
    new._agents = dict(election._agents)
    return new


def _since(moment_ms: float | None, now_ms: float) -> float | None:
    return None if moment_ms is None else max(moment_ms - now_ms, -1.0)


def _moments(one: Election) -> tuple[float, ...]:
    return (
        one.lapses_at_ms,
        one._campaign_at_ms,
        one._not_before_ms,
        one._overdue_at_ms,
        one._renew_at_ms,
        one._asked_at_ms,
    )


def _said(message: LeaseAsked | LeaseReport) -> tuple[object, ...]:
    """Of whom and to whom is known."""
    if isinstance(message, LeaseAsked):
        return message.epoch, message.number, message.in_place_of
    return message.epoch, message.holder_id, message.incarnation, message.is_free, message.number


def main() -> None:
    """Go deeper than the suite does: `python -m tests.election_model DEPTH [SECONDS]`, about five times the states with each step."""
    depth, limit_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else math.inf
    for rules in (
        Rules(restarts=0, closes=0),
        Rules(restarts=1, closes=0),
        Rules(restarts=0, closes=1),
        Rules(restarts=0, closes=0, handovers=1),
    ):
        for name, start in (("from the start", Cluster(rules)), ("from one that serves", served(rules))):
            began_ms = CLOCK.now_ms()
            for layers in range(4, depth + 1):
                states = explore(start, layers)
                took_s = (CLOCK.now_ms() - began_ms) / 1e3
                sys.stdout.write(f"{rules} {name}: depth {layers}, {states:,} states, {took_s:.0f} s\n")
                sys.stdout.flush()
                if took_s > limit_s / 5:
                    break


if __name__ == "__main__":
    main()
