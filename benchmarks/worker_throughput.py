"""What the worker's way of running a model leaves of a bare PyTorch loop; CUDA graphs beside eager.

    python -m benchmarks.worker_throughput --device cuda --arch resnet50 --batches 1,8,32 [--turns 100] [--json FILE]

The bare loop copies a pinned batch in, infers, copies out and waits. The worker gets the same requests one by one,
as arrays of their own, puts them together while the batch before runs, and gives numpy arrays back. Design section 12
asks for 0.95 of the bare loop's throughput.
"""

from __future__ import annotations

import argparse
import threading

import numpy as np
import torch

from benchmarks.figures import Figures, Line, add_json_option, tell
from fabric.clock import MonotonicClock
from fabric.link import NamedTensor
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.base import JobPart
from roles.gpu_worker.executors.hosted import DeviceReplica
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.profiled import device_named

WARM = 5
CLOCK = MonotonicClock()


def requests(spec: LoaderSpec, device: torch.device, count: int) -> list[dict[str, np.ndarray]]:
    """Copies of the model's example, each in memory of its own."""
    example = load_model(spec, device).example
    return [{key: value.cpu().numpy().copy() for key, value in example.items()} for _ in range(count)]


def bare_rps(spec: LoaderSpec, device: torch.device, batch_size: int, turns: int) -> float:
    """Requests a second of the loop anybody would write."""
    loaded = load_model(spec, device)
    host = {key: torch.stack([value.cpu()] * batch_size) for key, value in loaded.example.items()}
    if device.type == "cuda":
        host = {key: value.pin_memory() for key, value in host.items()}
    with torch.inference_mode():
        for turn in range(turns + WARM):
            if turn == WARM:
                began_ms = CLOCK.now_ms()
            outputs = loaded.model.infer(
                {key: value.to(device, non_blocking=True) for key, value in host.items()}
            )
            for output in outputs.values():
                output.cpu()
    return 1e3 * turns * batch_size / (CLOCK.now_ms() - began_ms)


def worker_rps(spec: LoaderSpec, device: torch.device, batch_size: int, turns: int) -> tuple[float, str]:
    """The same through the worker's model, the next batch staged by another thread; and how batches ran."""
    hosted = DeviceReplica("m", load_model(spec, device), batch_size, device, CLOCK)
    hosted.warm(1e9)
    rows = requests(spec, device, batch_size)
    batches = [
        [JobPart(batch_size, [NamedTensor(key, value) for row in rows for key, value in row.items()])]
        for _ in range(3)
    ]
    for turn in range(turns + WARM):
        if turn == WARM:
            began_ms = CLOCK.now_ms()
        stager = threading.Thread(target=hosted.stage, args=(batches[(turn + 1) % 3],))
        stager.start()
        hosted.run_parts(batches[turn % 3])
        stager.join()
    took_ms = CLOCK.now_ms() - began_ms
    return (
        1e3 * turns * batch_size / took_ms,
        hosted.buckets.problem or f"graphs {list(hosted.buckets.sizes)}",
    )


def main() -> None:
    """Print a row a batch size."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--zoo", default="torchvision")
    arguments.add_argument("--arch", default="resnet50")
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--batches", default="1,8,32")
    arguments.add_argument("--turns", type=int, default=100)
    add_json_option(arguments)
    asked = arguments.parse_args()
    figures = Figures("worker throughput")
    device = device_named(asked.device, torch.get_num_threads())
    graphs = LoaderSpec(zoo=asked.zoo, arch=asked.arch, dtype=asked.dtype)
    eager = LoaderSpec(zoo=asked.zoo, arch=asked.arch, dtype=asked.dtype, cuda_graphs=False)
    table = figures.table(
        f"{asked.arch} {asked.dtype} on {asked.device}: requests/s, and the part of the bare loop's",
        *("batch", "bare", "eager", "of bare", "graphs", "of bare", "how"),
    )
    for batch_size in (int(word) for word in asked.batches.split(",")):
        bare = bare_rps(eager, device, batch_size, asked.turns)
        plain, _ = worker_rps(eager, device, batch_size, asked.turns)
        captured, how = worker_rps(graphs, device, batch_size, asked.turns)
        table.rows.append((batch_size, bare, plain, plain / bare, captured, captured / bare, how))
        what = f"the worker's part of a bare loop, batches of {batch_size}"
        figures.lines.append(Line(what, max(plain, captured) / bare, at_least=0.95))
    tell(figures, asked.json)


if __name__ == "__main__":
    main()
