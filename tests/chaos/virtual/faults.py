"""Does what a script says goes wrong (docs/testing.md says what each word means)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from roles.runtime.process_events import StopAsked
from tests.chaos.virtual.processes.base import Process
from tests.chaos.virtual.processes.clients import ClientProcess
from tests.chaos.virtual.processes.roles import (
    AgentProcess,
    FrontendProcess,
    Host,
    SchedulerProcess,
    WorkerProcess,
)
from tests.chaos.virtual.script import ACTIVE, ALL, Fault

if TYPE_CHECKING:
    from tests.chaos.virtual.world import World

SLOWER: Final = 8.0
_OF_DEVICES: Final = frozenset({"slow", "raise", "break", "hang"})


class Faults:
    """Those of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._replaced: set[Process] = set()
        self._ending: list[Process] = []

    @property
    def are_ending(self) -> bool:
        """Whether somebody who was told to end has not ended."""
        return any(not process.is_dead for process in self._ending)

    def strike(self, fault: Fault) -> None:
        """Now."""
        world = self._world
        if fault.kind not in {"restart", "change", "disk", *_OF_DEVICES}:
            world.drained.clear()
        if fault.kind not in {"kill", "restart", "change", "disk", *_OF_DEVICES}:
            world.are_clocks_sure = False
        if fault.kind not in {"cut", "pause", "delay", "change", *_OF_DEVICES}:
            world.are_leases_sure = False
        if fault.kind == "disk":
            world.changes.may_be_lost()
        if fault.kind == "change":
            world.changes.ask(fault.whom)
            return
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
            case "vanish":
                self._vanish(process, fault.for_ms)
            case "restart":
                self._restart(process, fault.for_ms)
            case "pause":
                process.stop_for(fault.for_ms, does_clock_stop=False)
            case "sleep":
                process.stop_for(fault.for_ms, does_clock_stop=True)
            case "disk":
                until_ms = world.now_ms + fault.for_ms
                if isinstance(process, AgentProcess):
                    process.host.disk_fails_until_ms = until_ms
                elif isinstance(process, SchedulerProcess):
                    process.disk_fails_until_ms = until_ms
            case "slow":
                assert isinstance(process, AgentProcess)
                host = process.host
                host.slower = SLOWER
                world.at(world.now_ms + fault.for_ms, lambda: setattr(host, "slower", 1.0))
            case "raise":
                assert isinstance(process, AgentProcess)
                process.host.raises_until_ms = world.now_ms + fault.for_ms
            case "break" | "hang":
                assert isinstance(process, WorkerProcess)
                devices = process.devices
                process.when_running(devices.break_down if fault.kind == "break" else devices.hang)
            case _:
                raise AssertionError(fault)

    # ------------------------------------------------------------ what is between two roles

    def _strike_path(self, fault: Fault) -> None:
        other = self._find(fault.whom)
        for one in self._find_all(fault.who):
            if other is not None and one is not other:
                self._strike_between(fault, one, other)

    def _strike_between(self, fault: Fault, one: Process, other: Process) -> None:
        world = self._world
        match fault.kind:
            case "reset" | "lose":
                for wire in world.network.between(one.place, other.place):
                    wire.break_off(is_all_lost=fault.kind == "lose")
            case "cut":
                world.network.cut(one.place, other.place, fault.for_ms)
            case "full":
                if "client" not in fault.who:  # an answer that its client does not read has been given
                    path = world.network.path(one.place, other.place)
                    path.full_until_ms = world.now_ms + fault.for_ms
            case "delay":
                if "client" not in fault.who:  # the longer way is the client's, and no frontend knows of it
                    path = world.network.path(one.place, other.place)
                    path.slower_ms, path.slower_until_ms = 25.0, world.now_ms + fault.for_ms
            case _:
                raise AssertionError(fault)

    # ------------------------------------------------------------ who

    def _find(self, who: str) -> Process | None:
        found = self._find_all(who)
        return found[0] if found else None

    def _find_all(self, who: str) -> Sequence[Process]:
        world = self._world
        role, _, number = who.partition(":")
        living: dict[str, list[Any]] = {
            "scheduler": world.schedulers_alive(),
            "frontend": world.frontends_alive(),
            "agent": world.agents_alive(),
            "worker": world.workers_alive(),
            "client": world.clients,
        }
        found = [one for one in living[role] if one is not None]
        if number == ACTIVE:
            found.sort(key=lambda one: one.core is None)
            return found[:1]
        return found if number == ALL or not found else [found[int(number or 0) % len(found)]]

    # ------------------------------------------------------------ ends, and new starts

    def _restart(self, process: Process, after_ms: float) -> None:
        """In order: SIGTERM."""
        was_disturbed = self._world.is_disturbed
        self._ending.append(process)
        match process:
            case AgentProcess(stops=stops) | SchedulerProcess(stops=stops):
                process.when_running(lambda: stops.post(StopAsked()))
            case FrontendProcess(stops=stops, number=number):
                if not was_disturbed:
                    self._world.drained[number] = self._world.now_ms, process
                process.when_running(lambda: stops.post(StopAsked()))
            case WorkerProcess():
                process.stop()
                return  # its agent starts another one
            case _:
                process.when_running(process.end)
        self._when_dead(process, lambda: self._start_again(process, after_ms))

    def _vanish(self, process: Process, for_ms: float) -> None:
        world = self._world
        if isinstance(process, WorkerProcess):
            agent = process.host.agent
            if agent is None:
                return
            process = agent
        process.vanish(for_ms)
        if isinstance(process, FrontendProcess):
            for client in world.clients:
                if client is not None:
                    client.notice_silence_of(process.number)
        self._start_again(process, for_ms)

    def _when_dead(self, process: Process, then: Callable[[], None]) -> None:
        world = self._world
        if process.is_dead:
            then()
        else:
            world.at(world.now_ms + 5.0, lambda: self._when_dead(process, then))

    def _start_again(self, process: Process, after_ms: float) -> None:
        """Its place is empty, and taken again so much later."""
        world = self._world
        if process in self._replaced:
            return
        self._replaced.add(process)
        at_ms = world.now_ms + after_ms
        match process:
            case SchedulerProcess(number=number):
                del world.schedulers[number]
                world.at(at_ms, lambda: world.start_scheduler(number))
            case FrontendProcess(number=number):
                del world.by_number[number]
                world.at(at_ms, lambda: world.start_frontend(number))
            case AgentProcess(host=Host() as host):
                world.at(at_ms, lambda: world.start_agent(host))
            case ClientProcess(number=number):
                world.clients[number] = None
                world.at(at_ms, lambda: world.start_client(number))
            case _:
                pass  # workers are started by their agent
