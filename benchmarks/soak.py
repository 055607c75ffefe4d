"""An hour at half load in which every minute one role is killed: what always holds held, and no role's memory grows.

    python -m benchmarks.soak [--minutes 60] [--rate 500] [--budget 200] [--every 60] [--json FILE]

The cluster of `kills.py` with a standby, and a model of which four emulated GPUs carry 1,000 requests/s; one client that knows both frontends
sends at `--rate`, Poisson. Every `--every` seconds one role is killed (SIGKILL), in turn: a worker, an agent whose workers outlive it, a frontend,
the active scheduler; and of several of a kind the next one. Every second all processes are looked at.

Memory is resident MB, as `ps` shows it, of processes of equal age: a kind's median between the ages of 40 and 60 s (of the supervisor: of those seconds of the run, and of its last ones), of
those that began in the last third of the run over those of the first third. And of each process that is two minutes old when it ends: its last 20 s over those first ones, the median of each kind; but
not of schedulers, which have a core from the moment on at which they become active. A frontend fills its memory of requests first (8,192 good ones of a model at 50 a second, 700 bytes each): it counts from an age of three minutes on. Descriptors: those of the supervisor at the end, less those at the beginning. There is no rival here.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.kills import CLOCK, GRACE_MS, KILLERS, loaded_cluster, wait_until_whole
from benchmarks.memory import sample
from benchmarks.steady_load import Fate
from roles.benchmark.temporary_cluster import TemporaryCluster
from roles.runtime.running_cluster import processes_in
from tests.integration.proc import processes_naming

MODEL = "{name: resnet50, slo_ms: 200, profile: {alpha_ms: 3, beta_ms: 16, max_batch: 16}}"
KINDS = ("worker", "agent", "frontend", "scheduler")
SETTLED_S = (40.0, 60.0)
FULL_S = {"frontend": (180.0, 200.0)}  # where what is remembered fills up for longer
OLD_S = 60.0  # beyond that
LAST_S = 20.0
GROWTH_MAX = 0.02


@dataclass(slots=True)
class Life:
    """One process: its kind, its first moment (s from the start), and (age in s, resident MB) of each look."""

    kind: str
    began_s: float
    looks: list[tuple[float, float]] = field(default_factory=list)

    def between(self, from_s: float, until_s: float) -> float | None:
        """Median memory at that age; None: it was never so old."""
        found = [resident for age_s, resident in self.looks if from_s <= age_s < until_s]
        return median(found) if found else None

    @property
    def growth(self) -> float | None:
        """From its settled age to its end; None: it was not old enough."""
        from_s, until_s = FULL_S.get(self.kind, SETTLED_S)
        settled, age_s = self.between(from_s, until_s), self.looks[-1][0] if self.looks else 0.0
        last = self.between(age_s - LAST_S, age_s + 1.0)
        return None if settled is None or last is None or age_s < until_s + OLD_S else last / settled - 1.0


@dataclass(slots=True)
class Soak:
    """What was seen."""

    fates: list[Fate] = field(default_factory=list)
    lives: dict[int, Life] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)
    descriptors: list[int] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)


def pids_of(cluster: TemporaryCluster) -> Iterator[tuple[int, str]]:
    """Of all living processes, with their kinds."""
    yield cluster.pid, "supervisor"
    for process in processes_in(cluster.run_dir):
        if not process.alive:
            continue
        kind = process.role_id.partition("-")[0]
        yield process.pid, {"node": "agent"}.get(kind, kind)
    # Workers that have outlived an agent are nobody's children, but name the cluster's directory as the others do.
    for pid, command in processes_naming(str(cluster.run_dir)).items():
        if "-m roles.gpu_worker " in command:
            yield pid, "worker"


@contextmanager
def watched(cluster: TemporaryCluster, soak: Soak) -> Iterator[None]:
    """Looked at every second, in a thread."""
    ended = threading.Event()
    began_s = time.monotonic()

    def watch() -> None:
        while not ended.wait(1.0):
            at_s = time.monotonic() - began_s
            for pid, kind in pids_of(cluster):
                life = soak.lives.setdefault(pid, Life(kind, at_s))
                try:
                    life.looks.append((at_s - life.began_s, sample(pid, at_s).resident))
                except (OSError, KeyError):
                    continue  # it has ended just now
            soak.descriptors.append(len(list(Path(f"/proc/{cluster.pid}/fd").iterdir())))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def play(options: argparse.Namespace) -> Soak:
    """The whole of it."""
    soak = Soak()
    with loaded_cluster("scheduler", options.rate, options.budget, soak.fates, MODEL) as cluster:
        run_dir = str(cluster.run_dir)
        with watched(cluster, soak):
            begins_ms = CLOCK.now_ms()
            for minute in range(1, int(options.minutes * 60 / options.every)):
                time.sleep(max(0.0, (begins_ms + minute * options.every * 1e3 - CLOCK.now_ms()) / 1e3))
                kind = KINDS[(minute - 1) % len(KINDS)]
                wait_until_whole(cluster, "scheduler")
                KILLERS[kind](cluster, (minute - 1) // len(KINDS))
                soak.killed[kind] += 1
            time.sleep(options.every)
            wait_until_whole(cluster, "scheduler")
    soak.left_behind = list(processes_naming(run_dir).values())
    return soak


def found_in(soak: Soak, options: argparse.Namespace) -> Figures:
    """The tables and the lines."""
    figures = Figures(
        f"soak: {options.minutes:g} minutes at {options.rate:g} r/s, a kill every {options.every:g} s"
    )
    codes = Counter(fate.code for fate in soak.fates)
    unanswered = sum(fate.latency_ms > options.budget + GRACE_MS for fate in soak.fates)
    outcome = figures.table("requests", "all", "answered", "refused", "unanswered", "kills")
    refused = sum(codes.values()) - codes["ok"]
    kills = ", ".join(f"{count} {kind}" for kind, count in soak.killed.items())
    outcome.rows.append((len(soak.fates), codes["ok"], refused, unanswered, kills))
    figures.remarks.append(f"refused: {({code: n for code, n in codes.items() if code != 'ok'}) or 'none'}")
    table = figures.table(
        "resident MB at equal age, and how much old processes have grown",
        *("kind", "processes", "first third", "last third", "growth %", "of an old process %"),
    )
    by_kind: dict[str, list[Life]] = defaultdict(list)
    for life in soak.lives.values():
        by_kind[life.kind].append(life)
    third_s = options.minutes * 60 / 3
    worst = worst_old = float("-inf")
    for kind, lives in by_kind.items():
        settled = [(life.began_s, memory) for life in lives if (memory := life.between(*SETTLED_S))]
        first = [memory for began_s, memory in settled if began_s < third_s]
        last = [memory for began_s, memory in settled if began_s >= 2 * third_s]
        olds = [growth for life in lives if kind != "scheduler" and (growth := life.growth) is not None]
        grown = median(last) / median(first) - 1.0 if first and last else None
        old = median(olds) if olds else None
        table.rows.append(
            (
                kind,
                len(lives),
                median(first) if first else None,
                median(last) if last else None,
                None if grown is None else 100 * grown,
                None if old is None else 100 * old,
            )
        )
        worst, worst_old = max(worst, grown or worst), max(worst_old, old or worst_old)
    more = soak.descriptors[-1] - soak.descriptors[0] if soak.descriptors else float("nan")
    figures.remarks += [f"left behind: {command}" for command in soak.left_behind]
    figures.lines += [
        Line("not answered 50 ms after their deadline", unanswered, at_most=0),
        Line("processes that are left behind", len(soak.left_behind), at_most=0),
        Line("descriptors of the supervisor, more than at the beginning", more, at_most=0),
        Line("growth of a kind's memory at equal age, the worst", worst, at_most=GROWTH_MAX),
        Line("growth of old processes, the worst kind", worst_old, at_most=GROWTH_MAX),
    ]
    return figures


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=500.0, help="r/s; the devices carry 1,000")
    parser.add_argument("--budget", type=float, default=200.0, help="ms of each request")
    parser.add_argument("--every", type=float, default=60.0, help="s from one kill to the next one")
    add_json_option(parser)
    options = parser.parse_args()
    tell(found_in(play(options), options), options.json)


if __name__ == "__main__":
    main()
