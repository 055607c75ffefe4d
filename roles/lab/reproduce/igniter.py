"""iGniter (IEEE TPDS 34(3), 2023): table 1 and figures 14 and 18 to 21, planned by our policies and emulated.

Figures 11 to 13 are in `igniter_accuracy.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from fabric.clock import MonotonicClock
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, PlannedSlice, Profiles
from policies.placement.registry import placement_policy
from profiles.gpu import gpu_profile
from profiles.store import shipped_profile
from roles.lab.reproduce.igniter_runs import (
    PRICE_V100,
    IgniterRun,
    Workloads,
    cluster,
    name_of,
    planned,
    played,
    t4s,
    v100s,
    workloads_of,
)
from roles.lab.reproduce.report import Reproduction, Row

WINDOW_S = 10.0  # the paper measures for about 30 s; constant rates repeat themselves long before

_EMULATED = (
    "emulated: means of the model instead of measured tails; neither a wrong prediction nor SMs that two "
    "workloads were both promised cost anything here"
)


def reproduce_igniter_table_1(window_s: float = WINDOW_S) -> Reproduction:
    """AlexNet, ResNet-50 and VGG-19 (section 2.3): plans, and who violates."""
    workloads = workloads_of("illustrative_example")
    stated = {
        "GSLICE+": ("A(37.5 %, 18), R(30 %, 8), V(40 %, 6)", "A, R"),
        "gpu-lets+": ("A(40 %, 23) | R(60 %, 18), V(40 %, 6)", "A, R"),
        "iGniter": ("A(10 %, 4), R(30 %, 8), V(37.5 %, 6)", "none"),
    }
    why = {
        "GSLICE+": (
            "the table has GSLICE itself, which raises the batch for throughput; ours is the patched one of "
            "section 5.1"
        ),
        "gpu-lets+": (
            "the table has gpu-lets with the largest batch; ours just meets the rate, as section 5.1 says; "
            "its code's most efficient shares are not stated"
        ),
        "iGniter": "",
    }
    rows = []
    for strategy, (plan, violations) in stated.items():
        run = played(workloads, strategy, window_s)
        ours = _plan_text(run.placement)
        rows.append(Row(f"{strategy}: GPU by GPU, model (share, batch)", plan, ours, why[strategy]))
        note = "" if strategy == "iGniter" else _EMULATED
        rows.append(Row(f"{strategy}: P99 over the SLO", violations, _initials(run.violations), note))
    return Reproduction(
        "igniter-table-1",
        "iGniter: three models, three strategies",
        "iGniter, section 2.3, table 1.",
        tuple(rows),
    )


def reproduce_igniter_figures_14_and_18(window_s: float = WINDOW_S) -> Reproduction:
    """The 12 workloads on V100s under four strategies: GPUs, cost, violations, shares; predicted and emulated."""
    workloads = workloads_of("workloads_table3")
    runs = {name: played(workloads, name, window_s) for name in ("iGniter", "gpu-lets+", "FFD+", "GSLICE+")}
    stated = {
        "iGniter": (6, 18.36, 0),
        "gpu-lets+": (8, 24.48, 3),
        "FFD+": (5, 15.3, 10),
        "GSLICE+": (6, 18.36, 3),
    }
    which = {
        "iGniter": "",
        "gpu-lets+": "paper: W7, W8, W12. ",
        "FFD+": "",
        "GSLICE+": "paper: W12 and others. ",
    }
    rows = []
    for name, (gpus, dollars, violations) in stated.items():
        run = runs[name]
        used = len(run.placement.gpus_used)
        rows.append(Row(f"Fig. 14, {name}: V100s", gpus, used))
        rows.append(Row(f"Fig. 14, {name}: dollars an hour", dollars, round(used * PRICE_V100, 2)))
        found = ", ".join(run.violations) or "none"
        note = "" if name == "iGniter" else f"{which[name]}ours: {found}; {_EMULATED}"
        rows.append(
            Row(f"Fig. 14, {name}: workloads with P99 over the SLO", violations, len(run.violations), note)
        )
    rows.append(
        Row(
            "Fig. 14, FFD+: workloads predicted over half their SLO",
            10,
            sum("over half" in text for text in runs["FFD+"].placement.violations),
            "the paper counts observed violations",
        )
    )
    rows.extend(_stated_shares(runs))
    rows.extend(_share_rows(workloads, runs))
    rows.extend(_latency_rows(workloads, runs["iGniter"]))
    return Reproduction(
        "igniter-figures-14-18",
        "iGniter: the 12 workloads of table 3 on V100s",
        "iGniter, section 5.3, figures 14 and 18.",
        tuple(rows),
    )


def reproduce_igniter_figure_19() -> Reproduction:
    """Where the strategies put W2, App2's AlexNet."""
    workloads = workloads_of("workloads_table3")
    stated: dict[str, tuple[str, str]] = {
        "FFD+": ("GPU1, 7.5 %", ""),
        "gpu-lets+": ("GPU2, 40 %", "best fit over shares that the paper does not list"),
        "FFD++": (
            "GPU5, 15 %",
            "by the published coefficients nobody has room by then; the paper's FFD++ does not follow from them",
        ),
        "iGniter": ("GPU6, 7.5 %", ""),
    }
    rows = []
    for strategy, (paper, note) in stated.items():
        (slice_,) = _slices_of(planned(workloads, strategy), "W2")
        ours = f"GPU{slice_.gpu + 1}, {slice_.share_percent:g} %"
        rows.append(Row(f"{strategy}: W2", paper, ours, note))
    return Reproduction(
        "igniter-figure-19", "iGniter: where W2 goes", "iGniter, section 5.3, figure 19.", tuple(rows)
    )


def reproduce_igniter_figure_20() -> Reproduction:
    """The 12 workloads with 10 V100s and 20 T4s to choose from. The T4's coefficients are an estimate."""
    workloads = workloads_of("workloads_table3")
    estimate = "an estimate: no T4 coefficients were published; ours scale the V100's and were calibrated to these 15 GPUs"
    placed = cluster(workloads, "iGniter", [v100s(10), t4s(20)]).place()
    choice = next(decision for decision in placed.decisions if decision.subject == "GPU type")
    v100 = next(option for option in choice.rejected if option.option.startswith("v100"))
    several = [name_of(w) for w in workloads if len(_slices_of(placed, name_of(w))) > 1]
    rows = [
        Row("the type chosen", "T4", choice.chosen.removesuffix(" first").upper(), estimate),
        Row("T4s", 15, len(placed.gpus_used), estimate),
        Row("dollars an hour on T4s", 7.89, round(choice.metrics["price_per_hour"], 2), estimate),
        Row("dollars an hour on V100s", 18.36, round(v100.metrics["price_per_hour"], 2)),
        Row(
            "workloads on two T4s or more",
            "W7, W8, W10, W12",
            ", ".join(several),
            "W5 takes more than one of the estimated T4s at nine tenths of its throughput",
        ),
        Row("promises broken by the model", 0, len(placed.violations) + len(placed.unplaced)),
    ]
    return Reproduction(
        "igniter-figure-20",
        "iGniter: V100 or T4 (an estimate)",
        "iGniter, section 5.3, figure 20.",
        tuple(rows),
    )


def reproduce_igniter_figure_21() -> Reproduction:
    """How long planning takes for 12 and for 1,000 workloads."""
    table = workloads_of("workloads_table3")
    counts = {12: "3.64 ms", 1000: "4.61 s"}
    rows = []
    for count, paper in counts.items():
        spent_ms, gpus = _planning_ms(table, count)
        ours = f"{spent_ms:.1f} ms" if spent_ms < 100 else f"{spent_ms / 1000:.2f} s"
        note = f"{gpus} V100s; measured when this was written, on another machine than the paper's p3.2xlarge"
        rows.append(Row(f"planning {count} workloads", paper, ours, note))
    return Reproduction(
        "igniter-figure-21",
        "iGniter: time to plan",
        "iGniter, section 5.4, figure 21.",
        tuple(rows),
    )


# ---------------------------------------------------------------- rows of figures 14 and 18


def _stated_shares(runs: dict[str, IgniterRun]) -> list[Row]:
    """What section 5.3 says of single workloads."""
    stated = (
        ("iGniter", "W2", "7.5 %", False, ""),
        ("iGniter", "W4", "32.5 %, batch 4", True, ""),
        ("iGniter", "W9", "37.5 %", False, ""),
        ("gpu-lets+", "W2", "40 %", False, ""),
        ("gpu-lets+", "W9", "40 %", False, ""),
        (
            "gpu-lets+",
            "W4",
            "60 %, batch 2",
            True,
            "its most efficient share from measured latencies is 60 % here too; the fitted ones we plan with are smooth",
        ),
    )
    rows = []
    for strategy, name, paper, has_batch, note in stated:
        (slice_,) = _slices_of(runs[strategy].placement, name)
        ours = f"{slice_.share_percent:g} %" + (f", batch {slice_.models[0].batch}" if has_batch else "")
        rows.append(Row(f"Fig. 18, {strategy}: {name}", paper, ours, note))
    return rows


def _share_rows(workloads: Workloads, runs: dict[str, IgniterRun]) -> list[Row]:
    """How the others' shares compare with iGniter's, and all of them."""
    shares = {
        strategy: {name_of(w): _share(run.placement, name_of(w)) for w in workloads}
        for strategy, run in runs.items()
    }
    base = shares["iGniter"]
    names = list(base)
    rows = [
        Row(
            "Fig. 18: workloads to which gpu-lets+ gives at least iGniter's share",
            12,
            sum(shares["gpu-lets+"][name] >= base[name] for name in names),
        ),
        Row(
            "Fig. 18: workloads to which FFD+ gives at most iGniter's share",
            12,
            sum(shares["FFD+"][name] <= base[name] for name in names),
        ),
        Row(
            "Fig. 18: workloads to which GSLICE+ gives at least iGniter's share",
            "11 (all but W12)",
            sum(shares["GSLICE+"][name] >= base[name] for name in names),
            "its tuner reacts to the modelled latency, which does not waver: shares end within 10 % above what "
            "is needed, not in steps of 2.5 %",
        ),
    ]
    for name in names:
        ours = ", ".join(f"{strategy} {found[name]:.4g}" for strategy, found in shares.items())
        rows.append(Row(f"Fig. 18: share of {name}, %", None, ours, "the figure's bars are not labelled"))
    return rows


def _latency_rows(workloads: Workloads, run: IgniterRun) -> list[Row]:
    """The 12 workloads under iGniter: predicted (to be under half the SLO) and emulated (to be under the SLO)."""
    rows = []
    for workload in workloads:
        name = name_of(workload)
        (slice_,) = _slices_of(run.placement, name)
        outcome = run.models[ModelId(name)]
        ours = f"GPU{slice_.gpu + 1}, predicted {slice_.models[0].predicted_ms:.1f}, P99 {outcome.p99_ms or 0:.1f}"
        slo_ms = workload["slo_ms"]
        rows.append(Row(f"Fig. 14, iGniter: {name}, P99 in ms (SLO {slo_ms:g})", f"under {slo_ms:g}", ours))
    return rows


# ---------------------------------------------------------------- small things


def _plan_text(placement: Placement) -> str:
    """As in table 1: models by their initials, GPUs apart."""
    gpus = []
    for gpu in placement.gpus_used:
        on_it = sorted((s for s in placement.slices if s.gpu == gpu), key=lambda s: s.models[0].model_id)
        gpus.append(
            ", ".join(
                f"{s.models[0].model_id[0].upper()}({s.share_percent:.3g} %, {s.models[0].batch})"
                for s in on_it
            )
        )
    return " | ".join(gpus)


def _initials(names: Sequence[str]) -> str:
    return ", ".join(name[0].upper() for name in names) or "none"


def _slices_of(placement: Placement, name: str) -> list[PlannedSlice]:
    return [planned for planned in placement.slices if planned.models[0].model_id == name]


def _share(placement: Placement, name: str) -> float:
    return sum(planned.share_percent or 0.0 for planned in _slices_of(placement, name))


def _planning_ms(table: Workloads, count: int) -> tuple[float, int]:
    """The best of three; beyond 12, table 3 again and again with up to twice the SLO and down to a quarter of the rate."""
    draw = random.Random(count)
    models: list[PlacedModelInput] = []
    profiles: dict[tuple[ModelId, str], Any] = {}
    for i in range(count):
        row = table[i % len(table)]
        model_id = ModelId(f"W{i + 1}")
        slo_ms = row["slo_ms"] if count == len(table) else row["slo_ms"] * draw.uniform(1, 2)
        rate_rps = row["rate_rps"] if count == len(table) else row["rate_rps"] * draw.uniform(0.25, 1)
        models.append(PlacedModelInput(model_id, slo_ms, rate_rps))
        profiles[model_id, "v100"] = shipped_profile(f"igniter-v100/{row['model']}")
    memory_bytes = gpu_profile("v100").memory_bytes
    gpus = [GpuSlot(i, "v100", memory_bytes, NodeId("p3"), i) for i in range(count)]
    known: Profiles = profiles
    policy, clock = placement_policy("igniter"), MonotonicClock()
    best_ms, used = float("inf"), 0
    for _ in range(3):
        began_at_ms = clock.now_ms()
        placed = policy.place(models, gpus, known)
        best_ms, used = min(best_ms, clock.now_ms() - began_at_ms), len(placed.gpus_used)
    return best_ms, used
