"""One measuring process: it has one share of the device for life, loads one model, and says what it sees.

A share is set by the environment a process starts with, so every share needs a process of its own; and a model that
breaks its CUDA context breaks only this one. It reads lines of JSON and writes lines of JSON: first a request. A
member of a group then says that it is ready, runs from the word ``go`` on beside its neighbours, says what it saw, and
runs on until ``stop``, so that the slower ones are not left alone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from msgspec.structs import asdict

from fabric.clock import MonotonicClock
from fabric.errors import FabricError, error_text
from fabric.ids import ModelId
from fabric.messages import HeadSpec, LoaderSpec
from profiles.kernel_trace import kernels_of, limits_of
from profiles.occupancy import launch_gaps, requirements_of
from profiles.profilers.memory import is_out_of_memory
from profiles.profilers.plan import percentile
from profiles.profilers.torch import Measurer, device_memory_bytes, versions
from roles.gpu_worker.executors.profiled import ProfiledModel, device_named
from roles.profiling.kernels import kernel_rows
from roles.runtime.exit_codes import EXIT_FAILURE
from roles.runtime.process import die_with_parent


def main() -> int:
    """Serve one request from stdin; the exit code says whether it was served."""
    die_with_parent()
    sys.path.append(str(Path.cwd()))  # users' models, as for a worker
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a model prints must not end up among the answers
    try:
        _Measuring(json.loads(sys.stdin.readline()), out).run()
    except FabricError as error:
        _say(out, event="error", reason=str(error))
        return EXIT_FAILURE
    except Exception as error:  # noqa: BLE001  # top of process: users' code may raise anything
        _say(out, event="error", reason=error_text(error))
        return EXIT_FAILURE
    return 0


class _Measuring:
    def __init__(self, request: Mapping[str, Any], out: TextIO) -> None:
        self._request = request
        self._out = out
        self._clock = MonotonicClock()
        self._for_ms = float(request["for_ms"])
        self._device = device_named(request["device"], int(request["threads"]))
        self._measurer = Measurer(self._device, self._clock.now_ms)
        heads = [HeadSpec(ModelId(name), None, _loader_spec(loader)) for name, loader in request["heads"]]
        self._model = ProfiledModel(_loader_spec(request["loader"]), self._device, heads, request["merge"])

    def run(self) -> None:
        if self._request["is_group"]:
            self._run_beside_others()
            return
        self._say(
            event="loaded",
            digest=self._model.digest,
            not_merged=self._model.not_merged,
            load_bytes=self._model.load_bytes,
            feedback_bytes=self._model.feedback_bytes(),
            memory_bytes=device_memory_bytes(self._device),
            pcie_bytes_per_ms=self._measurer.copy_bytes_per_ms(),
            **versions(self._device),
        )
        for place, batch_size in enumerate(self._request["batch_sizes"]):
            try:
                self._measure(batch_size)
            except Exception as error:
                if is_out_of_memory(error):
                    reason = "out of memory"
                elif place:  # what was measured holds, whatever users' code says of larger batches
                    reason = error_text(error)
                else:
                    raise
                self._say(event="no_larger", batch_size=batch_size, reason=reason)
                break
        for count, found in self._model.stages_ms(self._request["stages"], self._clock):
            if isinstance(found, str):
                self._say(event="no_cut", stages=count, reason=found)
            else:
                self._say(event="cut", stages=count, stages_ms=found)
        self._say(event="end")

    def _measure(self, batch_size: int) -> None:
        self._say(event="starts", batch_size=batch_size)
        with self._measurer.memory() as most_bytes:
            batch = self._model.batch(batch_size)
            times_ms = self._measurer.run_times_ms(batch, self._for_ms)
            memory_bytes = most_bytes()
        self._say(event="point", batch_size=batch_size, memory_bytes=memory_bytes, **_numbers(times_ms))
        if batch_size not in self._request["traced"]:
            return
        trace = self._measurer.trace(batch)
        if trace is None:
            return
        kernels = kernels_of(trace)
        if not kernels:  # the tracer is not allowed to look, or another one does
            self._say(event="no_kernels", batch_size=batch_size)
            return
        limits = limits_of(trace, self._device.index or 0)
        total_bytes = device_memory_bytes(self._device)
        self._say(
            event="kernels",
            batch_size=batch_size,
            sm_count=limits.sm_count,
            gaps=asdict(launch_gaps(kernels)),
            requirements=asdict(requirements_of(kernels, limits, 100.0 * memory_bytes / total_bytes)),
            rows=[asdict(row) for row in kernel_rows(kernels, limits)],
        )

    def _run_beside_others(self) -> None:
        batch = self._model.batch(int(self._request["batch_sizes"][0]))
        self._measurer.run_times_ms(batch, 0.0)
        self._say(event="ready")
        if not sys.stdin.readline():
            return
        until_ms = self._clock.now_ms() + self._for_ms
        times_ms = self._measurer.back_to_back(batch, lambda: self._clock.now_ms() >= until_ms)
        trace = self._measurer.trace(batch)
        kernels = [] if trace is None else kernels_of(trace)
        gaps = asdict(launch_gaps(kernels)) if kernels else None
        self._say(event="ran", gaps=gaps, **_numbers(times_ms))
        stop = threading.Event()
        threading.Thread(target=_wait_for_a_word, args=(stop,), name="stop", daemon=True).start()
        self._measurer.back_to_back(batch, stop.is_set)

    def _say(self, **words: object) -> None:
        _say(self._out, **words)


def _loader_spec(written: Mapping[str, Any]) -> LoaderSpec:
    config = tuple((key, value) for key, value in written["config"])
    return LoaderSpec(**{**written, "config": config})


def _numbers(times_ms: list[float]) -> dict[str, float]:
    return {
        "p50_ms": percentile(times_ms, 50),
        "p95_ms": percentile(times_ms, 95),
        "p99_ms": percentile(times_ms, 99),
        "runs": len(times_ms),
    }


def _wait_for_a_word(stop: threading.Event) -> None:
    sys.stdin.readline()  # or the end of who would say it
    stop.set()


def _say(out: TextIO, **words: object) -> None:
    out.write(json.dumps(words) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
