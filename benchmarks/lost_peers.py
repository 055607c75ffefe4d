"""What the loss of peers costs a scheduler core: its longest turn, the others' requests, and its memory afterwards.

    python -m benchmarks.lost_peers [--queued 20000] [--restarts 10000] [--json FILE]

First: two frontends have as many requests queued, each alone in its run; one of them is lost, by its silence or
because its next incarnation says hello. The clock is virtual, and each turn's CPU time is measured. All requests of the
other one must be answered in time. And: once the scheduler has served as many batches as it remembers, so many slices are started again, each with run times of its own, and so many
nodes come under names that were never heard before and are lost; memory is what the process holds then. There is no
rival here.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from benchmarks.figures import Figures, Line, add_json_option, tell
from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    Done,
    Dropped,
    FrontendHello,
    GpuInfo,
    ModelSpec,
    NodeHello,
    PreemptBatch,
    ReplicaInfo,
    RunBatch,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceStatus,
)
from policies.batching.registry import DISCIPLINES, make_discipline
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.scheduler.core import Event, SchedulerCore
from roles.scheduler.dispatch.recorder import BATCHES_MAX
from roles.scheduler.settings import SchedulerSettings

MODELS = tuple(ModelId(f"m{number}") for number in range(4))
SLICES = tuple(SliceId(f"local/gpu{number}/0") for number in range(8))
NODE, AGENT = NodeId("local"), PeerId("node-local/0")
LEFT, RIGHT = PeerId("frontend-0/0"), PeerId("frontend-1/0")
SLO_MS = 10_000.0
EXEC_MS = tuple(0.1 * b + 4.0 for b in range(1, 65))
OPTIONS = {"timeout": {"timeout_ms": 5_000.0}}
TURN_MAX_MS = 20.0
GROWTH_MAX = 0.02
FEW = 100
IDLE_EVERY = 20
MB = 1e6


@dataclass
class Stage:
    """A core, its slices, and what became of the requests of the frontend that stays."""

    core: SchedulerCore
    now_ms: float = 0.0
    longest_ms: float = 0.0
    in_time: int = 0
    missed: int = 0
    ends: list[tuple[float, int, PeerId, Done]] = field(default_factory=list)
    ties: Iterator[int] = field(default_factory=count)
    free_at_ms: dict[SliceId, float] = field(default_factory=dict)
    rights: dict[BatchId, int] = field(default_factory=dict)

    def hear(self, event: Event) -> None:
        """One turn."""
        began_s = time.thread_time()
        actions = self.core.handle(event, self.now_ms)
        self.longest_ms = max(self.longest_ms, (time.thread_time() - began_s) * 1e3)
        assert not self.core.offences.counters, "the peers here say what real ones say"
        for action in actions:
            self.take(action)

    def take(self, action: Send) -> None:
        """What the core said."""
        match action.message:
            case RunBatch() as batch:
                size = sum(run.count for part in batch.parts for run in part.runs)
                begins_ms = max(self.now_ms + batch.start_in_ms, self.free_at_ms.get(batch.slice_id, 0.0))
                ends_ms = self.free_at_ms[batch.slice_id] = begins_ms + EXEC_MS[size - 1]
                done = Done(
                    batch.batch_id,
                    batch.slice_id,
                    batch.model_id,
                    "ok",
                    size,
                    (),
                    0.0,
                    0.0,
                    EXEC_MS[size - 1],
                )
                heappush(self.ends, (ends_ms, next(self.ties), action.peer, done))
                right = sum(
                    run.count for part in batch.parts if part.frontend_id == "frontend-1" for run in part.runs
                )
                self.in_time += right if ends_ms <= SLO_MS else 0
                self.missed += right if ends_ms > SLO_MS else 0
                self.rights[batch.batch_id] = right if ends_ms <= SLO_MS else 0
            case PreemptBatch() as preempt:
                self.in_time -= self.rights.pop(preempt.batch_id)
                self.free_at_ms[preempt.slice_id] = self.now_ms
            case Dropped() as dropped if action.peer == RIGHT:
                self.missed += sum(run.count for run in dropped.runs)

    def run(self, until_ms: float) -> None:
        """Ticks and ends of batches, each at its moment."""
        while True:
            wake_at_ms = self.core.wake_at_ms
            end_at_ms = self.ends[0][0] if self.ends else float("inf")
            next_ms = min(end_at_ms, float("inf") if wake_at_ms is None else wake_at_ms)
            if next_ms > until_ms:
                break
            self.now_ms = max(self.now_ms, next_ms)
            if end_at_ms <= next_ms:
                _, _, worker, done = heappop(self.ends)
                self.rights.pop(done.batch_id, None)
                self.hear(Heard(worker, done))
            else:
                self.hear(Tick())
        self.now_ms = until_ms


def stage(batching: str) -> Stage:
    """Eight slices that host four models, and two frontends."""
    specs = tuple(ModelSpec(one, SLO_MS, len(EXEC_MS), None, EXEC_MS) for one in MODELS)
    slices = tuple((NODE, SliceSpec(one, n, "emulated", None, specs)) for n, one in enumerate(SLICES))
    made = Stage(
        SchedulerCore(SchedulerSettings(specs, slices), make_discipline(batching, OPTIONS.get(batching, {})))
    )
    for number, peer in enumerate((LEFT, RIGHT)):
        made.hear(Heard(peer, FrontendHello(FrontendId(f"frontend-{number}"), Incarnation("0"), ())))
    made.hear(Heard(AGENT, NodeHello(NODE, Incarnation("0"), (), ())))
    for one in SLICES:
        made.hear(ready(one, "0", EXEC_MS))
    made.run(5.0)
    return made


def ready(slice_id: SliceId, boot: str, exec_ms: tuple[float, ...]) -> Heard:
    """A slice is warm."""
    replicas = tuple(ReplicaInfo(one, len(exec_ms), exec_ms) for one in MODELS)
    message = SliceReady(slice_id, Incarnation(boot), NODE, 0, ("ipc:///w",), replicas)
    return Heard(PeerId(f"worker-{NODE}-0/{boot}"), message)


def lose(batching: str, queued: int, event: Event) -> Stage:
    """`queued` requests of each frontend, then the event."""
    made = stage(batching)
    gc.collect()
    gc.freeze()
    gc.disable()  # as a scheduler does
    for number in range(queued):
        for peer in (LEFT, RIGHT):
            arrivals = Arrivals(MODELS[number % len(MODELS)], number // len(MODELS), 1, SLO_MS - 5.0)
            made.hear(Heard(peer, arrivals))
    made.longest_ms = 0.0
    made.hear(event)
    made.run(SLO_MS + 1_000.0)
    gc.enable()
    return made


def resident() -> float:
    """Of this process, in MB."""
    for row in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if row.startswith("VmRSS"):
            return int(row.split()[1]) * 1024 / MB
    raise RuntimeError("the kernel does not say")


def restart(made: Stage, draws: random.Random, first: int, last: int) -> None:
    """Slices start again and nodes come and go, the numbers of which are from `first` to `last`."""
    for number in range(first, last):
        slice_id = SLICES[number % len(SLICES)]
        status = SliceStatus(slice_id, Incarnation(str(max(0, number - len(SLICES)))), "lost", "it ended")
        made.hear(Heard(AGENT, SliceChanged(NODE, status)))
        measured = tuple(ms * (1 + 0.1 * draws.random()) for ms in (1.0,) * len(EXEC_MS))
        exec_ms = tuple(sum(measured[: b + 1]) * 0.1 + 4.0 for b in range(len(EXEC_MS)))
        made.hear(ready(slice_id, str(number), exec_ms))
        stranger = PeerId(f"node-n{number}/0")
        gpus = (GpuInfo(0, "generic", "emulated"),)
        made.hear(Heard(stranger, NodeHello(NodeId(f"n{number}"), Incarnation("0"), gpus, ())))
        made.hear(Lost(stranger, "silent"))
        serve(made, number)


def serve(made: Stage, number: int) -> None:
    """A tenth of a second with a batch of each model."""
    for model_id in MODELS:
        made.hear(Heard(LEFT, Arrivals(model_id, number * 4, 4, 50.0)))
    made.run(made.now_ms + 100.0)
    if number % IDLE_EVERY == 0:
        gc.collect()  # as a scheduler does when it is idle


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queued", type=int, default=20_000, help="requests of each frontend")
    parser.add_argument("--restarts", type=int, default=10_000)
    add_json_option(parser)
    asked = parser.parse_args()
    figures = Figures(
        f"{asked.queued:,} queued requests of a frontend that is lost; {asked.restarts:,} restarts"
    )
    memory = figures.table("memory of the core's process", "after", "MB resident")
    made, draws = stage("tenuto"), random.Random(1)
    gc.freeze()
    gc.disable()
    for number in range(BATCHES_MAX // len(MODELS) + 1):  # what is kept of past batches is no growth
        serve(made, number)
    sizes_mb: list[float] = []
    for first, last in ((1, FEW), (FEW, asked.restarts)):
        restart(made, draws, first, last)
        gc.collect()
        sizes_mb.append(resident())
        memory.rows.append((f"{last} restarts", sizes_mb[-1]))
    events = {
        "silent": Lost(LEFT, "silent"),
        "next incarnation": Heard(
            PeerId("frontend-0/1"), FrontendHello(FrontendId("frontend-0"), Incarnation("1"), ())
        ),
    }
    table = figures.table(
        "the loss of one of two frontends", "discipline", "how", "longest turn ms", "in time", "missed"
    )
    longest_ms, missed = 0.0, 0
    for batching in DISCIPLINES:
        for how, event in events.items():
            made = lose(batching, asked.queued, event)
            table.rows.append((batching, how, made.longest_ms, made.in_time, made.missed))
            if batching == "tenuto":
                longest_ms, missed = max(longest_ms, made.longest_ms), missed + made.missed
    figures.lines += [
        Line("longest turn of the default discipline, ms", longest_ms, at_most=TURN_MAX_MS),
        Line("requests of the other frontend that were not answered in time", missed, at_most=0),
        Line(f"growth of memory since restart {FEW}", sizes_mb[1] / sizes_mb[0] - 1.0, at_most=GROWTH_MAX),
    ]
    tell(figures, asked.json)


if __name__ == "__main__":
    main()
