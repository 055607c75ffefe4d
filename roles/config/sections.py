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
from policies.placement.registry import DEFAULT as PLACEMENT_DEFAULT
from roles.config.rates import Steps


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping in the file."""


class ArrivalSection(Section, frozen=True):
    """`models[].arrival`."""

    process: str = "poisson"
    """`poisson` (independent requests), `gamma` (bursts, with `shape`), `uniform` (equal gaps, with `phase`) or `trace` (with `path`)."""
    shape: float | None = None
    """Of `gamma`: the gaps' squared coefficient of variation is 1/shape, so less than 1 means bursts."""
    phase: float | None = None
    """Of `uniform`: the first request comes after so many gaps. Default: drawn, from 0 to 1."""
    path: str | None = None
    """Of `trace`: a CSV file with the header `at_ms[,model][,priority]`, ascending, repeated where it is too short. Relative to the file."""


class ProfileSection(Section, frozen=True):
    """`models[].profile`: exactly one of a line, `ref`, `table` and `by_type`; `stages`: ms of each stage of a cut, by their number."""

    alpha_ms: float | None = None
    """Of a line l(b) = alpha_ms · b + beta_ms: what each further request of a batch costs."""
    beta_ms: float | None = None
    """Of a line: what a batch costs however small it is."""
    max_batch: int | None = None
    """Of a line: the largest batch. Default: 512."""
    ref: str | None = None
    """A shipped profile such as `thesis-v100/resnet50`, or a `.json` file that `tenuto profile` wrote, relative to the file."""
    table: dict[str | int, float] | None = None
    """Run times in ms by batch size, linear in between; the last size is the largest batch."""
    by_type: dict[str, ProfileSection] | None = None
    """A profile for each type of GPU, by the type's name."""
    stages: dict[str | int, tuple[float, ...]] | None = None
    """Where the model is cut over several GPUs: ms of each stage for one request, by the number of stages."""


class LoaderSection(Section, frozen=True):
    """`models[].loader`: exactly one of `zoo` and `python`."""

    zoo: str | None = None
    """`torchvision` or `transformers`."""
    arch: str | None = None
    """Of a zoo: torchvision's name of a classifier, or transformers' type with random weights."""
    python: str | None = None
    """A class of yours, as `module:Class`: of an installed module, or of one in the folder in which `tenuto up` or the node agent was started. `tenuto deploy` carries a module beside the file along."""
    weights: str | None = None
    """Of a zoo: a file (torchvision) or a folder (transformers), relative to the file. Default: random ones by `seed`."""
    top_k: int | None = None
    """Of a zoo: the k best classes and their probabilities instead of all logits, reduced on the device."""
    seed: int = 0
    """Of random weights. For a class of yours torch's own generator is seeded before its `load`; models of the same worker that draw while they serve draw from that one as well."""
    dtype: str = "float32"
    """Of the weights: `float32`, `bfloat16` or `float16`. Requests and answers stay as they are."""
    channels_last: bool = False
    """Of torchvision: memory layout, mostly faster for convolutions with half precision."""
    cuda_graphs: bool | None = None
    """`true` asks for CUDA graphs, `false` forbids them. Default: where they are known to be safe."""
    sequence_length: int | None = None
    """Of transformers: tokens of a request. Default: 512."""
    config: dict[str, bool | int | float | str] | None = None
    """Of transformers with `arch`: over the type's default configuration."""
    from_hub: bool = False
    """Of transformers: `arch` is a name on the hub. Without it nothing is ever fetched."""
    stages: int | list[str] | None = None
    """Cut the model into so many stages, each on a GPU of its own; or at these modules, at which the second and following stages begin. Default: it stays whole, unless its placement cuts it."""
    ranks: int | None = None
    """Of `python`: so many processes, each with a GPU of its own, run every batch together (tensor parallel); the class is constructed with `rank` and `world_size`. Default: one, constructed without arguments."""


class HeadSection(Section, frozen=True):
    """One of `models[].heads`: a model that clients ask by its name, and that runs in the batches of the model it is listed under."""

    name: str
    """Unique in the file, among models too."""
    slo_ms: float | None = None
    """How long an answer may take; not less than the model's. Default: the model's."""
    loader: LoaderSection | None = None
    """What a real device loads for it. All heads of a model have one, or none has."""


class ModelSection(Section, frozen=True):
    """One of `models`."""

    name: str
    """Unique in the file: 1 to 128 letters, digits, `.`, `_` or `-`."""
    slo_ms: float | None = None
    """How long an answer may take: live from the client's send to its receipt, in `simulate` from arrival to finish. Only a model that stages of applications alone ask has none."""
    rate_rps: float | Steps | None = None
    """Requests per second that `simulate` and `bench` send and plans are made for; or steps `[[from_s, rps], …]` from the start of the run, warm-up included."""
    weight: float | None = None
    """The model's part of the file's total `rate_rps`, instead of a rate of its own."""
    arrival: ArrivalSection = ArrivalSection()
    """When requests come."""
    profile: ProfileSection | None = None
    """What a batch costs on a GPU: a line, `ref`, `table` or `by_type`. Emulated devices, `simulate` and `plan` need one; a real device measures for itself."""
    loader: LoaderSection | None = None
    """What a real device (`cpu`, `cuda`) loads. A model has a profile, a loader or both."""
    heads: tuple[HeadSection, ...] = ()
    """Fine-tuned models on one backbone, which clients ask instead of this one: their requests run in joint batches, equal leading layers once. Each has its own loader; profile, memory and rate are of all together."""
    merge: str | None = None
    """How the heads run together on a real device: `prefix` (equal leading layers once), `stacked` (one architecture, every layer once with the weights of all heads) or `operators` (each layer whose weights are equal or partly equal once). Default: `prefix`."""
    memory_mb: float | None = None
    """What it takes on a GPU. Default: the profile's, else what the worker measures."""
    priority: int = 0
    """From 0 to 9, of requests that name none. Of requests that cannot all be served those of a lower one go first."""
    run_limit_ms: float | None = None
    """A run that takes longer has hung. Default: 20 times l(b), at least 2 s."""
    idempotent: bool = True
    """`false`: a request that may have run is refused (`WorkerLost`) rather than run again after a loss."""
    shard: int | None = None
    """Which of `cluster.shards` serves it. Default: dealt by load and memory."""
    term: int = 0
    """How often it was moved between shards. Schedulers write it; nobody else should."""


class FanOutSection(Section, frozen=True):
    """`applications[].stages.….fan_out` where it is drawn: a mean, or the part of the answers that one request follows.

    `from`: the output of the stage before that decides it in a living cluster; the other key is what to expect of it then.
    """

    poisson: float | Steps | None = None
    """The mean of a Poisson number of requests that follow an answer; or steps."""
    share: float | Steps | None = None
    """One request follows this part of the answers, from 0 to 1; or steps."""
    source: str | None = msgspec.field(default=None, name="from")
    """The output of the stage before that says, in a living cluster, how many requests follow."""


class GlueSection(Section, frozen=True):
    """`applications[].stages.….glue`: a class of the user's, and how long one call of it may take. Or the class alone, as text."""

    python: str
    """The class, as `MODULE:CLASS`."""
    limit_ms: float = 100.0
    """How long one call of it may take, once it has its arguments; longer ones lose the request, or its optional stage."""


class StageSection(Section, frozen=True):
    """One of `applications[].stages`. `after`: the stage or stages that must have answered.

    `optional`: a request does without it. `answer`: its outputs are in the answer, though stages come after it.
    """

    model: str
    """One of `models`."""
    after: str | tuple[str, ...] = ()
    """The stage, or the list of stages, that must have answered first. Default: none, it starts with the request."""
    fan_out: int | FanOutSection = 1
    """How many requests follow each answer of the stage before: a whole number, or drawn."""
    glue: str | GlueSection | None = None
    """Code of the user's that makes this stage's inputs of the answers before: `"MODULE:CLASS"`, or with options."""
    optional: bool = False
    """Whether a request is answered without it, where it fails or would be late."""
    answer: bool = False
    """Whether its outputs are in the answer, though stages come after it."""


class ApplicationSection(Section, frozen=True):
    """One of `applications`."""

    name: str
    """Unique among applications."""
    slo_ms: float
    """Of the whole request, over all stages."""
    stages: dict[str, StageSection]
    """The graph: each stage by its name, which must not be another one's with a dot and a number behind it."""
    rate_rps: float | Steps | None = None
    """Requests per second of the application; or steps, as a model's."""
    weight: float | None = None
    """The application's part of the file's total `rate_rps`, beside the weights of models and other applications."""
    arrival: ArrivalSection = ArrivalSection()
    """When requests come, as a model's."""


class NodeSection(Section, frozen=True):
    """One of `cluster.nodes`."""

    host: str
    """The host's name, unique. With roles on several hosts: as the others find it, unless `cluster.addresses` has it."""
    gpus: int = 1
    """How many GPUs it has."""
    type: str = "generic"
    """Of its GPUs, by which `profile.by_type` and measured constants are found."""
    memory_gb: float | None = None
    """Of each GPU. Default: the type's."""
    price_per_hour: float | None = None
    """Of a GPU, for plans that count costs."""
    device: str = "emulated"
    """`emulated` (takes the time that the profile says), `cpu` or `cuda`."""
    mps: bool = True
    """`true`: real GPUs are shared through MPS where that is there; `false`: processes take turns."""
    pin_cores: int | None = None
    """So many cores for each worker process. Default: the system decides."""
    workers_outlive_agent: bool = False
    """`true`: workers serve on for 30 s without their agent, and the next one adopts them."""
    shard: int | None = None
    """Which of `cluster.shards` it belongs to. Default: dealt so that each has as many GPUs; all nodes say it, or none."""


class NetworkSection(Section, frozen=True):
    """`cluster.network`."""

    control_ms: float = 0.0
    """A message without tensors, one way."""
    data_ms_per_item: float = 0.0
    """Inputs on their way to the GPU, for each request of a batch."""
    result_ms: float = 0.0
    """An answer, one way."""
    jitter_ms: float = 0.0
    """Standard deviation of a half-normal delay on top of each."""


class HeartbeatSection(Section, frozen=True):
    """`cluster.heartbeats`."""

    interval_ms: float = INTERVAL_MS
    """A peer that was quiet for so long is asked for a sign of life."""
    patience_ms: float = PATIENCE_MS
    """A peer that was silent for so long is lost. At least twice the interval."""


class FrontendListenSection(Section, frozen=True):
    """`cluster.frontends[].listen`: what this frontend has instead of `listen`."""

    client: str | None = None
    """For clients: `tcp://HOST:PORT` or `ipc://PATH`; HOST may be an interface. Default: the host's address, port 5555 and on."""
    http: str | None = None
    """Accepted, and not used yet: gateways listen at `listen.http`."""
    metrics: str | None = None
    """HOST:PORT of its page for Prometheus."""


class FrontendSection(Section, frozen=True):
    """One of `cluster.frontends`."""

    host: str
    """Where it runs."""
    listen: FrontendListenSection = FrontendListenSection()
    """What it has instead of the file's `listen`."""


class SchedulerSection(Section, frozen=True):
    """One of `cluster.schedulers`."""

    host: str
    """Where it runs."""
    standby: bool = False
    """Whether it stands by at a start; the first one of a shard is the active one."""
    port: int = 5550
    """Of its control address."""
    shard: int = 0
    """Which shard it schedules."""


class GatewaySection(Section, frozen=True):
    """`cluster.gateway`: HTTP and gRPC, where `listen.http` and `listen.grpc` say."""

    token_file: str | None = None
    """A file with a bearer token a line, asked for by every path but health. Default: none, and loopback only."""
    tls_certificate: str | None = None
    """PEM file, for HTTP and gRPC."""
    tls_key: str | None = None
    """PEM file."""
    request_mb: int = 64
    """The largest body, decompressed. Of each request in it a frontend takes 64 MiB of inputs, whatever this says."""
    connections: int = 1_024
    """HTTP connections and gRPC calls at a time."""
    model_control: bool = False
    """Whether models may be loaded and unloaded through it."""


class ClusterSection(Section, frozen=True):
    """`cluster`: `gpus` (with `gpu_type`), or `nodes`."""

    gpus: int | None = None
    """So many emulated GPUs on this host. Or `nodes`, not both."""
    gpu_type: str | None = None
    """Of `gpus`. Default: `generic`."""
    nodes: tuple[NodeSection, ...] | None = None
    """The hosts with GPUs."""
    frontends: int | tuple[FrontendSection, ...] = 1
    """So many beside the scheduler, or a list of where each one is."""
    schedulers: int | tuple[SchedulerSection, ...] = 1
    """So many of each shard, the first of which is active while the others stand by; or a list of where each one is."""
    shards: int = 1
    """Parts of the cluster that schedule by themselves, for thousands of GPUs."""
    addresses: dict[str, str] = {}
    """IPv4 addresses of hosts that the others do not find by name."""
    network: NetworkSection = NetworkSection()
    """What messages take: in `simulate` exactly this, live a first guess."""
    interference: str | dict[str, dict[str, Any] | None] = "none"
    """How slices of one GPU disturb each other where devices are emulated: `none`, `igniter`, `gpulet`, `sm`, or `{sm: {strength: 1}}`."""
    heartbeats: HeartbeatSection = HeartbeatSection()
    """When a silent peer is asked, and when it is lost."""
    gateway: GatewaySection | None = None
    """HTTP and gRPC, at `listen.http` and `listen.grpc`."""


class PopularitySection(Section, frozen=True):
    """`popularity`: the i-th listed model (from 1) gets i^-zipf."""

    zipf: float
    """The exponent."""


class ListenSection(Section, frozen=True):
    """`listen`."""

    client: str = "tcp://127.0.0.1:0"
    """Where the first frontend takes clients, the next ones on the ports above: `tcp://HOST:PORT` or `ipc://PATH`. Port 0: any free one."""
    control: str | None = None
    """Where the scheduler takes operators from elsewhere. Default: local sockets only."""
    http: str | None = None
    """HOST:PORT of the gateway's HTTP. Default: none."""
    grpc: str | None = None
    """HOST:PORT of the gateway's gRPC. Default: none."""
    metrics: str | None = None
    """HOST:PORT of the first role's page for Prometheus, the next ones on the ports above. Default: none."""
    page: str | None = None
    """HOST:PORT of the page for people. Default: none."""


class SecuritySection(Section, frozen=True):
    """`security`: with keys every TCP connection needs one."""

    keys: str | None = None
    """A folder made by `tenuto keys create`, relative to the file. Default: no keys, and what others can reach is refused."""


class DeploySection(Section, frozen=True):
    """`deploy`: how `tenuto deploy` reaches hosts and sets them up."""

    user: str | None = None
    """Of ssh. Default: what ssh's own configuration says."""
    port: int | None = None
    """Of ssh. Default: what ssh's own configuration says."""
    python: str = "python3"
    """The interpreter on the hosts."""
    directory: str = ".tenuto"
    """Where everything goes on a host, relative to the user's home."""
    wheelhouse: str | None = None
    """A folder of wheels here, for hosts without a package index. Default: they use theirs."""
    units: str = "auto"
    """Who keeps roles alive: `systemd`, `supervisor`, or `auto`: systemd where it runs."""
    interface: str | None = None
    """Whose address roles bind on hosts that `cluster.addresses` does not have. Default: the one by which ssh reached the host; roles that are started by hand take the one of the host's name."""
    env: dict[str, str] = {}
    """Environment variables of every role."""


class Document(Section, frozen=True):
    """The whole file."""

    models: tuple[ModelSection, ...]
    """What is served; at least one."""
    cluster: ClusterSection
    """What serves it."""
    seed: int = 1
    """Of every random draw in `simulate` and `bench`, so that one seed is one history."""
    rate_rps: float | Steps | None = None
    """Requests per second of all models and applications together, shared out by `weight`, or of models by `popularity`; or steps. Not beside a rate of one's own."""
    popularity: PopularitySection | None = None
    """Shares the total rate out instead of weights."""
    applications: tuple[ApplicationSection, ...] = ()
    """Graphs of models with one SLO."""
    graph_deadlines: str | dict[str, dict[str, Any] | None] = policies.graphs.DEFAULT
    """By when each stage of an application is due: `carried`, `nexus`, `equal`, `proportional` or `pard`; a name, or a name with options."""
    batching: str | dict[str, dict[str, Any] | None] = BATCHING_DEFAULT
    """The discipline: a name, or a name with options."""
    placement: str | dict[str, dict[str, Any] | None] = PLACEMENT_DEFAULT
    """The placement policy: a name, or a name with options."""
    listen: ListenSection = ListenSection()
    """Where clients, operators and Prometheus come in."""
    security: SecuritySection = SecuritySection()
    """Keys for everything that goes by TCP."""
    deploy: DeploySection = DeploySection()
    """How `tenuto deploy` reaches hosts and sets them up."""


SECTIONS: Mapping[str, type[Section]] = {
    "": Document,
    "models": ModelSection,
    "heads": HeadSection,
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
    "frontends.listen": FrontendListenSection,
    "security": SecuritySection,
}
"""By the last name in a path, or its last two where that is not enough: which keys are allowed there."""


def document_schema() -> dict[str, Any]:
    """These structs as JSON Schema; docstrings are its descriptions."""
    return msgspec.json.schema(Document)
