"""Meets real models on this host's device: what a request holds, what batches take in our worker, what a bare loop serves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.peers.bare_model import BareModel
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

Prepared = TypeVar("Prepared")
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
    peer_ms = _peer_ms(BareModel(loader, device_name, size), example, size)
    served = ServedModel(
        arch,
        loader,
        example,
        _by_size(exec_ms),
        _by_size(peer_ms),
        rps(BareLoop(loaded, device, size), size, BARE_LOOP),
    )
    print(
        f"{arch} on {device_name}: a batch of 1 takes {exec_ms[0]:.2f} ms, of {size} {largest_ms:.2f} ms"
        f" (as peers run it {peer_ms[0]:.2f} and {peer_ms[-1]:.2f}); a bare loop of the latter serves {served.bare_rps:.0f} r/s",
        flush=True,
    )
    return served


def _staged_ms(replica: DeviceReplica, example: Inputs) -> tuple[float, ...]:
    """l(b) of a warm model whose inputs are in place, as those of a busy worker are: its own warm-up counts putting them there."""

    def staged(size: int) -> list[JobPart]:
        parts = [JobPart(size, [NamedTensor(*one) for _ in range(size) for one in example.items()])]
        replica.stage(parts)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return parts

    sizes = batch_sizes(replica.batch_size_max)
    took_ms = [_median_ms(partial(staged, size), replica.run_parts) for size in sizes]
    return stepped(sizes, took_ms) if replica.buckets.sizes else spread(sizes, took_ms)


def _peer_ms(model: BareModel, example: Inputs, size_max: int) -> tuple[float, ...]:
    """The same as a peer's server file runs it."""
    sizes = batch_sizes(size_max)
    row = list(example.values())
    return spread(sizes, [_median_ms(partial(list, [row] * size), model.run) for size in sizes])


def _median_ms(prepare: Callable[[], Prepared], run: Callable[[Prepared], object]) -> float:
    """Of runs, each of what was prepared for it before its time began."""
    clock, runs_ms = MonotonicClock(), list[float]()
    while len(runs_ms) < RUNS_MIN or (sum(runs_ms) < RUNS_MS and len(runs_ms) < RUNS_MAX):
        prepared = prepare()
        began_ms = clock.now_ms()
        run(prepared)
        runs_ms.append(clock.now_ms() - began_ms)
    return statistics.median(runs_ms)


def _by_size(took_ms: Sequence[float]) -> dict[int, float]:
    return {size: round(one_ms, 4) for size, one_ms in enumerate(took_ms, 1)}
