"""The configuration file as written, one frozen struct per mapping: which keys there are, and their kinds.

Defaults of plain values live here and nowhere else; what the values must satisfy is `roles/config/read_config.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

import policies.graphs
from fabric.heartbeats import INTERVAL_MS, PATIENCE_MS
from policies.batching.registry import DEFAULT as BATCHING_DEFAULT
from policies.placement import DEFAULT as PLACEMENT_DEFAULT
from roles.config.rates import Steps


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping in the file."""


class ArrivalSection(Section, frozen=True):
    """`models[].arrival`."""

    process: str = "poisson"
    shape: float | None = None
    phase: float | None = None
    path: str | None = None


class ProfileSection(Section, frozen=True):
    """`models[].profile`: exactly one of a line, `ref`, `table` and `by_type`; `stages`: ms of each stage of a cut, by their number."""

    alpha_ms: float | None = None
    beta_ms: float | None = None
    max_batch: int | None = None
    ref: str | None = None
    table: dict[str | int, float] | None = None
    by_type: dict[str, ProfileSection] | None = None
    stages: dict[str | int, tuple[float, ...]] | None = None


class LoaderSection(Section, frozen=True):
    """`models[].loader`: exactly one of `zoo` and `python`."""

    zoo: str | None = None
    arch: str | None = None
    python: str | None = None
    weights: str | None = None
    top_k: int | None = None
    seed: int = 0
    dtype: str = "float32"
    channels_last: bool = False
    cuda_graphs: bool | None = None
    sequence_length: int | None = None
    config: dict[str, bool | int | float | str] | None = None
    from_hub: bool = False


class ModelSection(Section, frozen=True):
    """One of `models`."""

    name: str
    slo_ms: float | None = None
    rate_rps: float | Steps | None = None
    weight: float | None = None
    arrival: ArrivalSection = ArrivalSection()
    profile: ProfileSection | None = None
    loader: LoaderSection | None = None
    memory_mb: float | None = None
    priority: int = 0
    run_limit_ms: float | None = None
    idempotent: bool = True
    shard: int | None = None
    term: int = 0


class FanOutSection(Section, frozen=True):
    """`applications[].stages.….fan_out` where it is drawn: a mean, or the part of the answers that one request follows.

    `from`: the output of the stage before that decides it in a living cluster; the other key is what to expect of it then.
    """

    poisson: float | Steps | None = None
    share: float | Steps | None = None
    source: str | None = msgspec.field(default=None, name="from")


class GlueSection(Section, frozen=True):
    """`applications[].stages.….glue`: a class of the user's, and how long one call of it may take."""

    python: str
    limit_ms: float = 100.0


class StageSection(Section, frozen=True):
    """One of `applications[].stages`. `after`: the stage or stages that must have answered.

    `optional`: a request does without it. `answer`: its outputs are in the answer, though stages come after it.
    """

    model: str
    after: str | tuple[str, ...] = ()
    fan_out: int | FanOutSection = 1
    glue: GlueSection | None = None
    optional: bool = False
    answer: bool = False


class ApplicationSection(Section, frozen=True):
    """One of `applications`."""

    name: str
    slo_ms: float
    stages: dict[str, StageSection]
    rate_rps: float | Steps | None = None
    arrival: ArrivalSection = ArrivalSection()


class NodeSection(Section, frozen=True):
    """One of `cluster.nodes`."""

    host: str
    gpus: int = 1
    type: str = "generic"
    memory_gb: float | None = None
    price_per_hour: float | None = None
    device: str = "emulated"
    mps: bool = True
    pin_cores: int | None = None
    workers_outlive_agent: bool = False
    shard: int | None = None


class NetworkSection(Section, frozen=True):
    """`cluster.network`."""

    control_ms: float = 0.0
    data_ms_per_item: float = 0.0
    result_ms: float = 0.0
    jitter_ms: float = 0.0


class HeartbeatSection(Section, frozen=True):
    """`cluster.heartbeats`."""

    interval_ms: float = INTERVAL_MS
    patience_ms: float = PATIENCE_MS


class FrontendListenSection(Section, frozen=True):
    """`cluster.frontends[].listen`: what this frontend has instead of `listen`."""

    client: str | None = None
    http: str | None = None
    metrics: str | None = None


class FrontendSection(Section, frozen=True):
    """One of `cluster.frontends`."""

    host: str
    listen: FrontendListenSection = FrontendListenSection()


class SchedulerSection(Section, frozen=True):
    """One of `cluster.schedulers`."""

    host: str
    standby: bool = False
    port: int = 5550
    shard: int = 0


class GatewaySection(Section, frozen=True):
    """`cluster.gateway`: HTTP and gRPC, where `listen.http` and `listen.grpc` say."""

    token_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    request_mb: int = 64
    connections: int = 1_024
    model_control: bool = False


class ClusterSection(Section, frozen=True):
    """`cluster`: `gpus` (with `gpu_type`), or `nodes`.

    `frontends`: so many beside the scheduler, or where each one is. `schedulers`: so many of each shard, or where each one is.
    `addresses`: of hosts that are not found by name.
    """

    gpus: int | None = None
    gpu_type: str | None = None
    nodes: tuple[NodeSection, ...] | None = None
    frontends: int | tuple[FrontendSection, ...] = 1
    schedulers: int | tuple[SchedulerSection, ...] = 1
    shards: int = 1
    addresses: dict[str, str] = {}
    network: NetworkSection = NetworkSection()
    interference: str | dict[str, dict[str, Any] | None] = "none"
    heartbeats: HeartbeatSection = HeartbeatSection()
    gateway: GatewaySection | None = None


class PopularitySection(Section, frozen=True):
    """`popularity`: the i-th listed model (from 1) gets i^-zipf."""

    zipf: float


class ListenSection(Section, frozen=True):
    """`listen`."""

    client: str = "tcp://127.0.0.1:0"
    control: str | None = None
    http: str | None = None
    grpc: str | None = None
    metrics: str | None = None
    page: str | None = None


class SecuritySection(Section, frozen=True):
    """`security`: `keys` is a folder made by `tenuto keys create`; with it TCP connections need a key."""

    keys: str | None = None


class DeploySection(Section, frozen=True):
    """`deploy`: how `tenuto deploy` reaches hosts and sets them up."""

    user: str | None = None
    port: int | None = None
    python: str = "python3"
    directory: str = ".tenuto"
    wheelhouse: str | None = None
    units: str = "auto"
    interface: str | None = None
    env: dict[str, str] = {}


class Document(Section, frozen=True):
    """The whole file."""

    models: tuple[ModelSection, ...]
    cluster: ClusterSection
    seed: int = 1
    rate_rps: float | Steps | None = None
    popularity: PopularitySection | None = None
    applications: tuple[ApplicationSection, ...] = ()
    graph_deadlines: str = policies.graphs.DEFAULT
    batching: str | dict[str, dict[str, Any] | None] = BATCHING_DEFAULT
    placement: str | dict[str, dict[str, Any] | None] = PLACEMENT_DEFAULT
    listen: ListenSection = ListenSection()
    security: SecuritySection = SecuritySection()
    deploy: DeploySection = DeploySection()


SECTIONS: Mapping[str, type[Section]] = {
    "": Document,
    "models": ModelSection,
    "applications": ApplicationSection,
    "stages": StageSection,
    "fan_out": FanOutSection,
    "glue": GlueSection,
    "arrival": ArrivalSection,
    "profile": ProfileSection,
    "by_type": ProfileSection,
    "loader": LoaderSection,
    "cluster": ClusterSection,
    "nodes": NodeSection,
    "frontends": FrontendSection,
    "schedulers": SchedulerSection,
    "deploy": DeploySection,
    "network": NetworkSection,
    "heartbeats": HeartbeatSection,
    "gateway": GatewaySection,
    "popularity": PopularitySection,
    "listen": ListenSection,
    "security": SecuritySection,
}
"""By the last name in a path: which keys are allowed there."""


def document_schema() -> dict[str, Any]:
    """These structs as JSON Schema; docstrings are its descriptions."""
    return msgspec.json.schema(Document)
