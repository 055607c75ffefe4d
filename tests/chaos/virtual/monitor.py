"""What always holds, whatever goes wrong: checked at every event that it concerns, in full when all is quiet again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fabric.ids import BatchId, Epoch
from fabric.messages import EpochGranted, Parcel, RunBatch
from fabric.messages import Host as HostMessage
from roles.gpu_worker.executors.base import Job
from roles.node_agent.lease import LeaseRecord
from roles.scheduler.fleet import Fleet

if TYPE_CHECKING:
    from tests.chaos.virtual.network import End, Owner, Wire
    from tests.chaos.virtual.process import Process
    from tests.chaos.virtual.processes import FrontendProcess, Host, SchedulerProcess, WorkerProcess
    from tests.chaos.virtual.world import World

GRACE_MS: Final = 50.0
"""After its deadline a request has its answer, or its frontend does not run."""


class Violated(AssertionError):
    """Something that always holds did not."""


@dataclass
class Asked:
    """A request, on the world's clock."""

    number: int
    client: Process
    frontend: Process
    asked_at_ms: float
    budget_ms: float
    slept_ms: float
    fate: str = ""
    """Empty: none yet."""


class Monitor:
    """Of one history."""

    def __init__(self, world: World) -> None:
        self.fates: Counter[str] = Counter()
        self._world = world
        self._asked: dict[int, Asked] = {}
        self._elected: dict[Epoch, SchedulerProcess] = {}
        self._commands: dict[BatchId, tuple[Epoch, Epoch]] = {}
        """By batch: the epoch of who sent it, and the one that its worker had heard of from its agent when it read that."""
        self._told: dict[Owner, Epoch] = {}

    # ------------------------------------------------------------ requests

    def asked(self, number: int, client: Process, frontend: Process, budget_ms: float) -> None:
        """A client sent it; its answer is due, and looked for."""
        world = self._world
        one = self._asked[number] = Asked(
            number, client, frontend, world.now_ms, budget_ms, frontend.slept_ms
        )
        world.at(self._due_at_ms(one), lambda: self._look(one))

    def not_asked(self) -> None:
        """There was no connection, and its client knows."""
        self.fates["not sent"] += 1

    def answered(self, request: int | None, name: object, code: str) -> None:
        """A client heard of it."""
        if request is None:
            raise Violated(f"a second answer, or one to nobody: {name} {code}")
        self._settle(self._asked[request], code or "answer")

    def cut_off(self, request: int) -> None:
        """Its connection broke."""
        self._settle(self._asked[request], "PeerLost")

    def client_gone(self, request: int) -> None:
        """Nobody waits for it any more."""
        self._settle(self._asked[request], "client gone")

    def fate_of(self, request: int) -> str:
        """What became of it; empty: nothing yet."""
        return self._asked[request].fate

    def _settle(self, one: Asked, fate: str) -> None:
        if one.fate:
            raise Violated(f"request {one.number} was {one.fate}, and is {fate}")
        one.fate = fate
        self.fates[fate] += 1

    def _due_at_ms(self, one: Asked) -> float:
        frontend = one.frontend
        deadline_at_ms = one.asked_at_ms + one.budget_ms + frontend.slept_ms - one.slept_ms
        path = self._world.network.path(one.client.place, frontend.place)
        runs_at_ms = max(frontend.resumed_at_ms, one.client.resumed_at_ms, path.cut_until_ms)
        if one.asked_at_ms < max(
            frontend.resumed_at_ms, path.cut_until_ms
        ):  # of a client's first messages nobody knows how long they waited
            runs_at_ms += one.budget_ms
        return max(deadline_at_ms, runs_at_ms) + GRACE_MS + 2 * self._world.client_way_ms

    def _look(self, one: Asked) -> None:
        if one.fate:
            return
        for process in (one.frontend, one.client):
            if process.is_stopped:
                process.when_running(lambda: self._look(one))
                return
        due_at_ms = self._due_at_ms(one)
        if due_at_ms > self._world.now_ms:
            self._world.at(due_at_ms, lambda: self._look(one))
            return
        late_ms = self._world.now_ms - one.asked_at_ms - one.budget_ms
        raise Violated(f"request {one.number} has no answer {late_ms:.1f} ms after its deadline")

    # ------------------------------------------------------------ commands and devices

    def granted(self, host: Host, record: LeaseRecord) -> None:
        """An agent writes an epoch down."""
        if record.epoch <= host.lease.epoch:
            raise Violated(f"{host.node.node_id} grants {record} after {host.lease}")

    def elected(self, scheduler: SchedulerProcess, epoch: Epoch) -> None:
        """A scheduler takes itself for the active one."""
        holder = self._elected.setdefault(epoch, scheduler)
        if holder is not scheduler:
            raise Violated(f"{holder.place} and {scheduler.place} both have epoch {epoch}")
        hosts = self._world.hosts
        granted = [host for host in hosts if host.lease.epoch >= epoch]
        needed = len(hosts) // 2 + 1 if self._world.shape.schedulers > 1 else 1
        if len(granted) < needed:
            raise Violated(f"{scheduler.place} has epoch {epoch}, which {len(granted)} agents granted")

    def read(self, wire: Wire, end: End, sent_at_ms: float, epoch: Epoch, parcels: Sequence[Parcel]) -> None:
        """A process reads messages of that epoch."""
        del wire, sent_at_ms
        for parcel in parcels:
            message = parcel.body
            if isinstance(message, HostMessage | EpochGranted):
                self._told[end.owner] = Epoch(message.epoch)
            elif isinstance(message, RunBatch):
                self._commands[message.batch_id] = epoch, self._told[end.owner]

    def runs(self, worker: WorkerProcess, job: Job) -> None:
        """A device starts a batch."""
        epoch, told = self._commands[job.batch_id]
        if epoch != told:
            raise Violated(f"{worker.place} obeys epoch {epoch}, and was told {told}")
        spec = worker.devices.specs[job.slice_id]
        size = sum(part.count for part in job.parts)
        largest = {model.model_id: model.batch_size_max for model in spec.models}
        if not 0 < size <= largest.get(job.model_id, 0):
            raise Violated(f"{job.slice_id} runs {size} of {job.model_id}, which fits {largest}")
        if any(running.job.slice_id == job.slice_id for running in worker.devices._running):
            raise Violated(f"{job.slice_id} runs two batches")

    def loaded(self, worker: WorkerProcess) -> None:
        """Everything that is on a GPU now fits into it."""
        used: Counter[int] = Counter()
        for other in worker.host.workers.values():
            for spec in other.devices.specs.values():
                used[spec.gpu] += sum(model.memory_bytes for model in spec.models)
        for info in worker.host.node.gpus:
            if used[info.gpu] > info.memory_bytes:
                raise Violated(f"{used[info.gpu]} bytes on a GPU of {info.memory_bytes}")

    # ------------------------------------------------------------ tables

    def bounded(self) -> None:
        """Nobody keeps more than there can be."""
        world = self._world
        for frontend in world.frontends_alive():
            pending = len(frontend.shell._core._pending)
            if len(frontend.shell._payloads) > pending + 64:
                raise Violated(
                    f"{frontend.place} keeps {len(frontend.shell._payloads)} payloads for {pending}"
                )
        for core in (scheduler.core for scheduler in world.schedulers.values()):
            for record in () if core is None else core._fleet.slices.values():
                if len(record.flights) > 2:
                    raise Violated(f"{record.spec.slice_id} has {len(record.flights)} batches in flight")

    def unsettled(self) -> str:
        """What is not as it should be when nothing goes wrong any more; empty: all is."""
        for problem in self._problems():
            return problem
        return ""

    def _problems(self) -> Iterator[str]:
        world = self._world
        active = [scheduler for scheduler in world.schedulers_alive() if scheduler.replica.core is not None]
        if len(active) != 1:
            yield f"{[scheduler.place for scheduler in active]} are active"
            return
        (scheduler,) = active
        core = scheduler.core
        assert core is not None, "it is active"
        fleet = core._fleet
        yield from self._of_standing(scheduler)
        frontends = {frontend.place: frontend for frontend in world.frontends_alive()}
        listed = {str(peer) for peer, _ in fleet.frontends.values()}
        living = {f"{place}/{frontend.incarnation}" for place, frontend in frontends.items()}
        if listed != living:
            yield f"frontends {sorted(listed)} are listed, {sorted(living)} live"
        agents = {f"{agent.place}/{agent.incarnation}" for agent in world.agents_alive()}
        if {str(peer) for peer in fleet.nodes.values()} != agents:
            yield f"nodes {sorted(map(str, fleet.nodes.values()))} are known, {sorted(agents)} live"
        for record in fleet.slices.values():
            if not record.is_ready:
                yield f"{record.spec.slice_id} is {record.state}: {record.reason}"
            if record.flights:
                yield f"{record.spec.slice_id} has batches in flight"
        if core._batches.flights:
            yield "batches are in flight of no slice"
        for model_id in fleet.replicas:
            if core._discipline.queued(model_id):
                yield f"{core._discipline.queued(model_id)} requests wait for {model_id}"
        workers = [worker for host in world.hosts for worker in host.workers.values()]
        hosted = sorted(slice_id for worker in workers for slice_id in worker.devices.specs)
        if hosted != sorted(map(str, fleet.slices)):
            yield f"{hosted} are hosted, {sorted(fleet.slices)} planned"
        for frontend in frontends.values():
            yield from self._of_frontend(frontend, scheduler, fleet)
        for worker in workers:
            yield from self._of_worker(worker, scheduler)
        for one in world.schedulers_alive():
            yield from self._of_links(one)

    def _of_standing(self, active: SchedulerProcess) -> Iterator[str]:
        others = {
            f"{one.place}/{one.incarnation}" for one in self._world.schedulers_alive() if one is not active
        }
        told = {str(peer) for peer, report in active.replica._standbys.items() if report.has_plan}
        if told != others:
            yield f"{sorted(told)} have the plan, {sorted(others)} stand by"
        newest = active.shell._kept.newest
        living = {f"{one.place}/{one.incarnation}" for one in self._world.frontends_alive()}
        for one in self._world.schedulers_alive():
            known = set(map(str, one.replica._frontends))
            if known != living:
                yield f"{one.place} knows the frontends {sorted(known)}, {sorted(living)} live"
            if one is active or newest is None:
                continue
            kept = one.shell._kept.newest
            if kept is None or (kept.epoch, kept.number) != (newest.epoch, newest.number):
                had = None if kept is None else (kept.epoch, kept.number)
                yield f"{one.place} has the plan {had}, the active one {(newest.epoch, newest.number)}"
        for host in self._world.hosts:
            if (host.lease.epoch, host.lease.holder_id) != (active.replica.epoch, active.place):
                yield f"{host.node.node_id} has granted {host.lease}, and {active.place} has {active.replica.epoch}"

    def _of_frontend(
        self, frontend: FrontendProcess, active: SchedulerProcess, fleet: Fleet
    ) -> Iterator[str]:
        core, shell = frontend.shell._core, frontend.shell
        pending = core._pending
        ready = {
            (record.spec.slice_id, record.incarnation) for record in fleet.slices.values() if record.is_ready
        }
        if shell._shards[0].active != active.number:
            yield f"{frontend.place} goes by scheduler {shell._shards[0].active}, not {active.number}"
        known = {(one.slice_id, one.incarnation) for one in core._shards.links[0].known._slices.values()}
        if known != ready:
            yield f"{frontend.place} knows the slices {sorted(known)}, not {sorted(ready)}"
        if not core._shards.are_linked:
            yield f"{frontend.place} is not linked"
        kept = [
            pending._by_client,
            pending._bytes_by_client,
            pending._by_seq,
            pending._by_slice,
            core._requests._decoding,
        ]
        if len(pending) or any(kept) or pending.size_bytes:
            yield f"{frontend.place} keeps {len(pending)} requests, {kept}"
        if len(shell._payloads):
            yield f"{frontend.place} keeps {len(shell._payloads)} payloads"
        if any(model.replicas == 0 for model in core.models):
            yield f"{frontend.place} knows no replica of a model"

    def _of_worker(self, worker: WorkerProcess, active: SchedulerProcess) -> Iterator[str]:
        core = worker.shell._core
        if core._registration.epoch != active.replica.epoch:
            yield f"{worker.place} obeys epoch {core._registration.epoch}, not {active.replica.epoch}"
        if len(core._early) or len(worker.shell._payloads):
            yield f"{worker.place} keeps {len(core._early)} early inputs, {len(worker.shell._payloads)} payloads"
        for slice_ in core._slices.values():
            if len(slice_.queue):
                yield f"{slice_.spec.slice_id} has {len(slice_.queue)} batches"

    def _of_links(self, scheduler: SchedulerProcess) -> Iterator[str]:
        world = self._world
        living = {str(wire.name) for wire in world.network.wires if not wire.near.owner.is_dead and wire.name}
        watched = {str(peer) for peer in scheduler.shell._heard._liveness._watched}
        if watched - living:
            yield f"{scheduler.place} watches {sorted(watched - living)}, who are dead"
