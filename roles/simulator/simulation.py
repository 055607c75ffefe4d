"""A configuration, played in virtual time: what `tenuto simulate` shows and `tenuto goodput` asks again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fabric.errors import ConfigError
from fabric.ids import ModelId, SliceId
from fabric.messages import GpuInfo
from roles.config.cluster import ClusterConfig
from roles.scheduler.build import scheduler_core
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.settings import SchedulerSettings, settings_from
from roles.simulator.fast_world import FastWorld
from roles.simulator.full_world import FullWorld
from roles.simulator.hardware import SimulatedHardware, SimulatedNode
from roles.simulator.network import Network, NetworkModel
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import Workload
from roles.workload.outcomes import BatchRecord, Outcome, Window, batch_sizes_in, busy_gpus, model_outcome

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
    """Batches that had ended when their stop came, of the fast simulation: see docs/replay.md."""


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
    slo_ms = max(model.slo_ms for model in config.models)
    until_ms = window.until_ms + COOLDOWN_SLOS * slo_ms
    requests = workload.expected(0.0, until_ms)
    if requests > REQUESTS_MAX:
        raise ConfigError(
            f"about {requests:,.0f} requests would come in {until_ms / 1000:,.0f} s, the window and twice the "
            f"longest SLO of {slo_ms:,.10g} ms; a simulated run holds at most {REQUESTS_MAX:,}: "
            "make it shorter, or the SLO or the rate lower"
        )
    settings = settings or settings_from(config)
    traffic = [
        ModelTraffic(model.model_id, model.slo_ms, arrived_at_ms, priorities)
        for model, arrived_at_ms, priorities in zip(
            config.models, workload.arrivals(until_ms), workload.priorities(until_ms), strict=True
        )
    ]
    hardware = hardware or hardware_of(config, workload.seed)
    core = scheduler_core(settings, config.batching)
    if replanning is not None:
        core = scheduler_core(settings, config.batching, replanning.controller)
        hardware = replace(hardware, start_ms=replanning.start_ms, plan_ms=replanning.plan_ms)
    world = FullWorld(core, hardware, traffic) if is_full else FastWorld(core, hardware, traffic)
    with _collector_paused():
        world.run()
    sizes = batch_sizes_in(world.batches, window)
    busy_fraction, used_gpus = busy_gpus(world.batches, len(config.gpus), window)
    models = {
        one.model_id: model_outcome(
            one.arrived_at_ms, one.finished_at_ms, one.slo_ms, window, sizes.get(one.model_id, ())
        )
        for one in traffic
    }
    outcome = Outcome(window.duration_s, models, busy_fraction, used_gpus)
    # Those that a new plan started come behind, in the order of their first batch.
    slices = [spec.slice_id for _, spec in settings.slices] + [batch.slice_id for batch in world.batches]
    log = () if core.controller is None else tuple(core.controller.unlogged)
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
        nodes.append(SimulatedNode(node.node_id, tuple(infos), devices))
    network = config.network
    modelled = NetworkModel(
        network.control_ms, network.data_ms_per_item, network.result_ms, network.jitter_ms
    )
    return SimulatedHardware(tuple(nodes), Network(modelled, seed), config.frontends)
