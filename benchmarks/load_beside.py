"""What a model that is loaded into a slice costs those that the slice serves meanwhile, and what its going costs.

    python -m benchmarks.load_beside --device cuda --serves resnet50 --loads resnet50 [--batch-max 32] [--seconds 3] [--json FILE]

One device's thread, one model that is asked for a request again and again with a pause of its own run time between; the
time from asking to having the answer is told before, while another model is loaded and warmed up, after, and while it is
unloaded. Beside it how long the same load takes where nothing else runs. What clients of a whole cluster see of it:
`change_under_load.py`.
"""

from __future__ import annotations

import argparse
import select
import time

import numpy as np

from benchmarks.device import described, loader_named
from benchmarks.figures import Figures, Line, Table, add_json_option, tell
from fabric.clock import MonotonicClock
from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import ModelSpec, ReplicaInfo, SliceSpec
from roles.gpu_worker.executors.base import (
    ExecutorEvent,
    Job,
    JobPart,
    JobRan,
    LoadBegins,
    Loaded,
    ModelLoaded,
    Warming,
)
from roles.gpu_worker.executors.thread import ThreadExecutor
from roles.gpu_worker.executors.torch import TorchDevice

SLICE = SliceId("here/gpu0/0")
SERVED, OTHER = ModelId("served"), ModelId("other")
CLOCK = MonotonicClock()
WAIT_S = 300.0


class Served:
    """A slice with one model, and what its requests took."""

    def __init__(self, device: str, served: ModelSpec) -> None:
        self._executor = ThreadExecutor(lambda: TorchDevice(CLOCK), CLOCK.now_ms)
        self._device = device
        began_ms = CLOCK.now_ms()
        self._executor.load(self.spec(served))
        event = self._next()
        assert isinstance(event, Loaded), event
        (self.replica,) = event.replicas
        self.load_ms = CLOCK.now_ms() - began_ms
        self._batches = 0
        self._others: list[ExecutorEvent] = []

    def spec(self, model: ModelSpec) -> SliceSpec:
        """The slice with that model."""
        return SliceSpec(SLICE, 0, self._device, None, (model,))

    def close(self) -> None:
        """End its threads."""
        self._executor.close()

    def ask(self) -> float:
        """One request; ms until its answer was here."""
        tensors = [NamedTensor(one.name, np.zeros(one.shape, one.dtype)) for one in self.replica.inputs]
        self._batches += 1
        began_ms = CLOCK.now_ms()
        self._executor.run(Job(SLICE, BatchId(self._batches), SERVED, [JobPart(1, tensors)]), began_ms)
        while not isinstance(event := self._next(), JobRan):
            self._others.append(event)
        took_ms = CLOCK.now_ms() - began_ms
        time.sleep(self.replica.exec_ms[0] / 1e3)
        return took_ms

    def for_seconds(self, seconds: float) -> list[float]:
        """What requests take for so long."""
        until_ms = CLOCK.now_ms() + 1e3 * seconds
        took_ms = []
        while CLOCK.now_ms() < until_ms:
            took_ms.append(self.ask())
        return took_ms

    def while_loading(self, model: ModelSpec) -> tuple[list[float], float, ReplicaInfo]:
        """What requests take until that model is warm, and how long that was."""
        began_ms = CLOCK.now_ms()
        self._executor.load_model(self.spec(model), 1)
        took_ms = []
        while not self._others:
            took_ms.append(self.ask())
        event = self._others.pop()
        assert isinstance(event, ModelLoaded), event
        assert event.replica is not None, event.reason
        return took_ms, CLOCK.now_ms() - began_ms, event.replica

    def while_unloading(self, model_id: ModelId, seconds: float) -> list[float]:
        """What requests take from the moment at which that model goes."""
        self._executor.unload_model(SLICE, model_id)
        return self.for_seconds(seconds)

    def _next(self) -> ExecutorEvent:
        while True:
            if not self._executor.has_more:
                assert select.select([self._executor], [], [], WAIT_S)[0], "nothing came of it"
            for event in self._executor.take(1, 0.0):
                if not isinstance(event, LoadBegins | Warming):
                    return event


def add_row(table: Table, when: str, took_ms: list[float]) -> float:
    """What requests took then; answers their p99 in ms."""
    p50, p99 = (float(value) for value in np.percentile(took_ms, [50, 99]))
    table.rows.append((when, len(took_ms), p50, p99, max(took_ms)))
    return p99


def main() -> None:
    """Print what requests took before, during and after."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--serves", default="resnet50")
    arguments.add_argument("--loads", default="resnet50")
    arguments.add_argument("--batch-max", type=int, default=32)
    arguments.add_argument("--slo-ms", type=float, default=1_000.0)
    arguments.add_argument("--seconds", type=float, default=3.0)
    add_json_option(arguments)
    asked = arguments.parse_args()

    def model(model_id: ModelId, arch: str) -> ModelSpec:
        return ModelSpec(model_id, asked.slo_ms, asked.batch_max, loader_named(arch))

    figures = Figures("a model loaded beside another", device=described(asked.device))
    served = Served(asked.device, model(SERVED, asked.serves))
    table = figures.table(
        f"{asked.serves} on {asked.device}, one request at a time, while {asked.loads} comes and goes: ms",
        *("when", "requests", "p50", "p99", "max"),
    )
    before_ms = add_row(table, "before", served.for_seconds(asked.seconds))
    took_ms, load_ms, replica = served.while_loading(model(OTHER, asked.loads))
    of_phase_ms = {"while it loads": add_row(table, "while it loads", took_ms)}
    add_row(table, "after", served.for_seconds(asked.seconds))
    when = "while it is unloaded"
    of_phase_ms[when] = add_row(table, when, served.while_unloading(OTHER, asked.seconds))
    figures.lines = [
        Line(f"a neighbour's p99 {when}, of that before", p99_ms / before_ms, at_most=1.2)
        for when, p99_ms in of_phase_ms.items()
    ]
    served.close()
    alone = Served(asked.device, model(OTHER, asked.loads))
    rows = figures.table("what was loaded", *("", "s", "l(1)", f"l({replica.batch_size_max})"))
    rows.rows.append(("beside a model that serves", load_ms / 1e3, replica.exec_ms[0], replica.exec_ms[-1]))
    alone_ms = alone.replica.exec_ms
    rows.rows.append(("with nothing beside", alone.load_ms / 1e3, alone_ms[0], alone_ms[-1]))
    alone.close()
    tell(figures, asked.json)


if __name__ == "__main__":
    main()
