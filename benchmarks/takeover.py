"""How long no request is granted when the active scheduler is lost and a standby takes over.

    python benchmarks/takeover.py [--kills 10] [--rate 500] [--slo 100] [--nodes 3] [--stop] [--json FILE]

A cluster of this host (supervisor, two schedulers, a frontend, an agent and a worker for each node with one emulated GPU)
serves one model; one more process sends, open loop, at even distances. `--kills` times the active scheduler is killed
(SIGKILL; with `--stop` it is stopped and goes on 2 s later), each time when the former one stands by again. The *gap*
is from the kill to the first answer of a request that was asked after it: the new scheduler's first grant, and the
transfer, run and return of that batch. There is no rival here. Everything shares the host's cores, and so does the
start of the process that takes the lost one's place.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import yaml
from figures import Figures, Line, add_json_option, tell

from fabric.client import Client
from fabric.errors import PeerLost, RequestError
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


def play(
    cluster: TemporaryCluster, options: argparse.Namespace
) -> tuple[list[float], list[tuple[float, float, str]]]:
    """When the schedulers were killed; when each request was asked, answered, and how (s, of the monotonic clock)."""
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.get_context("spawn").Process(
        target=send, args=(cluster.endpoints["client"], options.rate, theirs)
    )
    client.start()
    moments = []
    time.sleep(2.0)
    for _ in range(options.kills):
        pid = until_ready(cluster)
        moments.append(time.monotonic())
        os.kill(pid, signal.SIGSTOP if options.stop else signal.SIGKILL)
        if options.stop:
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
        time.sleep(AFTER_S + SPACED_S)
    ours.send("end")
    fates = ours.recv()
    client.join()
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


def send(addresses: list[str], rate_rps: float, pipe: Connection) -> None:
    """The client's process."""
    asyncio.run(_send(addresses, rate_rps, pipe))


async def _send(addresses: list[str], rate_rps: float, pipe: Connection) -> None:
    fates: list[tuple[float, float, str]] = []
    inputs = {"input": np.zeros(16, np.float32)}
    async with Client(addresses) as client:
        tasks: set[asyncio.Task[None]] = set()

        async def ask() -> None:
            asked_s = time.monotonic()
            try:
                await client.infer("m", inputs)
                fate = "ok"
            except RequestError as error:
                fate = error.code
            except PeerLost:
                fate = "PeerLost"
            fates.append((asked_s, time.monotonic(), fate))

        due_s = time.monotonic()
        while not pipe.poll():
            task = asyncio.create_task(ask())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due_s = max(due_s + 1 / rate_rps, time.monotonic() - 0.5)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await asyncio.gather(*tasks)
    pipe.send(fates)


def found_in(
    moments: list[float], fates: list[tuple[float, float, str]], options: argparse.Namespace
) -> Figures:
    """A row for each kill."""
    how = "stopped" if options.stop else "killed"
    figures = Figures(
        f"take-over: the active scheduler is {how}, {options.rate:g} r/s, {options.nodes} nodes"
    )
    table = figures.table(f"each time, of the requests of {AFTER_S:g} s after it", "gap ms", "ok", "not ok")
    gaps_ms = []
    for at_s in moments:
        after = [fate for fate in fates if at_s < fate[0] < at_s + AFTER_S]
        answered = [end_s for _, end_s, fate in after if fate == "ok"]
        gaps_ms.append(1e3 * (min(answered) - at_s) if answered else float("nan"))
        codes = Counter(fate for _, _, fate in after)
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
