"""One history: a cluster comes up, requests come, a script goes wrong, and all is well again."""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from fabric.ids import BatchId, Incarnation, ModelId, scheduler_id
from roles.runtime.environment import RunDir
from roles.simulator.simulation import hardware_of
from tests.chaos.virtual.answers_due import AnswersDue
from tests.chaos.virtual.changes import Changes
from tests.chaos.virtual.cluster_file import APPLICATION, COPIES, model_section, written_of
from tests.chaos.virtual.faults import Faults
from tests.chaos.virtual.monitor import ANSWER, GRACE_MS, Asked, Monitor
from tests.chaos.virtual.processes.base import Process
from tests.chaos.virtual.processes.clients import ClientProcess
from tests.chaos.virtual.processes.devices import FIRST_REQUEST
from tests.chaos.virtual.processes.network import Network
from tests.chaos.virtual.processes.roles import (
    AgentProcess,
    FrontendProcess,
    Host,
    SchedulerProcess,
    WorkerProcess,
)
from tests.chaos.virtual.script import FAULTY_MS, Script
from tests.chaos.virtual.settled import names_of, unsettled
from tests.chaos.virtual.stories import STUCK_MS, expected_of
from tests.chaos.virtual.violated import Violated

BOOT_WITHIN_MS: Final = 3_000.0
SETTLE_WITHIN_MS: Final = 20_000.0
LOOK_EVERY_MS: Final = 250.0
STEPS_MAX: Final = 400_000
"""Events of one history: more are a loop that feeds itself."""
ROUNDS, ROUND_MS = 12, 400.0
"""Of requests when all is well again, until all of one round are answered."""
PRIORITY_MAX: Final = 2
ENOUGH_MS: Final = 80.0
"""With as much time a request is answered where nothing goes wrong: two full batches, and all ways."""
SHARE_OF_OTHERS: Final = 0.5
"""Disciplines that leave a device idle until two models want it at one moment lose some of what is easy."""


class World:
    """The processes, the clock and the network of one script."""

    def __init__(self, script: Script) -> None:
        shape = self.shape = script.shape
        self.script = script
        self.now_ms = 0.0
        self.frontends = shape.frontends
        self.outlives = shape.outlives
        self.start_ms = shape.start_ms
        self.client_way_ms = 2 * shape.delay_ms
        self.run_dir = Path(tempfile.mkdtemp(prefix="tenuto-chaos-"))
        self.control_addresses = [
            RunDir(self.run_dir).ipc_address(f"{scheduler_id(number)}.control")
            for number in range(shape.schedulers)
        ]
        self.processes: list[Process] = []
        self.clients: list[ClientProcess | None] = []
        self.drained: dict[int, tuple[float, Process]] = {}
        """When frontends were told to end in order while nothing else went wrong, and their processes."""
        self.are_clocks_sure = True
        """Nobody stood still, and no way was cut or longer: all know how old what they hear is."""
        self.are_leases_sure = True
        """No agent took its lease for free before its time, as it does when its holder's connection ends."""
        self.by_number: dict[int, FrontendProcess] = {}
        self.schedulers: dict[int, SchedulerProcess] = {}
        """Those that run, by number."""
        self.network = Network(self, random.Random(f"{script.seed}/network"), self._delays)
        self.monitor = Monitor(self)
        self.network.read = self.monitor.read
        self.answers_due = AnswersDue(self)
        self.network.said = self.answers_due.said
        self._clocks = random.Random(f"{script.seed}/clocks")
        self._happening: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._faults = Faults(self)
        self.changes = Changes(self, partial(model_section, shape))
        self._easy_until_ms = 0.0
        """What is asked and due before that moment meets nothing that goes wrong."""
        self._roomy_until_ms = self._room_ms = 0.0
        """The same, but for one thing that costs nobody anything who has that much budget."""
        self._cancels = random.Random(f"{script.seed}/cancels")
        self._incarnations = count(1)
        self._requests = count(FIRST_REQUEST)
        self._batch_ids = random.Random(f"{script.seed}/batches")
        self.written = written_of(shape)
        self.hosts = [Host(node) for node in hardware_of(self.written.config, 1).nodes]

    # ------------------------------------------------------------ for the processes

    def at(self, at_ms: float, callback: Callable[[], object]) -> None:
        """Call back at that moment."""
        heapq.heappush(self._happening, (max(at_ms, self.now_ms), next(self._order), callback))

    @property
    def run_once(self) -> frozenset[ModelId]:
        """Models that must not run a request twice."""
        return frozenset([ModelId(f"m{self.shape.models - 1}")] if self.shape.run_once else [])

    @property
    def names(self) -> Sequence[ModelId]:
        """What clients ask."""
        models = [ModelId(f"m{number}") for number in range(self.shape.models)]
        return [*models, APPLICATION] if self.shape.application else models

    def models_of(self, name: ModelId) -> Sequence[ModelId]:
        """Those that a request goes through, one after the other."""
        return [ModelId("m0"), ModelId(f"m{self.shape.models - 1}")] if name == APPLICATION else [name]

    def copies(self, name: ModelId) -> int:
        """How many answers of its last model are in its answer."""
        return COPIES if name == APPLICATION else 1

    def priority_of(self, request: int) -> int | None:
        """That its client gives it; None: it gives none."""
        return request % (PRIORITY_MAX + 1) if self.shape.priorities else None

    def may_yield(self, request: int) -> bool:
        """Whether others are more important."""
        return self.priority_of(request) not in {None, PRIORITY_MAX}

    def is_doubtful(self, name: ModelId) -> bool:
        """Whether that may be known, and may not."""
        return any(self.changes.is_doubtful(one) for one in self.models_of(name))

    def ended_in_order_ms(self, frontend: int) -> float:
        """When a frontend that has ended was told to; 0: it has not, or otherwise."""
        at_ms, process = self.drained.get(frontend, (0.0, None))
        return at_ms if process is not None and process.is_dead else 0.0

    def start_scheduler(self, number: int) -> None:
        """Another process at that place; so the next three."""
        self.schedulers[number] = SchedulerProcess(self, number)

    def start_frontend(self, number: int) -> None:
        self.drained.pop(number, None)
        self.by_number[number] = FrontendProcess(self, number)

    def start_agent(self, host: Host) -> None:
        AgentProcess(self, host)

    def start_client(self, number: int) -> None:
        self.clients[number] = ClientProcess(self, number)

    def next_incarnation(self) -> Incarnation:
        """Another one for every start."""
        return Incarnation(f"{next(self._incarnations):08x}")

    def clock_offset_ms(self, place: str) -> float:
        """Hosts' clocks have nothing to do with each other, nor with those before a host's own restart."""
        del place
        return float(self._clocks.choice((0.0, 0.0, self._clocks.uniform(0.0, 1e7))))

    def next_batch_id(self) -> BatchId:
        """A scheduler's first one: none ever counts up to the next."""
        return BatchId((self._batch_ids.randrange(1 << 20) << 33) + 1)

    def schedulers_alive(self) -> list[SchedulerProcess]:
        """In the order of their numbers."""
        return [self.schedulers[number] for number in sorted(self.schedulers)]

    def frontends_alive(self) -> list[FrontendProcess]:
        """In the order of their numbers."""
        return [self.by_number[number] for number in sorted(self.by_number)]

    def agents_alive(self) -> list[AgentProcess]:
        """In the order of the nodes."""
        return [host.agent for host in self.hosts if host.agent is not None]

    def workers_alive(self) -> list[WorkerProcess]:
        """In the order of the nodes."""
        return [worker for host in self.hosts for worker in host.workers.values()]

    # ------------------------------------------------------------ a history

    def play(self) -> Monitor:
        """Raises Violated, or what a role raised."""
        try:
            self._boot()
            began_ms = self.now_ms
            expected = expected_of(self.script)
            self._load(f"{self.script.seed}/load", FAULTY_MS + 150.0)
            for fault in self.script.faults:
                self.at(began_ms + fault.at_ms, partial(self._faults.strike, fault))
            if self.shape.is_up:
                moments = [*(fault.at_ms for fault in self.script.faults), FAULTY_MS + 200.0]
                self._easy_until_ms = began_ms + moments[0]
                if expected.room_ms is not None:
                    self._room_ms, self._roomy_until_ms = expected.room_ms, began_ms + moments[1]
            if expected.active_ms is not None:
                self.at(began_ms + expected.active_ms, self._look_for_active)
            if expected.ended_ms is not None:
                self.at(began_ms + expected.ended_ms, self._look_for_stuck)
            workers = names_of(self.workers_alive())
            self._run_until(began_ms + FAULTY_MS + 200.0)
            lost = self.monitor.not_served
            if not self.monitor.serves(self._share):
                raise Violated(f"nothing has gone wrong that would cost it, and {lost}")
            self._settle()
            if expected.keeps_workers and workers != names_of(self.workers_alive()):
                raise Violated(f"of {sorted(workers)} not all have outlived their agent")
            self._run_until(self.now_ms + 600.0)  # the longest pause before a client tries to connect again
            self._serve_again()
            self._probe()
        finally:
            for client in self.clients:
                if client is not None:
                    client.pending.clear()
            for process in list(self.processes):
                process.kill()
            shutil.rmtree(self.run_dir, ignore_errors=True)
        return self.monitor

    def _boot(self) -> None:
        for number in range(self.shape.schedulers):
            self.schedulers[number] = SchedulerProcess(self, number)
        for host in self.hosts:
            AgentProcess(self, host)
        for number in range(self.shape.frontends):
            self.by_number[number] = FrontendProcess(self, number)
        self.clients = [ClientProcess(self, number) for number in range(self.shape.clients)]
        if self.shape.is_up:
            self._wait_until_settled(BOOT_WITHIN_MS, "it does not come up")

    def _load(self, name: str, for_ms: float) -> None:
        draws = random.Random(name)
        began_ms = at_ms = self.now_ms
        while (at_ms := at_ms + draws.expovariate(self.shape.rate_rps) * 1e3) < began_ms + for_ms:
            model_id = draws.choice(self.names)
            client, frontend = draws.randrange(self.shape.clients), draws.randrange(self.shape.frontends)
            budget_ms = self.shape.slo_ms * draws.choice((1.0, 1.0, 0.5, 2.0))
            burst = draws.choice((1, 1, 1, 5))
            for _ in range(burst):
                self.at(at_ms, partial(self._ask, client, frontend, model_id, budget_ms))

    def _ask(self, client_number: int, number: int, model_id: ModelId, budget_ms: float) -> int | None:
        client, frontend = self.clients[client_number], self.by_number.get(number)
        if client is None or client.is_stopped:
            return None
        request = next(self._requests)
        if frontend is None or not client.ask(request, number, model_id, budget_ms):
            self.monitor.not_asked()
            return None
        models = self.models_of(model_id)
        due_at_ms = self.now_ms + budget_ms + GRACE_MS
        is_easy = (
            (due_at_ms < self._easy_until_ms and budget_ms >= ENOUGH_MS * len(models))
            or (
                due_at_ms < self._roomy_until_ms
                and budget_ms >= self._room_ms * len(models)
                and self._share == 1.0
            )
        ) and not (self.is_doubtful(model_id) or self.may_yield(request))
        asked_at_ms, slept_ms = self.now_ms, frontend.slept_ms
        self.monitor.asked(
            Asked(request, model_id, models, client, frontend, asked_at_ms, budget_ms, slept_ms, is_easy)
        )
        if self._cancels.random() < self.shape.cancels:
            cancel_at_ms = self.now_ms + self._cancels.random() * budget_ms
            self.at(cancel_at_ms, partial(client.when_running, partial(self._cancel, client, request)))
        return request

    def _cancel(self, client: ClientProcess, request: int) -> None:
        if not self.monitor.fate_of(request):
            self.monitor.cancelled(request)
            client.cancel(request)

    def _look_for_active(self) -> None:
        if all(one.core is None for one in self.schedulers_alive()):
            raise Violated("no standby has taken over")

    def _look_for_stuck(self) -> None:
        stuck = [process.place for process in self.processes if process.is_stopped]
        if stuck:
            raise Violated(f"{stuck} stand still for {STUCK_MS / 1e3:g} s, and nobody ends them")

    def _settle(self) -> None:
        self._wait_until_settled(SETTLE_WITHIN_MS, "it does not recover")

    def _wait_until_settled(self, within_ms: float, what: str) -> None:
        until_ms = self.now_ms + within_ms
        while self.is_disturbed or (problem := unsettled(self)):
            if self.now_ms >= until_ms:
                problem = "" if self.is_disturbed else problem
                raise Violated(f"{what} within {within_ms / 1e3:g} s: {problem}")
            if self.is_disturbed:
                until_ms = self.now_ms + within_ms
            self._run_until(self.now_ms + 50.0)

    @property
    def is_disturbed(self) -> bool:
        """Whether something still goes wrong by the script."""
        return (
            any(process.is_stopped for process in self.processes)
            or self._faults.are_ending
            or self.changes.are_under_way
            or any(path.disturbed_until_ms > self.now_ms for path in self.network.paths)
            or len(self.schedulers) < self.shape.schedulers
            or any(one.disk_fails_until_ms > self.now_ms for one in self.schedulers.values())
            or any(host.agent is None or host.slower != 1.0 for host in self.hosts)
            or any(max(host.disk_fails_until_ms, host.raises_until_ms) > self.now_ms for host in self.hosts)
            or len(self.by_number) < self.shape.frontends
            or any(client is None for client in self.clients)
        )

    def _serve_again(self) -> None:
        """Who asks for what can be served is served, at the latest after a few seconds of asking."""
        self._easy_until_ms = math.inf
        for number in range(ROUNDS):
            self._load(f"{self.script.seed}/afterwards/{number}", ROUND_MS)
            self._run_until(self.now_ms + ROUND_MS + 2.5 * self.shape.slo_ms)
            lost = self.monitor.not_served
            if self.monitor.serves(self._share):
                return
        raise Violated(f"all is well for a while, and {lost}")

    @property
    def _share(self) -> float:
        """Of what is easy to serve this is served at least."""
        return 1.0 if self.shape.batching in {"tenuto", "eager"} else SHARE_OF_OTHERS

    def _probe(self) -> None:
        """Each client gets an answer of each model by each frontend.

        Where a discipline leaves a device idle until two models want it, they are asked one after the other.
        """
        is_one_by_one = self._share < 1.0
        served = {one: is_served for one, is_served in self.changes.served.items() if is_served is not None}
        if self.shape.application and all(served.get(one) for one in self.models_of(APPLICATION)):
            served[APPLICATION] = True
        asked = []
        for client in range(self.shape.clients):
            for frontend in range(self.shape.frontends):
                for model_id in served:
                    request = self._ask(client, frontend, model_id, 2_000.0)
                    if request is None:
                        raise Violated(f"client {client} is not connected to frontend {frontend}")
                    asked.append((request, model_id))
                    self._run_until(self.now_ms + 40.0)
                    while is_one_by_one and not self.monitor.fate_of(request):
                        self._run_until(self.now_ms + 40.0)
        self._run_until(self.now_ms + 2_500.0)
        for request, model_id in asked:
            fate, expected = self.monitor.fate_of(request), ANSWER if served[model_id] else "ModelNotFound"
            if fate not in {expected, "Cancelled"} and not (fate == "Overloaded" and self.may_yield(request)):
                raise Violated(f"all is well, and request {request} of {model_id} ends as {fate}")
        problem = unsettled(self)
        if problem:
            raise Violated(f"after the last answer {problem}")

    def _run_until(self, until_ms: float) -> None:
        happening = self._happening
        look_at_ms = self.now_ms + LOOK_EVERY_MS
        while happening and happening[0][0] <= until_ms:
            at_ms, order, callback = heapq.heappop(happening)
            if order > STEPS_MAX:
                raise Violated("there is no end of events")
            self.now_ms = at_ms
            if at_ms >= look_at_ms:
                look_at_ms = at_ms + LOOK_EVERY_MS
                self.monitor.look_at_tables()
            callback()
        self.now_ms = until_ms

    def _delays(self, one: str, other: str) -> tuple[float, float]:
        draws = random.Random(f"{self.script.seed}/{one}/{other}")
        return self.shape.delay_ms * draws.uniform(0.5, 1.0), self.shape.delay_ms * draws.uniform(0.0, 0.5)


def play(script: Script) -> Monitor:
    """One history; raises what went wrong."""
    with _quiet():
        return World(script).play()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
