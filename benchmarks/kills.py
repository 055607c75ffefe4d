"""What the loss of each role costs its clients: kill -9 under open-loop load, and a rolling restart of everything.

    python -m benchmarks.kills [--rate 500] [--budget 100] [--schedulers 1] [--kills 4] [--pause 6] [--only worker,agent,frontend,scheduler,rolling] [--json FILE]

A cluster of this host: 4 nodes with one emulated GPU each (so 4 agents and 4 workers, which may outlive their agent), two
frontends, a scheduler. One more process sends Poisson arrivals with a budget of 100 ms through one client that knows both
frontends, and measures from the intended moment. Each role is killed `--kills` times, `--pause` seconds apart, in a
cluster of its own. Everything shares the host's cores.

For each kill: what was refused and why; what of that had room for another run when it was refused (10 ms and l(1) were
left); what came after its deadline; the longest time without an answer ("gap") in the two seconds after the kill; for a
worker, when the scheduler's own status showed its slice as lost. There is no rival here: the lines are the issue's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.steady_load import CLOCK, Fate, Load, sending
from fabric.client import ask_status
from fabric.errors import PeerLost
from fabric.messages import SliceState
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.process import read_run_file

ROOM_MS = 10.0 + 6.1  # the way, and l(1)
GRACE_MS = 50.0
WATCHED_MS = 2_000.0
QUIET_S = 2.0
CONFIG = """\
models:
 - {name: resnet50, slo_ms: 100, profile: {alpha_ms: 1.053, beta_ms: 5.072, max_batch: 64}}
cluster:
  frontends: 2
  nodes:
"""
NODES = ("a", "b", "c", "d")


@dataclass(slots=True)
class Kill:
    """One of them: when, and how long until the scheduler knew (None: not asked)."""

    at_ms: float
    detected_ms: float | None = None


@dataclass(slots=True)
class Played:
    """What became of the requests around the kills of one role."""

    role: str
    fates: list[Fate] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    remark: str = ""


# ---------------------------------------------------------------- kills


def role_pid(cluster: TemporaryCluster, role_id: str) -> int:
    """Of a role that serves; waits for it."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        found = read_run_file(cluster.run_dir / f"{role_id}.json")
        if found is not None and Path(f"/proc/{found.pid}").exists():
            return found.pid
        time.sleep(0.02)
    raise TimeoutError(f"{role_id} does not serve")


def children_of(pid: int) -> list[int]:
    """Its living child processes."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def worker_pid(cluster: TemporaryCluster, node: str) -> int:
    """Of the one worker of a node."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        found = children_of(role_pid(cluster, f"node-{node}"))
        if found:
            return found[0]
        time.sleep(0.02)
    raise TimeoutError(f"no worker runs on {node}")


def slice_states(cluster: TemporaryCluster) -> list[str]:
    """As the scheduler's status has them; empty while nobody answers."""
    try:
        return [one.state for one in ask_status(cluster.endpoints["control"], 200.0).slices]
    except PeerLost:
        return []


def detected_ms(cluster: TemporaryCluster, from_ms: float) -> float:
    """How long it takes until a slice is not ready in the scheduler's eyes."""
    while CLOCK.now_ms() - from_ms < WATCHED_MS:
        states = slice_states(cluster)
        if states and any(state != SliceState.READY for state in states):
            break
    return CLOCK.now_ms() - from_ms


def wait_until_ready(cluster: TemporaryCluster) -> None:
    """Everything is as it was before the kill."""
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        states = slice_states(cluster)
        if len(states) == len(NODES) and all(state == SliceState.READY for state in states):
            return
        time.sleep(0.1)
    raise TimeoutError("not all slices are ready again")


def kill_worker(cluster: TemporaryCluster, number: int) -> Kill:
    """One of four."""
    pid = worker_pid(cluster, NODES[number % 4])
    at_ms = CLOCK.now_ms()
    os.kill(pid, signal.SIGKILL)
    return Kill(at_ms, detected_ms(cluster, at_ms))


def killer_of(role_ids: Sequence[str]) -> Callable[[TemporaryCluster, int], Kill]:
    """Kills these in turn."""

    def kill(cluster: TemporaryCluster, number: int) -> Kill:
        pid = role_pid(cluster, role_ids[number % len(role_ids)])
        at_ms = CLOCK.now_ms()
        os.kill(pid, signal.SIGKILL)
        return Kill(at_ms)

    return kill


KILLERS: dict[str, Callable[[TemporaryCluster, int], Kill]] = {
    "worker": kill_worker,
    "agent": killer_of([f"node-{node}" for node in NODES]),
    "frontend": killer_of(["frontend-0", "frontend-1"]),
    "scheduler": killer_of(["scheduler-0"]),
}


@contextmanager
def loaded_cluster(options: argparse.Namespace, fates: list[Fate]) -> Iterator[TemporaryCluster]:
    """With its load, some seconds old."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.yaml"
        nodes = "".join(f"   - {{host: {node}, gpus: 1, workers_outlive_agent: true}}\n" for node in NODES)
        load = Load(options.rate, ["resnet50"], options.budget)
        file.write_text(f"{CONFIG}{nodes}  schedulers: {options.schedulers}\n", encoding="utf-8")
        with (
            temporary_cluster(file) as cluster,
            sending(cluster.endpoints["client"], load, fates),
        ):
            time.sleep(QUIET_S)
            yield cluster


def play_kills(role: str, options: argparse.Namespace) -> Played:
    """One cluster, one load, `--kills` kills."""
    played = Played(role)
    with loaded_cluster(options, played.fates) as cluster:
        for number in range(options.kills):
            wait_until_ready(cluster)
            played.kills.append(KILLERS[role](cluster, number))
            time.sleep(options.pause)
    return played


def play_rolling(options: argparse.Namespace) -> Played:
    """One cluster, one load, `tenuto restart --rolling`."""
    played = Played("rolling restart")
    command = [sys.executable, "-m", "roles.cli", "restart", "--rolling", "--json", "--run-dir"]
    with loaded_cluster(options, played.fates) as cluster:
        wait_until_ready(cluster)
        played.kills.append(Kill(CLOCK.now_ms()))
        done = subprocess.run([*command, str(cluster.run_dir)], capture_output=True, text=True, check=False)
        took_s = (CLOCK.now_ms() - played.kills[0].at_ms) / 1e3
        played.remark = f"it took {took_s:.1f} s and ended with code {done.returncode} {done.stderr.strip()}"
        time.sleep(2.0)
    return played


def by_second(fates: Sequence[Fate], kill: Kill) -> dict[int, int]:
    """When requests failed, in seconds after the beginning."""
    return dict(
        sorted(Counter(int((fate.at_ms + fate.latency_ms - kill.at_ms) // 1e3) for fate in fates).items())
    )


# ---------------------------------------------------------------- what it cost


def gap_ms(fates: Sequence[Fate], kill: Kill) -> float:
    """The longest time without an answer, from the kill on."""
    until_ms = kill.at_ms + WATCHED_MS
    answered = sorted(fate.at_ms + fate.latency_ms for fate in fates if fate.code == "ok")
    moments = [kill.at_ms, *(moment for moment in answered if kill.at_ms < moment < until_ms), until_ms]
    return max(later - earlier for earlier, later in pairwise(moments))


def found_in(all_played: Sequence[Played], options: argparse.Namespace) -> Figures:
    """A row a role, and the lines."""
    figures = Figures(
        f"kills: {options.rate:g} r/s, budget {options.budget:g} ms, {options.schedulers} scheduler(s), {options.kills} kills of each role"
    )
    table = figures.table(
        "requests that were not answered in time, over all kills of a role; times in ms",
        *("role", "requests", "refused", "of these with room", "late", "unanswered"),
        *("median gap", "longest gap", "detected, median", "detected, longest"),
    )
    for played in all_played:
        refused = [fate for fate in played.fates if fate.code != "ok"]
        with_room = sum(fate.latency_ms < options.budget - ROOM_MS for fate in refused)
        late = sum(fate.code == "ok" and fate.latency_ms > options.budget for fate in played.fates)
        unanswered = sum(fate.latency_ms > options.budget + GRACE_MS for fate in played.fates)
        gaps = sorted(gap_ms(played.fates, kill) for kill in played.kills)
        detected = sorted(kill.detected_ms for kill in played.kills if kill.detected_ms is not None)
        table.rows.append(
            (
                played.role,
                len(played.fates),
                len(refused),
                with_room,
                late,
                unanswered,
                gaps[len(gaps) // 2],
                gaps[-1],
                detected[len(detected) // 2] if detected else None,
                detected[-1] if detected else None,
            )
        )
        codes = dict(Counter(fate.code for fate in refused)) or "none"
        when = f"by second: {by_second(refused, played.kills[0])}" if refused else ""
        figures.remarks.append(f"{played.role}: refused {codes} {played.remark} {when}".rstrip())
        match played.role:
            case "worker":
                figures.lines += [
                    Line("worker: refused with room for another run", with_room, at_most=0),
                    Line("worker: detected, longest, ms", detected[-1], at_most=100),
                ]
            case "agent":
                figures.lines.append(Line("agent: refused", len(refused), at_most=0))
            case "frontend":
                figures.lines += [
                    Line("frontend: failed", len(refused), at_most=0),
                    Line("frontend: longest gap, ms", gaps[-1], at_most=300),
                ]
            case "rolling restart":
                figures.lines.append(Line("rolling restart: failed", len(refused), at_most=0))
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=500.0, help="r/s in all")
    parser.add_argument("--budget", type=float, default=100.0, help="ms of each request")
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--pause", type=float, default=6.0, help="s after each kill")
    parser.add_argument("--only", default=",".join((*KILLERS, "rolling")), help="some of the roles")
    add_json_option(parser)
    options = parser.parse_args()
    all_played = [
        play_rolling(options) if role == "rolling" else play_kills(role, options)
        for role in options.only.split(",")
    ]
    tell(found_in(all_played, options), options.json)


if __name__ == "__main__":
    main()
