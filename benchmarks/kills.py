"""What the loss of each role costs its clients: kill -9 under open-loop load, and a rolling restart of everything.

    python -m benchmarks.kills [--rates 500,1000] [--budget 100] [--kills 50] [--pause 8] [--only worker,agent,frontend,scheduler,rolling] [--json FILE]

A cluster of this host: 4 nodes with one emulated GPU each (so 4 agents and 4 workers, which may outlive their agent), two
frontends, a scheduler, and a standby where schedulers are killed and where all are restarted. One more process sends Poisson
arrivals with a budget of 100 ms through one client that knows both frontends, and measures from the intended moment. Each role is
killed `--kills` times at each rate, `--pause` seconds apart and not before all is as it was, in a cluster of its own: of several the next one, of
schedulers the active one. Everything shares the host's cores.

What is asked in the first second is left out: twelve processes begin to work at once there, whose code has never run. For each row: what was refused; what of that had room for another run when it was refused (10 ms and l(1) were left); what came after
its deadline, or was not answered 50 ms after it. For each kill: the longest time without an answer in the two seconds after it ("gap"); until
the first answer to a request that was asked after it ("first"; a first grant comes before that); p99 of what was answered in the two seconds after all kills, over
that of the two seconds before them ("others"); for a worker, when the scheduler's own status showed its slice as lost. There is no rival here.
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

import numpy as np

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.steady_load import CLOCK, Fate, Load, sending
from deploy.local.rolling import Health, health_of
from fabric.client import ask_status
from fabric.errors import PeerLost
from fabric.messages import SliceState, StatusListed
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.process import read_run_file
from roles.runtime.running_cluster import active_schedulers
from tests.integration.proc import processes_naming

ROOM_MS = 10.0 + 6.1  # the way, and l(1)
GRACE_MS = 50.0
WATCHED_MS = 2_000.0
QUIET_S = 2.0
COLD_MS = 1_000.0
MODEL = "{name: resnet50, slo_ms: 100, profile: {alpha_ms: 1.053, beta_ms: 5.072, max_batch: 64}}"
NODES = ("a", "b", "c", "d")
WITH_STANDBY = ("scheduler", "rolling")
WHOLE = Health(is_ready=True, slices_ready=len(NODES), frontends=2)
WHOLE_WITHIN_S = 60.0


@dataclass(slots=True)
class Kill:
    """One of them: when, and how long until the scheduler knew (None: not asked)."""

    at_ms: float
    detected_ms: float | None = None


@dataclass(slots=True)
class Played:
    """What became of the requests around the kills of one role."""

    role: str
    rate_rps: float
    fates: list[Fate] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    remark: str = ""

    @property
    def warm_fates(self) -> list[Fate]:
        """Of what was asked after the first second."""
        from_ms = min((fate.at_ms for fate in self.fates), default=0.0) + COLD_MS
        return [fate for fate in self.fates if fate.at_ms >= from_ms]


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


def worker_pid(cluster: TemporaryCluster, node: str) -> int:
    """Of the one worker of a node; one that has outlived its agent is nobody's child, but names it."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        for pid, command in processes_naming(f"{cluster.run_dir}/node-{node}.control ").items():
            if "-m roles.gpu_worker " in command:
                return pid
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


def active_scheduler(cluster: TemporaryCluster) -> StatusListed | None:
    """What it says of itself; None: none is active."""
    try:
        return active_schedulers(cluster.run_dir)[0].status
    except PeerLost:
        return None


def wait_until_whole(cluster: TemporaryCluster, role: str) -> None:
    """Everything is as it was before the kill."""
    until_s = time.monotonic() + WHOLE_WITHIN_S
    while time.monotonic() < until_s:
        status = active_scheduler(cluster)
        if status is not None and health_of(status).is_as_good_as(WHOLE):
            standbys = status.standing.standbys if status.standing is not None else ()
            if role not in WITH_STANDBY or any(one.has_plan for one in standbys):
                return
        time.sleep(0.1)
    raise TimeoutError(f"after {WHOLE_WITHIN_S:g} s not all roles are there again")


def kill_worker(cluster: TemporaryCluster, number: int) -> Kill:
    """One of four."""
    kill = _kill(worker_pid(cluster, NODES[number % 4]))
    kill.detected_ms = detected_ms(cluster, kill.at_ms)
    return kill


def kill_scheduler(cluster: TemporaryCluster, number: int) -> Kill:
    """The active one."""
    del number
    status = active_scheduler(cluster)
    assert status is not None, "it was asked just now"
    return _kill(role_pid(cluster, status.role_id))


def killer_of(role_ids: Sequence[str]) -> Callable[[TemporaryCluster, int], Kill]:
    """Kills these in turn."""

    def kill(cluster: TemporaryCluster, number: int) -> Kill:
        return _kill(role_pid(cluster, role_ids[number % len(role_ids)]))

    return kill


def _kill(pid: int) -> Kill:
    at_ms = CLOCK.now_ms()
    os.kill(pid, signal.SIGKILL)
    return Kill(at_ms)


KILLERS: dict[str, Callable[[TemporaryCluster, int], Kill]] = {
    "worker": kill_worker,
    "agent": killer_of([f"node-{node}" for node in NODES]),
    "frontend": killer_of(["frontend-0", "frontend-1"]),
    "scheduler": kill_scheduler,
}


@contextmanager
def loaded_cluster(
    role: str, rate_rps: float, budget_ms: float, fates: list[Fate], model: str = MODEL
) -> Iterator[TemporaryCluster]:
    """With its load, some seconds old."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.yaml"
        nodes = "".join(f"   - {{host: {node}, gpus: 1, workers_outlive_agent: true}}\n" for node in NODES)
        roles = f"  frontends: 2\n  schedulers: {2 if role in WITH_STANDBY else 1}\n"
        file.write_text(f"models:\n - {model}\ncluster:\n{roles}  nodes:\n{nodes}", encoding="utf-8")
        with (
            temporary_cluster(file) as cluster,
            sending(cluster.endpoints["client"], Load(rate_rps, ["resnet50"], budget_ms), fates),
        ):
            time.sleep(QUIET_S)
            yield cluster


def play_kills(role: str, rate_rps: float, options: argparse.Namespace) -> Played:
    """One cluster, one load, `--kills` kills."""
    played = Played(role, rate_rps)
    with loaded_cluster(role, rate_rps, options.budget, played.fates) as cluster:
        for number in range(options.kills):
            wait_until_whole(cluster, role)
            played.kills.append(KILLERS[role](cluster, number))
            time.sleep(options.pause)
    return played


def play_rolling(rate_rps: float, options: argparse.Namespace) -> Played:
    """One cluster, one load, `tenuto restart --rolling`."""
    played = Played("rolling", rate_rps)
    command = [sys.executable, "-m", "roles.cli", "restart", "--rolling", "--json", "--run-dir"]
    with loaded_cluster("rolling", rate_rps, options.budget, played.fates) as cluster:
        wait_until_whole(cluster, "rolling")
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


def first_ms(fates: Sequence[Fate], kill: Kill) -> float:
    """Until the first answer to a request that was asked after the kill."""
    until_ms = kill.at_ms + WATCHED_MS
    answered = (
        fate.at_ms + fate.latency_ms
        for fate in fates
        if fate.code == "ok" and kill.at_ms < fate.at_ms < until_ms
    )
    return min(answered, default=until_ms) - kill.at_ms


def others_ratio(fates: Sequence[Fate], kills: Sequence[Kill]) -> float:
    """p99 of what was answered after the kills, over that before them."""
    p99s = []
    for after_ms in (-WATCHED_MS, 0.0):
        windows = [(kill.at_ms + after_ms, kill.at_ms + after_ms + WATCHED_MS) for kill in kills]
        took = [
            fate.latency_ms
            for fate in fates
            if fate.code == "ok" and any(begins <= fate.at_ms < ends for begins, ends in windows)
        ]
        p99s.append(float(np.quantile(took, 0.99)) if took else float("nan"))
    return p99s[1] / p99s[0]


def p50_p99(figures_ms: Sequence[float]) -> tuple[float | None, float | None]:
    """None of nothing."""
    if not figures_ms:
        return None, None
    return float(np.quantile(figures_ms, 0.5)), float(np.quantile(figures_ms, 0.99))


def found_in(all_played: Sequence[Played], options: argparse.Namespace) -> Figures:
    """A row for each role and rate, and the lines."""
    figures = Figures(f"kill -9, budget {options.budget:g} ms, {options.kills} kills of each role")
    failures = figures.table(
        "requests that were not answered in time, over all kills of a role",
        *("role", "r/s", "requests", "refused", "of these with room", "late", "unanswered"),
    )
    times = figures.table(
        "ms: p50 and p99 of all kills; others: a ratio of p99",
        *("role", "r/s", "gap p50", "gap p99", "first p50", "first p99"),
        *("noticed p50", "noticed p99", "others"),
    )
    for played in all_played:
        fates = played.warm_fates
        refused = [fate for fate in fates if fate.code != "ok"]
        with_room = sum(fate.latency_ms < options.budget - ROOM_MS for fate in refused)
        late = sum(fate.code == "ok" and fate.latency_ms > options.budget for fate in fates)
        unanswered = sum(fate.latency_ms > options.budget + GRACE_MS for fate in fates)
        failures.rows.append(
            (
                played.role,
                played.rate_rps,
                len(fates),
                len(refused),
                with_room,
                late,
                unanswered,
            )
        )
        gaps = p50_p99([gap_ms(fates, kill) for kill in played.kills])
        firsts = p50_p99([first_ms(fates, kill) for kill in played.kills])
        noticed = p50_p99([kill.detected_ms for kill in played.kills if kill.detected_ms is not None])
        others = others_ratio(fates, played.kills)
        if played.role != "rolling":
            times.rows.append((played.role, played.rate_rps, *gaps, *firsts, *noticed, others))
        codes = dict(Counter(fate.code for fate in refused)) or "none"
        when = f"by second: {by_second(refused, played.kills[0])}" if refused else ""
        name = f"{played.role}, {played.rate_rps:g} r/s"
        figures.remarks.append(f"{name}: refused {codes} {played.remark} {when}".rstrip())
        none: list[tuple[str, float]] = [("unanswered", unanswered)]
        at_most: list[tuple[str, float | None, float]] = []
        match played.role:
            case "worker":
                none.append(("refused with room for another run", with_room))
                at_most += [("noticed, p99, ms", noticed[1], 100.0), ("the others' p99, ratio", others, 1.2)]
            case "agent":
                none.append(("refused", len(refused)))
            case "scheduler":
                at_most.append(("first answer by the new one, p99, ms", firsts[1], 500.0))
            case "frontend":
                none.append(("failed", len(refused)))
                at_most.append(("gap, p99, ms", gaps[1], 300.0))
            case _:
                none.append(("failed", len(refused)))
        figures.lines += [Line(f"{name}: {what}", count, at_most=0) for what, count in none]
        figures.lines += [
            Line(f"{name}: {what}", float("nan") if found is None else found, at_most=most)
            for what, found, most in at_most
        ]
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="500,1000", help="r/s in all, separated by commas")
    parser.add_argument("--budget", type=float, default=100.0, help="ms of each request")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--pause", type=float, default=8.0, help="s after each kill; five ends in a minute are no accident"
    )
    parser.add_argument("--only", default=",".join((*KILLERS, "rolling")), help="some of the roles")
    add_json_option(parser)
    options = parser.parse_args()
    all_played = [
        play_rolling(rate_rps, options) if role == "rolling" else play_kills(role, rate_rps, options)
        for role in options.only.split(",")
        for rate_rps in map(float, options.rates.split(","))
    ]
    tell(found_in(all_played, options), options.json)


if __name__ == "__main__":
    main()
