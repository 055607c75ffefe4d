"""How late timers fire: the driver of every role, in the scheduler and alone, beside asyncio's and ZeroMQ's.

    python -m benchmarks.lateness [--timers 1000] [--repeat 3] [--quiet-rate 50] [--load-rate 1000] [--idle 5]
                                  [--json FILE]

A cluster of this host (one emulated GPU with a model of 2 ms, `deferred`: every batch leaves by a timer of the scheduler)
serves `--quiet-rate`, then `--load-rate` requests a second; each has a cluster of its own, whose roles say in the end how
late their timers were since their start. Beside it, in one more process and one after the other, each in turn `--repeat`
times: the same driver with a core that only has timers, asyncio's `call_at` (epoll: whole milliseconds), asyncio on
`select`, and `zmq.Poller.poll` with what is left in whole milliseconds. They all wait for the same `--timers` moments,
1 to 9 ms apart, with nothing else to do.

Before that, the cluster is left alone for `--idle` seconds: what each role then takes of a core is in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np
import zmq

from benchmarks.figures import Figures, Line, Table, add_json_option, tell
from benchmarks.stage import CpuMeter, Stage, cluster, context
from fabric.clock import MonotonicClock
from roles.benchmark.player import run_precisely
from roles.benchmark.run import run_load
from roles.benchmark.share import LoadPlan
from roles.runtime.core import SCHEDULER_ID, Tick
from roles.runtime.loop.driver import Driver, Role
from roles.runtime.running_cluster import look
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

CLUSTER = """
models: [{{name: sleeper, slo_ms: 50, rate_rps: {rate_rps:g}, profile: {{alpha_ms: 0.05, beta_ms: 2, max_batch: 64}}}}]
cluster: {{gpus: 1}}
batching: deferred
"""
GAPS_MS = (1.0, 9.0)
LATE_P99_MS_MAX = 0.5
IDLE_PERCENT_MAX = 5.0
LATENESS = ("timer_late_p50_ms", "timer_late_p99_ms", "timer_late_ms_max", "turn_ms_max", "collect_ms_max")

Waits = Callable[[Sequence[float]], list[float]]
"""Moments in ms from now -> how late each was noticed, in ms."""


# ---------------------------------------------------------------- timers


class TimerCore:
    """A core that only has moments to wake at."""

    def __init__(self, at_ms: Sequence[float], clock: MonotonicClock) -> None:
        began_at_ms = clock.now_ms()
        self._due = [began_at_ms + moment_ms for moment_ms in reversed(at_ms)]
        self.late_ms: list[float] = []

    @property
    def wake_at_ms(self) -> float | None:
        """The next one."""
        return self._due[-1] if self._due else None

    def handle(self, event: Tick, now_ms: float) -> Sequence[None]:
        """It has come."""
        del event
        self.late_ms.append(now_ms - self._due.pop())
        return ()


def by_driver(at_ms: Sequence[float]) -> list[float]:
    """`roles/runtime/loop/driver.py`, as every role has it."""
    clock = MonotonicClock()
    core = TimerCore(at_ms, clock)
    role: Role[Tick, None] = Role(core, [], lambda _: None)
    driver = Driver([role], clock)
    try:
        driver.run(lambda: core.wake_at_ms is None)
    finally:
        driver.close()
    return core.late_ms


async def _call_at(at_ms: Sequence[float]) -> list[float]:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    late_ms: list[float] = []
    began_s = loop.time()

    def fire(moment_ms: float) -> None:
        late_ms.append((loop.time() - began_s) * 1e3 - moment_ms)
        if len(late_ms) == len(at_ms):
            done.set_result(None)

    for moment_ms in at_ms:
        loop.call_at(began_s + moment_ms / 1e3, fire, moment_ms)
    await done
    return late_ms


def by_asyncio(at_ms: Sequence[float]) -> list[float]:
    """The default loop."""
    return asyncio.run(_call_at(at_ms))


def by_asyncio_on_select(at_ms: Sequence[float]) -> list[float]:
    """The loop of the load tool's senders."""
    return run_precisely(_call_at(at_ms))


def by_zmq_poll(at_ms: Sequence[float]) -> list[float]:
    """Polls a silent socket for what is left, rounded up: rounded down it would burn a core for a millisecond."""
    late_ms: list[float] = []
    with zmq.Context() as ctx, ctx.socket(zmq.PULL) as silent:
        silent.bind("inproc://silent")
        poller = zmq.Poller()
        poller.register(silent, zmq.POLLIN)
        began_s = time.perf_counter()
        for moment_ms in at_ms:
            while (left_ms := moment_ms - (time.perf_counter() - began_s) * 1e3) > 0:
                poller.poll(math.ceil(left_ms))
            late_ms.append(-left_ms)
    return late_ms


RIVALS: Mapping[str, Waits] = {
    "driver, alone": by_driver,
    "asyncio": by_asyncio,
    "asyncio on select": by_asyncio_on_select,
    "zmq poll": by_zmq_poll,
}


def wait_in_turn(count: int, repeat: int, writer: Connection) -> None:
    """A process's main: everybody `repeat` times; (p50, p99, max, CPU as a part of a core) of each time."""
    draws = random.Random(1)
    found: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(repeat):
        at_ms = np.cumsum([draws.uniform(*GAPS_MS) for _ in range(count)]).tolist()
        for name, wait in RIVALS.items():
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            late_ms = wait(at_ms)
            cpu = (time.process_time() - cpu_began_s) / (time.perf_counter() - began_s)
            p50, p99 = np.percentile(late_ms, (50, 99))
            found.setdefault(name, []).append((float(p50), float(p99), max(late_ms), cpu))
    writer.send(found)


# ---------------------------------------------------------------- the run


def under(rate_rps: float, figures: Figures, options: argparse.Namespace) -> None:
    """A cluster at that rate, with the timers beside it."""
    wanted_s = options.timers * options.repeat * len(RIVALS) * sum(GAPS_MS) / 2 / 1e3
    reader, writer = context.Pipe(duplex=False)
    with cluster(CLUSTER.format(rate_rps=rate_rps)) as stage:
        if not figures.tables:
            idle(stage, figures, options)
        timers = context.Process(
            target=wait_in_turn, args=(options.timers, options.repeat, writer), daemon=True
        )
        timers.start()
        try:
            run = run_load(
                LoadPlan(stage.config, workload_of(stage.config), stage.targets, wanted_s * 1e3, 1, 0),
                Window(0.0, wanted_s * 1e3),
                lambda _: None,
            )
            found = reader.recv()
        finally:
            timers.kill()
            timers.join()
        counters = look(stage.run_dir).counters
    table = figures.table(
        f"timers at {rate_rps:g} requests/s: how late, ms ({100 * run.outcome.worst_bad_rate:.2f} % of requests bad)",
        *("who", "p50", "p99", "max", "timers", "longest turn", "longest pause", "CPU %"),
    )
    _of_roles(table, counters)
    for name, (p50, p99, longest, cpu) in medians(found).items():
        table.rows.append((name, p50, p99, longest, options.timers * options.repeat, None, None, 100 * cpu))
    scheduler_p99_ms = counters[SCHEDULER_ID]["timer_late_p99_ms"]
    if rate_rps == options.quiet_rate:
        figures.lines.append(
            Line("dispatch lateness of the scheduler, p99, ms", scheduler_p99_ms, at_most=LATE_P99_MS_MAX)
        )


def medians(found: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """Over the times of each."""
    return {
        name: [statistics.median(column) for column in zip(*times, strict=True)]
        for name, times in found.items()
    }


def _of_roles(table: Table, counters: Mapping[str, Mapping[str, float]]) -> None:
    for role_id, counted in counters.items():
        p50, p99, longest, turn, pause = (counted[name] for name in LATENESS)
        table.rows.append((role_id, p50, p99, longest, int(counted["ticks"]), turn, pause, None))


def idle(stage: Stage, figures: Figures, options: argparse.Namespace) -> None:
    """What the roles take of a core when there is nothing to do, and how late timers are then."""
    meter = CpuMeter(stage.pids)
    time.sleep(1.0)  # what starting has left to do
    meter.begin()
    time.sleep(options.idle)
    took_s, spent_s = meter.spent()
    table = figures.table(f"idle for {options.idle:g} s", "role", "CPU %")
    for role_id, cpu_s in spent_s.items():
        table.rows.append((role_id, 100 * cpu_s / took_s))
    worst = max(100 * cpu_s / took_s for cpu_s in spent_s.values())
    figures.lines.append(Line("CPU of the busiest idle role, %", worst, at_most=IDLE_PERCENT_MAX))
    reader, writer = context.Pipe(duplex=False)
    timers = context.Process(target=wait_in_turn, args=(options.timers, options.repeat, writer), daemon=True)
    timers.start()
    try:
        found = medians(reader.recv())
    finally:
        timers.kill()
        timers.join()
    table = figures.table("timers beside the idle cluster: how late, ms", "who", "p50", "p99", "max", "CPU %")
    for name, (p50, p99, longest, cpu) in found.items():
        table.rows.append((name, p50, p99, longest, 100 * cpu))
    alone_ms = found["driver, alone"][1]
    figures.lines.append(
        Line("lateness of the driver, p99, idle machine, ms", alone_ms, at_most=LATE_P99_MS_MAX)
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timers", type=int, default=1_000, help="of a turn")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quiet-rate", type=float, default=50.0)
    parser.add_argument("--load-rate", type=float, default=1_000.0)
    parser.add_argument("--idle", type=float, default=5.0)
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("lateness")
    for rate_rps in (options.quiet_rate, options.load_rate):
        under(rate_rps, figures, options)
    tell(figures, options.json)


if __name__ == "__main__":
    main()
