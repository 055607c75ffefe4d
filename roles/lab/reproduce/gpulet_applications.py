"""gpulet's two applications as the graphs of its figure 12, in the measures of its figures 13 and 14.

Its schedulers know models, each with an SLO and a rate. Here both follow from the graph: the rate is the application's, and the SLO is what
`graph_deadlines` gives the stage. `equal` is how its authors divide `traffic` (69 ms for SSD-MobileNet, then 67). A request counts
from end to end. The latency table is SYNTHETIC (see `gpulet.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from profiles.store import shipped_data
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.lab.reproduce.gpulet import (
    GPU_COUNT,
    GPU_TYPE,
    SCHEDULERS,
    SYNTHETIC,
    Scheduler,
    highest_schedulable_rps,
    profile_of,
)
from roles.lab.reproduce.gpulet_violations import ALLOWED_PERCENT, WINDOW
from roles.lab.reproduce.report import Grid, Reproduction, Row, Value
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of

COMPARED = tuple(one for one in SCHEDULERS if one.search != "exhaustive")
RULES = {"game": ("equal",), "traffic": ("equal", "carried")}  # one stage has all of the SLO under every rule


def graphs() -> dict[str, tuple[float, dict[str, Any]]]:
    """By name, the SLO in ms and the stages: seven models in parallel, and two behind a detector."""
    data = shipped_data("gpulet_2080ti")["applications"]
    game, traffic = data["game"], data["traffic"]
    first, *others = traffic["models"]
    slos_ms = traffic["slo_ms_in_app_config"]
    behind = {name: {"model": name, "after": first} for name in others}
    return {
        "game": (game["slo_ms_in_app_config"], {name: {"model": name} for name in game["models"]}),
        "traffic": (slos_ms[first] + slos_ms[others[0]], {first: {"model": first}, **behind}),
    }


def cluster(name: str, scheduler: Scheduler, rule: str, rate_rps: float) -> ClusterConfig:
    """The application at that rate, planned by that scheduler."""
    slo_ms, stages = graphs()[name]
    document: dict[str, Any] = {
        "models": [
            {"name": model, "profile": {"by_type": {GPU_TYPE: {"ref": f"gpulet-2080ti/{profile_of(model)}"}}}}
            for model in stages
        ],
        "applications": [{"name": name, "slo_ms": slo_ms, "rate_rps": rate_rps, "stages": stages}],
        "graph_deadlines": rule,
        "cluster": {
            "nodes": [{"host": "server", "gpus": GPU_COUNT, "type": GPU_TYPE}],
            "interference": "gpulet",
        },
        "placement": {"gpulet": {"search": scheduler.search, "interference": scheduler.has_interference}},
    }
    return parse_config(document, Path(), source=f"gpulet's {name}")


def highest_rps(name: str, scheduler: Scheduler, rule: str) -> float:
    """The highest rate of the application, in requests/s, of which the scheduler places all."""

    def is_schedulable(rate_rps: float) -> bool:
        placed = cluster(name, scheduler, rule, rate_rps).place()
        return not placed.unplaced and not placed.violations

    return highest_schedulable_rps(is_schedulable)


def violations_percent(name: str, scheduler: Scheduler, rule: str, rate_rps: float) -> float:
    """Requests of the application that are not answered within its SLO, from end to end."""
    config = cluster(name, scheduler, rule, rate_rps)
    run = simulate(config, workload_of(config), WINDOW, settings_from(config))
    return 100 * run.outcome.applications[name].requests.bad_rate


def figures_12_to_14() -> Reproduction:
    """Both applications under three schedulers and two ways to divide the SLO."""
    bars: list[tuple[str, tuple[Value, ...]]] = []
    rows: list[Row] = []
    played: list[float] = []
    for name in graphs():
        for rule in RULES[name]:
            cells: list[Value] = []
            rates_rps: dict[str, float] = {}
            for scheduler in COMPARED:
                rate_rps = rates_rps[scheduler.name] = highest_rps(name, scheduler, rule)
                percent = violations_percent(name, scheduler, rule, rate_rps) if rate_rps else None
                cells += [round(rate_rps), None if percent is None else round(percent, 2)]
                if scheduler.has_interference and percent is not None:
                    played.append(percent)
            bars.append((f"{name}, {rule}", tuple(cells)))
            whole, *_, aware = rates_rps.values()
            rows.append(
                Row(
                    f"{name}, {rule}: gpulet with interference over time sharing",
                    None,
                    round(aware / whole, 2) if whole else None,
                    f"planned; {SYNTHETIC}",
                )
            )
    rows.append(
        Row(
            f"gpulet with interference: plans of {len(played)} under 1 % of violations, end to end",
            "all that it schedules (figure 13's caption)",
            sum(percent < ALLOWED_PERCENT for percent in played),
            SYNTHETIC,
        )
    )
    columns = tuple(f"{scheduler.name}: {what}" for scheduler in COMPARED for what in ("rate", "violations"))
    head = "Highest schedulable rate of the application, requests/s, and % of its requests that miss the SLO there, emulated:"
    return Reproduction(
        "gpulet-applications",
        "gpulet: its applications as graphs",
        f"gpulet (ATC 2022), figures 12 to 14, here on {GPU_COUNT} GPUs under the discipline `tenuto`. One request of `game` asks seven models, one of `traffic` "
        "three, and its SLO (95 and 136 ms) is the application's. The paper's bars are not labelled.",
        tuple(rows),
        (Grid(head, columns, tuple(bars)),),
    )
