"""The iGniter paper's workloads planned by a policy and played in the simulator, the way its testbed ran them.

Constant rates (section 5.1), batches of the plan's size (Triton with a fixed batch), iGniter's model of the
interference. Its workers load the next batch while one runs (figure 2): here that is the network's delay per
item, and taken out of the run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fabric.ids import ModelId
from policies.placement.common.base import Placement
from profiles.igniter.performance_model import IgniterProfile
from profiles.model import ModelProfile
from profiles.store import shipped_data
from roles.config.cluster import ClusterConfig, ModelConfig, NetworkConfig
from roles.config.read_config import parse_config
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import ModelOutcome, Window

WARM_MS = 2000.0
VIOLATION = 0.01
"""A workload violates its SLO where more than this fraction of its requests does: its P99 is over it."""

PRICE_V100, PRICE_T4 = 3.06, 0.526  # dollars an hour: p3.2xlarge and g4dn.xlarge
STRATEGIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "iGniter": ("igniter", {}),
    "gpu-lets+": ("gpulets", {}),
    "FFD+": ("ffd", {}),
    "GSLICE+": ("gslice", {}),
    "FFD++": ("ffd", {"growth": True}),
}
"""By the paper's name: ours, and its options."""

Workloads = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class IgniterRun:
    """A plan, and what came of each workload."""

    placement: Placement
    models: Mapping[ModelId, ModelOutcome]

    @property
    def violations(self) -> list[str]:
        """The workloads whose P99 is over their SLO; dropped requests count."""
        return [str(name) for name, outcome in self.models.items() if outcome.bad_rate > VIOLATION]


def workloads_of(name: str) -> Workloads:
    """``illustrative_example`` (section 2.3) or ``workloads_table3``."""
    rows: Workloads = shipped_data("igniter_v100")[name]
    return rows


def name_of(workload: Mapping[str, Any]) -> str:
    """W1 … W12; the example's are called by their models."""
    return str(workload.get("id", workload["model"]))


def cluster(workloads: Workloads, strategy: str, nodes: Sequence[Mapping[str, Any]]) -> ClusterConfig:
    """A configuration with these workloads, as a file would give it."""
    policy, options = STRATEGIES[strategy]
    types = [str(node["type"]) for node in nodes]
    models = [
        {
            "name": name_of(workload),
            "slo_ms": workload["slo_ms"],
            "rate_rps": workload["rate_rps"],
            "arrival": {"process": "uniform"},
            "profile": {"by_type": {t: {"ref": f"igniter-{t}/{workload['model']}"} for t in types}},
        }
        for workload in workloads
    ]
    document = {
        "models": models,
        "cluster": {"nodes": list(nodes), "interference": "igniter"},
        "batching": {"fixed": {}},
        "placement": {policy: dict(options)},
    }
    return parse_config(document, Path(), source="iGniter's workloads")


def planned(workloads: Workloads, strategy: str, gpus: int = 20) -> Placement:
    """The strategy's plan on V100s."""
    return cluster(workloads, strategy, [v100s(gpus)]).place()


def played(workloads: Workloads, strategy: str, window_s: float, gpus: int = 20) -> IgniterRun:
    """The strategy's plan, and `window_s` seconds of it after a warm-up."""
    config = cluster(workloads, strategy, [v100s(gpus)])
    placement = config.place()
    load_ms = max(_load_ms(profile) for profile in config.profiles().values())
    models = tuple(_without_load(model) for model in config.models)
    run_as = replace(config, models=models, network=NetworkConfig(data_ms_per_item=load_ms))
    window = Window(WARM_MS, WARM_MS + 1000 * window_s)
    run = simulate(run_as, workload_of(config), window, settings_from(run_as, placement))
    return IgniterRun(placement, run.outcome.models)


def v100s(count: int) -> dict[str, Any]:
    """A node of the configuration."""
    return {"host": "p3", "gpus": count, "type": "v100", "price_per_hour": PRICE_V100}


def t4s(count: int) -> dict[str, Any]:
    """A node of the configuration."""
    return {"host": "g4dn", "gpus": count, "type": "t4", "price_per_hour": PRICE_T4}


def _igniter(profile: ModelProfile) -> IgniterProfile:
    assert isinstance(profile, IgniterProfile), "the families igniter-v100 and igniter-t4 hold nothing else"
    return profile


def _load_ms(profile: ModelProfile) -> float:
    found = _igniter(profile)
    return found.coefficients.load_bytes / found.hardware.pcie_bytes_per_ms


def _without_load(model: ModelConfig) -> ModelConfig:
    by_type = {}
    for gpu_type, profile in model.profiles_by_type.items():
        found = _igniter(profile)
        coefficients = replace(found.coefficients, load_bytes=0.0)
        by_type[gpu_type] = IgniterProfile(found.hardware, coefficients, found.source)
    return replace(model, profiles_by_type=by_type)
