"""Who asks a virtual cluster: clients for answers, an operator for changes. The monitor hears what becomes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from fabric.ids import Incarnation, ModelId, PeerId, frontend_id, peer_id, scheduler_id
from fabric.link import Received
from fabric.messages import Answer, CancelRequest, Changed, Infer, Ping, PlanChange, Pong, Refusal, Unready
from roles.runtime.environment import RunDir
from tests.chaos.virtual.processes.base import Process
from tests.chaos.virtual.processes.devices import input_of
from tests.chaos.virtual.processes.links import VirtualServer
from tests.chaos.virtual.violated import Violated

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.virtual.world import World

Key = tuple[int, int]
"""A frontend, and the connection's own number of a request."""
SILENT_MS: Final = 600.0
ANSWER_WITHIN_MS: Final = 3_000.0


@dataclass
class Pending:
    """A request as its client knows it, by its own clock."""

    request: int
    model_id: ModelId
    budget_ms: float
    asked_at_ms: float


class ClientProcess(Process):
    """A client with a connection to each frontend.

    Where `shape.resends`, it sends what it asked a frontend that it lost to the next one, as the SDK does.
    """

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"client-{number}")
        self.number = number
        self.pending: dict[Key, Pending] = {}
        self._given_up: set[Key] = set()
        """Whose connection broke: an answer may still come by the next one, once."""
        self._links: list[VirtualServer] = []
        self._numbers = [0] * world.frontends
        self._unready: set[Incarnation] = set()
        """The starts of frontends that want no more requests."""
        self._known_at: dict[int, float] = {}
        """Since when a frontend that wants its requests has heard of it on the connection that it has there."""
        self._has_vanished = False
        self.silent_until_ms = [0.0] * world.frontends
        """By frontend: until when it may not know that this one has vanished."""
        own = peer_id(f"client-{number}", self.incarnation)
        for place in range(world.frontends):
            address = RunDir(world.run_dir).ipc_address(f"{frontend_id(place)}.client")
            link = self.transport.connect(own, PeerId(frontend_id(place)), [address])
            link.on_hang_up = partial(self._cut_off, place)
            self._links.append(link)

    def ask(self, request: int, place: int, model_id: ModelId, budget_ms: float) -> bool:
        """False: there is no connection to that frontend, or it wants no requests."""
        one = Pending(request, model_id, budget_ms, self.now_ms())
        frontend = self.world.by_number.get(place)
        is_unready = frontend is not None and frontend.incarnation in self._unready
        return not is_unready and self._send(one, place)

    def cancel(self, request: int) -> None:
        """It needs no answer any more."""
        for (place, number), one in self.pending.items():
            if one.request == request:
                self._links[place].send(PeerId(frontend_id(place)), CancelRequest(number))

    def notice_silence_of(self, place: int) -> None:
        """That frontend has vanished: give it up in a while, unless its connection ends before."""
        link = self._links[place]
        wire = link.wire
        self.silent_until_ms[place] = self.world.now_ms + SILENT_MS

        def give_up() -> None:
            if wire is not None and link.wire is wire:
                link.disconnect()
                link.connect()
                self._cut_off(place)

        self.world.at(self.silent_until_ms[place], lambda: self.when_running(give_up))

    def turn(self) -> None:
        for place, link in enumerate(self._links):
            for received in link.receive(1 << 20):
                self._heard(place, received)
        for link in self._links:
            if link.inbox:
                self.wake(link.inbox[0].arrives_at_ms)

    def close(self) -> None:
        for link in self._links:
            link.close()

    def vanish(self, for_ms: float) -> None:
        self._has_vanished = True
        super().vanish(for_ms)

    def _gone(self) -> None:
        super()._gone()
        for one in self.pending.values():
            self.world.monitor.client_gone(one.request, is_told=not self._has_vanished)

    def _send(self, one: Pending, place: int, *, is_again: bool = False) -> bool:
        self._numbers[place] += 1
        key = place, self._numbers[place]
        spent_ms = self.now_ms() - one.asked_at_ms
        asked = Infer(
            key[1],
            one.model_id,
            one.budget_ms,
            priority=self.world.priority_of(one.request),
            spent_ms=spent_ms if is_again else 0.0,
            may_have_run=is_again,
        )
        is_sent = self._links[place].send(PeerId(frontend_id(place)), asked, [input_of(one.request)])
        if is_sent:
            self.pending[key] = one
            self._known_at.setdefault(place, self.world.now_ms + self.world.client_way_ms)
        return is_sent

    def _heard(self, place: int, received: Received) -> None:
        message = received.message
        if isinstance(message, Unready):
            self._unready.add(message.incarnation)
            self._known_at.pop(place, None)
        elif isinstance(message, Answer | Refusal):
            key = place, message.request_no
            if key in self._given_up:
                self._given_up.remove(key)
                return
            one = self.pending.pop(key, None)
            monitor, request = self.world.monitor, None if one is None else one.request
            if isinstance(message, Answer):
                outputs = [float(tensor.array.reshape(-1)[0]) for tensor in received.tensors]
                monitor.answered(request, key, outputs)
            else:
                monitor.refused(request, key, message.code)

    def _cut_off(self, place: int) -> None:
        """Its connection broke: it knows nothing of what it asked there."""
        if self._known_at.pop(place, math.inf) < self.world.ended_in_order_ms(place):
            raise Violated(f"{frontend_id(place)} ended in order, and did not tell {self.place}")
        for key in [key for key in self.pending if key[0] == place]:
            one = self.pending.pop(key)
            self._given_up.add(key)
            if not self._asks_another(one, place):
                self.world.monitor.cut_off(one.request, place)

    def _asks_another(self, one: Pending, lost: int) -> bool:
        if not self.world.shape.resends or self.now_ms() >= one.asked_at_ms + one.budget_ms:
            return False
        for place in range(len(self._links)):
            frontend = self.world.by_number.get(place)
            if place != lost and frontend is not None and self._send(one, place, is_again=True):
                self.world.monitor.asked_again(one.request, frontend)
                return True
        return False


@dataclass
class _Change:
    message: PlanChange
    scheduler: int
    """Who was asked."""
    over: Callable[[Changed | None], object]


class OperatorProcess(Process):
    """Asks the schedulers in turn for a change until one is the active one. `over` hears the answer; None: nobody knows."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "operator")
        own = peer_id("operator", self.incarnation)
        self._under_way: dict[int, _Change] = {}
        self._links = [
            self.transport.connect(own, PeerId(scheduler_id(number)), [address])
            for number, address in enumerate(world.control_addresses)
        ]
        for number, link in enumerate(self._links):
            link.on_hang_up = partial(self._lost, number)

    def ask(self, message: PlanChange, over: Callable[[Changed | None], object]) -> None:
        """Each `message` with a number of its own."""
        number = message.request_no
        self._under_way[number] = _Change(message, -1, over)
        self._ask_next(number)
        self.world.at(self.world.now_ms + ANSWER_WITHIN_MS, lambda: self._end(number, None))

    def turn(self) -> None:
        for number, link in enumerate(self._links):
            for received in link.receive(1 << 10):
                match received.message:
                    case Ping(ping):
                        link.send(PeerId(scheduler_id(number)), Pong(ping))
                    case Changed(request_no=asked, code="NotActive"):
                        self._ask_next(asked)
                    case Changed(request_no=asked) as answer:
                        self._end(asked, answer)
        for link in self._links:
            if link.inbox:
                self.wake(link.inbox[0].arrives_at_ms)

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _ask_next(self, number: int) -> None:
        change = self._under_way.get(number)
        if change is None:
            return
        change.scheduler += 1
        if change.scheduler >= len(self._links):
            self._end(number, Changed(number, "refused", "NotActive"))
        elif not self._links[change.scheduler].send(PeerId(scheduler_id(change.scheduler)), change.message):
            self._ask_next(number)

    def _lost(self, scheduler: int) -> None:
        for number in [one for one, change in self._under_way.items() if change.scheduler == scheduler]:
            self._end(number, None)

    def _end(self, number: int, answer: Changed | None) -> None:
        change = self._under_way.pop(number, None)
        if change is not None:
            change.over(answer)
