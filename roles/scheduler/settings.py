"""What a scheduler must know before it starts: the models, the planned slices, the delays of the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import BatchId, ModelId, NodeId, SliceId
from fabric.messages import InterferenceOption, InterferenceSpec, ModelSpec, SliceSpec
from policies.batching.base import Delay
from policies.placement.common.base import GpuSlot, Placement, PlannedModel, PlannedSlice
from policies.placement.common.request_checks import require_pipelines
from profiles.device_model import DeviceModel, without_profile
from roles.config.cluster import ClusterConfig, ModelConfig
from roles.runtime.core import SCHEDULER_ID

BATCH_SIZE_UNPROFILED = 32  # the largest bucket a real device warms up where no profile says more

NO_DELAY = Delay()
FIRST_BATCH_ID = BatchId(1)


class SchedulerSettings(Struct, frozen=True):
    """What a scheduler starts with.

    `slices` are in order of rank, low ones are filled first: those that fewest models share, then by GPU.
    `hints`: the plan's target batch and weight.
    """

    models: tuple[ModelSpec, ...]
    slices: tuple[tuple[NodeId, SliceSpec], ...]
    delay: Delay = NO_DELAY
    priorities: Mapping[ModelId, int] = field(default_factory=dict)
    hints: Mapping[tuple[SliceId, ModelId], tuple[int | None, float]] = field(default_factory=dict)
    unplaced: Mapping[ModelId, str] = field(default_factory=dict)
    """Models that no slice hosts, with the reason."""
    guard_ms: float = 0.0
    """What to think of our own timer's lateness before it was measured."""
    transfer_ms: float = 0.0
    """What inputs take besides the configured delay before that was measured."""
    role_id: str = SCHEDULER_ID
    pid: int = 0
    first_batch_id: BatchId = FIRST_BATCH_ID
    """What it counts batches from. Those of a former scheduler may still be under way, and must not be meant."""


def settings_from(
    config: ClusterConfig, placement: Placement | None = None, pid: int = 0
) -> SchedulerSettings:
    """Place the models (unless a placement is given) and write down what the scheduler needs of it.

    Raises ConfigError where a planned model can neither be loaded nor emulated on its GPU, and where batching
    is `fixed` and neither its options nor the plan say how large a batch is.
    """
    placement = placement or config.place()
    _check_fixed(config, placement)
    require_pipelines(placement.slices, config.gpus)
    unrated = {m.model_id for planned in placement.slices for m in planned.models if not m.rate_rps}
    gpus = {gpu.index: gpu for gpu in config.gpus}
    devices = {gpu_type: config.device_model(gpu_type) for gpu_type in config.gpu_types}
    slices: list[tuple[NodeId, SliceSpec]] = []
    hints: dict[tuple[SliceId, ModelId], tuple[int | None, float]] = {}
    seen: Counter[int] = Counter()
    for planned in sorted(placement.slices, key=lambda planned: planned.gpu):
        gpu = gpus[planned.gpu]
        slice_id = SliceId(f"{gpu.node_id}/gpu{gpu.local_index}/{seen[planned.gpu]}")
        seen[planned.gpu] += 1
        slices.append((gpu.node_id, slice_spec(config, planned, gpu, devices[gpu.gpu_type], slice_id)))
        for model in planned.models:
            if model.batch is not None or model.rate_rps:
                hints[slice_id, model.model_id] = (model.batch, _weight(model, unrated))
    # A model that can go elsewhere leaves the slice it shares to those that cannot (ADR 0011).
    slices.sort(key=lambda ranked: len(ranked[1].models))
    hosted = {model.model_id for planned in placement.slices for model in planned.models}
    return SchedulerSettings(
        models=tuple(_model_spec(model) for model in config.models),
        slices=tuple(slices),
        delay=Delay(config.network.control_ms, config.network.data_ms_per_item),
        priorities={model.model_id: model.priority for model in config.models},
        hints=hints,
        unplaced={
            unplaced.model_id: unplaced.reason
            for unplaced in placement.unplaced
            if unplaced.model_id not in hosted
        },
        pid=pid,
    )


def _check_fixed(config: ClusterConfig, placement: Placement) -> None:
    if config.batching.name != "fixed" or "batch" in config.batching.options:
        return
    without = [m.model_id for planned in placement.slices for m in planned.models if m.batch is None]
    if without:
        raise ConfigError(
            f"batching.fixed: there is no batch size for {without[0]}: write batching: "
            "{fixed: {batch: 8}}, or choose a placement that plans one"
        )


def _weight(model: PlannedModel, unrated: set[ModelId]) -> float:
    """How much of its model's load a replica takes: the plan's share, else in proportion to its batch.

    The latter is what the thesis' router does with every plan (thesis section 4.3.3): one batch a turn.
    """
    if model.model_id not in unrated and model.rate_rps:
        return model.rate_rps
    return float(model.batch or 1)


def slice_spec(
    config: ClusterConfig, planned: PlannedSlice, gpu: GpuSlot, device: DeviceModel, slice_id: SliceId
) -> SliceSpec:
    """A planned slice as its agent is told. Raises ConfigError as `settings_from` does."""
    stages = len(planned.gpus)
    models = tuple(
        _bounded(
            _model_spec(config.model(model.model_id), gpu, device.exec_table, planned.share_percent, stages),
            model.batch_max,
        )
        for model in planned.models
    )
    first = gpu.index - gpu.local_index  # of the node, whose GPUs are numbered through
    following = tuple(other - first for other in planned.following)
    is_gang = _is_gang(config, planned)
    named, interference = config.interference, None
    if gpu.is_emulated and named.name != "none":
        options = tuple(InterferenceOption(option, value) for option, value in named.options.items())
        interference = InterferenceSpec(named.name, options)
    return SliceSpec(
        slice_id, gpu.local_index, gpu.device, planned.share_percent, models, interference, following, is_gang
    )


def _is_gang(config: ClusterConfig, planned: PlannedSlice) -> bool:
    """Whether its model runs in ranks, a GPU each. Raises ConfigError where it has not the slice for itself."""
    loaders = {model.model_id: config.model(model.model_id).loader for model in planned.models}
    ranked = [model_id for model_id, loader in loaders.items() if loader is not None and loader.ranks]
    if ranked and len(loaders) > 1:
        raise ConfigError(
            f"model {ranked[0]} runs in ranks (loader.ranks) and needs its slice for itself, but the placement puts {len(loaders)} models there"
        )
    return bool(ranked)


def _bounded(spec: ModelSpec, batch_max: int | None) -> ModelSpec:
    """The model as a slice runs it whose plan holds for batches up to that size only."""
    if batch_max is None or batch_max >= spec.batch_size_max:
        return spec
    stages_ms = tuple(table[:batch_max] for table in spec.stages_ms)
    return replace(spec, batch_size_max=batch_max, exec_ms=spec.exec_ms[:batch_max], stages_ms=stages_ms)


def _model_spec(
    model: ModelConfig,
    gpu: GpuSlot | None = None,
    exec_table: Callable[[ModelId, float | None], tuple[float, ...]] | None = None,
    share_percent: float | None = None,
    stages: int = 1,
) -> ModelSpec:
    """The model as one GPU hosts it, or so many; `gpu` None: as the scheduler knows it before anything hosts it."""
    profile = None if gpu is None else model.find_profile(gpu.gpu_type)
    if gpu is not None and gpu.is_emulated and profile is None:
        raise ConfigError(without_profile(model.model_id, gpu.gpu_type))
    if gpu is not None and not gpu.is_emulated and not model.has_loader:
        raise ConfigError(f"model {model.name} has no loader: a {gpu.device} device cannot load it")
    if gpu is not None and model.loader is not None and model.loader.stages not in (0, stages):
        raise ConfigError(
            f"model {model.name} must be cut into {model.loader.stages} stages (loader.stages), but the placement puts it "
            f"on {'one GPU' if stages == 1 else f'a pipeline of {stages} GPUs'}"
        )
    ranks = 0 if model.loader is None else model.loader.ranks
    if gpu is not None and ranks not in (0, stages):
        raise ConfigError(
            f"model {model.name} runs in {ranks} ranks (loader.ranks), but the placement puts it on "
            f"{'one GPU' if stages == 1 else f'{stages} GPUs'}; each rank needs one of its own"
        )
    stages_ms: tuple[tuple[float, ...], ...] = ()
    exec_ms: tuple[float, ...] = ()
    if profile is not None and exec_table is not None:
        if stages == 1 or ranks:  # a profile of a model in ranks is of all of them together
            exec_ms = exec_table(model.model_id, share_percent)
        elif stages in profile.cuts:  # else it is a real device's, which measures for itself
            stages_ms = profile.stage_tables(stages)
            exec_ms = tuple(sum(times) for times in zip(*stages_ms, strict=True))
    memory_bytes = (
        (model.memory_bytes or 0) if profile is None else (model.memory_bytes or profile.memory_bytes(1))
    )
    return ModelSpec(
        model.model_id,
        model.slo_ms,
        BATCH_SIZE_UNPROFILED if profile is None else profile.batch_size_max,
        model.loader,
        exec_ms,
        -(-memory_bytes // stages),
        "" if profile is None else profile.ref,
        model.run_limit_ms,
        model.is_idempotent,
        model.term if gpu is None else 0,
        stages_ms,
        model.heads,
        model.merge,
    )
