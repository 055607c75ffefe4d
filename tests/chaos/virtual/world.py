"""One history: a cluster comes up, requests come, a script goes wrong, and all is well again."""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from fabric.ids import BatchId, Incarnation, ModelId, scheduler_id
from roles.config.read_config import parse_config
from roles.runtime.environment import RunDir
from roles.runtime.process_events import StopAsked
from roles.scheduler.planning.saved_plan import Begun
from roles.scheduler.planning.start_config import Written
from roles.simulator.simulation import hardware_of
from tests.chaos.virtual.monitor import Monitor, Violated
from tests.chaos.virtual.network import Network
from tests.chaos.virtual.process import Process
from tests.chaos.virtual.processes import (
    AgentProcess,
    ClientProcess,
    FrontendProcess,
    Host,
    SchedulerProcess,
    WorkerProcess,
)
from tests.chaos.virtual.script import ALL, FAULTY_MS, Fault, Script, Shape

BOOT_WITHIN_MS: Final = 3_000.0
SETTLE_WITHIN_MS: Final = 20_000.0
LOOK_EVERY_MS: Final = 250.0
_STOP: Final = StopAsked()
STEPS_MAX: Final = 400_000
"""Events of one history: more are a loop that feeds itself."""
ALPHA_MS, BETA_MS, BATCH_MAX = 1.0, 6.0, 8
MEMORY_MB = 900


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
        self.by_number: dict[int, FrontendProcess] = {}
        self.schedulers: dict[int, SchedulerProcess] = {}
        """Those that run, by number."""
        self.network = Network(self, random.Random(f"{script.seed}/network"), self._delays)
        self.monitor = Monitor(self)
        self.network.opened = self.monitor.read
        self._clocks = random.Random(f"{script.seed}/clocks")
        self._happening: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._replaced: set[Process] = set()
        self._ending: list[Process] = []
        self._incarnations = count(1)
        self._requests = count(1)
        self._batch_ids = random.Random(f"{script.seed}/batches")
        self.written = _written(json.dumps(_document(shape)))
        self.hosts = [Host(node) for node in hardware_of(self.written.config, 1).nodes]

    # ------------------------------------------------------------ for the processes

    def at(self, at_ms: float, callback: Callable[[], object]) -> None:
        """Call back at that moment."""
        heapq.heappush(self._happening, (max(at_ms, self.now_ms), next(self._order), callback))

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

    # ------------------------------------------------------------ a history

    def play(self) -> Monitor:
        """Raises Violated, or what a role raised."""
        try:
            self._boot()
            began_ms = self.now_ms
            self._load(began_ms)
            for fault in self.script.faults:
                self.at(began_ms + fault.at_ms, partial(self._strike, fault))
            self._run_until(began_ms + FAULTY_MS + 200.0)
            self._settle()
            self._probe()
        finally:
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

    def _load(self, began_ms: float) -> None:
        draws = random.Random(f"{self.script.seed}/load")
        at_ms = began_ms
        while (at_ms := at_ms + draws.expovariate(self.shape.rate_rps) * 1e3) < began_ms + FAULTY_MS + 150.0:
            model_id = ModelId(f"m{draws.randrange(self.shape.models)}")
            client, frontend = draws.randrange(self.shape.clients), draws.randrange(self.shape.frontends)
            budget_ms = self.shape.slo_ms * draws.choice((1.0, 1.0, 0.5, 2.0))
            burst = draws.choice((1, 1, 1, 5))
            for _ in range(burst):
                self.at(
                    at_ms,
                    partial(self._ask, client, frontend, model_id, budget_ms),
                )

    def _ask(
        self, client_number: int, frontend_number: int, model_id: ModelId, budget_ms: float
    ) -> int | None:
        client, frontend = self.clients[client_number], self.by_number.get(frontend_number)
        if client is None or client.is_stopped:
            return None
        request = next(self._requests)
        if frontend is None or not client.ask(request, frontend_number, model_id, budget_ms):
            self.monitor.not_asked()
            return None
        self.monitor.asked(request, client, frontend, budget_ms)
        return request

    def _settle(self) -> None:
        self._wait_until_settled(SETTLE_WITHIN_MS, "it does not recover")

    def _wait_until_settled(self, within_ms: float, what: str) -> None:
        until_ms = self.now_ms + within_ms
        while self._is_disturbed() or (problem := self.monitor.unsettled()):
            if self.now_ms >= until_ms:
                problem = "" if self._is_disturbed() else problem
                raise Violated(f"{what} within {within_ms / 1e3:g} s: {problem}")
            if self._is_disturbed():
                until_ms = self.now_ms + within_ms
            self._run_until(self.now_ms + 50.0)

    def _is_disturbed(self) -> bool:
        """Whether something still goes wrong by the script."""
        return (
            any(process.is_stopped for process in self.processes)
            or any(not process.is_dead for process in self._ending)
            or any(path.disturbed_until_ms > self.now_ms for path in self.network.paths)
            or len(self.schedulers) < self.shape.schedulers
            or any(host.agent is None or host.slower != 1.0 for host in self.hosts)
            or len(self.by_number) < self.shape.frontends
            or any(client is None for client in self.clients)
        )

    def _probe(self) -> None:
        """Each client gets an answer of each model by each frontend."""
        self._run_until(self.now_ms + 600.0)  # the longest pause before a client tries to connect again
        asked = []
        for client in range(self.shape.clients):
            for frontend in range(self.shape.frontends):
                for model in range(self.shape.models):
                    request = self._ask(client, frontend, ModelId(f"m{model}"), 2_000.0)
                    if request is None:
                        raise Violated(f"client {client} is not connected to frontend {frontend}")
                    asked.append(request)
                    self._run_until(self.now_ms + 40.0)
        self._run_until(self.now_ms + 2_500.0)
        fates = [self.monitor.fate_of(request) for request in asked]
        if any(fate != "answer" for fate in fates):
            raise Violated(f"all is well, and requests end as {fates}")
        problem = self.monitor.unsettled()
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
                self.monitor.bounded()
            callback()
        self.now_ms = until_ms

    def _delays(self, one: str, other: str) -> tuple[float, float]:
        draws = random.Random(f"{self.script.seed}/{one}/{other}")
        return self.shape.delay_ms * draws.uniform(0.5, 1.0), self.shape.delay_ms * draws.uniform(0.0, 0.5)

    # ------------------------------------------------------------ faults

    def _strike(self, fault: Fault) -> None:
        if fault.whom:
            self._strike_path(fault)
            return
        process = self._find(fault.who)
        if process is None:
            return
        match fault.kind:
            case "kill":
                process.kill()
                self._start_again(process, fault.for_ms)
            case "restart":
                self._restart(process, fault.for_ms)
            case "pause":
                process.stop_for(fault.for_ms, does_clock_stop=False)
            case "sleep":
                process.stop_for(fault.for_ms, does_clock_stop=True)
            case "slow":
                assert isinstance(process, AgentProcess)
                host = process.host
                host.slower = 8.0
                self.at(self.now_ms + fault.for_ms, lambda: setattr(host, "slower", 1.0))
            case _:
                raise AssertionError(fault)

    def _strike_path(self, fault: Fault) -> None:
        other = self._find(fault.whom)
        for one in self._find_all(fault.who):
            if other is not None and one is not other:
                self._strike_between(fault, one, other)

    def _strike_between(self, fault: Fault, one: Process, other: Process) -> None:
        match fault.kind:
            case "reset" | "lose":
                for wire in self.network.between(one.place, other.place):
                    wire.break_off(is_all_lost=fault.kind == "lose")
            case "cut":
                self.network.cut(one.place, other.place, fault.for_ms)
            case "full":
                if "client" not in fault.who:  # an answer that its client does not read has been given
                    self.network.path(one.place, other.place).full_until_ms = self.now_ms + fault.for_ms
            case "delay":
                if "client" not in fault.who:  # the longer way is the client's, and no frontend knows of it
                    path = self.network.path(one.place, other.place)
                    path.slower_ms, path.slower_until_ms = 25.0, self.now_ms + fault.for_ms
            case _:
                raise AssertionError(fault)

    def _find(self, who: str) -> Process | None:
        found = self._find_all(who)
        return found[0] if found else None

    def _find_all(self, who: str) -> Sequence[Process]:
        role, _, number = who.partition(":")
        workers = [worker for host in self.hosts for worker in host.workers.values()]
        living: dict[str, list[Any]] = {
            "scheduler": self.schedulers_alive(),
            "frontend": self.frontends_alive(),
            "agent": self.agents_alive(),
            "worker": workers,
            "client": self.clients,
        }
        found = [one for one in living[role] if one is not None]
        return found if number == ALL or not found else [found[int(number or 0) % len(found)]]

    def _restart(self, process: Process, after_ms: float) -> None:
        """In order: SIGTERM."""
        self._ending.append(process)
        match process:
            case AgentProcess():
                process.when_running(lambda: process.stops.post(_STOP))
                self._when_dead(process, lambda: self._start_again(process, after_ms))
            case WorkerProcess():
                process.when_running(lambda: process.ended(0))
            case _:
                process.when_running(process.end)
                self._when_dead(process, lambda: self._start_again(process, after_ms))

    def _when_dead(self, process: Process, then: Callable[[], None]) -> None:
        if process.is_dead:
            then()
        else:
            self.at(self.now_ms + 5.0, lambda: self._when_dead(process, then))

    def _start_again(self, process: Process, after_ms: float) -> None:
        """Its place is empty, and taken again so much later."""
        if process in self._replaced:
            return
        self._replaced.add(process)
        match process:
            case SchedulerProcess():
                number = process.number
                del self.schedulers[number]
                self.at(self.now_ms + after_ms, lambda: self._start_scheduler(number))
            case FrontendProcess():
                number = next(number for number, one in self.by_number.items() if one is process)
                del self.by_number[number]
                self.at(self.now_ms + after_ms, lambda: self._start_frontend(number))
            case AgentProcess(host=host):
                self.at(self.now_ms + after_ms, lambda: self._start_agent(host))
            case ClientProcess():
                number = self.clients.index(process)
                self.clients[number] = None
                self.at(self.now_ms + after_ms, lambda: self._start_client(number))
            case _:
                pass  # workers are started by their agent

    def _start_scheduler(self, number: int) -> None:
        self.schedulers[number] = SchedulerProcess(self, number)

    def _start_frontend(self, number: int) -> None:
        self.by_number[number] = FrontendProcess(self, number)

    def _start_agent(self, host: Host) -> None:
        AgentProcess(self, host)

    def _start_client(self, number: int) -> None:
        self.clients[number] = ClientProcess(self, number)


def _document(shape: Shape) -> dict[str, Any]:
    profile = {"alpha_ms": ALPHA_MS, "beta_ms": BETA_MS, "max_batch": BATCH_MAX}
    return {
        "models": [
            {
                "name": f"m{number}",
                "slo_ms": shape.slo_ms,
                "rate_rps": shape.rate_rps,
                "profile": profile,
                "memory_mb": MEMORY_MB // shape.models,
            }
            for number in range(shape.models)
        ],
        "cluster": {
            "nodes": [
                {
                    "host": chr(97 + node),
                    "gpus": shape.gpus,
                    "memory_gb": 1,
                    "workers_outlive_agent": shape.outlives,
                }
                for node in range(shape.nodes)
            ],
            "frontends": shape.frontends,
            "schedulers": shape.schedulers,
        },
        "batching": shape.batching,
    }


class _Planned(Written):
    """Its first plan is made once: all histories of one shape begin with it."""

    __slots__ = ()

    def first_plan(self) -> Begun:
        return _first_plan(json.dumps(self.document))


@cache
def _written(text: str) -> _Planned:
    document = json.loads(text)
    return _Planned(parse_config(document, Path()), document, Path())


@cache
def _first_plan(text: str) -> Begun:
    return Written.first_plan(_written(text))


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
