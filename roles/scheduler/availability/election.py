"""Which scheduler is the active one, as one of them sees it: it asks the agents for leases, and holds them.

```
 STANDBY ──CAMPAIGN──▶ CANDIDATE ──GRANTED──▶ ACTIVE ──LAPSED──▶ STANDBY
    ▲                      │
    └───────OVERDUE────────┘
```

A standby campaigns when a majority of the agents say that their lease is free: it asks all of them for an epoch above
all that it has heard of. With a majority's grants it is active, for as long as a majority holds its lease, counted on
its own clock from before it asked. An agent that is late, or was granted a higher epoch meanwhile, makes the active one
ask for a still higher epoch, for agents grant no lower one than they have.

An active one that ends hands over: it tells a standby, which campaigns at once, and agents take the epoch that it names for
its predecessor's word that the lease may go. That one serves on until a majority has granted its successor's epoch, but no
longer than the lease that it had, and asks for no higher epoch.

A scheduler without standbys needs no majority, as nobody else asks: the first agent's grant makes it active, and it
stays that, whatever becomes of the agents. It has no command over workers whose agent has not granted its epoch.

Epochs end where a message's numbers do, so one agent's word alone takes nobody far up: who says one far above what a
majority has reached counts as an agent that grants nothing, until the others have come near.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fabric.ids import Epoch, Incarnation, NodeId, PeerId, scheduler_id
from fabric.messages import LeaseAsked, LeaseReport
from roles.runtime.core import Send
from roles.runtime.epochs import BELIEVED_LEAP_MAX, EPOCH_MAX, HELD_MS, RENEW_EVERY_MS, epoch_above

STAGGER_MS: Final = 20.0  # for each other scheduler that goes first: of a lower number, or with a newer plan
FIRST_STAGGER_MS: Final = 1_000.0  # the same, where no scheduler was ever active: nothing is served meanwhile
CANDIDATE_MS: Final = 300.0  # for a majority to grant: each agent writes to its disk first
AGAIN_AFTER_MS: Final = 100.0  # times its number and one, so that two do not campaign in step for ever
ASKS_MAX: Final = 4  # whose answers may still come, of each agent
NEVER_MS: Final = float("inf")


class ElectionState(Enum):
    """How far it is."""

    STANDBY = auto()
    CANDIDATE = auto()
    ACTIVE = auto()


class ElectionTransition(Enum):
    """What moves it on."""

    CAMPAIGN = auto()
    GRANTED = auto()
    OVERDUE = auto()
    LAPSED = auto()


NEXT: Final[Mapping[tuple[ElectionState, ElectionTransition], ElectionState]] = {
    (ElectionState.STANDBY, ElectionTransition.CAMPAIGN): ElectionState.CANDIDATE,
    (ElectionState.CANDIDATE, ElectionTransition.GRANTED): ElectionState.ACTIVE,
    (ElectionState.CANDIDATE, ElectionTransition.OVERDUE): ElectionState.STANDBY,
    (ElectionState.ACTIVE, ElectionTransition.LAPSED): ElectionState.STANDBY,
}


class Electorate(Struct, frozen=True):
    """Who elects: the agents of a shard's nodes, one of how many `schedulers`.

    `role_ids`: of each of these; empty: they are numbered as those of a cluster with one shard.
    """

    agents: frozenset[NodeId]
    schedulers: int = 1
    role_ids: tuple[str, ...] = ()

    def role_id(self, number: int) -> str:
        """Of the shard's scheduler with that number."""
        return self.role_ids[number] if self.role_ids else scheduler_id(number)

    def number_of(self, role_id: str) -> int:
        """The other way round."""
        return (self.role_ids or tuple(map(scheduler_id, range(self.schedulers)))).index(role_id)

    @property
    def has_standby(self) -> bool:
        """Whether another scheduler may take over."""
        return self.schedulers > 1

    @property
    def needed(self) -> int:
        """Agents that must have granted an epoch."""
        return len(self.agents) // 2 + 1 if self.has_standby else 1


class EpochTaken(Struct, frozen=True):
    """This scheduler is active: what it sends from here on has this epoch."""

    epoch: Epoch


class LeaseLapsed(Struct, frozen=True):
    """This scheduler is active no more. `is_handed_over`: another one is, as it wanted."""

    is_handed_over: bool = False


ElectionAction = Send | EpochTaken | LeaseLapsed


class _Agent(Struct, frozen=True):
    """What an agent said last. `peer` None: it is gone, and what it granted ends by itself."""

    peer: PeerId | None
    epoch: int = 0
    holder_id: str = ""
    incarnation: str = ""
    is_free: bool = True
    held_until_ms: float = 0.0
    number: int = 0
    asks: tuple[tuple[int, float], ...] = ()
    """Number and moment of those that may still be answered."""


class Election:
    """One scheduler's part in it, sans-IO. `number`: the scheduler's; lower ones go first."""

    def __init__(self, number: int, incarnation: Incarnation, electorate: Electorate) -> None:
        self.state = ElectionState.STANDBY
        self.epoch = Epoch(0)
        """The one that it was granted last."""
        self.takeovers = 0
        self.wake_at_ms = NEVER_MS
        """The next moment worth a `tick`; inf: none."""
        self.has_plan = True  # else it does not campaign, also when the moment for that has come
        self.plan_epoch = 0
        """Of the newest plan that it was sent or has read; 0: it made its plan itself, or has none."""
        self.lapses_at_ms = NEVER_MS
        """When it is active no more, unless the agents grant it longer; inf: it is not active, or stays so."""
        self._number = number
        self._own_id = electorate.role_id(number)
        self._incarnation = incarnation
        self._electorate = electorate
        self._agents: dict[NodeId, _Agent] = {}
        self._asking = Epoch(0)
        """The epoch that it asks for: `epoch`, or the next one."""
        self._in_place_of = 0
        """The epoch of the scheduler that told this one to take over, in the campaign that followed, and for agents that come late."""
        self._heir_id = ""
        self.is_leaving = False
        """It asks for no epoch any more: its process ends."""
        self._campaign_at_ms = NEVER_MS
        self._not_before_ms = 0.0
        self._overdue_at_ms = NEVER_MS
        self._renew_at_ms = NEVER_MS
        self._asked_at_ms = 0.0  # all agents, last

    # ------------------------------------------------------------ events

    def heard(self, peer: PeerId, report: LeaseReport, now_ms: float) -> Sequence[ElectionAction]:
        """What an agent says of its lease."""
        if report.node_id not in self._electorate.agents:
            return ()
        former = self._agents.get(report.node_id)
        is_new = former is None or former.peer != peer
        agent = replace(former, peer=peer) if former is not None else _Agent(peer)
        if is_new:  # what the former connection, or process, was asked is answered no more
            agent = replace(agent, asks=())
        held_until_ms = agent.held_until_ms
        # An agent that cannot write down the higher epoch that it is asked for renews the lease with the one that it granted.
        is_held = self._is_own(report) and report.epoch in (self.epoch, self._asking)
        for number, asked_at_ms in agent.asks:
            if number == report.number and is_held:
                held_until_ms = max(held_until_ms, asked_at_ms + HELD_MS)
        self._agents[report.node_id] = replace(
            agent,
            epoch=report.epoch,
            holder_id=report.holder_id,
            incarnation=report.incarnation,
            is_free=report.is_free,
            held_until_ms=held_until_ms if self._is_own(report) or self.is_leaving else 0.0,
        )
        actions: list[ElectionAction] = []
        if is_new and self.state is not ElectionState.STANDBY:
            self._ask(report.node_id, now_ms, actions)
        self._look(now_ms, actions)
        return actions

    def lost(self, peer: PeerId, now_ms: float) -> Sequence[ElectionAction]:
        """A peer is gone; if it is an agent, nothing more is asked of it, and its grant ends by itself."""
        actions: list[ElectionAction] = []
        for node_id, agent in self._agents.items():
            if agent.peer == peer:
                self._agents[node_id] = replace(agent, peer=None, asks=())
                self._look(now_ms, actions)
                break
        return actions

    def tick(self, now_ms: float) -> Sequence[ElectionAction]:
        """A moment has come: to renew, to campaign, or to give up."""
        actions: list[ElectionAction] = []
        self._look(now_ms, actions)
        return actions

    def take_over(self, epoch: int, now_ms: float) -> Sequence[ElectionAction]:
        """The scheduler with that epoch ends, and wants this one in its place. Nothing where a majority has gone on since."""
        actions: list[ElectionAction] = []
        gone_on = sum(agent.epoch > epoch for agent in self._agents.values())
        if self.state is ElectionState.STANDBY and not self.is_leaving and gone_on < self._electorate.needed:
            self._campaign(now_ms, actions, epoch)
        self._plan()
        return actions

    def leave(self, heir_id: str = "") -> None:
        """Ask for no other epoch any more: this process ends. An active one serves on until `heir_id` has a majority."""
        self.is_leaving, self._heir_id = True, heir_id

    @property
    def may_hand_over(self) -> bool:
        """Whether enough agents are there, and all that granted it anything granted one epoch: the one that it can give up."""
        is_steady = self.state is ElectionState.ACTIVE and self._asking == self.epoch
        return is_steady and self.has_majority

    @property
    def has_majority(self) -> bool:
        """Whether enough agents are connected to make it the active one."""
        return len(self.connected) >= self._electorate.needed

    @property
    def has_all(self) -> bool:
        """Whether all agents are connected."""
        return self.connected == self._electorate.agents

    @property
    def granted(self) -> frozenset[NodeId]:
        """Agents that granted its epoch, as far as it knows."""
        return frozenset(
            node_id
            for node_id, agent in self._agents.items()
            if agent.epoch == self.epoch and self._is_own(agent)
        )

    @property
    def connected(self) -> frozenset[NodeId]:
        """Agents that have granted its epoch, or may yet."""
        return frozenset(node_id for node_id, agent in self._agents.items() if agent.peer is not None)

    @property
    def unheard(self) -> frozenset[NodeId]:
        """Agents that have never been connected."""
        return self._electorate.agents - self._agents.keys()

    @property
    def active(self) -> str:
        """The scheduler that the agents say holds their leases; empty: none has enough of them, as far as it knows."""
        held = Counter(agent.holder_id for agent in self._agents.values() if agent.peer and not agent.is_free)
        holder, agents = max(held.items(), key=lambda one: one[1], default=("", 0))
        return holder if agents >= self._electorate.needed else ""

    def believes(self, node_id: NodeId) -> bool:
        """Whether what that agent says it granted last is an epoch that elections may have come to."""
        agent = self._agents.get(node_id)
        return agent is None or agent.epoch <= self._believed_max()

    # ------------------------------------------------------------ decisions

    def _look(self, now_ms: float, actions: list[ElectionAction]) -> None:
        self._take_what_is_granted(now_ms, actions)
        if self.state is ElectionState.ACTIVE:
            self._stay(now_ms, actions)
        if self.state is ElectionState.CANDIDATE and now_ms >= self._overdue_at_ms:
            self._step(ElectionTransition.OVERDUE)
            self._not_before_ms = now_ms + AGAIN_AFTER_MS * (self._number + 1)
        if self.state is ElectionState.STANDBY and not self.is_leaving:
            self._campaign_if_free(now_ms, actions)
        self._plan()

    def _take_what_is_granted(self, now_ms: float, actions: list[ElectionAction]) -> None:
        """The epoch that it asks for is its own once enough agents have granted it."""
        if self.state is ElectionState.STANDBY or self._asking == self.epoch:
            return
        held = [
            agent
            for agent in self._agents.values()
            if agent.epoch == self._asking and self._is_own(agent) and agent.held_until_ms > now_ms
        ]
        if len(held) < self._electorate.needed:
            return
        self.epoch = self._asking
        if self.state is ElectionState.CANDIDATE:
            self._step(ElectionTransition.GRANTED)
            self.takeovers += 1
            self._renew_at_ms = self._asked_at_ms + RENEW_EVERY_MS  # agents had to write: it may be long ago
        actions.append(EpochTaken(self.epoch))

    def _stay(self, now_ms: float, actions: list[ElectionAction]) -> None:
        self.lapses_at_ms = self._held_by_enough_until_ms()
        is_replaced = self.is_leaving and self._is_replaced
        if is_replaced or now_ms >= self.lapses_at_ms:
            self._step(ElectionTransition.LAPSED)
            actions.append(LeaseLapsed(is_replaced))
            return
        if not self.is_leaving and any(map(self._needs_a_higher_epoch, self._agents.values())):
            self._asking = epoch_above(self._highest(), self._number)
            self._renew_at_ms = now_ms
        if now_ms >= self._renew_at_ms:
            self._renew_at_ms = now_ms + RENEW_EVERY_MS
            self._ask_all(now_ms, actions)

    @property
    def _is_replaced(self) -> bool:
        """Whether a majority of the agents has granted its successor a higher epoch."""
        granted = sum(
            agent.epoch > self.epoch and agent.holder_id == self._heir_id for agent in self._agents.values()
        )
        return granted >= self._electorate.needed

    def _held_by_enough_until_ms(self) -> float:
        if not self._electorate.has_standby:
            return NEVER_MS
        held = [one for one in self._agents.values() if self._is_own(one) or self.is_leaving]
        until_ms = sorted((agent.held_until_ms for agent in held), reverse=True)
        needed = self._electorate.needed
        return until_ms[needed - 1] if len(until_ms) >= needed else 0.0

    def _campaign_if_free(self, now_ms: float, actions: list[ElectionAction]) -> None:
        believed_max = self._believed_max()
        here = [one for one in self._agents.values() if one.peer is not None and one.epoch <= believed_max]
        lacking = self._lacking(here)
        # Only it may have leases that are held. Where another one has a newer plan they are no head start.
        grantable = sum(one.is_free if lacking else self._is_grantable(one) for one in here)
        if grantable < self._electorate.needed:
            self._campaign_at_ms = NEVER_MS
            return
        behind = self._number + lacking * self._electorate.schedulers
        is_first = not any(agent.epoch for agent in here)
        stagger_ms = FIRST_STAGGER_MS * self._number if is_first else STAGGER_MS * behind
        # The least: of an agent that came later it may have learned that its plan is the newest.
        self._campaign_at_ms = min(self._campaign_at_ms, max(now_ms + stagger_ms, self._not_before_ms))
        if self.has_plan and now_ms >= self._campaign_at_ms:
            self._campaign(now_ms, actions)

    def _lacking(self, here: Sequence[_Agent]) -> int:
        """0: its plan is of the last epoch that a majority may have granted, so none is of a newer one. 1: it may be older; 2: it has none."""
        if not self._electorate.has_standby:
            return 0
        said = sorted((agent.epoch for agent in here if agent.epoch), reverse=True)
        # Who is away, or is new and was no voter then, may have granted, or made needless, whatever one of these has.
        away = len(self._electorate.agents) - len(said)
        needed_here = max(1, self._electorate.needed - away)
        granted = said[needed_here - 1] if said else 0
        plan_epoch = max(self.plan_epoch, self.epoch)
        return 0 if plan_epoch >= granted else 1 if plan_epoch else 2

    def _campaign(self, now_ms: float, actions: list[ElectionAction], in_place_of: int = 0) -> None:
        self._step(ElectionTransition.CAMPAIGN)
        self._in_place_of = in_place_of
        # Whoever hands over stops for grants that count here as long as this: none of them may come too late to be counted.
        self._overdue_at_ms = now_ms + (HELD_MS if in_place_of else CANDIDATE_MS)
        self._asking = epoch_above(self._highest(), self._number)
        self._ask_all(now_ms, actions)

    def _ask_all(self, now_ms: float, actions: list[ElectionAction]) -> None:
        self._asked_at_ms = now_ms
        for node_id in self._agents:
            self._ask(node_id, now_ms, actions)

    def _ask(self, node_id: NodeId, now_ms: float, actions: list[ElectionAction]) -> None:
        agent = self._agents[node_id]
        if agent.peer is None:
            return
        number = agent.number + 1
        asks = (*agent.asks, (number, now_ms))[-ASKS_MAX:]
        self._agents[node_id] = replace(agent, number=number, asks=asks)
        asked = LeaseAsked(self._own_id, self._incarnation, self._asking, number, self._in_place_of)
        actions.append(Send(agent.peer, asked))

    def _is_own(self, said: _Agent | LeaseReport) -> bool:
        return said.holder_id == self._own_id and said.incarnation == self._incarnation

    def _needs_a_higher_epoch(self, agent: _Agent) -> bool:
        """It would grant this scheduler its lease, but not this epoch."""
        return (
            self._asking <= agent.epoch <= self._believed_max()
            and not self._is_own(agent)
            and self._is_grantable(agent)
        )

    def _highest(self) -> int:
        """The highest epoch that it has heard of, or asked for: that may be granted yet. None that it does not believe (any more)."""
        believed_max = self._believed_max()
        known = (self.epoch, self._asking, *(agent.epoch for agent in self._agents.values()))
        return max(epoch for epoch in known if epoch <= believed_max)

    def _believed_max(self) -> int:
        said = sorted((agent.epoch for agent in self._agents.values()), reverse=True)
        others = len(self._electorate.agents) // 2  # one less than a majority: they may say what they like
        reached = said[others] if len(said) > others else 0
        return min(max(self.epoch, reached) + BELIEVED_LEAP_MAX, EPOCH_MAX)

    def _is_grantable(self, agent: _Agent) -> bool:
        """An agent also grants its holder a higher epoch, and what was started again in its holder's place."""
        return agent.is_free or agent.holder_id == self._own_id

    def _step(self, transition: ElectionTransition) -> None:
        self.state = NEXT[self.state, transition]
        self._campaign_at_ms = self._overdue_at_ms = self._renew_at_ms = NEVER_MS
        self.lapses_at_ms = NEVER_MS

    def _plan(self) -> None:
        self.wake_at_ms = min(self._campaign_at_ms, self._overdue_at_ms, self._renew_at_ms, self.lapses_at_ms)
