"""A cluster on a virtual clock, with every real core, and what its roles remember at the end: for `explain` and `why`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fabric.ids import ModelId, NodeId, PeerId
from fabric.messages import BatchesRemembered, RecordsAsked, RequestsRemembered, SliceSpec
from roles.config.cluster import NetworkConfig
from roles.config.read_config import parse_config
from roles.frontend.events import ClientSaid
from roles.observability.last_minute import minute_from
from roles.observability.remembered import (
    BatchSeen,
    CountsSeen,
    RequestSeen,
    batches_seen,
    requests_seen,
)
from roles.observability.situation import Situation
from roles.runtime.core import Heard
from roles.scheduler.build import scheduler_core
from roles.scheduler.settings import settings_from
from roles.simulator.full_world import FullWorld
from roles.simulator.simulation import hardware_of
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import workload_of

OPERATOR = PeerId("operator/00000000")
NEWEST = 1 << 52
Reality = Callable[[NodeId, SliceSpec], SliceSpec]


def as_it_is(node_id: NodeId, spec: SliceSpec) -> SliceSpec:
    del node_id
    return spec


def observed(
    document: Mapping[str, Any],
    duration_s: float = 10.0,
    *,
    reality: Reality = as_it_is,
    network: NetworkConfig | None = None,
    asked: Mapping[str, Mapping[str, Any]] | None = None,
    late_timers_ms: Mapping[str, float] | None = None,
) -> Situation:
    """Play `document`. `reality`: what slices really are, `network`: what it really is, `asked`: what models really ask for."""
    config = parse_config(document, Path())
    settings = settings_from(config)
    sections = [{**section, **(asked or {}).get(section["name"], {})} for section in document["models"]]
    real = parse_config({**document, "models": sections}, Path())
    if network is not None:
        real = replace(real, network=network)
    slices = tuple((node_id, reality(node_id, spec)) for node_id, spec in settings.slices)
    core = scheduler_core(replace(settings, slices=slices), config.batching)
    workload = workload_of(real, None)
    traffic = [
        ModelTraffic(model.model_id, model.slo_ms, arrived_at_ms)
        for model, arrived_at_ms in zip(real.models, workload.arrivals(1e3 * duration_s), strict=True)
    ]
    world = FullWorld([core], hardware_of(real, 1), traffic)
    world.run()
    now_ms = world.clock.now_ms()
    batches = _batches(core, now_ms)
    requests: list[RequestSeen] = []
    counts = CountsSeen()
    for frontend in world._frontends:
        for model in config.models:
            (reply,) = frontend._core.handle(
                ClientSaid(OPERATOR, RecordsAsked(model.model_id, NEWEST)), now_ms
            )
            remembered = reply.message  # type: ignore[union-attr]  # what else would it do
            assert isinstance(remembered, RequestsRemembered)
            requests += requests_seen(remembered, now_ms)
            counts.add(model.model_id, remembered, 0.0)
    replicas = {
        model.model_id: sum(
            model.model_id in {one.model_id for one in spec.models} for _, spec in settings.slices
        )
        for model in config.models
    }
    planned = {model.model_id: model.rate_rps for model in config.models if model.rate_rps}
    arrivals = counts.by_model()
    minute = minute_from(config, settings, arrivals, counts.bin_ms)
    return Situation(
        minute,
        requests,
        batches,
        arrivals,
        counts.bin_ms,
        counts.counted_ms(minute.span_ms),
        counts.offered(minute.span_ms),
        counts.bad(minute.span_ms),
        replicas,
        late_timers_ms or {"scheduler-0": 0.1, "frontend-0": 0.1},
        planned,
    )


def _batches(core: Any, now_ms: float) -> list[BatchSeen]:
    found: list[BatchSeen] = []
    before = NEWEST
    while True:
        (send,) = core.handle(Heard(OPERATOR, RecordsAsked(ModelId(""), before)), now_ms)
        assert isinstance(send.message, BatchesRemembered)
        if not send.message.batches:
            return found
        found += batches_seen(send.message, now_ms)
        before = send.message.batches[-1].number
