"""Goodput of applications under carried deadlines beside each rival, on the same arrivals and fan-outs.

    python -m benchmarks.applications [--cases traffic,chain-3] [--rules carried,nexus] [--batching tenuto] [--seconds 10]
                                      [--seeds 1] [--slo 1,2] [--processes 1] [--json FILE]

Goodput is the highest rate of the application at which less than 1 % of its requests are not answered within its SLO, from end
to end (`tenuto goodput`, virtual time, four GPUs that all host all models). `game` and `traffic` are gpulet's applications on its
synthetic profiles, `nexus-traffic` has Nexus' fan-outs that the data decide, chains and trees are of Symphony's table of models on a
GTX 1080 Ti. The SLO of the latter is `FITTED` times what the models on the longest way take alone; 2: twice the fitted SLO.
`surge` is `nexus-traffic` whose fan-outs double in the run.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from policies.graphs import GRAPH_DEADLINES
from roles.config.read_config import parse_config
from roles.lab.goodput import find_goodput, question_of
from roles.lab.parallel import executor_of

GPUS = 4
FITTED = 4.0
OURS = "carried"
PROFILES = json.loads((Path(__file__).parents[1] / "profiles/data/symphony_profiles.json").read_text())
SMALL = [row for row in PROFILES["gtx1080ti"] if row["alpha_ms"] + row["beta_ms"] < 20.0]

Stages = dict[str, dict[str, Any]]
Case = tuple[float, dict[str, dict[str, Any]], Stages]
"""SLO, profiles of models, stages."""


def gpulet(*names: str) -> dict[str, dict[str, Any]]:
    """Its synthetic profiles of the whole GPU."""
    return {name: {"ref": f"gpulet-2080ti/{name}"} for name in names}


def game() -> Case:
    """Six LeNets and a ResNet-50 in parallel, answers joined."""
    stages = {"digits": {"model": "lenet1", "fan_out": 6}, "scene": {"model": "resnet50"}}
    return 95.0, gpulet("lenet1", "resnet50"), stages


def traffic(cars: Any = 1, people: Any = 1) -> Case:
    """SSD, then GoogLeNet and VGG-16."""
    stages = {
        "detect": {"model": "ssd-mobilenetv1"},
        "cars": {"model": "googlenet", "after": "detect", "fan_out": cars},
        "people": {"model": "vgg16", "after": "detect", "fan_out": people},
    }
    return 136.0, gpulet("ssd-mobilenetv1", "googlenet", "vgg16"), stages


def drawn(seed: int, count: int, *, is_chain: bool) -> Case:
    """A chain or a random tree of so many models, with random fan-outs."""
    rng = random.Random(20261123 + seed)
    rows = rng.sample(SMALL, count)
    stages: Stages = {}
    ends_ms: dict[str, float] = {}
    for place, row in enumerate(rows):
        name = f"s{place}"
        before = None if place == 0 else f"s{place - 1 if is_chain else rng.randrange(place)}"
        stages[name] = {"model": row["name"]}
        if before is not None:
            stages[name] |= {"after": before, "fan_out": {"poisson": rng.choice((0.5, 1.0, 1.5, 2.0))}}
        ends_ms[name] = row["alpha_ms"] + row["beta_ms"] + (0.0 if before is None else ends_ms[before])
    profiles = {
        row["name"]: {"alpha_ms": row["alpha_ms"], "beta_ms": row["beta_ms"], "max_batch": 32} for row in rows
    }
    return FITTED * max(ends_ms.values()), profiles, stages


def cases(seconds: float) -> Mapping[str, Case]:
    """All of them. `seconds`: of a run, of which a surge begins in the middle."""
    surges = [{"poisson": [[0, mean], [1.0 + seconds / 2, 2 * mean]]} for mean in (1.2, 0.8)]
    return {
        "game": game(),
        "traffic": traffic(),
        "nexus-traffic": traffic({"poisson": 1.2}, {"poisson": 0.8}),
        **{f"chain-{count}": drawn(count, count, is_chain=True) for count in (2, 3, 4)},
        **{f"tree-{seed}": drawn(seed, 3 + seed, is_chain=False) for seed in (1, 2, 3)},
        "surge": traffic(*surges),
    }


def document(case: Case, rule: str, batching: str, slo_factor: float) -> dict[str, Any]:
    """The configuration of a case."""
    slo_ms, profiles, stages = case
    return {
        "models": [{"name": name, "profile": profile} for name, profile in profiles.items()],
        "applications": [
            {"name": "application", "slo_ms": slo_ms * slo_factor, "rate_rps": 100, "stages": stages}
        ],
        "graph_deadlines": rule,
        "cluster": {"gpus": GPUS},
        "batching": batching,
    }


def main() -> None:
    """Print a row per case and SLO, then means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="")
    parser.add_argument("--rules", default=",".join(GRAPH_DEADLINES))
    parser.add_argument("--batching", default="tenuto")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slo", default="1,2")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rules = asked.rules.split(",")
    known = cases(asked.seconds)
    rows: list[dict[str, Any]] = []
    print(f"{'case':<16}{'SLO':>6}" + "".join(f"{rule:>14}" for rule in rules), flush=True)
    with executor_of(asked.processes, None) as (executor, size):
        for name in asked.cases.split(",") if asked.cases else known:
            for factor in map(float, asked.slo.split(",")):
                found: dict[str, float] = {}
                for rule in rules:
                    config = parse_config(document(known[name], rule, asked.batching, factor), Path())
                    question = question_of(config, 1.0, asked.seconds)
                    seeds = [config.seed + number for number in range(asked.seeds)]
                    found[rule] = find_goodput(question, seeds, executor, size, lambda _: None).goodput_rps
                rows.append({"case": name, "slo_factor": factor, "goodput_rps": found})
                shown = "".join(f"{found[rule]:14.1f}" for rule in rules)
                print(f"{name:<16}{factor:6g}{shown}", flush=True)
    for rule in rules:
        if OURS in rules and rule != OURS:
            ratios = [row["goodput_rps"][OURS] / max(row["goodput_rps"][rule], 1e-9) for row in rows]
            print(f"{OURS} / {rule}: mean {fmean(ratios):.3f}, least {min(ratios):.3f}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
