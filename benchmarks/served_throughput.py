"""A real model behind the whole of Tenuto beside the same model in a bare PyTorch loop, at the same batch size.

    python -m benchmarks.served_throughput --device cuda --arch resnet50 --batches 8,32 [--seconds 5] [--json FILE]

A cluster of this host (supervisor, scheduler, frontend, node agent, one worker) and `--processes` clients that keep
`--in-flight` batches under way among them. Batching is `fixed` with that batch size, so both run the same thing. The bare loop is
the eager one of `worker_throughput.py`, with pinned memory. Design section 12 asks for 0.95 of it; where inputs are large and the GPU quick, copying
them between processes is what is left, which `payload.py` measures alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.device import described
from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.worker_throughput import BareLoop, Limits, rps
from fabric.client import Client
from fabric.clock import MonotonicClock
from fabric.messages import LoaderSpec
from roles.benchmark.temporary_cluster import temporary_cluster
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.profiled import device_named
from roles.runtime.process import PARENT_VARIABLE, child_environment, die_with_parent

CLOCK = MonotonicClock()
WARM_S = 1.0
Inputs = dict[str, np.ndarray]


async def _keep_going(
    addresses: Sequence[str], inputs: Inputs, in_flight: int, seconds: float
) -> tuple[int, float]:
    """Answers after the warm-up, and the mean of their batch sizes."""
    began_ms = CLOCK.now_ms()
    sizes: list[int] = []

    async def one(client: Client) -> None:
        while CLOCK.now_ms() < began_ms + 1e3 * (WARM_S + seconds):
            answer = await client.infer("served", inputs)
            if began_ms + 1e3 * WARM_S <= CLOCK.now_ms() < began_ms + 1e3 * (WARM_S + seconds):
                sizes.append(answer.ledger.batch_size)

    async with Client(addresses) as client:
        await client.infer("served", inputs)
        began_ms = CLOCK.now_ms()
        await asyncio.gather(*(one(client) for _ in range(in_flight)))
    return len(sizes), statistics.mean(sizes) if sizes else 0.0


def _client(
    addresses: Sequence[str], inputs: Inputs, in_flight: int, seconds: float, out: Connection
) -> None:
    die_with_parent()
    out.send(asyncio.run(_keep_going(addresses, inputs, in_flight, seconds)))


def served_rps(
    spec: LoaderSpec, inputs: Inputs, batch_size: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Answers a second of all clients together, and the mean batch size."""
    loader = {"zoo": spec.zoo, "arch": spec.arch, "dtype": spec.dtype}
    document = {
        "models": [
            {
                "name": "served",
                "slo_ms": 60_000,
                "loader": loader,
                "profile": {"alpha_ms": 1, "beta_ms": 1, "max_batch": batch_size},
            }
        ],
        "cluster": {"nodes": [{"host": "here", "gpus": 1, "device": options.device}]},
        "batching": {"fixed": {"batch": batch_size, "max_wait_ms": 50}},
        "placement": "exclusive",
    }
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "served.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        with temporary_cluster(file) as cluster:
            addresses = cluster.endpoints["client"]
            in_flight = max(1, options.in_flight * batch_size // options.processes)
            os.environ.update(child_environment())
            readers, clients = [], []
            for _ in range(options.processes):
                reader, writer = context.Pipe(duplex=False)
                arguments = (addresses, inputs, in_flight, options.seconds, writer)
                clients.append(context.Process(target=_client, args=arguments, daemon=True))
                clients[-1].start()
                writer.close()
                readers.append(reader)
            os.environ.pop(PARENT_VARIABLE, None)
            found = [reader.recv() for reader in readers]
            for client in clients:
                client.join(10.0)
    answers = sum(count for count, _ in found)
    mean = sum(count * size for count, size in found) / max(answers, 1)
    return answers / options.seconds, mean


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--zoo", default="torchvision")
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default="8,32")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=100, help="of the bare loop, at most")
    parser.add_argument("--in-flight", type=int, default=4, help="batches")
    parser.add_argument("--processes", type=int, default=2, help="that send")
    add_json_option(parser)
    options = parser.parse_args()
    spec = LoaderSpec(zoo=options.zoo, arch=options.arch, dtype=options.dtype)
    figures = Figures(
        f"{options.arch} {options.dtype} on {options.device}, through all of Tenuto",
        device=described(options.device),
    )
    table = figures.table("requests/s", "batch", "bare loop", "served", "of bare", "mean batch served")
    device = device_named(options.device, torch.get_num_threads() if options.device != "cpu" else 1)
    loaded = load_model(spec, device)
    inputs = {key: value.cpu().numpy() for key, value in loaded.example.items()}
    for batch_size in (int(word) for word in options.batches.split(",")):
        bare = rps(
            BareLoop(loaded, device, batch_size), batch_size, Limits(options.turns, 1e3 * options.seconds)
        )
        served, mean = served_rps(spec, inputs, batch_size, options)
        table.rows.append((batch_size, bare, served, served / bare, mean))
        what = f"served, of a bare loop's throughput, batches of {batch_size}"
        figures.lines.append(Line(what, served / bare, at_least=0.95))
    tell(figures, options.json)


if __name__ == "__main__":
    main()
