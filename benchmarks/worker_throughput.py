"""What the worker's way of running a model leaves of a bare PyTorch loop; CUDA graphs beside eager.

    python -m benchmarks.worker_throughput --device cuda --arch resnet50 --batches 1,2,4,8,32,128 [--dtype float16] [--json FILE]

Four loops of one model take turns. The bare one is what somebody writes who knows CUDA: inputs in pinned memory are copied to a buffer of
their own on the device, the model runs, outputs are copied to pinned memory, and the host waits once a batch. The bare one
with graphs is the same around a CUDA graph of that very batch size, captured beforehand. The worker's two get the same requests one
by one, as arrays of their own, put them together while the batch before runs, and give numpy arrays back: eagerly, and as CUDA
graphs. Design section 12 asks for 0.95 of the bare eager loop's throughput; a small model's graphs should be worth 1.3 times the
worker's own eager runs for as long as launching is most of the work. On a CPU there are no graphs.

A loop runs `--turns` batches, fewer where those would take over `--seconds`, in each of `--rounds` rounds; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from benchmarks.device import described
from benchmarks.figures import Figures, Line, Table, add_json_option, tell
from fabric.clock import MonotonicClock
from fabric.link import NamedTensor
from fabric.messages import LoaderSpec
from profiles.profilers.memory import empty_cache
from roles.gpu_worker.executors.base import JobPart
from roles.gpu_worker.executors.buckets import Graph, cuda_capture
from roles.gpu_worker.executors.hosted import DeviceReplica
from roles.gpu_worker.executors.loaders.base import LoadedModel
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.profiled import device_named
from roles.gpu_worker.executors.slots import stream_of

WARM: Final = 2
TURNS_MIN: Final = 2
STAGED_PART_MIN: Final = 0.95
"""Of the worker's batches that should find their inputs in place; the first one of a loop cannot."""
SMALL: Final = frozenset({"resnet18", "mobilenet_v2", "squeezenet1_0", "squeezenet1_1"})
"""Models that are launched for longer than they compute while a batch is at most `SMALL_BATCH_MAX`: what graphs are for."""
SMALL_BATCH_MAX: Final = 8
GRAPHS_AT_LEAST: Final = 1.3
CLOCK = MonotonicClock()


@dataclass(slots=True, frozen=True)
class Limits:
    """How long a loop runs: that many turns, or that long, whichever is over first; two turns in any case."""

    turns: int
    for_ms: float


class BareLoop:
    """One batch of `loaded`'s example again and again; a call is a batch, with its outputs on the host at its end.

    `is_captured`: by a CUDA graph. Raises RuntimeError where the model cannot be captured.
    """

    def __init__(
        self, loaded: LoadedModel, device: torch.device, batch_size: int, *, is_captured: bool = False
    ) -> None:
        self._infer = loaded.model.infer
        self._stream = stream_of(device, "bare") if device.type == "cuda" else None
        self._host = {key: torch.stack([value.cpu()] * batch_size) for key, value in loaded.example.items()}
        self._inputs = self._host
        if self._stream is not None:
            self._host = {key: value.pin_memory() for key, value in self._host.items()}
            self._inputs = {key: value.to(device) for key, value in self._host.items()}
            torch.cuda.synchronize(device)  # the weights came on another stream
        self._fetched: dict[str, Tensor] = {}
        self._graph: Graph | None = None
        self._outputs: Mapping[str, Tensor] = {}
        if is_captured:
            assert self._stream is not None, "a CPU has no graphs"
            self()  # memory is found and kernels are chosen before
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._graph, self._outputs = cuda_capture(device)(lambda: self._infer(dict(self._inputs)))

    def __call__(self) -> Mapping[str, Tensor]:
        """Copy in, infer, copy out, wait."""
        if self._stream is None:
            with torch.inference_mode():
                return self._infer(dict(self._inputs))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for key, value in self._host.items():
                self._inputs[key].copy_(value, non_blocking=True)
            if self._graph is None:
                outputs = self._infer(dict(self._inputs))
            else:
                self._graph.replay()
                outputs = self._outputs
            for key, output in outputs.items():
                if key not in self._fetched:
                    self._fetched[key] = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
                self._fetched[key].copy_(output, non_blocking=True)
        self._stream.synchronize()
        return self._fetched


class WorkerLoop:
    """The same through the worker's model; a call is a batch, while which `stager`'s thread stages the next one."""

    def __init__(
        self,
        hosted: DeviceReplica,
        example: Mapping[str, Tensor],
        batch_size: int,
        stager: ThreadPoolExecutor,
    ) -> None:
        self.hosted = hosted
        self.batches = [requests(example, batch_size) for _ in range(3)]
        self._stager = stager
        self._turn = 0
        self._staged_before = hosted.slots.staged_ahead

    def __call__(self) -> None:
        """Run the batch that was staged."""
        staging = self._stager.submit(self.hosted.stage, self.batches[(self._turn + 1) % 3])
        self.hosted.run_parts(self.batches[self._turn % 3])
        staging.result()
        self._turn += 1

    @property
    def staged_part(self) -> float:
        """Of its batches, how many found their inputs in place."""
        return (self.hosted.slots.staged_ahead - self._staged_before) / max(1, self._turn)


def requests(example: Mapping[str, Tensor], count: int) -> list[JobPart]:
    """A batch of copies of the model's example, each in memory of its own."""
    tensors = [
        NamedTensor(key, value.cpu().numpy().copy()) for _ in range(count) for key, value in example.items()
    ]
    return [JobPart(count, tensors)]


def rps(loop: Callable[[], object], batch_size: int, limits: Limits) -> float:
    """Requests a second, when it is warm."""
    for _ in range(WARM):
        loop()
    turns = 0
    began_ms = CLOCK.now_ms()
    while turns < TURNS_MIN or (turns < limits.turns and CLOCK.now_ms() - began_ms < limits.for_ms):
        loop()
        turns += 1
    return 1e3 * turns * batch_size / (CLOCK.now_ms() - began_ms)


class Comparison:
    """One model on one device: loaded once, warmed up to the largest batch as a worker does."""

    def __init__(self, spec: LoaderSpec, device: torch.device, batch_size_max: int) -> None:
        self._device = device
        self._loaded = load_model(spec, device)
        eager = replace(self._loaded, may_capture=False)
        self.eager = self._hosted(eager, batch_size_max)
        self.graphs = self._hosted(self._loaded, batch_size_max) if device.type == "cuda" else None
        self.staged_part = 1.0
        """Of the worker's batches of the last rates, how many found their inputs in place."""

    def _hosted(self, loaded: LoadedModel, batch_size_max: int) -> DeviceReplica:
        hosted = DeviceReplica("m", loaded, batch_size_max, self._device, CLOCK)
        hosted.warm(1e9)
        return hosted

    @property
    def batch_size_max(self) -> int:
        """What there is memory for."""
        return min(one.batch_size_max for one in (self.eager, self.graphs) if one is not None)

    @property
    def limited_by(self) -> str:
        """Why there are no larger ones."""
        return self.eager.limited_by or (self.graphs.limited_by if self.graphs is not None else "")

    @property
    def has_graphs(self) -> bool:
        """Whether the worker captured anything."""
        return self.graphs is not None and bool(self.graphs.buckets.sizes)

    @property
    def how(self) -> str:
        """How the worker's batches ran where it may capture."""
        if self.graphs is None:
            return "a CPU has no CUDA graphs"
        if self.graphs.buckets.problem is not None:
            return f"no CUDA graphs: {self.graphs.buckets.problem}"
        return f"CUDA graphs of batches of {', '.join(map(str, self.graphs.buckets.sizes))}"

    def rates(self, batch_size: int, limits: Limits, rounds: int) -> dict[str, float]:
        """Requests a second by loop, medians: `bare`, `eager`, and where graphs can be had `bare graphs`, `graphs`."""
        example = self._loaded.example
        with ThreadPoolExecutor(1) as stager:
            loops: dict[str, Callable[[], object]] = {
                "bare": BareLoop(self._loaded, self._device, batch_size),
                "eager": WorkerLoop(self.eager, example, batch_size, stager),
            }
            if self.graphs is not None and self.has_graphs:
                loops["bare graphs"] = BareLoop(self._loaded, self._device, batch_size, is_captured=True)
                loops["graphs"] = WorkerLoop(self.graphs, example, batch_size, stager)
            seen: dict[str, list[float]] = {name: [] for name in loops}
            for _ in range(rounds):
                for name, loop in loops.items():
                    seen[name].append(rps(loop, batch_size, limits))
        self.staged_part = min(loop.staged_part for loop in loops.values() if isinstance(loop, WorkerLoop))
        loops.clear()  # and the graph's memory with it
        empty_cache()
        return {name: statistics.median(values) for name, values in seen.items()}


def add_row(figures: Figures, table: Table, arch: str, batch_size: int, rates: Mapping[str, float]) -> None:
    """One batch size's row, and its lines."""
    bare, eager = rates["bare"], rates["eager"]
    bare_graphs, graphs = rates.get("bare graphs"), rates.get("graphs")
    of_eager = None if graphs is None else graphs / eager
    table.rows.append(
        (
            batch_size,
            bare,
            eager,
            eager / bare,
            bare_graphs,
            graphs,
            None if graphs is None or bare_graphs is None else graphs / bare_graphs,
            of_eager,
        )
    )
    what = f"the worker's part of a bare loop, batches of {batch_size}"
    figures.lines.append(Line(what, max(eager, graphs or 0.0) / bare, at_least=0.95))
    if of_eager is not None and arch in SMALL and batch_size <= SMALL_BATCH_MAX:
        figures.lines.append(
            Line(f"CUDA graphs of eager, batches of {batch_size}", of_eager, at_least=GRAPHS_AT_LEAST)
        )


def main() -> None:
    """Print a row a batch size."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--zoo", default="torchvision")
    arguments.add_argument("--arch", default="resnet50")
    arguments.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16")
    arguments.add_argument("--batches", default="1,2,4,8,32,128")
    arguments.add_argument("--turns", type=int, default=300, help="at most, of a loop in a round")
    arguments.add_argument("--seconds", type=float, default=0.2, help="at most, of a loop in a round")
    arguments.add_argument("--rounds", type=int, default=3)
    add_json_option(arguments)
    asked = arguments.parse_args()
    device = device_named(asked.device, torch.get_num_threads())
    figures = Figures(f"worker throughput, {asked.arch} {asked.dtype}", device=described(asked.device))
    table = figures.table(
        f"{asked.arch} {asked.dtype} on {asked.device}: requests/s of a bare loop and of the worker, eager and with CUDA graphs",
        *("batch", "bare", "eager", "of bare", "bare graphs", "graphs", "of bare graphs", "graphs of eager"),
    )
    batch_sizes = [int(word) for word in asked.batches.split(",")]
    compared = Comparison(
        LoaderSpec(zoo=asked.zoo, arch=asked.arch, dtype=asked.dtype), device, max(batch_sizes)
    )
    figures.remarks.append(compared.how)
    for batch_size in batch_sizes:
        if batch_size > compared.batch_size_max:
            figures.remarks.append(f"batches of {batch_size} are left out: {compared.limited_by}")
            continue
        rates = compared.rates(batch_size, Limits(asked.turns, 1e3 * asked.seconds), asked.rounds)
        add_row(figures, table, asked.arch, batch_size, rates)
        if compared.staged_part < STAGED_PART_MIN:
            figures.remarks.append(
                f"batches of {batch_size}: {100 * compared.staged_part:.0f} % found their inputs in place"
            )
    tell(figures, asked.json)


if __name__ == "__main__":
    main()
