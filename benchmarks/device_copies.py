"""How batches come to a device and their answers from it: pinned memory, copies that runs hide, a timeline to look at.

    python -m benchmarks.device_copies --device cuda [--models resnet50,transformers/bert] [--batch 32] [--timelines FOLDER] [--json FILE]

For each model: a batch's inputs and outputs between device and memory that is pinned or pageable, one at a time; batches one after
the other of which each is staged while the one before runs, as the worker does, or after it; an answer's way to numpy through pinned
memory, as the worker does, or pageable memory. `--timelines` gets a file for each model, of ten batches staged ahead, which
https://ui.perfetto.dev opens. A CPU has no pinned memory; its copies are from memory to memory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.device import described, loader_named
from benchmarks.figures import Figures, Table, add_json_option, tell
from benchmarks.worker_throughput import CLOCK, WARM, requests
from roles.gpu_worker.executors.base import JobPart
from roles.gpu_worker.executors.hosted import DeviceReplica, sendable
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.profiled import device_named

TIMELINE_BATCHES: Final = 10
ROUNDS: Final = 3
MIB: Final = 1 << 20
Interval = tuple[float, float]


class Copies:
    """One model's batches on one device."""

    def __init__(self, model: str, dtype: str, device: torch.device, batch_size: int, for_ms: float) -> None:
        loaded = load_model(loader_named(model, dtype), device)
        self.model = model
        self._device = device
        self._batch_size = batch_size
        self._for_ms = for_ms
        self._infer = loaded.model.infer
        self._inputs = {
            key: torch.stack([value.to(device)] * batch_size) for key, value in loaded.example.items()
        }
        self._hosted = DeviceReplica(model, loaded, batch_size, device, CLOCK)
        self._hosted.warm(1e9)
        self._batches = [requests(loaded.example, batch_size) for _ in range(3)]
        self._runs = 0

    # ------------------------------------------------ one copy at a time

    def add_transfers(self, table: Table) -> None:
        """A row for inputs and outputs each, in each kind of memory."""
        with torch.inference_mode():
            outputs = {key: sendable(value) for key, value in self._infer(dict(self._inputs)).items()}
        for what, tensors in (("inputs, to the device", self._inputs), ("outputs, from it", outputs)):
            sent_bytes = sum(value.numel() * value.element_size() for value in tensors.values())
            for is_pinned in (True, False):
                took_ms = self._transfer_ms(tensors, is_pinned=is_pinned, is_input=what.startswith("inputs"))
                rate = None if took_ms is None else sent_bytes / took_ms / 1e6
                memory = "pinned" if is_pinned else "pageable"
                table.rows.append((self.model, what, memory, sent_bytes / MIB, took_ms, rate))

    def _transfer_ms(self, tensors: Mapping[str, Tensor], *, is_pinned: bool, is_input: bool) -> float | None:
        if is_pinned and self._device.type != "cuda":
            return None
        host = {key: torch.empty_like(value, device="cpu") for key, value in tensors.items()}
        if is_pinned:
            host = {key: value.pin_memory() for key, value in host.items()}
        there = {key: torch.empty_like(value) for key, value in tensors.items()}
        pairs = [
            (there[key], host[key]) if is_input else (host[key], there[key])  # into, from
            for key in tensors
        ]

        def copy() -> None:
            for into, value in pairs:
                into.copy_(value, non_blocking=is_pinned)

        return self._median_ms(copy)

    def add_results(self, table: Table) -> None:
        """A row: outputs on the device until numpy has them, in memory that is new each time, as an answer's is."""
        with torch.inference_mode():
            outputs = [sendable(value) for value in self._infer(dict(self._inputs)).values()]

        def by_pinned() -> None:
            fetched = []
            for output in outputs:
                host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
                fetched.append(host.copy_(output, non_blocking=True))
            self._wait()
            for host in fetched:
                host.numpy()

        def by_pageable() -> None:
            for output in outputs:
                output.cpu().numpy()

        pinned_ms = self._median_ms(by_pinned) if self._device.type == "cuda" else None
        sent_bytes = sum(value.numel() * value.element_size() for value in outputs)
        table.rows.append((self.model, sent_bytes / MIB, pinned_ms, self._median_ms(by_pageable)))

    def _median_ms(self, call: Callable[[], object]) -> float:
        """What a call takes until the device has done it."""
        took_ms: list[float] = []
        until_ms = CLOCK.now_ms() + self._for_ms
        for turn in range(1_000):
            began_ms = CLOCK.now_ms()
            call()
            self._wait()
            if turn >= WARM:
                took_ms.append(CLOCK.now_ms() - began_ms)
            if took_ms and CLOCK.now_ms() > until_ms:
                break
        return statistics.median(took_ms)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ------------------------------------------------ batch after batch

    def add_staging(self, table: Table) -> None:
        """A row: what staging takes alone, and a batch where it is staged after the one before, or while that runs."""
        after, ahead, found, asked = [], [], 0, 0
        with ThreadPoolExecutor(1) as stager:
            alone_ms = self._median_ms(lambda: self._hosted.stage(self._batches[0]))
            for _ in range(ROUNDS):  # in turns, as a device's clock changes
                after.append(self._batch_ms(self._run_after))
                before, runs = self._hosted.slots.staged_ahead, self._runs
                ahead.append(self._batch_ms(lambda turn: self._run_ahead(turn, stager)))
                found += self._hosted.slots.staged_ahead - before
                asked += self._runs - runs
        after_ms, ahead_ms = statistics.median(after), statistics.median(ahead)
        # What is hidden is told only where rounds differ by less than all of staging: else it would be their noise.
        scatter_ms = max(max(rounds) - min(rounds) for rounds in (after, ahead))
        hidden = (after_ms - ahead_ms) / alone_ms if scatter_ms < alone_ms else None
        table.rows.append(
            (self.model, self._batch_size, alone_ms, after_ms, ahead_ms, hidden, 100 * found / asked)
        )

    def _batch_ms(self, run: Callable[[int], object]) -> float:
        """A batch's time, as the mean over many in a row."""
        for turn in range(WARM):
            run(turn)
        turns = 0
        began_ms = CLOCK.now_ms()
        while turns < WARM or CLOCK.now_ms() < began_ms + self._for_ms:
            run(WARM + turns)
            turns += 1
        return (CLOCK.now_ms() - began_ms) / turns

    def _run_after(self, turn: int) -> None:
        parts = self._batches[turn % 3]
        self._stage(parts)
        self._run(parts)

    def _run_ahead(self, turn: int, stager: ThreadPoolExecutor) -> None:
        staging = stager.submit(self._stage, self._batches[(turn + 1) % 3])
        self._run(self._batches[turn % 3])
        staging.result()

    def _stage(self, parts: Sequence[JobPart]) -> None:
        with record_function("stage"):
            self._hosted.stage(parts)

    def _run(self, parts: Sequence[JobPart]) -> None:
        self._runs += 1
        with record_function("run"):
            self._hosted.run_parts(parts)

    # ------------------------------------------------ to look at

    def timeline(self, path: Path, device: str) -> Sequence[Mapping[str, Any]]:
        """Write ten batches, staged ahead, as Chrome's JSON, packed where `path` ends in .gz; answers its events."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with ThreadPoolExecutor(1) as stager:
            for turn in range(WARM):
                self._run_ahead(turn, stager)
            with profile(activities=activities, experimental_config=_all_threads()) as seen:
                for turn in range(WARM, WARM + TIMELINE_BATCHES):
                    self._run_ahead(turn, stager)
                self._wait()
                seen.add_metadata_json("measured_on", json.dumps(device))
                seen.add_metadata_json("shows", json.dumps(f"{self.model}, batches of {self._batch_size}"))
        seen.export_chrome_trace(str(path))
        return read_events(path)


def _all_threads() -> Any:
    """So that what the staging thread does is seen too; torch before 2.7 sees only what it does on the device."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001  there is no public way
    except TypeError:
        return None


def read_events(path: Path) -> Sequence[Mapping[str, Any]]:
    """Those of a timeline."""
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    events: Sequence[Mapping[str, Any]] = json.loads(text)["traceEvents"]
    return events


def hidden_part(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Of the time in which inputs are copied to the device, the part in which kernels run as well; None: nothing was copied."""
    copies, kernels = [], []
    for event in events:
        if event.get("cat") == "kernel":
            kernels.append(_interval(event))
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in str(event.get("name")):
            copies.append(_interval(event))
    copies, kernels = _merged(copies), _merged(kernels)
    copied_us = sum(end - start for start, end in copies)
    both_us = sum(
        max(0.0, min(end, kernel_end) - max(start, kernel_start))
        for start, end in copies
        for kernel_start, kernel_end in kernels
    )
    return both_us / copied_us if copied_us else None


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Those that overlap as one: kernels of several streams run side by side."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="resnet50,transformers/bert")
    parser.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement")
    parser.add_argument("--timelines", type=Path, metavar="FOLDER")
    add_json_option(parser)
    options = parser.parse_args()
    device = device_named(options.device, torch.get_num_threads())
    figures = Figures(f"copies, batches of {options.batch}", device=described(options.device))
    transfers = figures.table("one copy at a time", "model", "what", "memory", "MiB", "ms", "GB/s")
    staging = figures.table(
        "ms a batch, with inputs staged after the batch before or while it runs; the part of staging that is hidden so, where rounds differ by less than all of it",
        *("model", "batch", "staging alone", "staged after", "staged ahead", "hidden", "found staged in %"),
    )
    results = figures.table(
        "ms until numpy has a batch's outputs",
        "model",
        "MiB",
        "through pinned memory",
        "through pageable memory",
    )
    for model in options.models.split(","):
        copies = Copies(model, options.dtype, device, options.batch, 1e3 * options.seconds)
        copies.add_transfers(transfers)
        copies.add_staging(staging)
        copies.add_results(results)
        if options.timelines is not None:
            path = options.timelines / f"timeline-{model.replace('/', '-')}.json.gz"
            hidden = hidden_part(copies.timeline(path, figures.device))
            under = (
                "no copies to be seen"
                if hidden is None
                else f"{hidden:.0%} of the copying of inputs was under kernels"
            )
            figures.remarks.append(f"{path.name}: {path.stat().st_size / MIB:.2f} MiB; {under}")
    if device.type != "cuda":
        figures.remarks.append(
            "a CPU has no pinned memory: that is left out; its copies are from memory to memory, and staging is to put a batch together"
        )
    tell(figures, options.json)


if __name__ == "__main__":
    main()
