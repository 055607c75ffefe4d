"""What a change of models costs those that are served meanwhile: their p99 before, during and after it.

    python -m benchmarks.change_under_load [--rate 300] [--batching eager] [--repeat 5] [--quiet 5] [--json FILE]

A cluster of this host (supervisor, scheduler, frontend, node agent, a worker for 2 emulated GPUs) serves three models
in equal parts; one more process sends, open loop, Poisson, latency from the intended moment. `--repeat` times a fourth
model is added and then removed with the `tenuto models` command. Under `symphony` each of these changes replaces every slice,
so it costs three starts of a process: the command, the planner, a worker. Everything shares the host's cores.

The rival is the same cluster at rest: p99 of 1-s windows in the `--quiet` seconds before each change, beside that of
the windows from the command's start to a second after its end, and of the second to third after that. The ratio is of the
medians of these windows; refused requests are counted, and there should be none. `--asked` changes by message
instead of command, as from another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.steady_load import CLOCK, Fate, Load, sending
from fabric.ids import ModelId
from fabric.messages import ModelsAdd, ModelsRemove
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.operator_request import ask_change, new_request_no

WINDOW_MS = 1_000.0
LAST_S = 3.0  # watched after a change
PROFILE = (
    "profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}"  # under half busy, so a wait is a delay of ours
)
ADDED = f"{{name: added, slo_ms: 1000, rate_rps: 1, {PROFILE}}}"
MODELS = ("one", "two", "three")


@dataclass(slots=True, frozen=True)
class Change:
    """A change: from the command's start to its end."""

    kind: str
    from_ms: float
    until_ms: float


# ---------------------------------------------------------------- changes


def change(cluster: TemporaryCluster, kind: str, *, is_asked: bool) -> Change:
    """Add or remove the fourth model; returns when its moves are over."""
    from_ms = CLOCK.now_ms()
    if is_asked:
        number = new_request_no()
        asked = (
            ModelsAdd(number, json.dumps([_section()]))
            if kind == "add"
            else ModelsRemove(number, (ModelId("added"),))
        )
        answer = ask_change(cluster.endpoints["control"], asked)
        assert answer.status == "ok", answer
    else:
        what = ADDED if kind == "add" else "added"
        command = [sys.executable, "-m", "roles.cli", "models", kind, what, "--run-dir", str(cluster.run_dir)]
        subprocess.run(command, check=True, capture_output=True)
    return Change(kind, from_ms, CLOCK.now_ms())


def _section() -> dict[str, Any]:
    profile = {"alpha_ms": 0.5, "beta_ms": 2, "max_batch": 32}
    return {"name": "added", "slo_ms": 1000, "rate_rps": 1, "profile": profile}


def play_changes(options: argparse.Namespace) -> tuple[list[Fate], list[Change]]:
    """One cluster, one load, `--repeat` pairs of changes."""
    sections = "".join(
        f" - {{name: {name}, slo_ms: {options.slo_ms:g}, rate_rps: {options.rate / len(MODELS):g}, {PROFILE}}}\n"
        for name in MODELS
    )
    fates: list[Fate] = []
    changes = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.yaml"
        file.write_text(
            f"models:\n{sections}cluster: {{nodes: [{{host: here, gpus: 2}}]}}\n"
            f"batching: {options.batching}\nplacement: symphony\n",
            encoding="utf-8",
        )
        with (
            temporary_cluster(file) as cluster,
            sending(cluster.endpoints["client"], Load(options.rate, MODELS), fates),
        ):
            for kind in ("add", "remove") * options.repeat:
                _wait(options.quiet)
                changes.append(change(cluster, kind, is_asked=options.asked))
                _wait(LAST_S)
    return fates, changes


def _wait(seconds: float) -> None:
    asyncio.run(asyncio.sleep(seconds))


# ---------------------------------------------------------------- what it cost


def windows(fates: Sequence[Fate], from_ms: float, until_ms: float) -> Iterator[list[Fate]]:
    """The requests of each whole window from `from_ms`, and of the one that `until_ms` is in."""
    while from_ms < until_ms:
        yield [fate for fate in fates if from_ms <= fate.at_ms < from_ms + WINDOW_MS]
        from_ms += WINDOW_MS


def p99(values: Sequence[float]) -> float:
    """The smallest value that 99 % are not above."""
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def found_in(fates: Sequence[Fate], changes: Sequence[Change], options: argparse.Namespace) -> Figures:
    """A row a phase: medians and worst of its windows' p99."""
    spans = {
        # The first of the quiet seconds still has the end of the change before in it.
        "before": [(one.from_ms - 1e3 * (options.quiet - 1), one.from_ms) for one in changes],
        "during": [(one.from_ms, one.until_ms + WINDOW_MS) for one in changes],
        "after": [(one.until_ms + WINDOW_MS, one.until_ms + 1e3 * LAST_S) for one in changes],
    }
    figures = Figures(f"change under load: {options.rate:g} r/s, {options.batching}")
    table = figures.table(
        "latency of models that are not changed, by 1-s windows, in ms",
        *("phase", "windows", "median p99", "worst p99", "p50", "p99 of the sender's lateness"),
    )
    p99_ms: dict[str, float] = {}
    for phase, phase_spans in spans.items():
        seen = [window for span in phase_spans for window in windows(fates, *span) if window]
        of_windows = [p99([fate.latency_ms for fate in window]) for window in seen]
        p99_ms[phase] = statistics.median(of_windows)
        p50_ms = statistics.median(fate.latency_ms for window in seen for fate in window)
        late_ms = p99([fate.late_ms for window in seen for fate in window])
        table.rows.append((phase, len(seen), p99_ms[phase], max(of_windows), p50_ms, late_ms))
    refused = Counter(fate.code for fate in fates if fate.code != "ok")
    figures.lines = [
        Line("p99 during a change, of that before", p99_ms["during"] / p99_ms["before"], at_most=1.2),
        Line(f"refused of {len(fates)} requests", refused.total(), at_most=0),
    ]
    took_ms = statistics.median(one.until_ms - one.from_ms for one in changes)
    figures.remarks.append(f"a change took {took_ms:.0f} ms; refused: {dict(refused) or 'none'}")
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=300.0, help="r/s in all")
    parser.add_argument("--slo-ms", type=float, default=1000.0)
    parser.add_argument("--batching", default="eager")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=5.0, help="s before each change")
    parser.add_argument("--asked", action="store_true", help="by message instead of by command")
    add_json_option(parser)
    options = parser.parse_args()
    tell(found_in(*play_changes(options), options), options.json)


if __name__ == "__main__":
    main()
