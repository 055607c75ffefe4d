"""ClusterConfig: a checked configuration as values, the way the rest of Tenuto wants them.

`roles/config/read_config.py` reads a file into these; nothing else makes them outside tests. Rates are per model, weights
and popularity already applied; times are in ms, memory is in bytes, names are ids, GPUs are numbered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

import policies.graphs
from fabric.errors import ConfigError, ProfileError
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import ModelId, NodeId
from fabric.messages import PREFIX, HeadSpec, LoaderSpec
from policies.graphs import ApplicationPlan, FanOut
from policies.graphs.fan_outs import means, moments_ms
from policies.graphs.limits import limits
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    NamingPolicy,
    PlacedModelInput,
    Placement,
    Profiles,
)
from policies.placement.common.conditions import MAX_WAIT_MS, ConditionedPolicy, Conditions
from policies.placement.common.cut_models import cut_first
from policies.placement.given import Given
from policies.placement.registry import placement_options, placement_policy
from profiles.device_model import DeviceModel
from profiles.interference import interference_named
from profiles.model import ModelProfile
from roles.applications.served import GlueSpec, ServedApplication
from roles.config.arrival_gaps import drawn_gaps
from roles.config.gateway import NO_GATEWAY, GatewayConfig
from roles.config.hosts import DEPLOY_DEFAULT, ONE_HOST, DeployConfig, Places


class ArrivalConfig(Struct, frozen=True):
    """How requests of a model come: `process` is poisson | gamma | uniform | trace.

    `shape`: of gamma gaps. `phase`: the first arrival of a uniform process in gaps, None draws it. `trace_path`: a trace's CSV file.
    """

    process: str = "poisson"
    shape: float = 1.0
    phase: float | None = None
    trace_path: Path | None = None


class ModelConfig(Struct, frozen=True):
    """A model. `profile` holds on every GPU type, `profiles_by_type` (lower case) on the named ones only.

    `rate_steps` are (from_ms, requests per second), ascending from 0; empty where no rate is known, as for a
    trace or a cluster that just serves. `memory_bytes` None: what the profile says. `weight`: its part of a
    total rate, None where it has its own. A run of more than `run_limit_ms` has hung; None: of many times l(b).
    `is_idempotent`: a request may run again after the worker that had it was lost. `shard`: whose scheduler has it;
    `term`: how often it was moved between shards. `stage_rps`: what stages of applications
    ask of it at their highest rates, beside its own requests. `heads`: what clients ask instead of it (ADR 0290); `merge`: how these run together.
    """

    model_id: ModelId
    slo_ms: float
    rate_steps: tuple[tuple[float, float], ...] = ()
    weight: float | None = None
    arrival: ArrivalConfig = ArrivalConfig()
    profile: ModelProfile | None = None
    profiles_by_type: Mapping[str, ModelProfile] = field(default_factory=dict)
    loader: LoaderSpec | None = None
    memory_bytes: int | None = None
    priority: int = 0
    run_limit_ms: float | None = None
    is_idempotent: bool = True
    stage_rps: float = 0.0
    shard: int = 0
    term: int = 0
    heads: tuple[HeadSpec, ...] = ()
    merge: str = PREFIX

    @property
    def name(self) -> str:
        """The model's id as text."""
        return str(self.model_id)

    @property
    def has_loader(self) -> bool:
        """Whether a real device can load it, or its heads."""
        return self.loader is not None or any(head.loader is not None for head in self.heads)

    @property
    def head_names(self) -> tuple[ModelId, ...]:
        """By which clients ask it; empty: by its own."""
        return tuple(head.model_id for head in self.heads)

    @property
    def rate_rps(self) -> float | None:
        """The highest rate of all steps, which is what a placement must carry; None where none is known."""
        own_rps = max((rate_rps for _, rate_rps in self.rate_steps), default=None)
        return own_rps if not self.stage_rps else (own_rps or 0.0) + self.stage_rps

    def find_profile(self, gpu_type: str) -> ModelProfile | None:
        """What the model costs on that type of GPU; None where nothing says so."""
        return self.profiles_by_type.get(gpu_type.lower(), self.profile)


class ApplicationConfig(Struct, frozen=True):
    """A graph of models with one SLO. `fan_outs` by stage, `glue` of those that have any; `rate_steps` and `arrival` as a model's."""

    plan: ApplicationPlan
    fan_outs: Mapping[str, FanOut]
    rate_steps: tuple[tuple[float, float], ...] = ()
    arrival: ArrivalConfig = ArrivalConfig()
    glue: Mapping[str, GlueSpec] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Which no model has."""
        return self.plan.name

    @property
    def slo_ms(self) -> float:
        """Of a whole request."""
        return self.plan.slo_ms

    def demand(self, at_ms: float) -> dict[str, float]:
        """How many requests of each stage a request comes to, on average, at a moment from the start of the run."""
        return self.plan.graph.demand(means(self.fan_outs, at_ms))

    @property
    def demands(self) -> list[dict[str, float]]:
        """At each moment at which a fan-out changes."""
        return [self.demand(at_ms) for at_ms in moments_ms(self.fan_outs.values())]

    def served(self, rule: str, seed: int) -> ServedApplication:
        """It, as a frontend serves it with that rule of `graph_deadlines`."""
        return ServedApplication(self.plan, self.fan_outs, rule, seed, self.glue)


class NodeConfig(Struct, frozen=True):
    """A host with `gpus` devices of one type; memory and price are per device.

    `mps`: share real GPUs through NVIDIA's MPS where it can be had. `pin_cores`: so many cores for each worker
    process, None: any. `workers_outlive_agent`: they serve on without it for a while. `shard`: whose scheduler has it.
    """

    host: str
    gpus: int
    gpu_type: str = "generic"
    memory_bytes: int = 0
    price_per_hour: float | None = None
    device: str = "emulated"
    mps: bool = True
    pin_cores: int | None = None
    workers_outlive_agent: bool = False
    shard: int = 0

    @property
    def node_id(self) -> NodeId:
        """The host's name as an id."""
        return NodeId(self.host)


class NetworkConfig(Struct, frozen=True):
    """Delays of the modelled network, one way; jitter is the standard deviation of a half-normal."""

    control_ms: float = 0.0
    data_ms_per_item: float = 0.0
    result_ms: float = 0.0
    jitter_ms: float = 0.0


class ListenConfig(Struct, frozen=True):
    """Where others come in. `client` is a ZeroMQ endpoint of the frontends, `control` one of the scheduler beside its ipc one.

    `metrics` and `page` are host:port. None: not served. HTTP and gRPC are the gateway's (`roles/config/gateway.py`).
    """

    client: str = "tcp://127.0.0.1:0"
    control: str | None = None
    metrics: str | None = None
    page: str | None = None


class SecurityConfig(Struct, frozen=True):
    """`keys`: the keys folder; None: TCP on loopback only, and nobody needs a key."""

    keys: Path | None = None


class PolicyChoice(Struct, frozen=True):
    """A policy's name and its options, checked and with their defaults."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Setting(Struct, frozen=True):
    """One value of the configuration and where it came from: the file's name, or ``default``."""

    path: str
    value: Any
    origin: str


class ClusterConfig(Struct, frozen=True):
    """One workload and cluster file (design section 10)."""

    models: tuple[ModelConfig, ...]
    nodes: tuple[NodeConfig, ...]
    batching: PolicyChoice
    placement: PolicyChoice
    seed: int = 1
    frontends: int = 1
    schedulers: int = 1
    """Of all shards. In each one is active, the others stand by."""
    shards: int = 1
    network: NetworkConfig = NetworkConfig()
    interference: PolicyChoice = PolicyChoice("none")
    heartbeats: HeartbeatTiming = field(default_factory=HeartbeatTiming)
    listen: ListenConfig = ListenConfig()
    security: SecurityConfig = SecurityConfig()
    places: Places = ONE_HOST
    gateway: GatewayConfig = NO_GATEWAY
    deploy: DeployConfig = DEPLOY_DEFAULT
    applications: tuple[ApplicationConfig, ...] = ()
    graph_deadlines: str = policies.graphs.DEFAULT
    settings: tuple[Setting, ...] = ()

    def of_shard(self, shard: int) -> ClusterConfig:
        """One shard's models and nodes, as a cluster of its own."""
        if self.shards == 1:
            return self
        return replace(
            self,
            models=tuple(replace(model, shard=0) for model in self.models if model.shard == shard),
            nodes=tuple(replace(node, shard=0) for node in self.nodes if node.shard == shard),
            shards=1,
        )

    @property
    def has_real_gpus(self) -> bool:
        """Whether any device computes, in use or not."""
        return any(not gpu.is_emulated for gpu in self.gpus)

    @property
    def gpus(self) -> tuple[GpuSlot, ...]:
        """Every device, numbered through from 0 in file order."""
        slots: list[GpuSlot] = []
        for node in self.nodes:
            first = len(slots)
            slots.extend(
                GpuSlot(
                    index=first + local_index,
                    gpu_type=node.gpu_type,
                    memory_bytes=node.memory_bytes,
                    node_id=node.node_id,
                    local_index=local_index,
                    device=node.device,
                    price_per_hour=node.price_per_hour,
                )
                for local_index in range(node.gpus)
            )
        return tuple(slots)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host that has a role, in file order: nodes, then schedulers, then frontends."""
        places = self.places
        placed = (*(one.host for one in places.schedulers), *(one.host for one in places.frontends))
        return tuple(dict.fromkeys((*(node.host for node in self.nodes), *placed)))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of GPU there are, in file order."""
        return tuple(dict.fromkeys(node.gpu_type for node in self.nodes if node.gpus))

    @property
    def rate_rps(self) -> float | None:
        """The sum of the models' highest rates; None where a model's is not known."""
        rates = [model.rate_rps for model in self.models]
        return None if None in rates else sum(rate for rate in rates if rate is not None)

    def served_applications(self) -> tuple[ServedApplication, ...]:
        """The applications, as frontends serve them."""
        return tuple(one.served(self.graph_deadlines, self.seed) for one in self.applications)

    def model(self, model_id: ModelId) -> ModelConfig:
        """The model of that name; ConfigError where there is none."""
        for model in self.models:
            if model.model_id == model_id:
                return model
        raise ConfigError(
            f"there is no model {model_id!r}; there is {', '.join(m.name for m in self.models)}"
        )

    def profiles(self) -> Profiles:
        """Every model's profile on every type of GPU there is, where it has one."""
        found = {
            (model.model_id, gpu_type): model.find_profile(gpu_type)
            for model in self.models
            for gpu_type in self.gpu_types
        }
        return {key: profile for key, profile in found.items() if profile is not None}

    def place(
        self,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        current: Placement | None = None,
        gpus: Sequence[GpuSlot] | None = None,
    ) -> Placement:
        """The placement of this workload by its own policy, or by another one, on all GPUs or on some of them.

        Each shard is placed by itself, and with them all `current` and `gpus` are not asked for.
        Raises ConfigError where the policy's options do not fit this cluster.
        """
        if self.shards > 1:
            return self._place_shards(name, options)
        policy = placement_policy(
            name or self.placement.name, self.placement.options if name is None else options
        )
        if isinstance(policy, ConditionedPolicy):
            policy = policy.under(self.conditions())
        own_gpus = self.gpus if gpus is None else gpus
        profiles = self.profiles()
        models = placed_models(self.models, has_real_gpus=self.has_real_gpus)
        if isinstance(policy, Given):
            placement = policy.place(models, own_gpus, profiles, current)
        else:
            cut = cut_first(models, own_gpus, profiles, current)
            placement = cut.with_others(policy, profiles, current)
        slo_ms = {model.model_id: model.slo_ms for model in self.models}
        asked = [(one.plan, one.demands) for one in self.applications]
        why = (
            *_joint(self.models),
            *_estimates(profiles),
            *limits(asked, placement, own_gpus, profiles, slo_ms),
        )
        return replace(placement, decisions=(*placement.decisions, *why))

    def _place_shards(self, name: str | None, options: Mapping[str, Any] | None) -> Placement:
        index_of = {(gpu.node_id, gpu.local_index): gpu.index for gpu in self.gpus}
        parts: list[Placement] = []
        for shard in range(self.shards):
            own = self.of_shard(shard)
            number = [index_of[gpu.node_id, gpu.local_index] for gpu in own.gpus]
            placed = own.place(name, options)
            slices = tuple(
                replace(one, gpu=number[one.gpu], following=tuple(number[gpu] for gpu in one.following))
                for one in placed.slices
            )
            parts.append(replace(placed, slices=slices))
        expected = [part.expected_goodput_rps for part in parts]
        return Placement(
            tuple(planned for part in parts for planned in part.slices),
            tuple(unplaced for part in parts for unplaced in part.unplaced),
            tuple(violation for part in parts for violation in part.violations),
            None if None in expected else sum(one for one in expected if one is not None),
            tuple(decision for part in parts for decision in part.decisions),
            {model_id: rps for part in parts for model_id, rps in part.short_rps.items()},
        )

    @property
    def is_planned_for_its_batching(self) -> bool:
        """Whether the placement's policy looks at what its plan will run under."""
        policy = placement_policy(self.placement.name, self.placement.options)
        return isinstance(policy, ConditionedPolicy)

    def conditions(self) -> Conditions:
        """What a placement of this cluster will run under.

        Raises ConfigError where a model's profile lacks what the interference model needs.
        """
        network = self.network
        return Conditions(
            {gpu_type: self.device_model(gpu_type).interference for gpu_type in self.gpu_types},
            self.batching.name == "fixed",
            self.batching.options.get("max_wait_ms", MAX_WAIT_MS),
            network.control_ms,
            network.data_ms_per_item,
            network.result_ms,
            gaps=self._gaps,
        )

    def _gaps(self, model_id: ModelId) -> Iterator[float]:
        arrival = self.model(model_id).arrival
        return drawn_gaps(arrival.process, arrival.shape, f"{self.seed}/{model_id}")

    def device_model(self, gpu_type: str) -> DeviceModel:
        """What a slice of a GPU of that type takes for a batch.

        Raises ConfigError where a model's profile lacks what the interference model needs.
        """
        found = {model.model_id: model.find_profile(gpu_type) for model in self.models}
        profiles = {model_id: profile for model_id, profile in found.items() if profile is not None}
        name, options = self.interference.name, self.interference.options
        try:
            interference = interference_named(name, profiles, gpu_type, options)
        except ProfileError as error:
            raise ConfigError(f"cluster.interference: {error}") from error
        return DeviceModel(profiles, interference, gpu_type)


def _joint(models: Sequence[ModelConfig]) -> list[Decision]:
    """Models that are placed as one, and their memory counted once."""
    return [
        Decision(
            f"model {model.name}",
            f"placed as one model with {len(model.heads)} heads ({', '.join(model.head_names)}): joint batches, memory counted once",
            {"heads": len(model.heads), "slo_ms": model.slo_ms},
        )
        for model in models
        if model.heads
    ]


def _estimates(profiles: Profiles) -> list[Decision]:
    """What the plan rests on that nobody measured."""
    return [
        Decision(
            f"profile of {model_id} on {gpu_type}",
            "an ESTIMATE from its operator graph, not measured",
            {"run time within %": 100 * profile.error},
        )
        for (model_id, gpu_type), profile in sorted(profiles.items())
        if profile.error is not None
    ]


def placed_models(
    models: Sequence[ModelConfig], *, has_real_gpus: bool = False
) -> tuple[PlacedModelInput, ...]:
    """The models as placement policies see them. `has_real_gpus`: the cluster does, whichever of them there are to place on."""
    return tuple(
        PlacedModelInput(
            model_id=model.model_id,
            slo_ms=model.slo_ms,
            rate_rps=model.rate_rps,
            memory_bytes=model.memory_bytes,
            has_loader=model.has_loader,
            needs_real_gpu=model.has_loader and has_real_gpus,
            priority=model.priority,
            stages=1 if model.loader is None else max(1, model.loader.stages),
            ranks=1 if model.loader is None else max(1, model.loader.ranks),
        )
        for model in models
    )


def placement_choice(
    name: str,
    options: Mapping[str, Any],
    models: Sequence[ModelConfig] | None,
    gpus: int,
    shards: int,
) -> PolicyChoice:
    """A placement policy's name with checked options; the policy itself checks what it alone understands.

    `models`, `gpus`: what there is for it to name, None where that is only a part.
    """
    policy = placement_policy(name, options)
    if shards > 1 and isinstance(policy, Given):
        raise ConfigError(
            f"placement: given numbers the GPUs of all nodes, and with cluster.shards: {shards} each shard is placed by itself;"
            " leave cluster.shards out, or name a policy that finds places itself"
        )
    if models is not None and isinstance(policy, NamingPolicy):
        policy.check_names(placed_models(models), gpus)
    return PolicyChoice(name, placement_options(name, options))
