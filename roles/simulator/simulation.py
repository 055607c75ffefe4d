"""A configuration, played in virtual time: what `tenuto simulate` shows and `tenuto goodput` asks again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from fabric.errors import ConfigError, ProfileError
from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import GpuInfo
from profiles.device_model import without_profile
from roles.config.cluster import ClusterConfig
from roles.scheduler.build import scheduler_core
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.settings import SchedulerSettings, settings_from
from roles.simulator.applications import (
    ApplicationPlay,
    application_outcomes,
    played_applications,
    with_stages,
)
from roles.simulator.fast_world import FastWorld
from roles.simulator.full_world import FullWorld
from roles.simulator.hardware import SimulatedHardware, SimulatedNode
from roles.simulator.network import Network, NetworkModel
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import Workload
from roles.workload.outcomes import (
    BatchRecord,
    GpuUse,
    Outcome,
    Window,
    batch_sizes_in,
    gpu_use,
    model_outcome,
)

REQUESTS_MAX = 50_000_000  # 24 bytes each are kept to the end: 1.2 GB
COOLDOWN_SLOS = 2.0  # load goes on behind the window for so long, so that its last requests have company


@dataclass(slots=True)
class SimulatedRun:
    """A finished run: the verdict, and what it was made of."""

    outcome: Outcome
    window: Window
    batches: Sequence[BatchRecord]
    traffic: Sequence[ModelTraffic]
    slices: Sequence[SliceId]
    unplaced: Mapping[ModelId, str] = field(default_factory=dict)
    """Models that nothing hosted at the start, with the reason: all their requests were dropped."""
    log: Sequence[str] = ()
    """What the controller did, where there was one."""
    late_preemptions: int = 0
    """Batches that had ended when their stop came, of the fast simulation: see docs/operate/replay.md."""


@dataclass(slots=True, frozen=True)
class Replanning:
    """The placement follows the load: a plan takes `plan_ms`, a new slice is warm after `start_ms`."""

    controller: ControllerSettings
    start_ms: float = 5_000.0
    plan_ms: float = 1_000.0


def simulate(
    config: ClusterConfig,
    workload: Workload,
    window: Window,
    settings: SchedulerSettings | None = None,
    replanning: Replanning | None = None,
    *,
    is_full: bool = False,
    hardware: SimulatedHardware | None = None,
) -> SimulatedRun:
    """Play `workload` on the cluster of `config` from 0 on, and judge what arrives in the window.

    `settings` spares placing the models again; they go with `replanning`, if the placement is to follow the load.
    `is_full`: with every real core, much slower (`FullWorld`). `hardware`: other devices than the configuration's.
    Raises ConfigError for a run with more requests than memory holds, and ProfileError where a profile is missing.
    """
    slo_ms = max([model.slo_ms for model in config.models] + [one.slo_ms for one in config.applications])
    until_ms = window.until_ms + COOLDOWN_SLOS * slo_ms
    requests = workload.expected(0.0, until_ms)
    if requests > REQUESTS_MAX:
        raise ConfigError(
            f"about {requests:,.0f} requests would come in {until_ms / 1000:,.0f} s, the window and twice the "
            f"longest SLO of {slo_ms:,.10g} ms; a simulated run holds at most {REQUESTS_MAX:,}: "
            "make it shorter, or the SLO or the rate lower"
        )
    if config.shards > 1 and not is_full:
        assert replanning is None, "each shard has a controller of its own"
        return _each_shard(config, workload, window, settings)
    settings = settings or settings_from(config)
    require_run_times(config, workload, settings, until_ms)
    traffic = [
        ModelTraffic(model.model_id, model.slo_ms, arrived_at_ms, priorities, model.head_names)
        for model, arrived_at_ms, priorities in zip(
            config.models, workload.arrivals(until_ms), workload.priorities(until_ms), strict=True
        )
    ]
    hardware = hardware or hardware_of(config, workload.seed)
    if replanning is not None:
        hardware = replace(hardware, start_ms=replanning.start_ms, plan_ms=replanning.plan_ms)
    planning = None if replanning is None else replanning.controller
    parts = [shard_settings(settings, config, shard) for shard in range(config.shards)]
    cores = [scheduler_core(part, config.batching, planning) for part in parts]
    played = played_applications(config, workload, until_ms)
    world = (
        FullWorld(cores, hardware, traffic, played)
        if is_full
        else FastWorld(
            cores[0], hardware, traffic, ApplicationPlay(played, config.frontends) if played else None
        )
    )
    with _collector_paused():
        world.run()
    sizes = batch_sizes_in(world.batches, window)
    models = {
        one.model_id: model_outcome(
            one.arrived_at_ms, one.finished_at_ms, one.slo_ms, window, sizes.get(one.model_id, ())
        )
        for one in traffic
    }
    tallies = world.stage_tallies
    outcome = Outcome(
        window.duration_s,
        models,
        gpu_use(world.batches, len(config.gpus), window),
        application_outcomes(played, tallies, window),
        with_stages(traffic, played, tallies, window, sizes),
        gpus_min=max((len(spec.gpus) for _, spec in settings.slices), default=1),
    )
    # Those that a new plan started come behind, in the order of their first batch.
    slices = [spec.slice_id for _, spec in settings.slices] + [batch.slice_id for batch in world.batches]
    log = [line for core in cores if core.controller is not None for line in core.controller.unlogged]
    return SimulatedRun(
        outcome,
        window,
        world.batches,
        traffic,
        list(dict.fromkeys(slices)),
        settings.unplaced,
        log,
        world.late_preemptions if isinstance(world, FastWorld) else 0,
    )


def require_run_times(
    config: ClusterConfig, workload: Workload, settings: SchedulerSettings, until_ms: float
) -> None:
    """Raise ProfileError where requests come for a model on a slice, and nothing says how long they take there.

    A living cluster has no need of that: there a real device measures for itself.
    """
    asked = {source.model_id for source in workload.sources if source.expected(0.0, until_ms) > 0}
    asked.update(stage.model_id for one in config.applications for stage in one.plan.graph.stages)
    types = {node.node_id: node.gpu_type for node in config.nodes}
    for node_id, spec in settings.slices:
        for model in spec.models:
            if model.exec_ms or model.model_id not in asked:
                continue
            gpu_type = types[node_id]
            if config.model(model.model_id).find_profile(gpu_type) is None:
                raise ProfileError(without_profile(model.model_id, gpu_type))
            stages = 1 + len(spec.following)
            raise ProfileError(
                f"model {model.model_id} is cut into {stages} stages, and its profile for GPU type {gpu_type} has no times of them: "
                f"measure them with `tenuto profile {model.model_id} --file FILE --stages {stages}`, or write profile.stages"
            )


def _each_shard(
    config: ClusterConfig, workload: Workload, window: Window, settings: SchedulerSettings | None
) -> SimulatedRun:
    """One after the other: nothing that happens in one changes what happens in another.

    Frontends take all shards' requests, but here they are delays, which other requests do not change.
    """
    runs = []
    for shard in range(config.shards):
        own = config.of_shard(shard)
        part = None if settings is None else shard_settings(settings, config, shard)
        run = simulate(own, workload.of([model.model_id for model in own.models]), window, part)
        runs.append(run)
    return merged_runs(config, window, runs)


def merged_runs(config: ClusterConfig, window: Window, runs: Sequence[SimulatedRun]) -> SimulatedRun:
    """The shards' runs as that of the cluster: models in the order of the file, GPUs as it numbers them."""
    index_of = {(gpu.node_id, gpu.local_index): gpu.index for gpu in config.gpus}
    own_gpus = [config.of_shard(shard).gpus for shard in range(config.shards)]
    numbers = [[index_of[gpu.node_id, gpu.local_index] for gpu in gpus] for gpus in own_gpus]
    busy = [0.0] * len(config.gpus)
    for shard, run in enumerate(runs):
        for number, fraction in zip(numbers[shard], run.outcome.gpus.busy_fraction, strict=True):
            busy[number] = fraction
    of_model = {model_id: gpus for run in runs for model_id, gpus in run.outcome.gpus.of_model.items()}
    models = {model_id: one for run in runs for model_id, one in run.outcome.models.items()}
    traffic = {one.model_id: one for run in runs for one in run.traffic}
    outcome = Outcome(
        window.duration_s,
        {model.model_id: models[model.model_id] for model in config.models},
        GpuUse(tuple(busy), of_model),
        gpus_min=max(run.outcome.gpus_min for run in runs),
    )
    batches = [
        batch._replace(
            gpu=numbers[shard][batch.gpu],
            stages=tuple((numbers[shard][gpu], start, end) for gpu, start, end in batch.stages),
        )
        for shard, run in enumerate(runs)
        for batch in run.batches
    ]
    return SimulatedRun(
        outcome,
        window,
        sorted(batches, key=lambda batch: batch.finished_at_ms),
        [traffic[model.model_id] for model in config.models],
        [slice_id for run in runs for slice_id in run.slices],
        {model_id: reason for run in runs for model_id, reason in run.unplaced.items()},
        [line for run in runs for line in run.log],
        sum(run.late_preemptions for run in runs),
    )


def shard_settings(settings: SchedulerSettings, config: ClusterConfig, shard: int) -> SchedulerSettings:
    """What one shard's scheduler starts with, of what all together would."""
    if config.shards == 1:
        return settings
    own = config.of_shard(shard)
    names = {model.model_id for model in own.models}
    nodes = {node.node_id for node in own.nodes}
    slices = tuple(one for one in settings.slices if one[0] in nodes)
    ids = {spec.slice_id for _, spec in slices}
    return replace(
        settings,
        models=tuple(model for model in settings.models if model.model_id in names),
        slices=slices,
        priorities={model_id: one for model_id, one in settings.priorities.items() if model_id in names},
        hints={key: hint for key, hint in settings.hints.items() if key[0] in ids},
        unplaced={model_id: one for model_id, one in settings.unplaced.items() if model_id in names},
        first_batch_id=BatchId((shard << 33) + settings.first_batch_id),
    )


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for cycles meanwhile: a run makes none, and looking at all that lives took a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def hardware_of(config: ClusterConfig, seed: int) -> SimulatedHardware:
    """The nodes, GPUs and network of a configuration; every device is emulated, whatever it is in reality."""
    nodes = []
    for node in config.nodes:
        infos = [GpuInfo(gpu, node.gpu_type, "emulated", node.memory_bytes) for gpu in range(node.gpus)]
        devices = (config.device_model(node.gpu_type),) * node.gpus
        nodes.append(SimulatedNode(node.node_id, tuple(infos), devices, node.shard))
    network = config.network
    modelled = NetworkModel(
        network.control_ms, network.data_ms_per_item, network.result_ms, network.jitter_ms
    )
    return SimulatedHardware(tuple(nodes), Network(modelled, seed), config.frontends)
