"""What always holds, whatever goes wrong: checked at every event that it concerns, in full when all is quiet again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final

from fabric.ids import BatchId, Epoch, ModelId
from fabric.link import Received
from fabric.messages import EpochGranted, Inputs, RunBatch
from fabric.messages import Host as HostMessage
from roles.gpu_worker.executors.base import Job
from roles.node_agent.lease import LeaseRecord
from tests.chaos.virtual.processes.devices import output_of, request_of
from tests.chaos.virtual.violated import Violated

if TYPE_CHECKING:
    from tests.chaos.virtual.processes.clients import ClientProcess
    from tests.chaos.virtual.processes.network import End, Owner, Wire
    from tests.chaos.virtual.processes.roles import FrontendProcess, Host, SchedulerProcess, WorkerProcess
    from tests.chaos.virtual.world import World

ANSWER: Final = "answer"
REFUSALS: Final = frozenset({"DeadlineExceeded", "NoReplica", "Overloaded", "WorkerLost"})
"""What may be said of any request while something goes wrong."""
GRACE_MS: Final = 50.0
"""After its deadline a request has its answer, or its frontend does not run."""
LATE_START_MS: Final = 5.0
"""After the loosest deadline of a batch, while clocks and ways are as they should be, it does not start any more."""


@dataclass
class Asked:
    """A request, on the world's clock."""

    number: int
    name: ModelId
    """Of a model, or of an application."""
    models: Sequence[ModelId]
    """That model, or the application's, in the order in which the request goes through them."""
    client: ClientProcess
    frontend: FrontendProcess
    """Who was asked last."""
    asked_at_ms: float
    budget_ms: float
    slept_ms: float
    is_easy: bool = False
    """Nothing went wrong since all was well, or does before its deadline: it is answered."""
    is_cancelled: bool = False
    is_asked_again: bool = False
    """Another frontend was asked too."""
    has_failed: bool = False
    """A model raised on it, or broke its batch, of which it may not run again."""
    unwanted_at_ms: float = math.inf
    """Since when nobody waits for it: it has its fate, its client cancelled it, or was killed."""
    runs: Counter[int] = field(default_factory=Counter)
    """How often each of them ran it."""
    fate: str = ""
    """Empty: none yet."""


class Monitor:
    """Of one history."""

    def __init__(self, world: World) -> None:
        self.fates: Counter[str] = Counter()
        self.easy = 0
        self.not_served: list[str] = []
        """How many easy requests ended, and what became of those that were not answered, since `serves` was asked last."""
        self._world = world
        self._asked: dict[int, Asked] = {}
        self._elected: dict[Epoch, SchedulerProcess] = {}
        self._commands: dict[BatchId, tuple[Epoch, Epoch, int, float]] = {}
        """By batch: the epoch of who sent it, and the one that its worker had heard of from its agent when it read that; of how many requests; when it expires."""
        self._obeyed: dict[Owner, Epoch] = {}
        """By worker: which epoch its agent named last."""
        self._inputs_sent_at_ms: dict[BatchId, float] = {}
        """By batch: when the first of its inputs were sent."""

    # ------------------------------------------------------------ requests

    def asked(self, one: Asked) -> None:
        """A client sent it; its answer is due, and looked for."""
        self._asked[one.number] = one
        self._world.at(self._due_at_ms(one), lambda: self._look(one))

    def asked_again(self, request: int, frontend: FrontendProcess) -> None:
        """Its client lost the frontend that had it, and sent it to that one."""
        one = self._asked[request]
        one.frontend, one.slept_ms, one.is_asked_again = frontend, frontend.slept_ms, True

    def cancelled(self, request: int) -> None:
        """Its client wants no answer any more."""
        one = self._asked[request]
        one.is_cancelled, one.unwanted_at_ms = True, self._world.now_ms

    def not_asked(self) -> None:
        """There was no connection, and its client knows."""
        self.fates["not sent"] += 1

    def answered(self, request: int | None, name: object, output: Sequence[float]) -> None:
        """A client has an answer."""
        one = self._of(request, name)
        expected = [reduce(output_of, one.models, float(one.number))] * self._world.copies(one.name)
        if list(output) != expected:
            raise Violated(f"request {request} of {one.name} is answered {output}, not {expected}")
        self._settle(one, ANSWER)

    def refused(self, request: int | None, name: object, code: str) -> None:
        """A client has a refusal."""
        one = self._of(request, name)
        is_possible = {
            "Cancelled": one.is_cancelled,
            "Internal": one.has_failed,
            "ModelNotFound": self._world.is_doubtful(one.name),
        }.get(code, code in REFUSALS)
        if not is_possible:
            raise Violated(f"request {request} of {one.name} is refused as {code}")
        self._settle(one, code)

    def serves(self, share: float) -> bool:
        """Whether at least that share of the easy requests was answered since the last call."""
        is_enough = len(self.not_served) <= (1.0 - share) * self.easy
        self.easy = 0
        self.not_served = []
        return is_enough

    def cut_off(self, request: int, place: int) -> None:
        """Its connection to that frontend broke."""
        one = self._asked[request]
        if self._world.ended_in_order_ms(place):
            raise Violated(f"{one.frontend.place} ended in order, and left request {request} unanswered")
        self._settle(one, "PeerLost")

    def client_gone(self, request: int, *, is_told: bool) -> None:
        """Nobody waits for it any more. `is_told`: its connection was closed."""
        one = self._asked[request]
        if is_told:
            one.unwanted_at_ms = min(one.unwanted_at_ms, self._world.now_ms)
        self._settle(one, "client gone")

    def fate_of(self, request: int) -> str:
        """What became of it; empty: nothing yet."""
        return self._asked[request].fate

    def _of(self, request: int | None, name: object) -> Asked:
        if request is None:
            raise Violated(f"a second answer, or one to nobody: {name}")
        return self._asked[request]

    def _settle(self, one: Asked, fate: str) -> None:
        if one.fate:
            raise Violated(f"request {one.number} was {one.fate}, and is {fate}")
        if one.is_easy and fate != "client gone" and not one.is_cancelled:
            self.easy += 1
            if fate != ANSWER:
                self.not_served.append(f"request {one.number} of {one.name} is {fate}")
        one.fate = fate
        if fate in REFUSALS | {ANSWER, "Cancelled", "Internal"}:
            one.unwanted_at_ms = min(one.unwanted_at_ms, self._world.now_ms)
        self.fates[fate] += 1

    def _due_at_ms(self, one: Asked) -> float:
        frontend = one.frontend
        deadline_at_ms = one.asked_at_ms + one.budget_ms + frontend.slept_ms - one.slept_ms
        path = self._world.network.path(one.client.place, frontend.place)
        runs_at_ms = max(
            frontend.resumed_at_ms,
            one.client.resumed_at_ms,
            path.cut_until_ms,
            one.client.silent_until_ms[frontend.number],
        )
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
        also_active = [
            other.place
            for other in self._world.schedulers_alive()
            if other is not scheduler
            and other.core is not None
            and not (other.is_stopped or other.replica._election.is_leaving)
        ]
        if also_active and self._world.are_leases_sure:
            raise Violated(f"{scheduler.place} is active, and so are {also_active}")
        hosts = self._world.hosts
        granted = [host for host in hosts if host.lease.epoch >= epoch]
        needed = len(hosts) // 2 + 1 if self._world.shape.schedulers > 1 else 1
        if len(granted) < needed:
            raise Violated(f"{scheduler.place} has epoch {epoch}, which {len(granted)} agents granted")

    def commanded(self, worker: Owner, epoch: Epoch) -> None:
        """A scheduler sends a batch: to a worker that has said that it obeys, or it would come back."""
        obeyed = self._obeyed.get(worker, Epoch(0))
        if obeyed < epoch:
            raise Violated(
                f"{worker.place} is sent a batch of epoch {epoch}, and has heard of {obeyed} alone"
            )

    def read(self, wire: Wire, end: End, sent_at_ms: float, received: Received) -> None:
        """A process reads a message."""
        message, epoch = received.message, received.epoch
        self._world.answers_due.read(wire, end.owner, epoch, message)
        if isinstance(message, HostMessage | EpochGranted):
            self._obeyed[end.owner] = Epoch(message.epoch)
        elif isinstance(message, RunBatch):
            granted = sum(run.count for part in message.parts for run in part.runs)
            expires_at_ms = self._world.now_ms + message.expires_in_ms
            self._commands[message.batch_id] = epoch, self._obeyed[end.owner], granted, expires_at_ms
        elif isinstance(message, Inputs):
            self._inputs_sent_at_ms.setdefault(message.batch_id, sent_at_ms)

    def runs(self, worker: WorkerProcess, job: Job, values: Sequence[float], began_at_ms: float) -> None:
        """A device starts a batch with those inputs, or did so at that moment of its process's clock."""
        epoch, obeyed, granted, expires_at_ms = self._commands[job.batch_id]
        if epoch != obeyed:
            raise Violated(f"{worker.place} obeys epoch {epoch}, and was told {obeyed}")
        spec = worker.devices.specs[job.slice_id]
        size = sum(part.count for part in job.parts)
        largest = {model.model_id: model.batch_size_max for model in spec.models}
        if not 0 < size <= largest.get(job.model_id, 0):
            raise Violated(f"{job.slice_id} runs {size} of {job.model_id}, which fits {largest}")
        if worker.devices.runs_on(job.slice_id):
            raise Violated(f"{job.slice_id} runs two batches")
        if len(values) != size:
            raise Violated(f"{job.slice_id} runs {size} requests with the inputs {values}")
        asked = [(self._asked[request], place) for request, place in map(request_of, values)]
        for one, place in asked:
            self._run(one, place, job)
        start_at_ms = self._world.now_ms - (worker.now_ms() - began_at_ms)
        due_at_ms = max(one.asked_at_ms + one.budget_ms for one, _ in asked)
        # A batch expires with the loosest deadline that it was granted with, be that one cancelled since.
        if size < granted:
            due_at_ms = max(due_at_ms, expires_at_ms)
        late_ms = start_at_ms - due_at_ms
        if late_ms > LATE_START_MS and self._world.are_clocks_sure:
            raise Violated(f"{job.slice_id} starts {values} {late_ms:.1f} ms after their deadlines")

    def fails(self, values: Sequence[float]) -> None:
        """A batch with those inputs has no outputs: its model raises, or its device is gone."""
        for value in values:
            request, place = request_of(value)
            one = self._asked[request]
            runs_once = one.models[place] in self._world.run_once
            one.has_failed |= runs_once or len(values) == 1

    def _run(self, one: Asked, place: int, job: Job) -> None:
        if self._inputs_sent_at_ms[job.batch_id] > self._known_unwanted_at_ms(one):
            raise Violated(f"request {one.number}, which nobody wanted any more, runs ({one.fate})")
        if one.models[place] != job.model_id:
            raise Violated(f"request {one.number} of {one.name} runs as {job.model_id} after {place}")
        one.runs[place] += 1
        most = self._world.copies(one.name) if place else 1
        if one.runs[place] > most and job.model_id in self._world.run_once:
            raise Violated(f"request {one.number} of {one.name} runs {one.runs[place]} times")

    def _known_unwanted_at_ms(self, one: Asked) -> float:
        """When its frontend knows that at the latest, if nothing is in its way."""
        path = self._world.network.path(one.client.place, one.frontend.place)
        since_ms = one.unwanted_at_ms
        is_disturbed = max(path.disturbed_until_ms, one.frontend.resumed_at_ms) > since_ms
        if one.is_asked_again or one.fate == "PeerLost" or is_disturbed or one.frontend.is_stopped:
            return math.inf
        return since_ms + self._world.client_way_ms + 1.0

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

    def look_at_tables(self) -> None:
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
