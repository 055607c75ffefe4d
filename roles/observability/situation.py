"""From what roles remember to evidence about one model: the figures that `diagnosis` goes by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from fabric.errors import ConfigError, ProfileError
from fabric.ids import ModelId, SliceId
from fabric.messages import SliceSpec
from profiles.interference import Running
from roles.config.cluster import ClusterConfig
from roles.observability.absences import absences_of
from roles.observability.diagnosis import BATCHES_MIN, Evidence, Played
from roles.observability.last_minute import MINUTE_MS, Minute, ways_ms
from roles.observability.remedies import suspects_played
from roles.observability.remembered import AbsenceSeen, BatchSeen, RequestSeen
from roles.scheduler.settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Situation:
    """All that is known of a cluster's last minute. `arrivals`: by model, counts in bins of `bin_ms`.

    `offered`, `bad`, `unserved`: of the whole seconds that the part of it is in that `minute` has, `counted_ms` together. `late_timers_ms`: p99 of each process's loop. `planned_rps`: what the present plan is for.
    """

    minute: Minute
    requests: Sequence[RequestSeen]
    batches: Sequence[BatchSeen]
    arrivals: Mapping[ModelId, Sequence[int]]
    bin_ms: float
    counted_ms: float
    offered: Mapping[ModelId, int]
    bad: Mapping[ModelId, int]
    replicas: Mapping[ModelId, int]
    late_timers_ms: Mapping[str, float]
    planned_rps: Mapping[ModelId, float]
    unhosted: Mapping[ModelId, Mapping[SliceId, str]] = field(default_factory=dict)
    """Of models without a ready slice: why, by slice; see `diagnosis.Evidence`."""
    unserved: Mapping[ModelId, int] = field(default_factory=dict)
    """Of the bad ones: how many found no slice, or lost theirs."""
    hosting: Mapping[ModelId, Collection[SliceId]] = field(default_factory=dict)
    """Slices that should host each model."""
    absences: Sequence[AbsenceSeen] = ()

    @property
    def bad_rates(self) -> Mapping[ModelId, float]:
        """Of what came of each model in the part of the minute that is played."""
        return {
            model_id: min(1.0, self.bad.get(model_id, 0) / count)
            for model_id, count in self.offered.items()
            if count
        }

    def evidence(self, model_id: ModelId, *, is_played: bool = True) -> Evidence:
        """About one model, with its minute played again where it misses its SLO, unless that would take too long."""
        minute = self.minute
        counts = self.arrivals.get(model_id, ())
        if counts:
            counts = counts[-round(minute.span_ms / self.bin_ms) :]
        batches = self._batches_played
        network = minute.config.network
        hosting = self.hosting.get(model_id, ())
        return Evidence(
            model_id,
            minute.config.model(model_id).slo_ms,
            self.counted_ms,
            self.offered.get(model_id, 0),
            self.bad.get(model_id, 0),
            self.replicas.get(model_id, 0),
            [
                one
                for one in self.requests
                if one.record.model_id == model_id and one.record.ended_ago_ms <= MINUTE_MS
            ],
            batches,
            self._profile_ms(model_id, batches),
            self.late_timers_ms,
            minute.rates_rps,
            self.planned_rps,
            dispersion_of(counts),
            network.control_ms + network.result_ms,
            network.data_ms_per_item,
            suspects_played(minute, model_id, dict(self.planned_rps)) if is_played else Played(),
            self.unhosted.get(model_id, {}),
            self.unserved.get(model_id, 0),
            hosting,
            [
                one
                for one in absences_of(self.absences, model_id, hosting)
                if one.entry.ended_ago_ms is None or one.entry.ended_ago_ms <= MINUTE_MS
            ],
        )

    def like_live(self) -> Minute:
        """The minute, to be simulated with run times and ways as they were measured: the medians of each model on each GPU."""
        settings = self.minute.settings
        assert settings is not None, "of a running cluster"
        places = {spec.slice_id: (str(node), spec.gpu) for node, spec in settings.slices}
        batches = self._batches_played
        tables = {model_id: self._profile_ms(model_id, batches) for model_id in self.arrivals}
        ratios: dict[tuple[str, int], dict[ModelId, list[float]]] = defaultdict(lambda: defaultdict(list))
        for batch, expected in _slowed_by_neighbours(self.minute.config, settings, batches):
            alone_ms = tables.get(batch.model_id, {}).get((batch.slice_id, batch.entry.batch_size), 0.0)
            if alone_ms > 0:
                ratios[places[batch.slice_id]][batch.model_id].append(
                    batch.entry.exec_ms / (expected * alone_ms)
                )
        slowdown = {
            gpu: {model_id: median(its) for model_id, its in models.items() if len(its) >= BATCHES_MIN}
            for gpu, models in ratios.items()
        }
        returns = [
            one.ledger.return_ms
            for one in self.requests
            if one.has_run and one.record.ended_ago_ms <= MINUTE_MS
        ]
        return self.minute.like_live(slowdown, *ways_ms(returns, batches))

    @property
    def _batches_played(self) -> list[BatchSeen]:
        """Of the minute, and of the shard whose minute it is: its models are of no other."""
        models = {model.model_id for model in self.minute.config.models}
        return [one for one in self.batches if one.model_id in models and one.entry.ended_ago_ms <= MINUTE_MS]

    def _profile_ms(
        self, model_id: ModelId, batches: Sequence[BatchSeen]
    ) -> dict[tuple[SliceId, int], float]:
        """What the configured profile says of the batches that were run; where it is silent the worker's own table stands."""
        config, settings = self.minute.config, self.minute.settings
        assert settings is not None, "of a running cluster"
        types = {node.node_id: node.gpu_type for node in config.nodes}
        places = {spec.slice_id: (types.get(node_id), spec) for node_id, spec in settings.slices}
        found: dict[tuple[SliceId, int], float] = {}
        for slice_id, size in {
            (one.slice_id, one.entry.batch_size) for one in batches if one.model_id == model_id
        }:
            gpu_type, spec = places.get(slice_id, (None, None))
            if gpu_type is None or spec is None:
                continue
            try:
                table = _table_ms(config, model_id, gpu_type, spec)
            except (ConfigError, ProfileError):
                continue
            if 0 < size <= len(table):
                found[slice_id, size] = table[size - 1]
        return found


def _table_ms(config: ClusterConfig, model_id: ModelId, gpu_type: str, spec: SliceSpec) -> Sequence[float]:
    """l(b) at index b - 1, of a pipeline all stages together. Raises ConfigError or ProfileError where there is none."""
    profile = config.model(model_id).find_profile(gpu_type)
    if spec.is_pipeline and profile is not None:
        return [sum(times_ms) for times_ms in zip(*profile.stage_tables(spec.stages), strict=True)]
    return config.device_model(gpu_type).exec_table(model_id, spec.share_percent)


def _slowed_by_neighbours(
    config: ClusterConfig, settings: SchedulerSettings, batches: Iterable[BatchSeen]
) -> Iterator[tuple[BatchSeen, float]]:
    """Each batch that ran on a slice that is there, and how many times as long it took for its neighbours by the configured law.

    A simulation applies that law itself. As there, neighbours are what ran on the GPU's other slices when the batch began.
    """
    laws = {gpu_type: config.device_model(gpu_type).interference for gpu_type in config.gpu_types}
    types = {node.node_id: node.gpu_type for node in config.nodes}
    specs = {spec.slice_id: (types.get(node_id, ""), spec) for node_id, spec in settings.slices}
    profiles = config.profiles()
    running: dict[str, list[tuple[BatchSeen, Running]]] = defaultdict(list)
    for batch in sorted(batches, key=lambda one: one.started_at_ms):
        gpu_type, spec = specs.get(batch.slice_id, ("", None))
        if not batch.has_run or spec is None or (batch.model_id, gpu_type) not in profiles:
            continue
        there = [one for one in running[batch.gpu] if one[0].ended_at_ms > batch.started_at_ms]
        own = Running(batch.model_id, batch.entry.batch_size, spec.share_percent)
        neighbours = [other for one, other in there if one.slice_id != batch.slice_id]
        law = laws[gpu_type]
        yield batch, law.slowdown(own, neighbours) / law.slowdown(own, ())
        running[batch.gpu] = [*there, (batch, own)]


def dispersion_of(counts: Sequence[int], joined: int = 10) -> float:
    """Variance by mean of the counts of so many neighbouring bins together (50 ms); 1 under Poisson arrivals, 0 without any."""
    sums = [sum(counts[at : at + joined]) for at in range(0, len(counts) - joined + 1, joined)]
    while sums and sums[0] == 0:  # before the first one came
        sums.pop(0)
    mean = sum(sums) / len(sums) if sums else 0.0
    if mean == 0:
        return 0.0
    return sum((one - mean) ** 2 for one in sums) / len(sums) / mean
