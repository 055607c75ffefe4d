"""One of a cluster's schedulers: active, or standing by until it is (docs/operate/availability.md).

While it is the active one it has a scheduler's core (`roles/scheduler/core.py`), which hears all that is not about leases,
and what that decides bears the epoch. A standby has none: it remembers which frontends are there and the plan that the
active one sent, and answers questions about itself. When it becomes active it makes a fresh core of that plan, tells
it of the frontends, and learns the rest from agents and workers, who introduce themselves to it. The frontends come last:
what they ask for before the slices are known would be refused. When its lease has lapsed the core is dropped with all that it knew: whoever is active next learns it anew.

Asked to stop, the active one tells a standby that has the plan to take over, and serves on until that is active: what it has handed out is
with workers and frontends by then. One to which the agents have not connected yet, as after its start, is waited for. Operators are
turned away at once, for what it would still settle nobody took over.

A scheduler without standbys has its core from the start, and keeps it. To frontends it opens as the others do, when an agent has
granted it an epoch: before that it knows of no slice, and would have them turn requests away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, get_args

from msgspec import Struct
from msgspec.structs import replace

from fabric.errors import RemoteProtocolError
from fabric.ids import (
    FRONTEND_PREFIX,
    OPERATOR,
    Epoch,
    Incarnation,
    NodeId,
    PeerId,
    SliceId,
    peer_id,
    role_id_of,
    role_id_of_node,
)
from fabric.messages import (
    AnyMessage,
    Arrivals,
    Changed,
    Directory,
    EpochGranted,
    FrontendHello,
    LeaseReport,
    Left,
    NodeHello,
    Ping,
    PlanCopy,
    PlanRequest,
    Pong,
    SchedulerHello,
    SchedulerStanding,
    SliceChanged,
    SliceReady,
    SliceState,
    StandbyReport,
    StatusAsked,
    StatusListed,
    TakeOver,
    Withdraw,
)
from roles.runtime.core import ELECTION, Heard, Lost, Send, Tick
from roles.runtime.epochs import SCHEDULERS_MAX
from roles.runtime.loop.sources import CLOSED
from roles.runtime.peer_checks import (
    NOT_OWNER,
    OUT_OF_RANGE,
    WRONG_IDENTITY,
    Offences,
    PeerChecks,
    Rule,
    require_identity,
)
from roles.runtime.process_events import SchedulerFound, StopAsked
from roles.scheduler.availability.early_words import EarlyWords
from roles.scheduler.availability.election import (
    NEVER_MS,
    Election,
    ElectionAction,
    ElectionState,
    Electorate,
    EpochTaken,
    LeaseLapsed,
)
from roles.scheduler.peer_checks import FRONTENDS_MAX, require_worker

NOT_ACTIVE: Final = "NotActive"
_CHANGES: Final = frozenset(get_args(PlanRequest))
_ABOUT_LEASES: Final = frozenset({LeaseReport, SchedulerHello, PlanCopy, TakeOver})
_ALSO_HEARD: Final = _ABOUT_LEASES | {NodeHello, FrontendHello, StatusAsked}
"""By the replica itself, before or instead of the core."""
_LOOKED_AT: Final = _ALSO_HEARD | _CHANGES | {SliceReady}
TELL_AGAIN_MS: Final = 100.0
ASKED_MAX: Final = 4_096
GATHER_MS: Final = 250.0
"""For agents to grant an epoch and say what is ready on their nodes, and for these slices' workers to say so."""
GATHER_FIRST_MS: Final = 1_000.0
"""The same, while not one of these slices has said so: there would be nothing to grant."""
PREPARE_AFTER_MS: Final = 100.0
"""From a copy of the plan on, or from the start where a plan was kept: where one follows another, it is the last that may be needed."""
HANDED_OVER_MS: Final = 500.0
"""For a standby to be active after it was told to take over; then the agents see this one end, and free their leases."""
OTHERS_WITHIN_MS: Final = 1_000.0
"""For the other agents to connect to a standby after a majority has: what is on their nodes it could not go on with."""
HEIR_WITHIN_MS: Final = 2_000.0
"""For the agents to connect to a standby; then one is told to take over all the same."""
SETTLED_MS: Final = GATHER_MS + 50.0
"""That this one stays once another is active: frontends go by the next one then, and what its end costs the host delays nobody."""
_OF_FRONTENDS: Final = frozenset({Arrivals, Withdraw, Left, Ping, Pong})
"""What a frontend says to a scheduler that it takes for the one that lists it."""
_GATHERED: Final = _LOOKED_AT | {SliceChanged} | _OF_FRONTENDS
"""What the replica looks at while it gathers."""


class SchedulerLike(Protocol):
    """The scheduler's core, or one that is recorded."""

    @property
    def wake_at_ms(self) -> float | None:
        """See `roles.runtime.core.Core`."""
        ...

    def handle(self, event: Heard | Lost | Tick, now_ms: float) -> Sequence[Send]:
        """See `roles.runtime.core.Core`."""
        ...


class ReplicaSettings(Struct, frozen=True):
    """Which scheduler of its shard this is, and who elects the active one."""

    incarnation: Incarnation
    electorate: Electorate
    number: int = 0
    pid: int = 0
    shard: int = 0
    shards: int = 1
    kept_epoch: int = 0
    """Of the newest plan that is kept here and of use; 0: there is none."""


class CopyPlan(Struct, frozen=True):
    """Send these standbys the plan as it is now."""

    peers: tuple[PeerId, ...]


class KeepPlan(Struct, frozen=True):
    """A copy of the active scheduler's plan came: keep it, should it be needed."""

    copy: PlanCopy


class PrepareCore(Struct, frozen=True):
    """Make a core of the newest plan, for `make_core` to give: in a take-over each millisecond counts."""


ReplicaEvent = Heard | Lost | SchedulerFound | StopAsked | Tick
ReplicaAction = Send | EpochTaken | LeaseLapsed | CopyPlan | KeepPlan | PrepareCore


@dataclass(slots=True)
class _Gathering:
    """An epoch has begun: what is still awaited before frontends hear of it."""

    began_ms: float
    nodes: dict[NodeId, Heard | None]
    """Whose agents have not introduced themselves in this epoch, and how they did before, if that is known."""
    slices: set[SliceId] = field(default_factory=set)
    has_any: bool = False
    """Whether one of these slices has said that it is ready."""

    @property
    def until_ms(self) -> float:
        """When it is waited for no longer."""
        is_soon = self.has_any or not (self.nodes or self.slices)
        return self.began_ms + (GATHER_MS if is_soon else GATHER_FIRST_MS)


class SchedulerReplica:
    """Sans-IO: see `roles/runtime/core.py`. `make_core` makes a fresh scheduler's core, of the newest plan."""

    def __init__(self, settings: ReplicaSettings, make_core: Callable[[], SchedulerLike]) -> None:
        self.wake_at_ms: float | None = None
        """The election's next moment, or the core's."""
        self.offences = Offences()
        self._settings = settings
        self._own_id = settings.electorate.role_id(settings.number)
        self._make_core = make_core
        self._election = Election(settings.number, settings.incarnation, settings.electorate)
        self._frontends: dict[PeerId, FrontendHello] = {}
        self._silent: dict[PeerId, FrontendHello] = {}
        """Frontends that were taken for lost while their connections stand: they need not know, and say no other hello."""
        self._unknown: dict[PeerId, Ping | Pong] = {}
        """Frontends that speak as if they were known here, with what shows the core that they are there. It hears that once."""
        self._standbys: dict[PeerId, StandbyReport] = {}
        self._unasked: set[PeerId] = set()
        """Standbys taken for lost that did not take the question who they are. They need not know: their connections may stand."""
        self._tell_again_at_ms = NEVER_MS
        """When standbys are told again what they did not take."""
        self._asked: set[tuple[PeerId, int]] = set()
        """Changes that the core was asked for and has not answered. Who was lost may have been stopped, and waits for the answer."""
        self._gathering: _Gathering | None = None
        self._began_ms = NEVER_MS
        """The first event's moment."""
        self._is_fresh = True
        """No frontend has heard of what its core knows."""
        self._prepare_at_ms = NEVER_MS
        """When the plan that was kept last has been the newest for a while."""
        self._early = EarlyWords()
        """What agents that granted already, and their workers, say before a majority has, or obey another epoch than ours."""
        self._also_heard = _GATHERED
        self._newest: tuple[int, int] = (0, -1)  # epoch and number of the newest copy that came
        self._found: set[PeerId] = set()
        """Schedulers that it connects to."""
        self._was_electable = False
        """As they were told."""
        self._majority_at_ms = NEVER_MS
        """Since when a majority of the agents is connected; infinite: none is."""
        self._is_ending = False
        """It was asked to stop, and hands over."""
        self._heir: PeerId | None = None
        """The standby that was told to take over."""
        self._heir_by_ms = NEVER_MS
        """Until when one that could be elected is waited for."""
        self._leaving: set[PeerId] = set()
        """Standbys that handed over to this one, and end."""
        self._ends_at_ms = NEVER_MS
        """Infinite: nobody asked it to end."""
        self.has_left = False
        """It was asked to stop, and nothing is left to wait for."""
        rules: dict[type, Rule] = {
            LeaseReport: _check_agent,
            SchedulerHello: self._check_scheduler,
            PlanCopy: _check_scheduler_found,
            TakeOver: self._check_take_over,
            SliceReady: self._check_early,
        }
        self._checks = PeerChecks(rules, self.offences)
        self._core: SchedulerLike | None = None if settings.electorate.has_standby else make_core()
        self._election.has_plan = self._core is not None
        self._election.plan_epoch = settings.kept_epoch
        self._look_ahead()

    @property
    def core(self) -> SchedulerLike | None:
        """Of the active one."""
        return self._core

    @property
    def epoch(self) -> Epoch:
        """The one that was granted last."""
        return self._election.epoch

    @property
    def lapses_at_ms(self) -> float:
        """When it is active no more, unless the agents grant it longer; inf: it is not active, or stays so."""
        return self._election.lapses_at_ms

    def handle(self, event: ReplicaEvent, now_ms: float) -> Sequence[ReplicaAction]:
        """Take one event; see `roles.runtime.core.Core`. A lease that has lapsed is noticed before anything else."""
        core = self._core
        if (
            core is not None
            and type(event) is Heard
            and type(event.message) not in self._also_heard  # nearly all there is
            and not self._is_ending
            and now_ms < self._election.lapses_at_ms
        ):
            sent = core.handle(event, now_ms)
            if self._asked:
                self._note_answered(sent)
            self._look_ahead()
            return sent
        actions: list[ReplicaAction] = []
        if self._began_ms == NEVER_MS:
            self._began_ms = now_ms
            if self._core is None and self._settings.kept_epoch:
                self._prepare_at_ms = now_ms + PREPARE_AFTER_MS
        if now_ms >= self._election.lapses_at_ms:
            self._elect(self._election.tick(now_ms), actions, now_ms)
        match event:
            case Heard():
                self._heard(event, actions, now_ms)
            case Tick():
                if self._election.wake_at_ms <= now_ms:
                    self._elect(self._election.tick(now_ms), actions, now_ms)
                if self._tell_again_at_ms <= now_ms:
                    self._tell_again(actions)
                if self._prepare_at_ms <= now_ms:
                    self._prepare(actions)
                core_at_ms = None if self._core is None else self._core.wake_at_ms
                if core_at_ms is not None and core_at_ms <= now_ms:
                    self._to_core(event, actions, now_ms)
            case SchedulerFound(peer=found):
                self._found.add(found)
                actions.append(self._hello(found))
            case StopAsked():
                self._leave(actions, now_ms)
            case Lost(peer):
                self._lost(event, peer, actions, now_ms)
        self._open_if_gathered(actions, now_ms)
        if self._is_electable(now_ms) is not self._was_electable:
            self._was_electable = not self._was_electable
            actions.extend(map(self._hello, sorted(self._found)))
        if self._heir_by_ms != NEVER_MS:
            self._choose_heir(actions, now_ms)
        self.has_left = self.has_left or now_ms >= self._ends_at_ms
        if not self._election.has_plan and self._election.wake_at_ms <= now_ms and not self.has_left:
            # To make one may take longer than a lease lasts, and this one hears nobody meanwhile. The next turn asks for the epoch.
            self._prepare(actions)
        self._look_ahead()
        return actions

    def plan_changed(self) -> tuple[PeerId, ...]:
        """The plan is another now: the standbys that it has to be sent to."""
        return self._plan_goes_to(self._standbys)

    def refused(self, peer: PeerId, message: PlanCopy | SchedulerHello | TakeOver, now_ms: float) -> None:
        """A standby did not take its copy of the plan, or the question who it is: it is told again in a while.

        Of one that does not hear that it is to take over, this one's end tells the agents, and they tell it.
        """
        if isinstance(message, TakeOver):
            self.has_left = True
            self._look_ahead()
            return
        if isinstance(message, SchedulerHello):
            self._unasked.add(peer)
        elif peer in self._standbys:
            self._standbys[peer] = replace(self._standbys[peer], has_plan=False)
        else:
            return
        self._tell_again_at_ms = now_ms + TELL_AGAIN_MS
        self._look_ahead()

    def prepared(self, plan_epoch: int) -> None:
        """The core that was to be made is of a plan of that epoch; 0: of the file's. A copy that was sent may have been of no use."""
        self._election.plan_epoch = plan_epoch

    def not_copied(self, peers: Iterable[PeerId]) -> None:
        """The plan is too large for a message: these standbys are without one until it is another."""
        for peer in peers:
            self._standbys[peer] = replace(self._standbys[peer], has_plan=False)

    # ------------------------------------------------------------ events

    def _heard(self, event: Heard, actions: list[ReplicaAction], now_ms: float) -> None:
        peer, message = event.peer, event.message
        if peer in self._silent:
            self._frontends[peer] = self._silent.pop(peer)
        if type(message) not in _ALSO_HEARD:
            if self._is_too_early(peer, message):
                if isinstance(message, Ping):
                    actions.append(Send(peer, Pong(message.number)))
                self._note_unknown(peer, message)
            elif isinstance(message, SliceReady) and (self._core is None or not self._is_obeyed_by(message)):
                # Its worker would refuse what we send it now. Its agent may have granted an epoch of which we hear next; else the
                # worker says this again when it has.
                if self._checks.check(peer, message, now_ms) is None:
                    self._early.keep(event, message.slice_id)
            elif self._core is not None and not (self._is_ending and type(message) in _CHANGES):
                is_asked = (
                    type(message) in _CHANGES and role_id_of(peer) == OPERATOR
                )  # else the core refuses it
                if is_asked and len(self._asked) < ASKED_MAX:
                    self._asked.add((peer, message.request_no))  # type: ignore[union-attr]  # all of them have one
                self._to_core(event, actions, now_ms)
                self._note_ready(message)
            elif type(message) in _CHANGES:
                what = "hands over to another scheduler" if self._is_ending else "stands by"
                reason = f"{self._own_id} {what}: ask the active one"
                actions.append(Send(peer, Changed(message.request_no, "refused", NOT_ACTIVE, reason)))  # type: ignore[union-attr]  # all of them have one
            elif self._core is None:
                self._note_unknown(peer, message)
            return
        if type(message) in _ABOUT_LEASES and self._checks.check(peer, message, now_ms) is not None:
            return
        match message:
            case LeaseReport():
                self._hear_lease(peer, message, actions, now_ms)
            case NodeHello(node_id=node_id, incarnation=incarnation):
                if peer == peer_id(role_id_of_node(node_id), incarnation):  # else the core refuses it
                    self._hear_lease(peer, _report_in(message), actions, now_ms)
                    self._await_slices(message)
                    if self._core is None and node_id in self._settings.electorate.agents:
                        self._early.keep(event, "")
                    elif self._gathering is not None and node_id in self._gathering.nodes:
                        self._gathering.nodes[node_id] = None  # the core has this one, which is newer
            case FrontendHello(frontend_id=frontend_id, incarnation=incarnation):
                self._remember(peer, message, is_its_own=peer == peer_id(frontend_id, incarnation))
            case SchedulerHello() if _is_connected_to(peer):  # it had lost us, and asks who we are
                actions.append(self._hello(peer))
            case SchedulerHello():
                self._standbys[peer] = StandbyReport(
                    message.scheduler_id,
                    message.incarnation,
                    has_plan=False,
                    is_electable=message.is_electable,
                )
                self._unasked.discard(peer)
                if self._core is not None:
                    actions.append(CopyPlan(self._plan_goes_to((peer,))))
            case PlanCopy():
                self._keep(message, actions, now_ms)
            case TakeOver(epoch):
                self._leaving.update(
                    one for one, standby in self._standbys.items() if standby.scheduler_id == peer
                )
                self._elect(self._election.take_over(epoch, now_ms), actions, now_ms)
            case StatusAsked() if self._core is None:
                actions.append(Send(peer, self._status()))
        if self._core is None or type(message) in _ABOUT_LEASES:
            return
        is_open = self._gathering is None and not self._is_fresh
        if is_open or not isinstance(message, FrontendHello):
            self._to_core(event, actions, now_ms)

    def _hear_lease(
        self, peer: PeerId, report: LeaseReport, actions: list[ReplicaAction], now_ms: float
    ) -> None:
        self._elect(self._election.heard(peer, report, now_ms), actions, now_ms)
        if not self._election.believes(report.node_id):
            what = f"its epoch {report.epoch} is far above what elections have come to"
            self.offences.note(peer, RemoteProtocolError(what, OUT_OF_RANGE), now_ms, may_cut_off=False)

    def _is_too_early(self, peer: PeerId, message: AnyMessage) -> bool:
        """Whether it is of a frontend that would be shown a cluster without slices.

        It would give up what runs there and turn requests away. What it announces now it announces again when it hears of the epoch.
        """
        is_fresh = self._core is not None and self._is_fresh
        return is_fresh and type(message) in _OF_FRONTENDS and _is_frontend(peer)

    def _note_unknown(self, peer: PeerId, message: AnyMessage) -> None:
        is_unknown = peer not in self._frontends and _is_frontend(peer)
        if is_unknown and isinstance(message, Ping | Pong) and len(self._unknown) < FRONTENDS_MAX:
            self._unknown[peer] = message

    def _is_obeyed_by(self, ready: SliceReady) -> bool:
        return ready.epoch == self._election.epoch

    def _note_ready(self, message: object) -> None:
        if self._gathering is not None and isinstance(message, SliceReady):
            self._gathering.slices.discard(message.slice_id)
            self._gathering.has_any = True

    def _await_slices(self, hello: NodeHello) -> None:
        """Also those that drain: what was granted there runs on."""
        gathering = self._gathering
        if gathering is None or hello.epoch != self._election.epoch or hello.node_id not in gathering.nodes:
            return
        del gathering.nodes[hello.node_id]
        awaited = (SliceState.READY, SliceState.DRAINING)
        gathering.slices.update(status.slice_id for status in hello.slices if status.state in awaited)

    def _remember(self, peer: PeerId, hello: FrontendHello, *, is_its_own: bool) -> None:
        if is_its_own and (peer in self._frontends or len(self._frontends) < FRONTENDS_MAX):
            # Kept for a later epoch, in which nobody is linked yet.
            self._frontends[peer] = replace(hello, is_linked=False)
            self._silent.pop(peer, None)
            self._unknown.pop(peer, None)

    def _lost(self, event: Lost, peer: PeerId, actions: list[ReplicaAction], now_ms: float) -> None:
        if _is_connected_to(peer):  # it is greeted until it hears it
            actions.append(self._hello(peer))
            return
        self.offences.forget(peer)
        self._unknown.pop(peer, None)
        hello = self._frontends.pop(peer, None) or self._silent.pop(peer, None)
        if hello is not None and event.reason != CLOSED and len(self._silent) < FRONTENDS_MAX:
            self._silent[peer] = hello
        self._leaving.discard(peer)
        self._early.forget(peer)
        if event.reason == CLOSED:
            self._standbys.pop(peer, None)
            self._unasked.discard(peer)
        elif self._standbys.pop(peer, None) is not None:
            actions.append(self._hello(peer))  # one that was only stopped says hello again
        if peer == self._heir:
            self.has_left = True
        self._elect(self._election.lost(peer, now_ms), actions, now_ms)
        if self._gathering is not None:
            nodes = self._gathering.nodes
            for node_id in nodes.keys() - self._election.connected - self._election.unheard:
                del nodes[node_id]
            for node_id, early in nodes.items():
                if early is not None and early.peer == peer:  # its node has another agent by now
                    nodes[node_id] = None
        # Workers that leave for its successor are not lost: frontends would give up what runs there.
        if self._core is not None and not (self._heir and not _is_frontend(peer)):
            self._to_core(event, actions, now_ms)

    def _hello(self, other: PeerId) -> Send:
        return Send(other, SchedulerHello(self._own_id, self._settings.incarnation, self._was_electable))

    def _keep(self, copy: PlanCopy, actions: list[ReplicaAction], now_ms: float) -> None:
        """Of the highest epoch; one of another configuration too, for that may be about to come here as well.

        Whoever has been overtaken and does not know it yet keeps the copy too: it is not sent again.
        """
        version = (copy.epoch, copy.number)
        if version > self._newest and (self._core is None or copy.epoch > self._election.epoch):
            self._newest = version
            if not self._is_ending:
                self._prepare_at_ms = now_ms + PREPARE_AFTER_MS
            self._election.has_plan = True
            self._election.plan_epoch = max(self._election.plan_epoch, copy.epoch)
            actions.append(KeepPlan(copy))

    def _prepare(self, actions: list[ReplicaAction]) -> None:
        self._prepare_at_ms = NEVER_MS
        self._election.has_plan = True
        actions.append(PrepareCore())

    def _tell_again(self, actions: list[ReplicaAction]) -> None:
        self._tell_again_at_ms = NEVER_MS
        actions.extend(map(self._hello, sorted(self._unasked)))
        self._unasked.clear()
        lacking = [peer for peer, standby in self._standbys.items() if not standby.has_plan]
        if self._core is not None and lacking:
            actions.append(CopyPlan(self._plan_goes_to(lacking)))

    def _plan_goes_to(self, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        told = tuple(peers)
        for peer in told:
            self._standbys[peer] = replace(self._standbys[peer], has_plan=True)
        return told

    # ------------------------------------------------------------ active, or not

    def _leave(self, actions: list[ReplicaAction], now_ms: float) -> None:
        """Hand over, if this is the active one, a standby can go on, and the agents can say so."""
        if self._is_ending:
            return
        self._is_ending = True
        self._heir_by_ms = now_ms + HEIR_WITHIN_MS
        self._choose_heir(actions, now_ms)
        if not self.has_left:
            self._turn_operators_away(actions)

    def _is_electable(self, now_ms: float) -> bool:
        """Whether the agents are connected: all, or those of a majority for so long that the others are away."""
        if not self._election.has_majority:
            self._majority_at_ms = NEVER_MS
            return False
        self._majority_at_ms = min(self._majority_at_ms, now_ms)
        return self._election.has_all or now_ms >= self._majority_at_ms + OTHERS_WITHIN_MS

    def _choose_heir(self, actions: list[ReplicaAction], now_ms: float) -> None:
        """Of those that have the plan the first that is electable; in the end any."""
        election, electorate = self._election, self._settings.electorate
        heirs = {
            peer: standby
            for peer, standby in self._standbys.items()
            if standby.has_plan and peer not in self._leaving
        }
        electable = {peer: standby for peer, standby in heirs.items() if standby.is_electable}
        is_possible = self._core is not None and bool(heirs) and election.has_majority
        is_ready = bool(electable) and election.may_hand_over
        if is_possible and not is_ready and now_ms < self._heir_by_ms:
            return
        self._heir_by_ms = NEVER_MS
        if not is_possible or not election.may_hand_over:
            election.leave()
            self.has_left = True
            return
        self._heir, standby = min(
            (electable or heirs).items(), key=lambda one: electorate.number_of(one[1].scheduler_id)
        )
        election.leave(standby.scheduler_id)
        self._ends_at_ms = now_ms + HANDED_OVER_MS
        actions.append(Send(self._heir, TakeOver(election.epoch)))

    def _elect(self, decided: Iterable[ElectionAction], actions: list[ReplicaAction], now_ms: float) -> None:
        for action in decided:
            actions.append(action)
            if isinstance(action, LeaseLapsed):
                self._turn_operators_away(actions)
                if self._heir:
                    self._ends_at_ms = now_ms + (SETTLED_MS if action.is_handed_over else 0.0)
                self._core = self._gathering = None
                self._also_heard = _LOOKED_AT
            elif isinstance(action, EpochTaken):
                self._begin_epoch(actions, now_ms)

    def _turn_operators_away(self, actions: list[ReplicaAction]) -> None:
        for peer, request_no in sorted(self._asked):
            actions.append(Send(peer, turned_away(self._own_id, request_no)))
        self._asked.clear()

    def _begin_epoch(self, actions: list[ReplicaAction], now_ms: float) -> None:
        if self._core is None:
            self._core, self._is_fresh = self._make_core(), True
            self._prepare_at_ms = NEVER_MS
            actions.append(CopyPlan(self._plan_goes_to(self._standbys)))
        else:
            self._to_core(Heard(ELECTION, EpochGranted(self._election.epoch, ())), actions, now_ms)
        # Who has not come while this process was there for a while is away, perhaps for long; at its start all are on their way.
        is_young = now_ms - self._began_ms < GATHER_FIRST_MS
        awaited = self._election.connected | (self._election.unheard if is_young else frozenset())
        self._gathering = gathering = _Gathering(now_ms, dict.fromkeys(awaited))
        self._also_heard = _GATHERED
        for event in self._early.take():
            message = event.message
            if isinstance(message, NodeHello) and message.epoch == self._election.epoch:
                self._await_slices(message)
                self._to_core(event, actions, now_ms)
            elif isinstance(message, NodeHello) and message.node_id in gathering.nodes:
                gathering.nodes[message.node_id] = event
            elif isinstance(message, SliceReady) and self._is_obeyed_by(message):
                self._to_core(event, actions, now_ms)
                self._note_ready(message)

    def _open_if_gathered(self, actions: list[ReplicaAction], now_ms: float) -> None:
        """Frontends hear of the epoch by a directory that lists them."""
        gathering = self._gathering
        if gathering is None or ((gathering.nodes or gathering.slices) and now_ms < gathering.until_ms):
            return
        for early in gathering.nodes.values():  # its agent may grant yet: models on its slices are waited for
            if early is not None:
                self._to_core(early, actions, now_ms)
        self._gathering, self._is_fresh = None, False
        self._also_heard = _LOOKED_AT
        for peer, hello in self._frontends.items():
            self._to_core(Heard(peer, hello), actions, now_ms)
        unknown, self._unknown = self._unknown, {}
        for peer, message in unknown.items():  # it sends them the directory, upon which they say hello
            self._to_core(Heard(peer, message), actions, now_ms)

    def _to_core(self, event: Heard | Lost | Tick, actions: list[ReplicaAction], now_ms: float) -> None:
        assert self._core is not None, "asked before"
        sent = self._core.handle(event, now_ms)
        if self._asked:
            self._note_answered(sent)
        for send in sent:
            status = send.message
            if self._is_fresh and _is_frontend(send.peer) and isinstance(status, Directory):
                continue
            if self._is_ending and isinstance(status, Changed):  # the operator has been turned away
                continue
            if isinstance(status, StatusListed):
                counters = Counter(status.counters)
                counters.update(self.offences.counters)
                status = replace(status, counters=dict(counters), standing=self.standing())
                actions.append(Send(send.peer, status))
            else:
                actions.append(send)

    def _note_answered(self, sent: Iterable[Send]) -> None:
        for send in sent:
            if isinstance(send.message, Changed):
                self._asked.discard((send.peer, send.message.request_no))

    def standing(self) -> SchedulerStanding:
        """For people."""
        election = self._election
        state = ElectionState.ACTIVE if self._core is not None else election.state
        return SchedulerStanding(
            state.name.lower(),
            election.epoch,
            len(election.granted),
            len(self._settings.electorate.agents),
            election.takeovers,
            tuple(self._standbys.values()),
            self._settings.shard,
            self._settings.shards,
            election.active,
        )

    def _status(self) -> StatusListed:
        counters = {name: float(count) for name, count in self.offences.counters.items()}
        return StatusListed(self._own_id, self._settings.pid, (), (), counters, standing=self.standing())

    def _look_ahead(self) -> None:
        if self.has_left:
            self.wake_at_ms = 0.0  # whoever runs it asks after a turn, and sleeps no more
            return
        others_by_ms = NEVER_MS if self._was_electable else self._majority_at_ms + OTHERS_WITHIN_MS
        own_moments = (
            self._tell_again_at_ms,
            self._prepare_at_ms,
            others_by_ms,
            self._heir_by_ms,
            self._ends_at_ms,
        )
        at_ms = min(self._election.wake_at_ms, *own_moments)
        core_at_ms = None if self._core is None else self._core.wake_at_ms
        if core_at_ms is not None and core_at_ms < at_ms:
            at_ms = core_at_ms
        if self._gathering is not None:
            at_ms = min(at_ms, self._gathering.until_ms)
        self.wake_at_ms = None if at_ms == NEVER_MS else at_ms

    # ------------------------------------------------------------ rules

    def _check_early(self, peer: PeerId, ready: SliceReady) -> None:
        require_worker(peer, ready)
        if ready.node_id not in self._settings.electorate.agents:
            raise RemoteProtocolError(f"the configuration has no node {ready.node_id}", NOT_OWNER)

    def _check_take_over(self, peer: PeerId, word: TakeOver) -> None:
        _check_scheduler_found(peer, word)
        number = self._settings.electorate.number_of(peer)
        if not word.epoch or word.epoch % SCHEDULERS_MAX != number:
            raise RemoteProtocolError(f"epoch {word.epoch} is not one of {peer}", NOT_OWNER)

    def _check_scheduler(self, peer: PeerId, hello: SchedulerHello) -> None:
        if _is_connected_to(peer):
            return
        require_identity(peer, hello.scheduler_id, hello.incarnation)
        electorate = self._settings.electorate
        if hello.scheduler_id not in set(map(electorate.role_id, range(electorate.schedulers))) - {
            self._own_id
        }:
            raise RemoteProtocolError(f"the configuration has no other {hello.scheduler_id}", NOT_OWNER)


def turned_away(own_id: str, request_no: int) -> Changed:
    """The answer to an operator whose change may not be in the plan that holds from here on."""
    reason = f"{own_id} is active no more: see what the next one serves, and ask it again"
    return Changed(request_no, "refused", NOT_ACTIVE, reason)


def _is_connected_to(peer: PeerId) -> bool:
    """Whether it is a scheduler that this one connects to: names without a nonce exist only in this process."""
    return peer == role_id_of(peer)


def _is_frontend(peer: PeerId) -> bool:
    return role_id_of(peer).startswith(FRONTEND_PREFIX)


def _check_agent(peer: PeerId, report: LeaseReport) -> None:
    if role_id_of(peer) != role_id_of_node(report.node_id):
        raise RemoteProtocolError(f"it is not the agent of node {report.node_id}", NOT_OWNER)


def _check_scheduler_found(peer: PeerId, message: PlanCopy | TakeOver) -> None:
    del message
    if not _is_connected_to(peer):
        raise RemoteProtocolError("it is not a scheduler that this one connected to", WRONG_IDENTITY)


def _report_in(hello: NodeHello) -> LeaseReport:
    return LeaseReport(
        hello.node_id, hello.epoch, hello.holder_id, hello.holder_incarnation, hello.is_lease_free
    )
