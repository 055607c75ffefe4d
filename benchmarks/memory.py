"""Memory of every role over minutes at half load, in three overload bursts, and after them.

    python -m benchmarks.memory [--minutes 10] [--rate 350] [--burst 2] [--json FILE]

A cluster of this host (supervisor, scheduler, frontend, node agent, a worker with one emulated device), and one
sender process of the load tool's player, open loop, Poisson. The device carries about 700 r/s, of which `--rate` is
half; a burst is `--burst` times the device's most for 5 s. Of the requests a fifth have 150 kB, a twentieth 0.6 MB,
the others 4 kB. After 20 s of warm-up memory is looked at every second: `resident` is what `ps` shows, `own` is
without what is shared with others (binaries, and payload of the same host), `shared` is that payload.

Flat means: the median of the last minute (or third, when it is shorter) is at most 2 % above that of the first, and so
is that of the half minute that begins half a minute after the last burst. There is no rival here.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.stage import Stage, cluster, context, processes
from fabric.client import Client
from fabric.clock import MonotonicClock
from fabric.errors import RequestError
from roles.benchmark.player import PlannedRequest, PlayedRequest, play, run_precisely

CLUSTER = """
models:
 - {name: small, slo_ms: 60, rate_rps: 1, profile: {alpha_ms: 1, beta_ms: 6, max_batch: 16}}
 - {name: picture, slo_ms: 60, rate_rps: 1, profile: {alpha_ms: 1, beta_ms: 6, max_batch: 16}}
 - {name: large, slo_ms: 60, rate_rps: 1, profile: {alpha_ms: 1, beta_ms: 6, max_batch: 16}}
cluster: {gpus: 1}
"""
PAYLOADS = {"small": (4_096, 15), "picture": (150_000, 4), "large": (600_000, 1)}  # bytes, of 20 requests
DEVICE_RPS = 16 / (16 * 1 + 6) * 1e3  # of full batches
WARMUP_S = 20.0
BURSTS, BURST_S, PAUSE_S = 3, 5.0, 15.0
AFTER_S = 60.0  # the second half of it counts
GROWTH_MAX = 0.02
MB = 1e6


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run with one rate; moments in seconds from the start."""

    name: str
    from_s: float
    until_s: float
    rate_rps: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of one process at a moment, in MB."""

    at_s: float
    resident: float
    own: float
    shared: float


def phases(minutes: float, rate_rps: float, burst: float) -> tuple[Phase, ...]:
    """Warm-up, steady, bursts with pauses, and what is left after them."""
    plan = [("warm-up", WARMUP_S, rate_rps), ("steady", minutes * 60, rate_rps)]
    for _ in range(BURSTS):
        plan += [("burst", BURST_S, burst * DEVICE_RPS), ("pause", PAUSE_S, rate_rps)]
    plan.append(("after", AFTER_S, rate_rps))
    ends_s = list(itertools.accumulate(length_s for _, length_s, _ in plan))
    return tuple(
        Phase(name, end_s - length_s, end_s, rate)
        for (name, length_s, rate), end_s in zip(plan, ends_s, strict=True)
    )


def requests(plan: Sequence[Phase]) -> Iterator[PlannedRequest]:
    """Poisson arrivals of all models, phase after phase."""
    draws = random.Random(1)
    inputs = {name: {"input": np.zeros(size, np.uint8)} for name, (size, _) in PAYLOADS.items()}
    names, weights = list(PAYLOADS), [weight for _, weight in PAYLOADS.values()]
    for phase in plan:
        at_s = phase.from_s + draws.expovariate(phase.rate_rps)
        while at_s < phase.until_s:
            (name,) = draws.choices(names, weights)
            yield PlannedRequest(1e3 * at_s, name, inputs[name])
            at_s += draws.expovariate(phase.rate_rps)


def send(address: str, plan: Sequence[Phase], began_at_ms: float, fates: Connection) -> None:
    """The sender process: plays all phases, then says what became of the requests of each."""
    counts: dict[str, Counter[str]] = {phase.name: Counter() for phase in plan}
    ends_ms = [1e3 * phase.until_s for phase in plan]

    def note(played: PlayedRequest) -> None:
        phase = plan[int(np.searchsorted(ends_ms, played.planned.at_ms, "right"))]
        error = played.error
        code = "ok" if error is None else error.code if isinstance(error, RequestError) else "PeerLost"
        counts[phase.name][code] += 1

    async def run() -> None:
        async with Client(address) as client:
            await play(client, requests(plan), began_at_ms, MonotonicClock(), note)

    run_precisely(run())
    fates.send(counts)


def sample(pid: int, at_s: float) -> Sample:
    """One look, by the kernel's own sums."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]:
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    own = fields["Private_Clean"] + fields["Private_Dirty"]
    return Sample(at_s, fields["Rss"] / MB, own / MB, fields.get("Pss_Shmem", 0) / MB)


def watch(pids: Mapping[str, int], plan: Sequence[Phase], began_at_ms: float) -> dict[str, list[Sample]]:
    """Look at every process once a second until the last phase ends."""
    clock = MonotonicClock()
    samples: dict[str, list[Sample]] = {role: [] for role in pids}
    for second in range(1, int(plan[-1].until_s)):
        time.sleep(max(0.0, (began_at_ms + 1e3 * second - clock.now_ms()) / 1e3))
        for role, pid in pids.items():
            samples[role].append(sample(pid, second))
    return samples


def run(
    minutes: float, rate_rps: float, burst: float
) -> tuple[dict[str, list[Sample]], dict[str, Counter[str]]]:
    """One whole run: samples by role, fates by phase."""
    plan = phases(minutes, rate_rps, burst)
    with cluster(CLUSTER) as stage:
        reader, writer = context.Pipe(duplex=False)
        began_at_ms = MonotonicClock().now_ms() + 3_000.0  # the sender has to start first
        with processes((send, (stage.targets[0], plan, began_at_ms, writer))):
            samples = watch(_roles(stage), plan, began_at_ms)
            if not reader.poll(30):
                raise RuntimeError("the sender does not end")
            return samples, reader.recv()


def _roles(stage: Stage) -> dict[str, int]:
    return {role: pid for role, pid in stage.pids.items() if role != "up"} | {"supervisor": stage.pids["up"]}


def median(samples: Sequence[Sample], what: str, from_s: float, until_s: float) -> float:
    """Of one column between two moments."""
    return float(statistics.median(getattr(one, what) for one in samples if from_s <= one.at_s <= until_s))


def main() -> None:
    """Run, and print a row a role."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=350.0, help="requests per second but for the bursts")
    parser.add_argument("--burst", type=float, default=2.0, help="times what the device carries")
    add_json_option(parser)
    asked = parser.parse_args()
    figures = Figures(f"memory over {asked.minutes:g} minutes at {asked.rate:g} r/s")
    samples, fates = run(asked.minutes, asked.rate, asked.burst)
    plan = phases(asked.minutes, asked.rate, asked.burst)
    steady = next(phase for phase in plan if phase.name == "steady")
    window_s = min(60.0, (steady.until_s - steady.from_s) / 3)
    end_s = plan[-1].until_s
    table = figures.table(
        "MB resident (own: not shared with other processes; shared: payload of the same host)",
        "role", "first", "last", "growth %", "peak in bursts", "after bursts", "growth %", "own first", "own last", "own after", "shared after",
    )  # fmt: skip
    worst_steady = worst_after = -1.0
    for role, own in samples.items():
        in_steady = (steady.from_s, steady.from_s + window_s), (steady.until_s - window_s, steady.until_s)
        at_end = (end_s - AFTER_S / 2, end_s)
        first, last = (median(own, "resident", *window) for window in in_steady)
        after = median(own, "resident", *at_end)
        peak = max(one.resident for one in own if steady.until_s <= one.at_s <= end_s - AFTER_S)
        worst_steady, worst_after = max(worst_steady, last / first - 1), max(worst_after, after / first - 1)
        table.rows.append(
            (
                role, first, last, 100 * (last / first - 1), peak, after, 100 * (after / first - 1),
                *(median(own, "own", *window) for window in (*in_steady, at_end)),
                median(own, "shared", *at_end),
            )
        )  # fmt: skip
    outcome = figures.table("requests by phase", "phase", "ok", "refused", "by code")
    for name, codes in fates.items():
        refused = {code: count for code, count in codes.most_common() if code != "ok"}
        words = ", ".join(f"{code} {count}" for code, count in refused.items()) or "-"
        outcome.rows.append((name, codes["ok"], sum(refused.values()), words))
    figures.lines += [
        Line("growth of a role's memory in the steady part", worst_steady, at_most=GROWTH_MAX),
        Line("of its memory after the bursts over that before them", worst_after, at_most=GROWTH_MAX),
    ]
    tell(figures, asked.json)


if __name__ == "__main__":
    main()
