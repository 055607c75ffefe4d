"""Added latency of the whole fabric beside a bare six-hop ZeroMQ chain that carries the same frames.

    python -m benchmarks.latency [--requests 300] [--repeat 5] [--sizes 4096 600000] [--rate 1000] [--seconds 5]
                                 [--json FILE]

Ours: a cluster of this host with one emulated GPU and a model that takes a microsecond, so all of a request's time is
added by us. Four processes are on a request's way: this one (the SDK), a frontend, the scheduler, a worker; node agent
and supervisor idle beside them. The rival has four processes too (`chain.py`), and both idle while the other is
measured. `eager` is what the line is about; `tenuto` stands beside it, because it may hold a request on purpose.

First one request at a time, `--requests` of each kind in turn, `--repeat` times; percentiles are of each turn, and the
median of turns counts; a request that gets no answer counts with the second until its refusal. Then `--rate` requests a second with 4 kB, open loop, Poisson, latency from the intended moment.
The transport is that of the client's hop. The others are what the fabric chooses on one host (ipc, and shared memory
for large payloads), and ipc in the chain; the chain with tcp on all hops is a row of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.chain import BareClient, bare_chain
from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.stage import Stage, cluster
from fabric.client import Client
from fabric.clock import MonotonicClock
from fabric.errors import RequestError
from roles.benchmark.player import PlannedRequest, PlayedRequest, play, run_precisely
from roles.benchmark.share import STAGES

CLUSTER = """
models: [{{name: noop, slo_ms: 1000, profile: {{alpha_ms: 0.0001, beta_ms: 0.001, max_batch: 16}}}}]
cluster: {{gpus: 1}}
batching: {batching}
"""
OPEN_LOOP_BYTES = 4_096
RATIO_MAX = 3.0
OPEN_LOOP_P99_MS_MAX = 5.0
PERCENTILES = (50, 95, 99)
WARM_BUDGET_MS = 30_000.0

Turn = Callable[[int, int], Sequence[float]]
"""(bytes, requests) -> latencies in ms, one request at a time."""


def ours(address: str) -> Turn:
    """A turn through the cluster, by the SDK."""

    def turn(size: int, count: int) -> Sequence[float]:
        return run_precisely(_one_by_one(address, size, count))

    return turn


async def _one_by_one(address: str, size: int, count: int) -> list[float]:
    inputs = {"input": np.random.default_rng(0).integers(0, 256, size, np.uint8)}
    found_ms = []
    async with Client(address) as client:
        for _ in range(10):
            await client.infer("noop", inputs, WARM_BUDGET_MS)
        for _ in range(count):
            began_s = time.perf_counter()
            with contextlib.suppress(RequestError):  # it took as long as it took
                await client.infer("noop", inputs)
            found_ms.append((time.perf_counter() - began_s) * 1e3)
    return found_ms


async def _open_loop(address: str, at_ms: Sequence[float]) -> list[PlayedRequest]:
    inputs = {"input": np.random.default_rng(0).integers(0, 256, OPEN_LOOP_BYTES, np.uint8)}
    all_played: list[PlayedRequest] = []

    clock = MonotonicClock()
    async with Client(address) as client:
        await client.infer("noop", inputs, WARM_BUDGET_MS)
        plan = (PlannedRequest(moment_ms, "noop", inputs) for moment_ms in at_ms)
        await play(client, plan, clock.now_ms() + 50.0, clock, all_played.append)
    return all_played


def closed_loop(figures: Figures, turns: dict[tuple[str, str], Turn], options: argparse.Namespace) -> None:
    """One request at a time, everybody in turn."""
    table = figures.table(
        "one request at a time, ms", "who", "transport", "bytes", "p50", "p95", "p99", "p50 of the chain's"
    )
    found: dict[tuple[str, str, int], list[list[float]]] = {}
    for _ in range(options.repeat):
        for size in options.sizes:
            for (who, transport), turn in turns.items():
                values = [float(value) for value in np.percentile(turn(size, options.requests), PERCENTILES)]
                found.setdefault((who, transport, size), []).append(values)
    medians = {key: [statistics.median(column) for column in zip(*rows)] for key, rows in found.items()}  # noqa: B905  rows of three
    for (who, transport, size), values in sorted(medians.items(), key=lambda one: (one[0][2], one[0][1])):
        ratio = values[0] / medians["chain", transport, size][0]
        table.rows.append((who, transport, size, *values, None if who == "chain" else ratio))
        if who == "eager":
            what = f"p50 at {size:,} bytes over {transport}, of the bare chain's"
            figures.lines.append(Line(what, ratio, at_most=RATIO_MAX))


def open_loop(
    figures: Figures, stages: dict[str, Stage], chain: BareClient, options: argparse.Namespace
) -> None:
    """A steady rate, latency from the intended moment."""
    table = figures.table(
        f"{options.rate:g} requests/s, open loop, {OPEN_LOOP_BYTES:,} bytes, ipc, ms",
        *("who", "p50", "p95", "p99", "refused", "sender late p99"),
    )
    draws = np.random.default_rng(1)
    found: dict[str, list[list[float]]] = {}
    ledgers: dict[str, list[list[float]]] = {}
    for _ in range(options.repeat):
        gaps_ms = draws.exponential(1e3 / options.rate, int(options.rate * options.seconds))
        at_ms = np.cumsum(gaps_ms).tolist()
        for who, stage in stages.items():
            all_played = run_precisely(_open_loop(stage.clients[0], at_ms))
            mine_ms = [one.latency_ms for one in all_played if one.result is not None]
            late_ms = [one.late_ms for one in all_played]
            found.setdefault(who, []).append(_row(mine_ms, late_ms, len(all_played) - len(mine_ms)))
            ledgers.setdefault(who, []).extend(
                [getattr(one.result.ledger, stage) for stage in STAGES]
                for one in all_played
                if one.result is not None
            )
        bare_ms, late_ms = chain.open_loop(OPEN_LOOP_BYTES, at_ms)
        found.setdefault("chain", []).append(_row(bare_ms, late_ms, 0))
    for who, rows in found.items():
        medians = [statistics.median(column) for column in zip(*rows)]  # noqa: B905  rows of five
        table.rows.append((who, *medians[:3], int(medians[3]), medians[4]))
        if who == "eager":
            what = f"p99 added at {options.rate:g} requests/s, ms"
            figures.lines.append(Line(what, medians[2], at_most=OPEN_LOOP_P99_MS_MAX))
    stages_table = figures.table(
        "where that time goes: the ledger's stages, p50 and p99 in ms", "stage", *ledgers
    )
    for place, name in enumerate(STAGES):
        columns = [[ledger[place] for ledger in rows] for rows in ledgers.values()]
        cells = [f"{np.percentile(column, 50):.3f} {np.percentile(column, 99):6.3f}" for column in columns]
        stages_table.rows.append((name.removesuffix("_ms"), *cells))


def _row(found_ms: Sequence[float], late_ms: Sequence[float], refused: int) -> list[float]:
    percentiles = [float(value) for value in np.percentile(found_ms, PERCENTILES)]
    return [*percentiles, float(refused), float(np.percentile(late_ms, 99))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300, help="of a turn")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4_096, 600_000], help="in bytes")
    parser.add_argument("--rate", type=float, default=1_000.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of open loop, each time")
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("latency")
    with ExitStack() as stack:
        stages = {
            batching: stack.enter_context(cluster(CLUSTER.format(batching=batching)))
            for batching in ("eager", "tenuto")
        }
        turns: dict[tuple[str, str], Turn] = {}
        chains = {
            ("chain", "ipc"): stack.enter_context(bare_chain("ipc", "ipc")),
            ("chain", "tcp"): stack.enter_context(bare_chain("tcp", "ipc")),
            ("chain", "tcp, all hops"): stack.enter_context(bare_chain("tcp", "tcp")),
        }
        for key, chain in chains.items():
            turns[key] = chain.one_by_one
        for who, stage in stages.items():
            turns[who, "ipc"] = ours(stage.clients[0])
            turns[who, "tcp"] = ours(stage.tcp)
        closed_loop(figures, turns, options)
        open_loop(figures, stages, chains["chain", "ipc"], options)
    tell(figures, options.json)


if __name__ == "__main__":
    main()
