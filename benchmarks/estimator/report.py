"""The results as tables between the marks of docs/guides/estimator.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiles.estimator.gpus import RECORDED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "estimator.md"
SPLITS = {"random": "random", "sizes": "unseen sizes", "models": "unseen models"}


def written(page: str, results: Mapping[str, Any]) -> str:
    """The page with every table whose results are there."""
    tables = {
        "operators": _operators,
        "gpus": _gpus,
        "own": _own,
        "latency": _latency,
        "rows": _rows,
        "orion": _orion,
        "placements": _placements,
    }
    for name, table in tables.items():
        text = table(results)
        if text:
            marks = (f"<!-- {name} -->", f"<!-- end of {name} -->")
            between = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
            page = between.sub(lambda _, text=text, marks=marks: f"{marks[0]}\n{text}\n{marks[1]}", page)
    return page


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _operators(results: Mapping[str, Any]) -> str:
    """A row an operator and GPU; in each split ours, then the roofline."""
    rows = []
    for gpu_type in RECORDED:
        found = {name: results.get(f"{name}-{gpu_type}", {}) for name in SPLITS}
        if not all(found.values()):
            continue
        stack = {name: results.get(f"stack-{name}", {}) if gpu_type == "v100" else {} for name in SPLITS}
        for op in found["random"]["bounded"]:
            cells = [gpu_type, op]
            for name in SPLITS:
                ours, bare = found[name]["bounded"].get(op), found[name]["roofline"].get(op)
                cells.append(_pair(ours) if ours else "-")
                cells.append(_pair(bare) if bare else "-")
                if gpu_type == "v100":
                    said = stack[name].get("stacked", {}).get(op)
                    cells[-1] += f" (stack {_pair(said)})" if said else ""
            rows.append(cells)
    head = ["GPU", "operator"]
    for words in SPLITS.values():
        head += [words, "roofline"]
    return _table(head, rows) if rows else ""


def _gpus(results: Mapping[str, Any]) -> str:
    if "gpus" not in results:
        return ""
    rows = []
    for name, found in results["gpus"].items():
        for op, ours in found["bounded"].items():
            rows.append([name, op, str(ours[0]), _pair(ours), _pair(found["roofline"][op])])
    return _table(["learned from -> judged on", "operator", "records", "estimator", "roofline"], rows)


def _own(results: Mapping[str, Any]) -> str:
    """A row an operator; on each GPU ours, then the roofline."""
    if "own" not in results:
        return ""
    head = ["operator"]
    rows = {op: [op] for op in results["own"][RECORDED[0]]["bounded"]}
    for gpu_type in RECORDED:
        head += [gpu_type, "roofline"]
        for op, ours in results["own"][gpu_type]["bounded"].items():
            rows[op] += [_pair(ours), _pair(results["own"][gpu_type]["roofline"][op])]
    return _table(head, list(rows.values()))


def _latency(results: Mapping[str, Any]) -> str:
    """A row a model of Table A.1."""
    if "models" not in results:
        return ""
    rows = results["models"]["rows"]
    lines = [_model(model, [row for row in rows if row["model"] == model]) for model in _names(rows)]
    lines.append(_model("all 71 rows", rows))
    lines.append(_model("all but xlnet", [row for row in rows if row["model"] != "xlnet"]))
    head = [
        "model",
        "run time",
        "by roofline",
        "within bars",
        "memory",
        "weighted SM",
        "weighted occ.",
        "max. occ.",
    ]
    return _table(head, lines)


def _model(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    run = [100 * abs(row["ms"] / row["measured_ms"] - 1) for row in rows]
    bare = [100 * abs(row["roofline_ms"] / row["measured_ms"] - 1) for row in rows]
    memory = [
        100 * abs(row["memory_percent"] / row["measured_memory_percent"] - 1)
        for row in rows
        if row["measured_memory_percent"]
    ]
    inside = sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in rows)
    points = [
        f"{np.median([abs(row[key] - row[f'measured_{key}']) for row in rows if row[f'measured_{key}'] is not None]):.0f}"
        for key in ("wsm", "wao", "ao")
    ]
    return [name, _spread(run), _spread(bare), f"{inside} of {len(rows)}", _spread(memory), *points]


def _rows(results: Mapping[str, Any]) -> str:
    if "models" not in results:
        return ""
    lines = []
    for row in results["models"]["rows"]:
        memory = row["measured_memory_percent"]
        lines.append(
            [
                f"{row['model']} {row['batch']}",
                f"{row['measured_ms']:.1f}",
                f"{row['ms']:.1f} ({row['low_ms']:.1f} to {row['high_ms']:.1f})",
                f"{row['roofline_ms']:.1f}",
                f"{'-' if memory is None else f'{memory:.2f}'} / {row['memory_percent']:.2f}",
                f"{row['measured_wsm']:.0f} / {row['wsm']:.0f}",
                f"{_or_dash(row['measured_wao'])} / {row['wao']:.0f}",
                f"{_or_dash(row['measured_ao'])} / {row['ao']:.0f}",
            ]
        )
    head = [
        "row",
        "ms",
        "estimate",
        "roofline",
        "memory %",
        "weighted SM %",
        "weighted occ. %",
        "max. occ. %",
    ]
    return _table(head, lines)


def _orion(results: Mapping[str, Any]) -> str:
    if "orion" not in results:
        return ""
    rows = [
        [
            row["model"],
            f"{row['kernels']} / {row['operators']}",
            f"{row['in_order_percent']:.1f}",
            f"{row['rank_correlation']:.2f}",
            f"{row['sm_difference']:.1f}",
            f"{row['measured_sm']:.1f} / {row['sm']:.1f}",
            f"{row['measured_ms']:.1f} / {row['ms']:.1f}",
        ]
        for row in results["orion"]
    ]
    head = [
        "model",
        "kernels / operators",
        "same order %",
        "rank correlation of SMs",
        "median SM difference, points",
    ]
    return _table([*head, "weighted SM %, traced / estimated", "busy ms"], rows)


def _placements(results: Mapping[str, Any]) -> str:
    if "placements" not in results:
        return ""
    found = results["placements"]
    policies = list(dict.fromkeys(row["policy"] for row in found))
    rows = []
    for setting in dict.fromkeys(row["setting"] for row in found):
        by_policy = {row["policy"]: row for row in found if row["setting"] == setting}
        offered = by_policy[policies[0]]["offered"]
        rows.append([setting, f"{offered:.0f}", *(_lost(by_policy[policy]) for policy in policies)])
    lost = [
        f"{np.mean([_lost_percent(row) for row in found if row['policy'] == policy]):.1f}"
        for policy in policies
    ]
    return _table(["setting", "offered/s", *policies], [*rows, ["mean lost %", "", *lost]])


def _lost(row: Mapping[str, Any]) -> str:
    return f"{row['measured']:.0f} → {row['estimated']:.0f} ({_lost_percent(row):+.1f})"


def _lost_percent(row: Mapping[str, Any]) -> float:
    return float(100 * (1 - row["estimated"] / row["measured"]))


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _spread(errors: Sequence[float]) -> str:
    return f"{np.median(errors):.1f} / {np.quantile(errors, 0.9):.1f}" if errors else "-"


def _pair(found: Sequence[float]) -> str:
    return f"{found[1]:.1f} / {found[2]:.1f}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
