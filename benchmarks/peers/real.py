"""Meets real models on this host's device: what a request holds, what batches take in our worker, what a bare loop serves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks.peers.cases import Inputs, RealCase, ServedModel
from benchmarks.worker_throughput import BareLoop, Limits, rps
from fabric.clock import MonotonicClock
from fabric.errors import ConfigError
from fabric.link import NamedTensor
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.base import JobPart
from roles.gpu_worker.executors.hosted import DeviceReplica, batch_sizes, spread, stepped
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.profiled import device_named
from roles.profiling.sensors import Sensors

TOKENS = 128
"""Of a request to a language model: with our default, 512, it would take most of a mix."""
BARE_LOOP = Limits(turns=1_000, for_ms=1_000.0)
RUNS_MIN, RUNS_MAX, RUNS_MS = 3, 20, 300.0
"""Of each batch size: at least and at most so many, or for so long."""


def real_cases(
    words: Sequence[str], device: str, slos_ms: Sequence[float], batch_max: int
) -> Iterator[RealCase]:
    """One for each SLO; `words` are models as `tenuto profile` names them, such as resnet50 or transformers/bert.

    Each is measured once, beforehand. Raises LoaderError for a model that is not there, and ConfigError for a device that is not, or
    two models of one name.
    """
    if len({word.rpartition("/")[2] for word in words}) < len(words):
        raise ConfigError(f"two of {', '.join(words)} have one name: each model may be served once")
    served = tuple(_met(word, device, max(slos_ms), batch_max) for word in words)
    for slo_ms in slos_ms:
        yield RealCase(1, len(served), slo_ms, device=device, served=served)


def _met(word: str, device_name: str, slo_ms: float, batch_max: int) -> ServedModel:
    zoo, _, arch = word.rpartition("/")
    loader: dict[str, Any] = {"zoo": zoo or "torchvision", "arch": arch}
    if zoo == "transformers":
        loader["sequence_length"] = TOKENS
    spec = LoaderSpec(**loader)
    device = device_named(device_name)
    loaded = load_model(spec, device)
    example = {name: value.cpu().numpy() for name, value in loaded.example.items()}
    replica = DeviceReplica(arch, loaded, batch_max, device, MonotonicClock())
    replica.warm(slo_ms)
    exec_ms = _staged_ms(replica, example)
    size, largest_ms = len(exec_ms), exec_ms[-1]
    served = ServedModel(
        arch,
        loader,
        example,
        {number: round(took_ms, 4) for number, took_ms in enumerate(exec_ms, 1)},
        rps(BareLoop(loaded, device, size), size, BARE_LOOP),
    )
    print(
        f"{arch} on {device_name}: a batch of 1 takes {exec_ms[0]:.2f} ms, of {size} {largest_ms:.2f} ms;"
        f" a bare loop of the latter serves {served.bare_rps:.0f} r/s",
        flush=True,
    )
    return served


def _staged_ms(replica: DeviceReplica, example: Inputs) -> tuple[float, ...]:
    """l(b) of a warm model whose inputs are in place, as those of a busy worker are: its own warm-up counts putting them there."""
    clock, took_ms = MonotonicClock(), []
    sizes = batch_sizes(replica.batch_size_max)
    for size in sizes:
        runs_ms: list[float] = []
        while len(runs_ms) < RUNS_MIN or (sum(runs_ms) < RUNS_MS and len(runs_ms) < RUNS_MAX):
            parts = [JobPart(size, [NamedTensor(*one) for _ in range(size) for one in example.items()])]
            replica.stage(parts)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began_ms = clock.now_ms()
            replica.run_parts(parts)
            runs_ms.append(clock.now_ms() - began_ms)
        took_ms.append(statistics.median(runs_ms))
    return stepped(sizes, took_ms) if replica.buckets.sizes else spread(sizes, took_ms)


def machine(device: str) -> dict[str, str]:
    """On what it was measured, and when."""
    gpu = torch.cuda.get_device_name() if device != "cpu" else ""
    return {
        "device": gpu or device,
        "driver": Sensors.open(0).driver,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
