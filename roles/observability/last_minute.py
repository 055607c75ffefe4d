"""The last minute of a cluster, played by the simulator: what came then, and what might have come.

Arrivals are those that came, to within a bin of 5 ms. Run times are the profiles', and messages take what the configuration
says; `like_live` makes both what was measured. So a difference between the two is the cluster's, and not the plan's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from fabric.errors import ConfigError, FabricError
from fabric.ids import ModelId
from fabric.messages import GpuRef, SliceSpec
from policies.batching.registry import discipline_options
from policies.placement.common.base import GpuSlot
from profiles.device_model import DeviceModel
from profiles.model import ModelProfile
from roles.config.cluster import ClusterConfig, NetworkConfig, NodeConfig, PolicyChoice
from roles.config.read_config import parse_config
from roles.observability.remembered import BatchSeen
from roles.scheduler.replay_start import settings_of
from roles.scheduler.settings import SchedulerSettings, settings_from
from roles.simulator.hardware import SimulatedHardware
from roles.simulator.simulation import hardware_of, simulate
from roles.workload.arrivals import ArrivalSource, Trace, Workload
from roles.workload.outcomes import Outcome, Window

MINUTE_MS: Final = 60_000.0
REQUESTS_MAX: Final = 40_000
"""Of all models: the newest that many are played, a second or so each time."""
SEED: Final = 1
REPEATED_MS: Final = 5.0
"""As wide as the bins that arrivals are counted in."""
_NOT_RATES: Final = ("rate_rps", "weight", "arrival")

Arrivals = Mapping[ModelId, NDArray[np.float64]]
Slowdown = Mapping[tuple[str, int], Mapping[ModelId, float]]


class Minute(Struct, frozen=True):
    """A situation that can be played. `arrivals`: ascending, in ms from its beginning to `span_ms`.

    `settings`: the slices that there are; None: the models are placed anew. `slowdown`: by GPU (node and number), how many times
    as long as their profiles models run there. `gpus_out`: drained, or not there, so that nothing is placed on them.
    """

    config: ClusterConfig
    settings: SchedulerSettings | None
    arrivals: Arrivals
    span_ms: float
    slowdown: Slowdown = field(default_factory=dict)
    gpus_out: frozenset[GpuRef] = frozenset()

    @property
    def gpus(self) -> list[GpuSlot]:
        """Those that models may be placed on."""
        return [gpu for gpu in self.config.gpus if GpuRef(gpu.node_id, gpu.local_index) not in self.gpus_out]

    @property
    def rates_rps(self) -> Mapping[ModelId, float]:
        """Of each model, the mean."""
        return {model_id: 1e3 * at_ms.size / self.span_ms for model_id, at_ms in self.arrivals.items()}

    def played(self) -> Outcome:
        """What becomes of all requests. Raises FabricError for a situation that cannot be."""
        sources = tuple(
            ArrivalSource(
                model.model_id,
                "trace",
                trace=Trace({model.model_id: self.arrivals.get(model.model_id, np.empty(0))}, 0.0),
            )
            for model in self.config.models
        )
        window = Window(0.0, self.span_ms)
        settings = self.settings or settings_from(self.config, self.config.place(gpus=self.gpus))
        workload = Workload(SEED, sources)
        return simulate(self.config, workload, window, settings, hardware=self._hardware()).outcome

    def _hardware(self) -> SimulatedHardware:
        hardware = hardware_of(self.config, SEED)
        nodes = [
            replace(
                node,
                devices=tuple(
                    self._slowed(device, info.gpu_type, self.slowdown.get((node.node_id, info.gpu), {}))
                    for device, info in zip(node.devices, node.gpus, strict=True)
                ),
            )
            for node in hardware.nodes
        ]
        return replace(hardware, nodes=tuple(nodes))

    def _slowed(self, device: DeviceModel, gpu_type: str, factors: Mapping[ModelId, float]) -> DeviceModel:
        if not factors:
            return device
        found = {model.model_id: model.find_profile(gpu_type) for model in self.config.models}
        profiles = {
            model_id: _Slower(profile, factors.get(model_id, 1.0))
            for model_id, profile in found.items()
            if profile is not None
        }
        # By the law of the profiles as they are: a slower one may not be of the kind that it needs.
        return DeviceModel(profiles, device.interference, gpu_type)

    def bad_rate(self, model_id: ModelId) -> float | None:
        """Of one model; None where this cannot be played."""
        try:
            return self.played().models[model_id].bad_rate
        except FabricError:
            return None

    # ------------------------------------------------------------ as it might have been

    def without(self, model_ids: Sequence[ModelId]) -> Minute:
        """These models' requests never came."""
        kept = {model_id: at_ms for model_id, at_ms in self.arrivals.items() if model_id not in model_ids}
        return replace(self, arrivals=kept)

    def smooth(
        self, model_ids: Sequence[ModelId], rates_rps: Mapping[ModelId, float] | None = None
    ) -> Minute:
        """These models' requests came by chance alone (Poisson), at the same mean rates or at others."""
        arrivals = dict(self.arrivals)
        rates = {**self.rates_rps, **(rates_rps or {})}
        for model_id in model_ids:
            arrivals[model_id] = _poisson(rates.get(model_id, 0.0), self.span_ms, model_id)
        return replace(self, arrivals=arrivals)

    def like_live(self, slowdown: Slowdown, transfer_ms: float, return_ms: float) -> Minute:
        """With these for the run times of profiles and the ways of the configuration, whose data and jitter are in them."""
        network = NetworkConfig(control_ms=transfer_ms / 2, result_ms=return_ms)
        return replace(self, config=replace(self.config, network=network), slowdown=slowdown)

    def with_slo(self, model_id: ModelId, slo_ms: float) -> Minute:
        """The model had another SLO."""
        models = tuple(
            replace(model, slo_ms=slo_ms) if model.model_id == model_id else model
            for model in self.config.models
        )
        settings = self.settings
        if settings is not None:
            specs = tuple(
                replace(spec, slo_ms=slo_ms) if spec.model_id == model_id else spec
                for spec in settings.models
            )
            settings = replace(settings, models=specs)
        return replace(self, config=replace(self.config, models=models), settings=settings)

    def with_rate(self, model_id: ModelId, factor: float) -> Minute:
        """So many times as many requests came for the model, when its own came: in the same bursts, with the same lulls.

        Of a fraction each request has that chance; one that comes several times comes within a bin of its first.
        """
        own = random.Random(f"{SEED}/rate/{model_id}")
        whole = int(factor)
        moments: list[float] = []
        for at_ms in self.arrivals.get(model_id, np.empty(0)).tolist():
            count = whole + (own.random() < factor - whole)
            moments += [
                min(self.span_ms - 1e-3, at_ms + own.random() * REPEATED_MS * (at > 0)) for at in range(count)
            ]
        return replace(
            self, arrivals={**self.arrivals, model_id: np.array(sorted(moments), dtype=np.float64)}
        )

    def with_discipline(self, name: str) -> Minute:
        """Batches were decided by another rule."""
        return replace(
            self, config=replace(self.config, batching=PolicyChoice(name, discipline_options(name, {})))
        )

    def with_gpus(self, more: int) -> Minute:
        """The first node had so many more GPUs, and all models were placed anew at the rates that came."""
        first, *others = self.config.nodes
        nodes: tuple[NodeConfig, ...] = (replace(first, gpus=first.gpus + more), *others)
        return replace(self, config=replace(self._rated(), nodes=nodes), settings=None)

    def with_share(self, model_id: ModelId, more_percent: float) -> Minute | None:
        """The slices that host the model had that much more of their GPUs; None where there is no room for that."""
        if self.settings is None:
            return None
        used: dict[tuple[str, int], float] = {}
        for node, spec in self.settings.slices:
            used[node, spec.gpu] = used.get((node, spec.gpu), 0.0) + (spec.share_percent or 100.0)
        slices: list[Any] = []
        is_changed = False
        for node, spec in self.settings.slices:
            fits = spec.share_percent is not None and used[node, spec.gpu] + more_percent <= 100.0
            if (
                fits
                and spec.share_percent is not None
                and any(one.model_id == model_id for one in spec.models)
            ):
                used[node, spec.gpu] += more_percent
                slices.append((node, self._reshared(node, spec, spec.share_percent + more_percent)))
                is_changed = True
            else:
                slices.append((node, spec))
        return replace(self, settings=replace(self.settings, slices=tuple(slices))) if is_changed else None

    def _reshared(self, node_id: str, spec: SliceSpec, share_percent: float) -> SliceSpec:
        gpu_type = next(node.gpu_type for node in self.config.nodes if node.host == node_id)
        device = self.config.device_model(gpu_type)
        models = tuple(
            replace(one, exec_ms=device.exec_table(one.model_id, share_percent)[: one.batch_size_max])
            for one in spec.models
        )
        return replace(spec, share_percent=share_percent, models=models)

    def _rated(self) -> ClusterConfig:
        rates = self.rates_rps
        models = tuple(
            replace(model, rate_steps=((0.0, rates.get(model.model_id, 0.0)),))
            for model in self.config.models
        )
        return replace(self.config, models=models)


def minute_of(plan: str, bins: Mapping[ModelId, Sequence[int]], bin_ms: float) -> Minute:
    """Of what a scheduler tells of its plan, and what frontends counted. Raises ConfigError for a plan that cannot be read."""
    if not plan:
        raise ConfigError("the scheduler's plan is too large to be told, so it cannot be played")
    settings, _, planning = settings_of(plan.encode())
    assert planning is not None, "a scheduler that serves has one"
    desired = planning.desired
    rest = {key: value for key, value in desired.rest.items() if key not in ("rate_rps", "popularity")}
    sections = [
        {key: value for key, value in section.items() if key not in _NOT_RATES}
        for section in desired.sections
    ]
    document = {**rest, "models": sections}
    config = parse_config(document, Path(desired.base_dir), source="the running plan", is_whole=False)
    return replace(minute_from(config, settings, bins, bin_ms), gpus_out=desired.drained)


def minute_from(
    config: ClusterConfig, settings: SchedulerSettings, bins: Mapping[ModelId, Sequence[int]], bin_ms: float
) -> Minute:
    """Of a configuration and its slices. `bins`: of the same span, by model; without any it is a minute in which nothing came.

    Requests of applications are in the counts of the models that their stages ask, and are played as those models' own.
    """
    config = replace(config, applications=())
    newest = _newest_bins(bins)
    span_ms = newest * bin_ms if bins else MINUTE_MS
    arrivals = {model_id: _moments(counts[-newest:], bin_ms) for model_id, counts in bins.items()}
    settings = replace(settings, guard_ms=0.0, transfer_ms=0.0)
    return Minute(config, settings, arrivals, span_ms)


def _newest_bins(bins: Mapping[ModelId, Sequence[int]]) -> int:
    """How many of them hold as many requests as are played, from the first bin in which any came."""
    length = max(map(len, bins.values()), default=0)
    total = np.zeros(length, dtype=np.int64)
    for counts in bins.values():
        total += np.asarray(counts, dtype=np.int64)
    came = np.flatnonzero(total)
    if came.size == 0:
        return max(1, length)
    newest_first = np.cumsum(total[::-1])
    fitting = int(np.searchsorted(newest_first, REQUESTS_MAX, side="right"))
    return max(1, min(length - int(came[0]), fitting))


def _moments(counts: Sequence[int], bin_ms: float) -> NDArray[np.float64]:
    """Spread evenly over each bin."""
    found = [
        (at + (number + 0.5) / count) * bin_ms
        for at, count in enumerate(counts)
        if count
        for number in range(count)
    ]
    return np.array(found, dtype=np.float64)


def _poisson(rate_rps: float, span_ms: float, model_id: ModelId) -> NDArray[np.float64]:
    own = random.Random(f"{SEED}/smooth/{model_id}")
    at_ms, found = 0.0, []
    while rate_rps > 0:
        at_ms += own.expovariate(rate_rps / 1e3)
        if at_ms >= span_ms:
            break
        found.append(at_ms)
    return np.array(found, dtype=np.float64)


class _Slower(ModelProfile):
    """Another profile, each run so many times as long."""

    def __init__(self, inner: ModelProfile, factor: float) -> None:
        super().__init__(f"{factor:.2f} times {inner.source}", inner.batch_size_max, usage=inner.usage)
        self._inner = inner
        self._factor = factor

    def memory_bytes(self, batch_size: int) -> int:
        """As it was."""
        return self._inner.memory_bytes(batch_size)

    @property
    def share_percent_min(self) -> float:
        """As it was."""
        return self._inner.share_percent_min

    def _exec_ms(self, batch_size: int, share_percent: float) -> float:
        return self._factor * self._inner.exec_ms(batch_size, share_percent, extrapolate=True)


def ways_ms(returns_ms: Sequence[float], batches: Sequence[BatchSeen]) -> tuple[float, float]:
    """The median way of inputs, and of outputs."""
    transfers = [one.entry.transfer_ms for one in batches if one.has_run]
    return (median(transfers) if transfers else 0.0, median(returns_ms) if returns_ms else 0.0)
