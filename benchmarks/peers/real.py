"""Meets real models on this host's device: what a request holds, what batches take in our worker, what a bare loop serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks.peers.cases import RealCase, ServedModel
from benchmarks.worker_throughput import bare_rps
from fabric.clock import MonotonicClock
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.hosted import DeviceReplica
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.profiled import device_named
from roles.profiling.sensors import Sensors

TOKENS = 128
"""Of a request to a language model: with our default, 512, it would take most of a mix."""
BARE_LOOP_MS = 1_000.0


def real_cases(
    words: Sequence[str], device: str, slos_ms: Sequence[float], batch_max: int
) -> Iterator[RealCase]:
    """One for each SLO; `words` are models as `tenuto profile` names them, such as resnet50 or transformers/bert.

    Each is measured once, beforehand. Raises LoaderError for a model and ConfigError for a device that is not there.
    """
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
    replica = DeviceReplica(arch, loaded, batch_max, device, MonotonicClock())
    replica.warm(slo_ms)
    size = replica.batch_size_max
    turns = max(3, round(BARE_LOOP_MS / replica.exec_ms[-1]))
    served = ServedModel(
        arch,
        loader,
        {name: value.cpu().numpy() for name, value in loaded.example.items()},
        {number: round(took_ms, 4) for number, took_ms in enumerate(replica.exec_ms, 1)},
        bare_rps(spec, device, size, turns),
    )
    print(
        f"{arch} on {device_name}: a batch of 1 takes {replica.exec_ms[0]:.2f} ms, of {size} {replica.exec_ms[-1]:.2f} ms;"
        f" a bare loop of the latter serves {served.bare_rps:.0f} r/s",
        flush=True,
    )
    return served


def machine(device: str) -> dict[str, str]:
    """On what it was measured, and when."""
    gpu = torch.cuda.get_device_name() if device != "cpu" else ""
    return {
        "device": gpu or device,
        "driver": Sensors.open(0).driver,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
