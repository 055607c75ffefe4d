"""Every placement policy on the settings of the thesis' figures 6.1, 6.10 and 6.15, under two disciplines.

    python -m benchmarks.placements run RESULTS.json [--set thesis|held-out] [--settings 6.1,6.10/5-gpus]
                                                     [--seconds 20] [--strength 1]
                                                     [--policies tenuto,symphony] [--processes 2]
    python -m benchmarks.placements table RESULTS.json

The set `held-out` has settings drawn at random, on which nothing was tuned.

Emulated V100s, table A.1's run times, interference `sm` of the given strength, Poisson arrivals, no network delay.
All policies play the same arrivals. A row is a setting under a discipline: the best of the others, `tenuto` beside
it, and whether it has what docs/results/placements.md promises. What `tenuto` plans depends on discipline and strength, the
others' plans do not. A run goes on where its results file ends.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

from fabric.errors import ConfigError, ProfileError
from policies.placement.common.base import largest_batch
from profiles.store import shipped_profile, shipped_refs
from roles.lab.parallel import executor_of
from roles.lab.reproduce.thesis_runs import Contender, contenders
from roles.lab.reproduce.thesis_settings import JUDGED, PROFILE_FAMILY, FigureSetting
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

BATCHINGS = ("fixed", "deferred")
OURS = "tenuto"
ESTIMATE = "thesis-v100-estimate"
WARMUP_MS = 2_000.0  # as the thesis does, and long enough for overloaded queues to be full
NEAR = 0.98
NOISE = 0.005  # of a served fraction: what a run of 20 s leaves to chance where all is served


def held_out() -> tuple[FigureSetting, ...]:
    """Twelve settings that nothing was tuned on, drawn from one seed.

    Three to seven models of table A.1 on two to six V100s, one SLO for all, and the last number of the name: how many
    times what the GPUs carry comes, were each model alone on its part of them with 2 l(b) within the SLO.
    """
    rng = random.Random(20261124)
    family = f"{PROFILE_FAMILY}/"
    names = sorted(ref.removeprefix(family) for ref in shipped_refs() if ref.startswith(family))
    drawn = []
    for _ in range(12):
        slo_ms, gpu_count, load = (
            rng.choice((150, 200, 300, 400)),
            rng.randint(2, 6),
            rng.choice((0.8, 1.0, 1.3)),
        )
        hosted = [name for name in names if shipped_profile(family + name).exec_ms(1) <= slo_ms / 2]
        chosen = rng.sample(hosted, rng.randint(3, 7))
        parts = [rng.uniform(0.5, 1.5) for _ in chosen]
        loads = []
        for name, part in zip(chosen, parts, strict=True):
            table = shipped_profile(family + name).exec_table()
            size = largest_batch(table, slo_ms / 2)
            alone_rps = 1000 * size / table[size - 1]
            loads.append((name, round(load * gpu_count * part / sum(parts) * alone_rps, 1)))
        label = f"held-out/{len(chosen)}-models/{gpu_count}-gpus/{slo_ms}-ms/{load:g}"
        drawn.append(FigureSetting(label, "drawn from a seed", tuple(loads), slo_ms, gpu_count))
    return tuple(drawn)


SETS: Mapping[str, Sequence[FigureSetting]] = {"thesis": JUDGED, "held-out": held_out()}

_THESIS = {
    "iGniter": "igniter",
    "Usher": "usher",
    "WAO-Usher": "wao-usher",
    "AO-MILP": "ao-milp",
    "WSM-MILP": "wsm-milp",
}


def policies(setting: FigureSetting) -> dict[str, Contender]:
    """The thesis' five as its evaluation has them, and the others."""
    found = {_THESIS[one.label]: one for one in contenders(setting)}
    others = (
        Contender(OURS, OURS),
        Contender("symphony", "symphony"),
        Contender("exclusive", "exclusive"),
        Contender("wsm-usher", "wsm-usher"),
        Contender("gpulet", "gpulet", {"interference": False}),
        Contender("ffd", "ffd", family=ESTIMATE),
        Contender("gslice", "gslice", family=ESTIMATE),
        Contender("gpulets", "gpulets", family=ESTIMATE),
    )
    return {**{one.label: one for one in others}, **found}


def play(
    setting: FigureSetting, policy: str, batching: str, strength: float, seconds: float
) -> dict[str, Any]:
    """One row of results; `error` where the combination cannot be."""
    contender = policies(setting)[policy]
    row: dict[str, Any] = {
        "setting": setting.name,
        "policy": policy,
        "batching": batching,
        "strength": strength,
    }
    try:
        plan = setting.config(
            contender.policy, contender.options, batching=batching, strength=strength, family=contender.family
        ).place()
        config = setting.config(batching=batching, strength=strength)
        settings = settings_from(config, plan)
    except (ConfigError, ProfileError) as error:
        return {**row, "error": str(error)}
    window = Window(WARMUP_MS, WARMUP_MS + 1000 * seconds)
    outcome = simulate(config, workload_of(config), window, settings).outcome
    fractions = {name: one.good / one.offered for name, one in outcome.models.items() if one.offered}
    return {
        **row,
        "goodput_rps": outcome.good / outcome.duration_s,
        "offered_rps": outcome.offered / outcome.duration_s,
        "expected_rps": plan.expected_goodput_rps,
        "worst_fraction": min(fractions.values()),
        "served": fractions,
        "gpus_used": len(plan.gpus_used),
        "slices": len(plan.slices),
    }


def run(arguments: argparse.Namespace) -> None:
    """Play what the results file does not have yet."""
    path = Path(arguments.results)
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {(row["setting"], row["policy"], row["batching"], row["strength"]) for row in rows}
    asked = [part for part in arguments.settings.split(",") if part]
    chosen = [
        s
        for s in SETS[arguments.set]
        if not asked or any(s.name == a or s.name.startswith(f"{a}/") for a in asked)
    ]
    only = [part for part in arguments.policies.split(",") if part]
    jobs = [
        (setting, policy, batching, arguments.strength)
        for setting in chosen
        for policy in policies(setting)
        if not only or policy in only
        for batching in BATCHINGS
        if (setting.name, policy, batching, arguments.strength) not in done
    ]
    with executor_of(arguments.processes) as (executor, _):
        playing = [executor.submit(play, *job, arguments.seconds) for job in jobs]
        for played in as_completed(playing):
            rows.append(played.result())
            path.write_text(json.dumps(rows, indent=1))
    table(rows)


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """The settings, best of the others and ours; then the means."""
    for strength in sorted({row["strength"] for row in rows}):
        for batching in BATCHINGS:
            print(f"\nstrength {strength:g}, {batching}\n")
            _table([r for r in rows if r["strength"] == strength and r["batching"] == batching])


def _table(rows: Sequence[Mapping[str, Any]]) -> None:
    print("| setting | ideal | best other | goodput | worst | `tenuto` | worst | ratio | |")
    print("|---|---|---|---|---|---|---|---|---|")
    bests, ours = [], []
    for setting in (one for settings in SETS.values() for one in settings):
        played = {r["policy"]: r for r in rows if r["setting"] == setting.name and "error" not in r}
        own = played.pop(OURS, None)
        if own is None or not played:
            continue
        best = max(played.values(), key=lambda row: row["goodput_rps"])
        ratio = own["goodput_rps"] / best["goodput_rps"]
        misses = []
        if ratio < NEAR:
            misses.append("total")
        if ratio < 1 and own["worst_fraction"] < best["worst_fraction"] - NOISE:
            misses.append("worst")
        bests.append(best["goodput_rps"])
        ours.append(own["goodput_rps"])
        print(
            f"| {setting.name} | {setting.ideal_rps:.0f} | {best['policy']} | {best['goodput_rps']:.0f} "
            f"| {best['worst_fraction']:.3f} | {own['goodput_rps']:.0f} | {own['worst_fraction']:.3f} "
            f"| {ratio:.3f} | {', '.join(misses)} |"
        )
    if ours:
        print(f"\nmean of the bests {fmean(bests):.1f}, of tenuto {fmean(ours):.1f}")
    names = dict.fromkeys(row["policy"] for row in rows)
    means = {name: fmean([r.get("goodput_rps", 0.0) for r in rows if r["policy"] == name]) for name in names}
    ranking = sorted(means.items(), key=lambda entry: -entry[1])
    print("ranking by mean: " + ", ".join(f"{name} {mean:.0f}" for name, mean in ranking))


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("results")
    running.add_argument("--set", default="thesis", choices=SETS)
    running.add_argument("--settings", default="")
    running.add_argument("--policies", default="")
    running.add_argument("--seconds", type=float, default=20.0)
    running.add_argument("--strength", type=float, default=1.0)
    running.add_argument("--processes", type=int, default=None)
    running.set_defaults(does=run)
    showing = commands.add_parser("table")
    showing.add_argument("results")
    showing.set_defaults(does=lambda given: table(json.loads(Path(given.results).read_text())))
    arguments = parser.parse_args()
    arguments.does(arguments)


if __name__ == "__main__":
    main()
