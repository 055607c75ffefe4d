"""What the scheduler core costs, alone: no sockets, no GPUs, one core (design section 12).

The core is a server on a virtual clock that advances by the measured CPU time of each of its calls: an event that
finds it busy waits. So a core that is too slow falls behind, exactly as it would live, and requests miss their
deadlines. The harness around it (arrivals, slices) is not counted, nor
what reading the CPU's clock takes, half a µs a call (the least of many). The setting with 4096 slices is 25 cores' worth
of requests: there the clock stands still during a call, and only the cost per batch is of interest. All batches
are made of about ten runs, except in the last setting.

Rival: Symphony's own scheduler in C++ keeps up with 0.5 to 0.7 M requests/s on such a core if only its generators
may not lag, with 0.2 to 0.25 M/s if nearly every request must also be in time (measured beside the paper's code).

    python -m benchmarks.scheduler_core [--seconds 2] [--batching deferred] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from benchmarks.figures import Figures, Line, add_json_option, tell
from fabric.ids import FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    Done,
    FrontendHello,
    ModelSpec,
    ReplicaInfo,
    RunBatch,
    SliceReady,
    SliceSpec,
)
from policies.batching.registry import make_discipline
from roles.runtime.core import Heard, Tick
from roles.scheduler.core import SchedulerCore
from roles.scheduler.settings import SchedulerSettings

ALPHA_MS, BETA_MS, SLO_MS, BATCH_MAX = 0.02, 4.0, 40.0, 512
EXEC_MS = tuple(ALPHA_MS * b + BETA_MS for b in range(1, BATCH_MAX + 1))
FRONTEND, WORKER = PeerId("frontend-0/0"), PeerId("worker-local-0/0")
NODE, BOOT = NodeId("local"), Incarnation("0")
WARMUP_MS = 200.0
TRIES = 3  # the one that took the least CPU time was disturbed least


@dataclass
class Setting:
    """One row: `run` requests arrive together, `rate_rps` in total."""

    name: str
    models: int
    slices: int
    rate_rps: float
    run: int
    is_timed: bool = True


@dataclass
class Verdict:
    """What came of it, after the warm-up."""

    offered: int = 0
    in_time: int = 0
    batches: int = 0
    busy_ms: float = 0.0
    window_ms: float = 0.0
    sizes: list[int] = field(default_factory=list)
    runs: int = 0


def unused_ms() -> float:
    """What a call that does nothing seems to take."""
    looks = []
    for _ in range(10_000):
        began_s = time.thread_time()
        looks.append(time.thread_time() - began_s)
    return statistics.quantiles(looks, n=20)[0] * 1e3


def measure(setting: Setting, batching: str, seconds: float) -> Verdict:
    """Play one setting."""
    models = [ModelId(f"m{number}") for number in range(setting.models)]
    specs = tuple(ModelSpec(model_id, SLO_MS, BATCH_MAX, None, EXEC_MS) for model_id in models)
    slices = [SliceId(f"local/gpu{number}/0") for number in range(setting.slices)]
    core = SchedulerCore(
        SchedulerSettings(
            models=specs,
            slices=tuple((NODE, SliceSpec(one, n, "emulated", None, specs)) for n, one in enumerate(slices)),
        ),
        make_discipline(batching, {}),
    )
    core.handle(Heard(FRONTEND, FrontendHello(FrontendId("frontend-0"), BOOT, ())), 0.0)
    replicas = tuple(ReplicaInfo(model_id, BATCH_MAX, EXEC_MS) for model_id in models)
    for number, one in enumerate(slices):
        core.handle(Heard(WORKER, SliceReady(one, BOOT, NODE, number, (), replicas)), 0.0)

    gap_ms = setting.run * setting.models / setting.rate_rps * 1e3  # between two runs of one model
    start_ms = 10.0
    phases = {model_id: start_ms + gap_ms * n / setting.models for n, model_id in enumerate(models)}
    counted_from_ms = start_ms + WARMUP_MS
    counted_to_ms = counted_from_ms + seconds * 1e3
    until_ms = counted_to_ms + 2 * SLO_MS  # what came last is followed to its fate
    ties = count()
    heap: list[tuple[float, int, object]] = []
    for model_id in models:
        heappush(heap, (phases[model_id], next(ties), model_id))
    free_at_ms = dict.fromkeys(slices, 0.0)
    next_seq = dict.fromkeys(models, 0)
    verdict, clock_takes_ms = Verdict(window_ms=seconds * 1e3), unused_ms()
    clock_ms = 0.0
    gc.collect()
    gc.disable()
    while True:
        due_ms = heap[0][0]
        wake_at_ms = core.wake_at_ms
        is_tick = wake_at_ms is not None and wake_at_ms <= due_ms
        at_ms = max(clock_ms, wake_at_ms if is_tick and wake_at_ms is not None else due_ms)
        if at_ms > until_ms:
            break
        is_counted = counted_from_ms < at_ms <= counted_to_ms
        if is_tick:
            event: Tick | Heard = Tick()
        else:
            _, _, what = heappop(heap)
            if isinstance(what, Done):
                event = Heard(WORKER, what)
            else:
                assert isinstance(what, str)
                model_id = ModelId(what)
                late_ms = at_ms - due_ms  # it lay in the socket while the core was busy
                event = Heard(FRONTEND, Arrivals(model_id, next_seq[model_id], setting.run, SLO_MS), late_ms)
                next_seq[model_id] += setting.run
                heappush(heap, (due_ms + gap_ms, next(ties), model_id))
                verdict.offered += setting.run if counted_from_ms < due_ms <= counted_to_ms else 0
        began_s = time.thread_time()
        actions = core.handle(event, at_ms)
        took_ms = max(0.0, (time.thread_time() - began_s) * 1e3 - clock_takes_ms)
        clock_ms = at_ms + took_ms if setting.is_timed else at_ms
        verdict.busy_ms += took_ms if is_counted else 0.0
        for action in actions:
            batch = action.message
            if not isinstance(batch, RunBatch):
                continue
            runs = [run for part in batch.parts for run in part.runs]
            size = sum(run.count for run in runs)
            begins_ms = max(clock_ms + batch.start_in_ms, free_at_ms[batch.slice_id])
            ends_ms = begins_ms + EXEC_MS[size - 1]
            free_at_ms[batch.slice_id] = ends_ms
            done = Done(
                batch.batch_id, batch.slice_id, batch.model_id, "ok", size, (), 0.0, 0.0, EXEC_MS[size - 1]
            )
            heappush(heap, (ends_ms, next(ties), done))
            verdict.batches += is_counted
            verdict.runs += -(-size // setting.run) if is_counted else 0
            verdict.sizes.append(size)
            for run in runs:
                first_good_ms = ends_ms - SLO_MS - 1e-6  # whoever came before that is answered too late
                arrived_ms = [
                    phases[batch.model_id] + gap_ms * (seq // setting.run)
                    for seq in range(run.first_seq, run.first_seq + run.count)
                ]
                verdict.in_time += sum(
                    one >= first_good_ms for one in arrived_ms if counted_from_ms < one <= counted_to_ms
                )
    gc.enable()
    return verdict


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--batching", default="deferred")
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("scheduler core")
    per_model_rps = 1_000_000 / 20
    settings = [
        Setting("1 M/s, runs of 50", 20, 64, 1_000_000, 50),
        Setting("500 models, 4096 slices, same total", 500, 4096, 1_000_000, 8, False),
        Setting("500 models, 4096 slices, each model as busy", 500, 4096, per_model_rps * 500, 50, False),
        Setting("single requests", 20, 64, 100_000, 1),
    ]
    table = figures.table(
        f"the core alone, {options.batching}",
        *("setting", "requests/s", "in time %", "core busy", "us a batch", "batch", "runs a batch"),
    )
    costs = []
    for setting in settings:
        seconds = options.seconds if setting.is_timed else 0.2
        tries = [measure(setting, options.batching, seconds) for _ in range(TRIES)]
        verdict = min(tries, key=lambda one: one.busy_ms)
        per_batch_us = 1e3 * verdict.busy_ms / max(1, verdict.batches)
        costs.append(per_batch_us)
        singles = setting.rate_rps * verdict.window_ms / verdict.busy_ms / 1e6
        table.rows.append(
            (
                setting.name,
                setting.rate_rps,
                100 * verdict.in_time / verdict.offered,
                verdict.busy_ms / verdict.window_ms,
                per_batch_us,
                statistics.fmean(verdict.sizes),
                verdict.runs / max(1, verdict.batches),
            )
        )
    what = "cost per batch at 4096 slices and 500 models, of that at 64 and 20"
    figures.lines += [
        Line(f"{what}, at the same total rate", costs[1] / costs[0], at_most=1.3),
        Line(f"{what}, with 25 times the traffic", costs[2] / costs[0], at_most=1.3),
        Line("single requests for each second of a core, M/s", singles, at_least=1.0),
    ]
    tell(figures, options.json)


if __name__ == "__main__":
    main()
