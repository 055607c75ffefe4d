"""What readers of the page cost: CPU time of the scheduler (with its frontend) and of the page's own process, by readers.

    python -m benchmarks.page_cost --seconds 20 --readers 0 1 10

A reader asks for the feed once a second, as a tab does. Load is open-loop, from this process.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from fabric.client import Client
from fabric.errors import RequestError
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.running_cluster import processes_in

MODELS = 8
FILE = """
models:
{models}
cluster: {{gpus: 4}}
listen: {{page: "127.0.0.1:0"}}
"""
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print a line for each number of readers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1, 10])
    given = parser.parse_args()
    models = "\n".join(
        f" - {{name: m{number}, slo_ms: 400, profile: {{alpha_ms: 1, beta_ms: 8, max_batch: 32}}}}"
        for number in range(MODELS)
    )
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(FILE.format(models=models), encoding="utf-8")
        with temporary_cluster(file) as cluster:
            pids = {one.role_id: one.pid for one in processes_in(cluster.run_dir)}
            print("readers  scheduler+frontend ms/s  page ms/s  bytes/answer  answers  requests/s")
            for readers in given.readers:
                measure(cluster, pids, readers, given.seconds, given.rate)


def measure(
    cluster: TemporaryCluster, pids: dict[str, int], readers: int, seconds: float, rate: float
) -> None:
    """One line."""
    stop = threading.Event()
    read: list[int] = []
    threads = [
        threading.Thread(target=follow, args=(cluster.endpoints["page"][0], stop, read), daemon=True)
        for _ in range(readers)
    ]
    for thread in threads:
        thread.start()
    asyncio.run(load(cluster, 3.0, rate))  # warm
    read.clear()
    before = {role_id: cpu_s(pid) for role_id, pid in pids.items()}
    began = time.monotonic()
    good = asyncio.run(load(cluster, seconds, rate))
    took = time.monotonic() - began
    used = {role_id: 1e3 * (cpu_s(pid) - before[role_id]) / took for role_id, pid in pids.items()}
    stop.set()
    for thread in threads:
        thread.join()
    size = sum(read) / len(read) if read else 0
    print(
        f"{readers:7}  {used['scheduler-0']:23.1f}  {used['page']:9.1f}  {size:12.0f}  {len(read):7}  {good / took:10.0f}",
        flush=True,
    )


def follow(url: str, stop: threading.Event, read: list[int]) -> None:
    """Ask as a tab does."""
    import json  # noqa: PLC0415  of readers only

    address, after, served = urlsplit(url).netloc, 0, ""
    while not stop.is_set():
        connection = http.client.HTTPConnection(address, timeout=20)
        connection.request("GET", f"/feed?after={after}&served={served}")
        body = connection.getresponse().read()
        connection.close()
        told = json.loads(body)
        frames, served = told["frames"], told["served"]
        after = frames[-1]["seq"] if frames else after
        read.append(len(body))
        stop.wait(1.0)


async def load(cluster: TemporaryCluster, seconds: float, rate: float) -> int:
    """Requests at their moments, Poisson; how many were answered in time."""
    moments = np.cumsum(np.random.default_rng(1).exponential(1 / rate, int(rate * seconds)))
    good = 0
    async with Client(cluster.endpoints["client"]) as client:
        began = time.monotonic()

        async def one(number: int) -> None:
            nonlocal good
            try:
                await client.infer(f"m{number % MODELS}", {"x": np.zeros((1, 16), np.float32)})
                good += 1
            except RequestError:
                pass

        tasks = []
        for number, at_s in enumerate(moments):
            await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
            tasks.append(asyncio.ensure_future(one(number)))
        await asyncio.gather(*tasks)
    return good


def cpu_s(pid: int) -> float:
    """Of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
