"""A scheduler's figures as metrics; read when somebody asks for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fabric.ids import ModelId
from fabric.messages import PlanReport, SchedulerStanding
from roles.runtime.metrics import catalog
from roles.runtime.metrics.snapshot import MS, Measured, buckets_of
from roles.scheduler.dispatch.batches import Batches
from roles.scheduler.fleet import Fleet
from roles.scheduler.measured_rates import Tallies


def measured_standing(standing: SchedulerStanding) -> Iterator[Measured]:
    """Whether it is the active one; a standby has no more than this."""
    yield Measured(catalog.ACTIVE, (), float(standing.state == "active"))
    yield Measured(catalog.EPOCH, (), standing.epoch)
    yield Measured(catalog.TAKEOVERS, (), standing.takeovers)
    yield Measured(catalog.LEASES, (), standing.agents_granted)
    yield Measured(catalog.STANDBYS, (), len(standing.standbys))


def measured_batches(fleet: Fleet, batches: Batches, plan: PlanReport | None) -> Iterator[Measured]:
    """What an active scheduler knows of models, slices and its plan."""
    recorder = batches.recorder
    recorder.keep_slices(set(fleet.slices))
    for (model_id, reason), count in recorder.reasons.items():
        yield Measured(catalog.BATCHES, (model_id, reason), count)
    for model_id, sizes in recorder.sizes.items():
        yield Measured(catalog.BATCH_SIZE, (model_id,), buckets_of(sizes, 1.0))
    for (model_id, reason), count in recorder.drops.items():
        yield Measured(catalog.DROPS, (model_id, reason), count)
    yield from _models(fleet, batches)
    yield from _slices(fleet)
    for (slice_id, model_id), busy_ms in recorder.busy_ms.items():
        yield Measured(catalog.SLICE_BUSY, (slice_id, model_id), busy_ms * MS)
    for (slice_id, status), count in recorder.ends.items():
        yield Measured(catalog.SLICE_BATCHES, (slice_id, status), count)
    for (node_id, gpu), busy_ms in recorder.gpu_busy_ms.items():
        yield Measured(catalog.GPU_BUSY, (node_id, str(gpu)), busy_ms * MS)
    yield Measured(catalog.GUARD, (), batches.counters.guard_ms * MS)
    yield Measured(catalog.FRONTENDS, (), len(fleet.frontends))
    if plan is not None:
        yield from _plan(plan)


def _models(fleet: Fleet, batches: Batches) -> Iterator[Measured]:
    for model_id, slo_ms in fleet.slos_ms.items():
        model = (str(model_id),)
        yield Measured(catalog.SLO, model, slo_ms * MS)
        yield Measured(catalog.REPLICAS, model, fleet.replicas[model_id])
        yield Measured(catalog.QUEUE, model, batches.queued(model_id))
        yield Measured(catalog.RETURNS, model, _returned(batches.tallies, model_id))


def _returned(tallies: Tallies, model_id: ModelId) -> int:
    tally = tallies.get(model_id)
    return 0 if tally is None else tally.returned


def _slices(fleet: Fleet) -> Iterator[Measured]:
    states = Counter(record.state.value for record in fleet.slices.values())
    for state, count in states.items():
        yield Measured(catalog.SLICES, (state,), count)
    for slice_id, record in fleet.slices.items():
        for model_id, speed in record.speeds.items():
            yield Measured(catalog.SLICE_SLOWDOWN, (slice_id, model_id), speed.factor)


def _plan(plan: PlanReport) -> Iterator[Measured]:
    yield Measured(catalog.GPUS, (), plan.gpus)
    yield Measured(catalog.GPUS_ADVISED, (), plan.gpus_advised)
    yield Measured(catalog.MOVES, ("done",), plan.moves_done)
    yield Measured(catalog.MOVES, ("failed",), plan.moves_failed)
    for model in plan.models:
        yield Measured(catalog.RATE, (model.model_id,), model.rate_rps)
        yield Measured(catalog.MODEL_ADVICE, (model.model_id,), model.gpus)
        if model.planned_rps is not None:
            yield Measured(catalog.PLANNED_RATE, (model.model_id,), model.planned_rps)
