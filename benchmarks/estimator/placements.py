"""Where estimates lead: the thesis' placements planned with estimated profiles, played with the measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from profiles.model import WHOLE_GPU_PERCENT, TableProfile
from profiles.requirements import Requirements, Usage
from roles.lab.reproduce.thesis_runs import WINDOW, describe
from roles.lab.reproduce.thesis_settings import (
    FIGURE_5_5,
    FIGURE_5_6,
    FIGURE_5_7,
    FIGURE_6_1,
    FIGURE_6_10,
    FigureSetting,
)
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of

SETTINGS = (FIGURE_5_5, FIGURE_5_6, FIGURE_5_7, *FIGURE_6_1[1::2], *FIGURE_6_10[1::2])
POLICIES = ("usher", "wao-usher", "ao-milp", "wsm-milp")
GPU_BYTES = 16 * 2**30
MILP_OPTIONS = {"time_limit_s": 60.0}
BATCHING = "fixed"  # as the thesis' router, and as plans with a batch size mean it


def estimated_profiles(rows: list[dict[str, Any]]) -> dict[str, TableProfile]:
    """Of Table A.1's models, at its batch sizes; `rows` are those of `models.on_table_a1`."""
    columns: dict[str, dict[int, float]] = {}
    memory: dict[str, dict[int, float]] = {}
    needs: dict[str, dict[int, Requirements]] = {}
    for row in rows:
        model, batch = row["model"], row["batch"]
        column = columns.setdefault(model, {})
        column[batch] = max([row["ms"], *column.values()])
        memory.setdefault(model, {})[batch] = row["memory_percent"] / 100 * GPU_BYTES
        needs.setdefault(model, {})[batch] = Requirements(
            row["ao"], row["wao"], row["wsm"], row["memory_percent"]
        )
    return {
        model: TableProfile(
            {WHOLE_GPU_PERCENT: column},
            source="estimate",
            memory_by_batch=memory[model],
            is_padded=True,
            usage=Usage(needs[model]),
        )
        for model, column in columns.items()
    }


def on_thesis_settings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each setting and policy: goodput of the plan from Table A.1 and of the plan from estimates.

    Both are played with Table A.1's run times, `sm` interference and the same arrivals.
    """
    estimates = estimated_profiles(rows)
    found = []
    for setting in SETTINGS:
        for policy in POLICIES:
            one = _compared(setting, policy, estimates)
            found.append(one)
            print({key: value for key, value in one.items() if "plan" not in key}, flush=True)
    return found


def _compared(setting: FigureSetting, policy: str, estimates: Mapping[str, TableProfile]) -> dict[str, Any]:
    options = MILP_OPTIONS if policy.endswith("-milp") else {}
    measured = setting.config(policy, options)
    estimated = replace(
        measured,
        models=tuple(replace(model, profile=estimates[str(model.model_id)]) for model in measured.models),
    )
    answer: dict[str, Any] = {"setting": setting.name, "policy": policy, "offered": setting.ideal_rps}
    played = setting.config(batching=BATCHING)
    for name, config in (("measured", measured), ("estimated", estimated)):
        plan = config.place()
        outcome = simulate(played, workload_of(played), WINDOW, settings_from(played, plan)).outcome
        answer[name] = outcome.good / outcome.duration_s
        answer[f"{name}_plan"] = describe(plan)
    return answer
