"""Random clusters, played by the fast simulator and by the one with every real core: each request's fate in both."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fabric.ids import ModelId
from roles.config.read_config import parse_config
from roles.simulator.simulation import SimulatedRun, simulate
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

SHIPPED = ("alexnet", "resnet50", "vgg19", "ssd")  # of iGniter's V100, whose interference is known
BATCHINGS: tuple[Any, ...] = (
    "tenuto",
    "deferred",
    "eager",
    {"timeout": {"slo_percent": 30}},
    "clockwork",
    "nexus",
    "shepherd",
    {"fixed": {"batch": 1}},
    {"fixed": {"batch": 4}},
)
TOLERANCE_MS = 1e-4
"""Of the moments of both: durations travel in one of them, and a batch may go by a timer there, which disciplines set a little
before the moment, or by the news that made that timer needless."""


@dataclass(frozen=True)
class Fate:
    """When a request was answered in time; None: it was not."""

    model_id: ModelId
    index: int
    arrived_at_ms: float
    fast_ms: float | None
    full_ms: float | None


def random_cluster(seed: int) -> dict[str, Any]:
    """A configuration without jitter: one to five models, their own lines or shipped ones on shares of a GPU."""
    rng = random.Random(seed)
    gpus = rng.randint(1, 4)
    document: dict[str, Any] = {
        "cluster": {
            "gpus": gpus,
            "frontends": rng.randint(1, 3),
            "network": {
                "control_ms": rng.choice((0.0, 0.2, rng.uniform(0, 2))),
                "data_ms_per_item": rng.choice((0.0, rng.uniform(0, 0.1))),
                "result_ms": rng.choice((0.0, 0.3, rng.uniform(0, 2))),
            },
        },
        "batching": rng.choice(BATCHINGS),
    }
    if rng.random() < 0.3:
        _share(document, rng, gpus)
    else:
        document["models"] = [_of_its_own(rng, place) for place in range(rng.randint(1, 5))]
    for model in document["models"]:
        model["arrival"] = rng.choice(
            ({"process": "poisson"}, {"process": "gamma", "shape": rng.choice((0.1, 0.5))})
        )
    return document


def _of_its_own(rng: random.Random, place: int) -> dict[str, Any]:
    alpha_ms, beta_ms = rng.uniform(0.2, 4), rng.uniform(0, 12)
    return {
        "name": f"m{place}",
        "slo_ms": (alpha_ms + beta_ms) * rng.uniform(1.5, 6) + rng.uniform(1, 20),
        "rate_rps": rng.uniform(20, 400),
        "profile": {"alpha_ms": alpha_ms, "beta_ms": beta_ms, "max_batch": rng.choice((4, 16, 64))},
    }


def _share(document: dict[str, Any], rng: random.Random, gpus: int) -> None:
    names = rng.sample(SHIPPED, rng.randint(1, len(SHIPPED)))
    document["cluster"] |= {"gpu_type": "v100", "interference": "igniter"}
    document["models"] = [
        {
            "name": name,
            "slo_ms": rng.uniform(30, 120),
            "rate_rps": rng.uniform(20, 300),
            "profile": {"ref": f"igniter-v100/{name}"},
        }
        for name in names
    ]
    slices = []
    for gpu in range(gpus):
        shares = rng.choice(((100,), (50, 50), (30, 30, 40)))
        for share in shares:
            hosted = rng.sample(names, rng.randint(1, len(names)))
            slices.append(
                {"gpu": gpu, "share_percent": share, "models": [{"model": name} for name in hosted]}
            )
    document["placement"] = {"given": {"slices": slices}}


def with_application(document: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same models, and an application of one to four stages that asks some of them, with time enough for most of its requests."""
    rng = random.Random(f"{seed}/application")
    names = [model["name"] for model in document["models"]]
    stages: dict[str, Any] = {}
    for place in range(rng.randint(1, 4)):
        after = rng.sample(sorted(stages), min(len(stages), rng.choice((1, 1, 2))))
        stage: dict[str, Any] = {"model": rng.choice(names), "after": after}
        if len(after) == 1:
            stage["fan_out"] = rng.choice((1, 2, {"poisson": 1.2}, {"share": 0.7}))
        stages[f"s{place}"] = stage | {"optional": rng.random() < 0.2}
    slo_ms = sum(model["slo_ms"] for model in document["models"]) * rng.uniform(1.5, 4.0) + 60.0
    application = {"name": "app", "slo_ms": slo_ms, "rate_rps": rng.uniform(10, 80), "stages": stages}
    rule = rng.choice(("carried", "equal", "proportional", "pard"))
    return document | {"applications": [application], "graph_deadlines": rule}


def with_pipeline(document: dict[str, Any], seed: int) -> dict[str, Any]:
    """Models of the same kind, all of them cut over the first GPUs, and some of them whole on each GPU that is left."""
    rng = random.Random(f"{seed}/pipeline")
    gpus = rng.randint(2, 4)
    stages = rng.randint(2, gpus)
    models = [_of_its_own(rng, place) for place in range(rng.randint(1, 4))]
    for model in models:
        line = model["profile"]
        batches = range(1, rng.choice((1, 4, 8)) + 1)
        table = {batch: line["alpha_ms"] * batch + line["beta_ms"] for batch in batches}
        parts = [rng.uniform(0.5, 1.5) for _ in range(stages)]
        cut = {stages: [1.1 * table[1] * part / sum(parts) for part in parts]}
        model["profile"] = {"table": table, "stages": cut}
        model["rate_rps"] /= 4.0
        model["arrival"] = {"process": "gamma", "shape": rng.choice((0.1, 1.0))}
    hosted = [[{"model": model["name"]} for model in models]]
    hosted += [[{"model": rng.choice(models)["name"]}] for _ in range(stages, gpus)]
    slices = [
        {"gpu": gpu, "following": list(range(1, stages)) if gpu == 0 else [], "models": of_slice}
        for gpu, of_slice in zip((0, *range(stages, gpus)), hosted, strict=True)
    ]
    return {
        "cluster": document["cluster"] | {"gpus": gpus, "gpu_type": "generic", "interference": "none"},
        "models": models,
        "batching": document["batching"],
        "placement": {"given": {"slices": slices}},
    }


def with_ranks(document: dict[str, Any], seed: int) -> dict[str, Any]:
    """Models of the same kind, the first of them in ranks on the first GPUs, each other one on a GPU that is left."""
    rng = random.Random(f"{seed}/ranks")
    ranks, others = rng.randint(2, 3), rng.randint(0, 2)
    models = [_of_its_own(rng, place) for place in range(1 + others)]
    models[0]["loader"] = {"python": "a.b:C", "ranks": ranks}
    for model in models:
        model["rate_rps"] /= 2.0
        model["arrival"] = {"process": "gamma", "shape": rng.choice((0.1, 1.0))}
    slices: list[dict[str, Any]] = [
        {"gpu": 0, "following": list(range(1, ranks)), "models": [{"model": models[0]["name"]}]}
    ]
    slices += [
        {"gpu": ranks + place, "models": [{"model": model["name"]}]} for place, model in enumerate(models[1:])
    ]
    return {
        "cluster": document["cluster"]
        | {"gpus": ranks + others, "gpu_type": "generic", "interference": "none"},
        "models": models,
        "batching": document["batching"],
        "placement": {"given": {"slices": slices}},
    }


def play(document: Mapping[str, Any], seed: int, requests: int, *, is_full: bool) -> SimulatedRun:
    """About so many requests of it."""
    config = parse_config(dict(document), Path())
    rate_rps = sum(model["rate_rps"] for model in document["models"])
    window = Window(0.0, 1000.0 * requests / rate_rps)
    return simulate(config, workload_of(config, seed), window, is_full=is_full)


def fates_apart(fast: SimulatedRun, full: SimulatedRun) -> list[Fate]:
    """The requests whose fates differ, by arrival."""
    apart = []
    for one, other in zip(fast.traffic, full.traffic, strict=True):
        fast_ms, full_ms = _in_time(one), _in_time(other)
        is_same = (np.isnan(fast_ms) & np.isnan(full_ms)) | (np.abs(fast_ms - full_ms) < TOLERANCE_MS)
        for index in np.flatnonzero(~is_same).tolist():
            moments = (float(moments[index]) for moments in (one.arrived_at_ms, fast_ms, full_ms))
            arrived_ms, *answered_ms = moments
            answered = [None if math.isnan(at_ms) else at_ms for at_ms in answered_ms]
            apart.append(Fate(one.model_id, index, arrived_ms, answered[0], answered[1]))
    return sorted(apart, key=lambda fate: fate.arrived_at_ms)


def _in_time(traffic: ModelTraffic) -> Any:
    """Moments of the answers; NaN: none, or too late, which a frontend's client does not see."""
    deadlines_ms = traffic.arrived_at_ms + traffic.slo_ms
    return np.where(traffic.finished_at_ms <= deadlines_ms + TOLERANCE_MS, traffic.finished_at_ms, np.nan)


def with_heads(document: dict[str, Any], seed: int) -> dict[str, Any]:
    """The first model is asked by its heads' names, some of which allow more time than it does."""
    rng = random.Random(f"{seed}/heads")
    first, *others = document["models"]
    heads = [{"name": f"head{number}"} for number in range(rng.randint(2, 5))]
    heads[0]["slo_ms"] = 2 * first["slo_ms"]
    return document | {"models": [first | {"heads": heads}, *others]}
