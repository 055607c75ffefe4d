"""What a request costs by HTTP, and by the SDK: processor time of each process, and requests per second.

    python -m benchmarks.gateway [--seconds 4] [--in-flight 32] [--repeat 3] [--json FILE]

A cluster of this host with four emulated devices that are not what ends the load, and one process that asks, closed loop: by the SDK, and
by HTTP as tritonclient does (binary tensors), small ones and 0.6 MB. The sender of HTTP is raw sockets (`roles/benchmark/http_connections.py`), so that no client of
a peer is in the figures. CPU a request is of the processes between it and the device; the sender's own is told beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.stage import CpuMeter, Stage, by_kind, cluster
from fabric.client import Client
from roles.benchmark.http_connections import HttpClient, HttpTarget
from roles.gateway.tensors import to_raw
from roles.runtime.process import read_run_file

CLUSTER = """
models: [{name: sleeper, slo_ms: 2000, rate_rps: 1000, profile: {alpha_ms: 0.02, beta_ms: 2, max_batch: 128}}]
cluster: {gpus: 4}
listen: {http: "127.0.0.1:0"}
"""
SIZES = {"64 B": (16,), "0.6 MB": (3, 224, 224)}
WARMUP_S = 1.0
SDK_AHEAD_MIN = 2.0
Ask = Callable[[], Awaitable[Any]]


async def play(ask: Ask, in_flight: int, seconds: float) -> int:
    """So many requests were answered, with so many under way all the time."""
    until_s = time.perf_counter() + seconds
    answered = 0

    async def one() -> None:
        nonlocal answered
        while time.perf_counter() < until_s:
            await ask()
            answered += 1

    await asyncio.gather(*(one() for _ in range(in_flight)))
    return answered


async def measure(
    stage: Stage, way: str, shape: tuple[int, ...], options: argparse.Namespace
) -> tuple[float, dict[str, float]]:
    """Requests per second, and CPU a request in us by kind of process."""
    array = np.ones(shape, np.float32)
    async with AsyncExitStack() as stack:
        if way == "SDK":
            client = await stack.enter_async_context(Client(stage.targets))

            def ask() -> Awaitable[Any]:
                return client.infer("sleeper", {"x": array})
        else:
            port = port_of(stage)
            request = written(port, array)
            sender = await stack.enter_async_context(HttpClient(HttpTarget({"sleeper": [(port, request)]})))

            def ask() -> Awaitable[Any]:
                return sender.submit("sleeper", {})

        await play(ask, options.in_flight, WARMUP_S)
        meter = CpuMeter({**stage.pids, "sender": os.getpid()})
        meter.begin()
        answered = await play(ask, options.in_flight, options.seconds)
        passed_s, spent_s = meter.spent()
    return answered / passed_s, {kind: s / answered * 1e6 for kind, s in by_kind(spent_s).items()}


def port_of(stage: Stage) -> int:
    """The gateway's."""
    found = read_run_file(stage.run_dir / "gateway-0.json")
    assert found is not None, "it serves"
    return int(found.addresses["http"][0].rpartition(":")[2])


def written(port: int, array: Any) -> bytes:
    """The request, as tritonclient writes it."""
    raw = bytes(to_raw(array))
    shape = ", ".join(map(str, array.shape))
    head = (
        f'{{"inputs":[{{"name":"x","shape":[{shape}],"datatype":"FP32","parameters":{{"binary_data_size":{len(raw)}}}}}],'
        '"parameters":{"binary_data_output":true}}'
    ).encode()
    fields = f"Host: 127.0.0.1:{port}\r\nInference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + len(raw)}"
    return f"POST /v2/models/sleeper/infer HTTP/1.1\r\n{fields}\r\n\r\n".encode() + head + raw


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("What a request costs by HTTP")
    table = figures.table(
        "closed loop; CPU a request in us",
        "payload",
        "way",
        "r/s",
        "gateway",
        "other roles",
        "sender",
        "r/s a core of roles",
    )
    with cluster(CLUSTER) as stage:
        a_core: dict[tuple[str, str], float] = {}
        for size, shape in SIZES.items():
            for way in ("SDK", "HTTP"):
                runs = [asyncio.run(measure(stage, way, shape, options)) for _ in range(options.repeat)]
                rate, spent = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
                ours = {kind: us for kind, us in spent.items() if kind not in ("sender", "agent and up")}
                a_core[size, way] = 1e6 / sum(ours.values())
                gateway_us = ours.pop("gateway", 0.0) if way == "HTTP" else None
                ours.pop("gateway", None)
                row = (size, way, rate, gateway_us, sum(ours.values()), spent["sender"], a_core[size, way])
                table.rows.append(row)
    ahead = statistics.median(a_core[size, "SDK"] / a_core[size, "HTTP"] for size in SIZES)
    figures.lines.append(Line("requests/s a core of roles, SDK / HTTP", ahead, at_least=SDK_AHEAD_MIN))
    tell(figures, options.json)


if __name__ == "__main__":
    main()
