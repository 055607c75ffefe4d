"""How long no request is granted when the active scheduler is lost and a standby takes over.

    python -m benchmarks.takeover [--kills 10] [--rate 500] [--slo 100] [--nodes 3] [--stop] [--json FILE]

A cluster of this host (supervisor, two schedulers, a frontend, an agent and a worker for each node with one emulated GPU)
serves one model; one more process sends, open loop, at even distances. `--kills` times the active scheduler is killed
(SIGKILL; with `--stop` it is stopped and goes on 2 s later), each time when the former one stands by again. The *gap*
is from the kill to the first answer of a request that was asked after it: the new scheduler's first grant, and the
transfer, run and return of that batch. There is no rival here. Everything shares the host's cores, and so does the
start of the process that takes the lost one's place.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import yaml

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.steady_load import CLOCK, Fate, Load, sending
from fabric.errors import PeerLost
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.process import read_run_file
from roles.runtime.running_cluster import look

AFTER_S = 3.0  # of answers that are looked at after a kill
GAP_MAX_MS = 500.0
STOPPED_S = 2.0
SPACED_S = 5.0  # more: five ends of one process in a minute are no accident to a supervisor


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--slo", type=float, default=100.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--stop", action="store_true")
    add_json_option(parser)
    options = parser.parse_args()
    nodes = [{"host": f"n{number}"} for number in range(options.nodes)]
    model = {
        "name": "m",
        "slo_ms": options.slo,
        "profile": {"alpha_ms": 1.053, "beta_ms": 5.072, "max_batch": 64},
    }
    document = {"models": [model], "cluster": {"nodes": nodes, "schedulers": 2}}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "cluster.yaml")
        path.write_text(yaml.safe_dump(document))
        with temporary_cluster(path) as cluster:
            moments, fates = play(cluster, options)
    tell(found_in(moments, fates, options), options.json)


def play(cluster: TemporaryCluster, options: argparse.Namespace) -> tuple[list[float], list[Fate]]:
    """When the schedulers were killed, in ms, and what became of each request."""
    moments: list[float] = []
    fates: list[Fate] = []
    with sending(cluster.endpoints["client"], Load(options.rate, ["m"], is_even=True), fates):
        time.sleep(2.0)
        for _ in range(options.kills):
            pid = until_ready(cluster)
            moments.append(CLOCK.now_ms())
            os.kill(pid, signal.SIGSTOP if options.stop else signal.SIGKILL)
            if options.stop:
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
            time.sleep(AFTER_S + SPACED_S)
    return moments, fates


def until_ready(cluster: TemporaryCluster) -> int:
    """The active scheduler's process, when the other one stands by with the plan."""
    while True:
        try:
            listed = look(cluster.run_dir).scheduler
        except PeerLost:
            continue
        if listed.standing is not None and any(one.has_plan for one in listed.standing.standbys):
            found = read_run_file(cluster.run_dir / f"{listed.role_id}.json")
            if found is not None:
                return found.pid
        time.sleep(0.1)


def found_in(moments: list[float], fates: list[Fate], options: argparse.Namespace) -> Figures:
    """A row for each kill."""
    how = "stopped" if options.stop else "killed"
    figures = Figures(
        f"take-over: the active scheduler is {how}, {options.rate:g} r/s, {options.nodes} nodes"
    )
    table = figures.table(f"each time, of the requests of {AFTER_S:g} s after it", "gap ms", "ok", "not ok")
    gaps_ms = []
    for at_ms in moments:
        after = [fate for fate in fates if at_ms < fate.at_ms < at_ms + AFTER_S * 1e3]
        answered = [fate.at_ms + fate.latency_ms for fate in after if fate.code == "ok"]
        gaps_ms.append(min(answered) - at_ms if answered else float("nan"))
        codes = Counter(fate.code for fate in after)
        ok = codes.pop("ok", 0)
        table.rows.append((gaps_ms[-1], ok, ", ".join(f"{count} {code}" for code, count in codes.items())))
    quantiles = figures.table("the gap, ms", "p50", "p99", "longest")
    quantiles.rows.append((*(float(np.quantile(gaps_ms, q)) for q in (0.5, 0.99)), max(gaps_ms)))
    figures.lines = [
        Line("first answer after the kill, p99, ms", float(np.quantile(gaps_ms, 0.99)), at_most=GAP_MAX_MS),
    ]
    return figures


if __name__ == "__main__":
    main()
