"""The same run with every real core: frontends, scheduler, node agents and workers on one virtual clock.

Messages go through the real codec over loopback links, with the modelled network's delays; devices are the emulated
ones that a live cluster has. Only sockets, processes and clients are missing. `FastWorld` plays the same with models of all but
the scheduler, many times as fast; docs/operate/replay.md says where the two may differ, and a property test holds them against
each other.

Of one moment's events requests come first, then messages with what devices answer to them, batches that end, the timers of
frontends, agents and workers, and the scheduler's timer last, as in `FastWorld`.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from fabric.clock import VirtualClock
from fabric.errors import DeadlineExceeded
from fabric.ids import BatchId, ModelId, PeerId
from fabric.link import Received
from fabric.loopback import LoopbackLink
from fabric.messages import Inputs, SliceSpec
from roles.applications.tally import StageTally
from roles.runtime.core import Core, Heard, Lost, Send, Tick
from roles.simulator.applications import PlayedApplication
from roles.simulator.hardware import SimulatedHardware, SimulatedNode
from roles.simulator.surroundings import BatchTimes, VirtualRole
from roles.simulator.traffic import ModelTraffic
from roles.simulator.virtual_links import VirtualLinks
from roles.simulator.virtual_node import VirtualAgent
from roles.simulator.virtual_roles import VirtualFrontend, VirtualScheduler
from roles.workload.outcomes import BatchRecord

BOOT_MS: Final = -1_000.0
"""When everything starts, so that the cluster is up when time begins."""


class FullWorld:
    """One run around `cores`, each a shard's scheduler's. `traffic` says what arrives, and takes each request's fate."""

    def __init__(
        self,
        cores: Sequence[Core[Heard | Lost | Tick, Send]],
        hardware: SimulatedHardware,
        traffic: Sequence[ModelTraffic],
        applications: Sequence[PlayedApplication] = (),
    ) -> None:
        self.batches: list[BatchRecord] = []
        """Every batch that started, in the order of their ends."""
        self.dropped: dict[ModelId, int] = {
            one.model_id: 0 for one in (*traffic, *(one.traffic for one in applications))
        }
        """Requests that were refused before their deadline."""
        self.clock = VirtualClock(BOOT_MS)
        self.hardware = hardware
        network = hardware.network
        self.control = VirtualLinks(self.clock, self._control_at_ms)
        self.work = VirtualLinks(self.clock, self._control_at_ms)
        self.reports = VirtualLinks(self.clock, self._control_at_ms)
        self.inputs = VirtualLinks(
            self.clock, lambda _from, _to, sent_at_ms: sent_at_ms + self._inputs_take_ms
        )
        self.outputs = VirtualLinks(
            self.clock, lambda _from, _to, sent_at_ms: network.result_at_ms(sent_at_ms)
        )
        self.times_of_batch: dict[BatchId, BatchTimes] = {}
        self._inputs_take_ms = 0.0
        self._traffic = [*traffic, *(one.traffic for one in applications)]
        self._names = [ModelId(one.served.plan.name) for one in applications]
        self._asked: list[tuple[ModelTraffic, int]] = []
        self._unanswered = 0
        self._hearers: dict[LoopbackLink, Callable[[Received], None]] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._gpu_numbers: dict[tuple[str, int], int] = {}
        for node in hardware.nodes:
            for info in node.gpus:
                self._gpu_numbers[node.node_id, info.gpu] = len(self._gpu_numbers)
        self._schedulers = [VirtualScheduler(self, core, shard) for shard, core in enumerate(cores)]
        count_of_frontends = hardware.frontends
        self._frontends = [
            VirtualFrontend(
                self,
                number,
                len(cores),
                [one.served.drawn((number, count_of_frontends)) for one in applications],
            )
            for number in range(count_of_frontends)
        ]
        self._agents = [VirtualAgent(self, node) for node in hardware.nodes]
        # What workers say of a batch comes before what follows from its outputs, though both may take no time. What they
        # are told comes last of one moment: inputs that come with it are there.
        agents_links = [agent.links for agent in self._agents]
        self._networks = [
            *agents_links,
            self.reports,
            self.control,
            self.inputs,
            self.outputs,
            self.work,
        ]

    def run(self) -> None:
        """Play everything, until each request has its answer."""
        self._boot()
        requests = heapq.merge(*map(_requests_of, self._traffic), key=lambda one: one[0])
        upcoming = next(requests, None)
        while upcoming is not None or self._unanswered:
            at_ms = self._next_at_ms()
            if upcoming is None or at_ms < upcoming[0]:
                assert at_ms < math.inf, "a frontend answers by its own timer at last"
                self.clock.advance(at_ms)
                self._step()
                continue
            self.clock.advance(upcoming[0])
            asked: dict[int, VirtualFrontend] = {}
            while upcoming is not None and upcoming[0] <= self.clock.now_ms():
                self._ask(upcoming[1], upcoming[2], asked)
                upcoming = next(requests, None)
            for number in sorted(asked):
                asked[number].end_turn()
        for one in self._traffic:
            one.settle()

    @property
    def stage_tallies(self) -> Sequence[Mapping[str, StageTally]]:
        """Of each application."""
        found: list[dict[str, StageTally]] = []
        for name in self._names:
            total: dict[str, StageTally] = {}
            for frontend in self._frontends:
                for stage, tally in frontend.stage_tallies[name].items():
                    total.setdefault(stage, StageTally(fates=array("d"))).add(tally)
            found.append(total)
        return found

    # ------------------------------------------------------------ for the roles

    def connect(
        self,
        links: VirtualLinks,
        own: PeerId,
        hear: Callable[[Received], None],
        *,
        is_anonymous: bool = False,
    ) -> LoopbackLink:
        """See `Surroundings`."""
        link = links.link(own, is_anonymous=is_anonymous)
        self._hearers[link] = hear
        return link

    def push(self, link: LoopbackLink, peer: PeerId, message: Inputs) -> None:
        """See `Surroundings`."""
        each_ms = self.hardware.network.model.data_ms_per_item
        self._inputs_take_ms = each_ms * self.times_of_batch[message.batch_id].size
        link.send(peer, message)

    def after(self, wait_ms: float, callback: Callable[[], None]) -> None:
        """See `Surroundings`."""
        heapq.heappush(self._later, (self.clock.now_ms() + wait_ms, next(self._order), callback))

    def answered(self, number: int, started_at_ms: float) -> None:
        """See `Surroundings`."""
        traffic, index = self._asked[number - 1]
        traffic.answered(index, 1, 1, started_at_ms, self.clock.now_ms())
        self._unanswered -= 1

    def refused(self, number: int, code: str) -> None:
        """See `Surroundings`."""
        traffic, _ = self._asked[number - 1]
        self.dropped[traffic.model_id] += code != DeadlineExceeded.code
        self._unanswered -= 1

    def ran(
        self,
        node: SimulatedNode,
        spec: SliceSpec,
        batch_id: BatchId,
        size: int,
        spans: Sequence[tuple[float, float]],
    ) -> None:
        """See `Surroundings`."""
        times = self.times_of_batch[batch_id]
        number_of, ended_at_ms = self._gpu_numbers, self.clock.now_ms()
        if spec.is_gang:
            spans = [(times.started_at_ms, ended_at_ms)] * len(spec.gpus)
        self.batches.append(
            BatchRecord(
                times.model_id,
                size,
                spec.slice_id,
                number_of[node.node_id, spec.gpu],
                spec.share_percent,
                times.sent_at_ms,
                times.started_at_ms,
                ended_at_ms,
                tuple(
                    (number_of[node.node_id, gpu], *span) for gpu, span in zip(spec.gpus, spans, strict=False)
                ),
            )
        )

    # ------------------------------------------------------------ what happens next

    def _boot(self) -> None:
        """Everybody starts and says hello; time begins when all that follows has happened."""
        for agent in self._agents:
            agent.begin()
        while (at_ms := self._next_at_ms()) < 0.0:
            self.clock.advance(at_ms)
            self._step()

    def _control_at_ms(self, sender: PeerId, peer: PeerId, sent_at_ms: float) -> float:
        """Before time begins messages take none, so that the cluster is up in time whatever the network is."""
        return (
            self.hardware.network.control_at_ms(sender, peer, sent_at_ms) if sent_at_ms >= 0.0 else sent_at_ms
        )

    def _ask(self, traffic: ModelTraffic, index: int, asked: dict[int, VirtualFrontend]) -> None:
        """Requests go to the frontends in turn."""
        number = index % len(self._frontends)
        asked[number] = frontend = self._frontends[number]
        self._asked.append((traffic, index))
        self._unanswered += 1
        name = traffic.asked_name(index // len(self._frontends))
        frontend.ask(len(self._asked), name, traffic.slo_ms, traffic.priority(index))

    def _next_at_ms(self) -> float:
        moments = [links.next_arrival_at_ms for links in self._networks]
        moments += [role.wake_at_ms for role in self._roles()]
        moments += [agent.devices_at_ms for agent in self._agents]
        if self._later:
            moments.append(self._later[0][0])
        return min((at_ms for at_ms in moments if at_ms is not None), default=math.inf)

    def _step(self) -> None:
        """Let the first thing happen that is due."""
        now_ms = self.clock.now_ms()
        if self._later and self._later[0][0] <= now_ms:
            _, _, callback = heapq.heappop(self._later)
            callback()
            return
        for agent in self._agents:
            if agent.devices_have_news:
                agent.hear_device()
                return
        for links in self._networks:
            link = links.next_link
            if link is not None and link.has_more:
                (received,) = link.receive(1)
                self._hearers[link](received)
                return
        for agent in self._agents:
            at_ms = agent.devices_at_ms
            if at_ms is not None and at_ms <= now_ms:
                agent.hear_device()
                return
        for role in self._roles():
            at_ms = role.wake_at_ms
            if at_ms is not None and at_ms <= now_ms:
                role.tick()
                return

    def _roles(self) -> Sequence[VirtualRole]:
        """In the order in which timers of one moment go."""
        workers = [worker for agent in self._agents for worker in agent.workers.values()]
        return [*self._frontends, *self._agents, *workers, *self._schedulers]


def _requests_of(traffic: ModelTraffic) -> Iterator[tuple[float, ModelTraffic, int]]:
    for index, at_ms in enumerate(traffic.arrived_at_ms.tolist()):
        yield at_ms, traffic, index
