"""How long iGniter's placement takes (figure 21 of its paper: 4.61 s for 1,000 workloads, quadratic).

python -m benchmarks.igniter_planning [--repeats N] [--json FILE]

Two kinds of workload sets on V100s: the 12 of the paper's table 3 again and again, and drawn ones: a model of
the four, an SLO between the paper's smallest and twice its largest for that model, a rate between a quarter of
its smallest and its largest. Each line is the best of the repeats, profiles already read.
"""

from __future__ import annotations

import argparse
import random
import time

from benchmarks.figures import Figures, add_json_option, tell
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, PlacementPolicy, Profiles
from policies.placement.igniter.ffd import Ffd
from policies.placement.igniter.policy import Igniter
from profiles.store import shipped_data, shipped_profile

COUNTS = (10, 100, 300, 1000)
GIB = 2**30


def repeated(count: int) -> tuple[list[PlacedModelInput], Profiles]:
    """Table 3, as often as needed."""
    rows = shipped_data("igniter_v100")["workloads_table3"]
    chosen = [(f"{i}", rows[i % len(rows)]) for i in range(count)]
    models = [PlacedModelInput(ModelId(name), row["slo_ms"], row["rate_rps"]) for name, row in chosen]
    return models, {
        (ModelId(name), "v100"): shipped_profile(f"igniter-v100/{row['model']}") for name, row in chosen
    }


def drawn(count: int, seed: int = 1) -> tuple[list[PlacedModelInput], Profiles]:
    """Workloads of which no two are alike."""
    draw = random.Random(seed)
    ranges: dict[str, tuple[list[float], list[float]]] = {}
    for row in shipped_data("igniter_v100")["workloads_table3"]:
        slos, rates = ranges.setdefault(row["model"], ([], []))
        slos.append(row["slo_ms"])
        rates.append(row["rate_rps"])
    models: list[PlacedModelInput] = []
    profiles = {}
    for i in range(count):
        name = draw.choice(list(ranges))
        slos, rates = ranges[name]
        slo_ms, rate_rps = draw.uniform(min(slos), 2 * max(slos)), draw.uniform(min(rates) / 4, max(rates))
        models.append(PlacedModelInput(ModelId(f"{i}"), slo_ms, rate_rps))
        profiles[ModelId(f"{i}"), "v100"] = shipped_profile(f"igniter-v100/{name}")
    return models, profiles


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("igniter planning")
    table = figures.table("placing workloads, ms of the best time", "workloads", "policy", "n", "GPUs", "ms")
    policies: dict[str, PlacementPolicy] = {
        "igniter": Igniter(),
        "ffd": Ffd(),
        "ffd with growth": Ffd(has_growth=True),
    }
    for kind, make in (("table 3, repeated", repeated), ("drawn", drawn)):
        for count in COUNTS:
            models, profiles = make(count)
            gpus = [GpuSlot(i, "v100", 16 * GIB, NodeId("n"), i) for i in range(2 * count)]
            for name, policy in policies.items():
                spent_ms = []
                for _ in range(options.repeats):
                    began = time.perf_counter()
                    placed = policy.place(models, gpus, profiles)
                    spent_ms.append((time.perf_counter() - began) * 1000)
                assert not placed.unplaced
                table.rows.append((kind, name, count, len(placed.gpus_used), min(spent_ms)))
    tell(figures, options.json)


if __name__ == "__main__":
    main()
