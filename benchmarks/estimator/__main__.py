"""Runs the evaluation and writes its tables into docs/guides/estimator.md; an hour on two busy cores, minutes on idle ones.

python -m benchmarks.estimator            everything
python -m benchmarks.estimator orion      one part; the others' results stay as they were
python -m benchmarks.estimator tables     only the tables again
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.estimator.models import Key, on_table_a1, table_a1
from benchmarks.estimator.orion import on_orions_models
from benchmarks.estimator.placements import on_thesis_settings
from benchmarks.estimator.records import SPLITS, on_own_records, on_split, on_unseen_gpus
from benchmarks.estimator.report import PAGE, written
from benchmarks.estimator.zoo import graphs
from profiles.estimator.gpus import RECORDED
from profiles.estimator.graph import OperatorGraph

STACKED_ON = "v100"  # Usher's stack trains four times as long as everything else
QUICK = ("roofline", "bounded")
RESULTS = Path(__file__).parent / "results.json"


@cache
def table_graphs() -> dict[Key, OperatorGraph]:
    """The graphs of Table A.1's rows."""
    found = {}
    for model in dict.fromkeys(key[0] for key in table_a1()):
        sizes = [key[1] for key in table_a1() if key[0] == model]
        for graph in graphs(model, sizes):
            found[model, graph.batch_size] = graph
        print("traced", model, flush=True)
    return found


def _split(gpu_type: str, name: str, variants: tuple[str, ...]) -> Callable[[dict[str, Any]], Any]:
    return lambda _: on_split(gpu_type, name, lambda: table_graphs().values(), variants)


PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "models": lambda _: on_table_a1(table_graphs()),
    "orion": lambda _: on_orions_models(),
    "placements": lambda results: on_thesis_settings(results["models"]["rows"]),
    "gpus": lambda _: on_unseen_gpus(QUICK),
    "own": lambda _: on_own_records(QUICK),
    **{f"{name}-{gpu_type}": _split(gpu_type, name, QUICK) for gpu_type in RECORDED for name in SPLITS},
    **{f"stack-{name}": _split(STACKED_ON, name, ("stacked",)) for name in SPLITS},
}


def main(asked: list[str]) -> int:
    """Whatever was asked, in the order of PARTS."""
    unknown = set(asked) - {*PARTS, "tables"}
    if unknown:
        print(f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}, tables")
        return 2
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name, part in PARTS.items():
        if not asked or name in asked:
            results[name] = part(results)
            RESULTS.write_text(json.dumps(_rounded(results), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), _rounded(results)), encoding="utf-8")
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
