"""What a change of models costs those that are served meanwhile: their p99 before, during and after it.

    python -m benchmarks.change_under_load [--device cuda --model resnet50] [--rate 300] [--batching eager] [--repeat 5] [--quiet 5] [--json FILE]

A cluster of this host (supervisor, scheduler, frontend, node agent, a worker for 2 emulated GPUs) serves three models
in equal parts; one more process sends, open loop, Poisson, latency from the intended moment. `--repeat` times a fourth
model is added and then removed with the `tenuto models` command. Under `symphony` each of these changes replaces every slice,
so it costs three starts of a process: the command, the planner, a worker. Everything shares the host's cores. With `--device`
it is one real device: `--model` under three names is served, and what comes and goes is the same model under a fourth name, loaded,
warmed up and captured on the device beside the others, as it would be for anybody.

The rival is the same cluster at rest: p99 of 1-s windows in the `--quiet` seconds before each change, beside that of
the windows from the command's start to a second after its end, for adding and for removing, and of the second to third after that. The ratio is of the
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.device import described, example_inputs, loader_named
from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.steady_load import CLOCK, Fate, Load, sending
from fabric.ids import ModelId
from fabric.messages import ModelsAdd, ModelsRemove
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.operator_request import ask_change, new_request_no

WINDOW_MS = 1_000.0
LAST_S = 3.0  # watched after a change
DURING = {"add": "while a model is added", "remove": "while it is removed"}
EMULATED = {"alpha_ms": 0.5, "beta_ms": 2}  # under half busy, so a wait is a delay of ours
BATCH_MAX = 32
MODELS = ("one", "two", "three")
EMULATOR = "emulated"


@dataclass(slots=True, frozen=True)
class Change:
    """A change: from the command's start to its end."""

    kind: str
    from_ms: float
    until_ms: float


# ---------------------------------------------------------------- changes


def change(cluster: TemporaryCluster, kind: str, options: argparse.Namespace) -> Change:
    """Add or remove the fourth model; returns when its moves are over."""
    added = section("added", 1.0, options)
    from_ms = CLOCK.now_ms()
    if options.asked:
        number = new_request_no()
        asked = (
            ModelsAdd(number, json.dumps([added]))
            if kind == "add"
            else ModelsRemove(number, (ModelId("added"),))
        )
        answer = ask_change(cluster.endpoints["control"], asked)
        assert answer.status == "ok", answer
    else:
        what = json.dumps(added) if kind == "add" else "added"
        command = [sys.executable, "-m", "roles.cli", "models", kind, what, "--run-dir", str(cluster.run_dir)]
        subprocess.run(command, check=True, capture_output=True)
    return Change(kind, from_ms, CLOCK.now_ms())


def section(name: str, rate_rps: float, options: argparse.Namespace) -> dict[str, Any]:
    """A model as a cluster file has it."""
    model = {"name": name, "slo_ms": options.slo_ms, "rate_rps": rate_rps}
    if options.device == EMULATOR:
        return model | {"profile": EMULATED | {"max_batch": BATCH_MAX}}
    spec = loader_named(options.model)
    # A worker measures what its model takes; these times are of nothing but the plan.
    return model | {
        "profile": {"alpha_ms": 1, "beta_ms": 1, "max_batch": options.batch_max},
        "loader": {"zoo": spec.zoo, "arch": spec.arch},
    }


def play_changes(options: argparse.Namespace) -> tuple[list[Fate], list[Change]]:
    """One cluster, one load, `--repeat` pairs of changes."""
    is_emulated = options.device == EMULATOR
    node = (
        {"host": "here", "gpus": 2} if is_emulated else {"host": "here", "gpus": 1, "device": options.device}
    )
    document = {
        "models": [section(name, options.rate / len(MODELS), options) for name in MODELS],
        "cluster": {"nodes": [node]},
        "batching": options.batching,
        "placement": "symphony",
    }
    load = Load(options.rate, MODELS)
    if not is_emulated:
        load = replace(load, inputs=example_inputs(loader_named(options.model)))
    fates: list[Fate] = []
    changes = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        with (
            temporary_cluster(file) as cluster,
            sending(cluster.endpoints["client"], load, fates),
        ):
            for kind in ("add", "remove") * options.repeat:
                _wait(options.quiet)
                changes.append(change(cluster, kind, options))
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
        **{
            phase: [(one.from_ms, one.until_ms + WINDOW_MS) for one in changes if one.kind == kind]
            for kind, phase in DURING.items()
        },
        "after": [(one.until_ms + WINDOW_MS, one.until_ms + 1e3 * LAST_S) for one in changes],
    }
    is_emulated = options.device == EMULATOR
    title = f"change under load: {options.rate:g} r/s, {options.batching}"
    figures = (
        Figures(title)
        if is_emulated
        else Figures(f"{title}, {options.model}", device=described(options.device))
    )
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
        *(
            Line(f"p99 {phase}, of that before", p99_ms[phase] / p99_ms["before"], at_most=1.2)
            for phase in DURING.values()
        ),
        Line(f"refused of {len(fates)} requests", refused.total(), at_most=0),
    ]
    took_ms = {
        kind: statistics.median(one.until_ms - one.from_ms for one in changes if one.kind == kind)
        for kind in DURING
    }
    figures.remarks.append(
        f"adding took {took_ms['add']:.0f} ms, removing {took_ms['remove']:.0f} ms; refused: {dict(refused) or 'none'}"
    )
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default=EMULATOR,
        choices=(EMULATOR, "cpu", "cuda"),
        help="two emulated GPUs, or one real one",
    )
    parser.add_argument("--model", default="resnet50", help="on a real device: ARCH or ZOO/ARCH")
    parser.add_argument("--batch-max", type=int, default=BATCH_MAX, help="on a real device")
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
