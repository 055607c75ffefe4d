"""How long a device that always has a next batch idles between two of them.

    python -m benchmarks.idle_gap [--batches 1000] [--run-ms 5] [--device emulated cpu] [--json FILE]

A real worker process; the benchmark is its agent, scheduler and frontend, and sees to it that there is always one batch
behind the one that runs, with its inputs. A batch's gap is the time from one `Done` to the next less what the device says
that the run took. The mean is over all batches, so what delays single messages falls out of it. The CPU's model sleeps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.figures import Figures, add_json_option, tell
from fabric.link import NamedTensor
from fabric.messages import Done, LoaderSpec, SliceSpec, Stop
from tests.integration.test_worker_process import DIGITS as ON_CPU
from tests.integration.test_worker_process import EMULATED, Cluster
from tests.worker_builders import model_spec, slice_spec

SLEEPS_MS = 5.0
X = NamedTensor("x", np.zeros(3, np.float32))
WARM = 20


class Sleeper:
    """Users' code that leaves the interpreter to others while it runs."""

    def load(self, device: str) -> None:
        """Nothing."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its input."""
        time.sleep(SLEEPS_MS / 1e3)
        return {"x": batch["x"]}

    def example(self) -> dict[str, Tensor]:
        """Three numbers."""
        return {"x": torch.zeros(3)}


def specification(device: str, run_ms: float) -> SliceSpec:
    """A slice with the one model."""
    if device == "emulated":
        return slice_spec(EMULATED, [model_spec(exec_ms=(run_ms,))])
    loader = LoaderSpec(python="benchmarks.idle_gap:Sleeper")
    return slice_spec(ON_CPU, [model_spec("sleeper", (), 1, loader, slo_ms=60_000.0)], device=device)


def gaps_ms(spec: SliceSpec, batches: int) -> list[float]:
    """Of each batch, the gap before it."""
    tensors = [] if spec.device == "emulated" else [X]
    with tempfile.TemporaryDirectory(prefix="g-") as run_dir:
        cluster = Cluster(Path(run_dir))
        try:
            cluster.start(spec)
            cluster.introduce(1)

            def grant(batch_id: int) -> None:
                cluster.run(spec.slice_id, batch_id, [batch_id], latest_in_ms=60_000.0)
                cluster.feed(spec.slice_id, batch_id, [batch_id], tensors)

            ended: list[tuple[float, float]] = []
            grant(0)
            grant(1)
            for batch_id in range(2, batches + WARM + 2):
                done = cluster.hear(cluster.scheduler, Done).message
                ended.append((cluster.clock.now_ms(), done.exec_ms))
                grant(batch_id)
            cluster.agent.send(cluster.worker, Stop(1_000.0))
            cluster.end()
        finally:
            cluster.close()
    ended = ended[WARM:]
    return [at_ms - before_ms - exec_ms for (before_ms, _), (at_ms, exec_ms) in pairwise(ended)]


def main() -> None:
    """Print a row a device."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--batches", type=int, default=1_000)
    arguments.add_argument("--run-ms", type=float, default=5.0)
    arguments.add_argument("--device", nargs="+", default=["emulated", "cpu"])
    add_json_option(arguments)
    asked = arguments.parse_args()
    figures = Figures("idle time of a busy device")
    table = figures.table("between two batches, ms", "device", "batches", "mean", "p50", "p99")
    for device in asked.device:
        gaps = gaps_ms(specification(device, asked.run_ms), asked.batches)
        table.rows.append(
            (device, len(gaps), float(np.mean(gaps)), *map(float, np.percentile(gaps, [50, 99])))
        )
    tell(figures, asked.json)


if __name__ == "__main__":
    main()
