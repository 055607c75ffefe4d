"""What is not as it should be once nothing goes wrong any more: whom each role knows, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fabric.messages import SliceSpec, SliceState
from roles.scheduler.fleet import Fleet
from tests.chaos.virtual.processes.links import VirtualPeers, VirtualPush

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.chaos.virtual.processes.base import Process
    from tests.chaos.virtual.processes.roles import (
        AgentProcess,
        FrontendProcess,
        SchedulerProcess,
        WorkerProcess,
    )
    from tests.chaos.virtual.world import World


def unsettled(world: World) -> str:
    """The first thing found; empty: all is well."""
    return next(_problems(world), "")


def names_of(processes: Iterable[Process]) -> set[str]:
    """As peers know them: the role, and which start of it this is."""
    return {f"{one.place}/{one.incarnation}" for one in processes}


def _problems(world: World) -> Iterator[str]:
    active = [scheduler for scheduler in world.schedulers_alive() if scheduler.replica.core is not None]
    if len(active) != 1:
        yield f"{[scheduler.place for scheduler in active]} are active"
        return
    (scheduler,) = active
    core = scheduler.core
    assert core is not None, "it is active"
    fleet = core._fleet
    yield from _of_standing(world, scheduler)
    frontends = world.frontends_alive()
    listed = {str(peer) for peer, _ in fleet.frontends.values()}
    living = names_of(frontends)
    if listed != living:
        yield f"frontends {sorted(listed)} are listed, {sorted(living)} live"
    agents = names_of(world.agents_alive())
    if {str(peer) for peer in fleet.nodes.values()} != agents:
        yield f"nodes {sorted(map(str, fleet.nodes.values()))} are known, {sorted(agents)} live"
    for record in fleet.slices.values():
        if not record.is_ready:
            yield f"{record.spec.slice_id} is {record.state}: {record.reason}"
        if record.is_fenced:
            yield f"{record.spec.slice_id} is fenced, though its agent has granted the epoch"
        if record.flights:
            yield f"{record.spec.slice_id} has batches in flight"
    if core._batches.flights:
        yield "batches are in flight of no slice"
    for model_id in fleet.replicas:
        if core._discipline.queued(model_id):
            yield f"{core._discipline.queued(model_id)} requests wait for {model_id}"
    workers = world.workers_alive()
    hosted = sorted(_hosting(spec) for worker in workers for spec in worker.devices.specs.values())
    planned = sorted(_hosting(record.spec) for record in fleet.slices.values())
    if hosted != planned:
        yield f"{hosted} are hosted, {planned} planned"
    yield from world.changes.lacking(fleet)
    yield from world.answers_due.unsettled()
    for frontend in frontends:
        yield from _of_frontend(frontend, scheduler, fleet)
    for agent in world.agents_alive():
        yield from _of_agent(agent)
    for worker in workers:
        yield from _of_worker(worker, scheduler)
    for one in world.schedulers_alive():
        yield from _of_links(world, one)
    for process in world.processes:
        for end in process.ends:
            if isinstance(end, VirtualPeers):
                yield from _of_routes(process.place, end, world)


def _hosting(spec: SliceSpec) -> tuple[str, list[str]]:
    return str(spec.slice_id), sorted(str(model.model_id) for model in spec.models)


def _of_routes(place: str, end: VirtualPeers, world: World) -> Iterator[str]:
    """Half of a connection whose other end has vanished is there until somebody says something."""
    connected = {str(wire.name) for wire in world.network.wires if wire.far is end}
    routes = end._routes
    for kept in (routes._routes, routes._peers.values(), *routes._names.values()):
        if gone := {str(peer) for peer in kept} - connected:
            yield f"{place} keeps routes to {sorted(gone)}, who are gone"


def _of_standing(world: World, active: SchedulerProcess) -> Iterator[str]:
    others = names_of(one for one in world.schedulers_alive() if one is not active)
    told = {str(peer) for peer, report in active.replica._standbys.items() if report.has_plan}
    if told != others:
        yield f"{sorted(told)} have the plan, {sorted(others)} stand by"
    newest = active.shell._kept.newest
    living = names_of(world.frontends_alive())
    for one in world.schedulers_alive():
        known = set(map(str, one.replica._frontends))
        if known != living:
            yield f"{one.place} knows the frontends {sorted(known)}, {sorted(living)} live"
        if one is active or newest is None:
            continue
        kept = one.shell._kept.newest
        if kept is None or (kept.epoch, kept.number) != (newest.epoch, newest.number):
            had = None if kept is None else (kept.epoch, kept.number)
            yield f"{one.place} has the plan {had}, the active one {(newest.epoch, newest.number)}"
    for host in world.hosts:
        if (host.lease.epoch, host.lease.holder_id) != (active.replica.epoch, active.place):
            yield f"{host.node.node_id} has granted {host.lease}, and {active.place} has {active.replica.epoch}"


def _of_frontend(frontend: FrontendProcess, active: SchedulerProcess, fleet: Fleet) -> Iterator[str]:
    core, shell = frontend.shell._core, frontend.shell
    pending = core._pending
    ready = {
        (record.spec.slice_id, record.incarnation) for record in fleet.slices.values() if record.is_ready
    }
    if shell._shards[0].active != active.number:
        yield f"{frontend.place} goes by scheduler {shell._shards[0].active}, not {active.number}"
    assert isinstance(shell._slices, VirtualPush), "all its links are virtual"
    known = {(one.slice_id, one.incarnation) for one in core._shards.links[0].known._slices.values()}
    if known != ready:
        yield f"{frontend.place} knows the slices {sorted(known)}, not {sorted(ready)}"
    if not set(map(str, shell._slices.targets)) <= {slice_id for slice_id, _ in known}:
        yield f"{frontend.place} has connections to {sorted(shell._slices.targets)}, and knows {sorted(known)}"
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


def _of_agent(agent: AgentProcess) -> Iterator[str]:
    """An agent ends workers that are not ready in time, so it has to know that they are."""
    hosted = {slice_id for worker in agent.host.workers.values() for slice_id in worker.devices.specs}
    ready = {str(one.slice_id) for one in agent.core._reports.alive() if one.state is SliceState.READY}
    if ready != hosted:
        yield f"{agent.place} takes {sorted(ready)} for ready, {sorted(hosted)} are hosted"


def _of_worker(worker: WorkerProcess, active: SchedulerProcess) -> Iterator[str]:
    core = worker.shell._core
    if core._registration.epoch != active.replica.epoch:
        yield f"{worker.place} obeys epoch {core._registration.epoch}, not {active.replica.epoch}"
    if len(core._early) or len(worker.shell._payloads):
        yield f"{worker.place} keeps {len(core._early)} early inputs, {len(worker.shell._payloads)} payloads"
    for slice_ in core._slices.values():
        if len(slice_.queue):
            yield f"{slice_.spec.slice_id} has {len(slice_.queue)} batches"
    frontends = worker.world.frontends_alive()
    living = {(str(one.shell._id), one.incarnation) for one in frontends}
    known = {(str(one.frontend_id), one.incarnation) for one in core._frontends}
    if known != living:
        yield f"{worker.place} knows the frontends {sorted(known)}, {sorted(living)} live"


def _of_links(world: World, scheduler: SchedulerProcess) -> Iterator[str]:
    living = {str(wire.name) for wire in world.network.wires if not wire.near.owner.is_dead and wire.name}
    watched = {str(peer) for peer in scheduler.shell._heard._liveness._watched}
    if watched - living:
        yield f"{scheduler.place} watches {sorted(watched - living)}, who are dead"
