"""Live chaos: real processes, real faults, the same invariants as the virtual one.

    python -m tests.chaos.live --runs 5 --seconds 30 [--seed 0]

What a host does not permit is left out, and said. Exit code 1: something that always holds did not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from fabric.clock import MonotonicClock
from fabric.errors import FabricError
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.run_directory import run_files
from roles.runtime.running_cluster import ClusterReport, look
from tests.chaos.live.faults import Fault, Hand, document, draw, free_port
from tests.chaos.live.hosts import ClientHost, client_host
from tests.chaos.live.relay import Relay
from tests.chaos.live.starvation import HOST, Waits
from tests.integration.proc import processes_naming, zombies_of

CLOCK: Final = MonotonicClock()
GRACE_MS: Final = 50.0
RECOVERS_WITHIN_MS: Final = 30_000.0
MODELS: Final = 2
KEY_FILE: Final = "client-chaos.key"
BUDGET_MS: Final = 300.0
RATE_RPS: Final = 40.0
"""Of each of four clients, on two cores."""
SMALL_DISK: Final = "size=8m"
SAID_LINES: Final = 60
SKEW_S: Final = 86_400
DESCRIPTORS_MORE: Final = 12
"""That a process may have at the end above what it had: connections of whoever was restarted are counted once more until
the kernel has ended them."""


@dataclass
class Run:
    """One run: what was done, and what did not hold."""

    seed: int
    done: list[tuple[float, Fault, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """The cluster's last lines."""


def main() -> int:
    """Run them; the exit code."""
    parser = argparse.ArgumentParser(description="live chaos: a cluster of processes, faults from a seed")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.seed, options.seed + options.runs):
        run = Run(seed)
        with small_disk(run) as disk:
            play(run, options.seconds * 1e3, disk)
        click.echo(f"seed {seed}: {len(run.done)} faults, {json.dumps(run.counts)}")
        for text in run.left_out if seed == options.seed else ():
            click.echo(f"  left out: {text}")
        if run.wrong:
            failed += 1
            for at_ms, _, text in run.done:
                click.echo(f"  {at_ms / 1e3:7.2f} s  {text}")
            for text in run.said:
                click.echo(f"  | {text}")
            for text in run.wrong:
                click.echo(f"  WRONG: {text}")
    click.echo(f"{options.runs} runs of {options.seconds:g} s, {failed} failed")
    return 1 if failed else 0


def play(run: Run, for_ms: float, disk: Path | None) -> None:
    """One run. With an even seed some clients are on another host, and all that come by TCP have keys."""
    before = tempfile.tempdir
    tempfile.tempdir = None if disk is None else str(disk)
    hosts = client_host(run.left_out) if run.seed % 2 == 0 else contextlib.nullcontext()
    try:
        with hosts as host, tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as directory:
            port = free_port()
            server = "127.0.0.1" if host is None else host.server
            config = _written(Path(directory), f"tcp://{server}:{port}", has_keys=host is not None)
            relays = [Relay((server, port + number), run.seed) for number in range(2)]
            run_dir: Path | None = None
            try:
                with temporary_cluster(config, ["--apart"]) as cluster:
                    run_dir = cluster.run_dir
                    hand = Hand(cluster.run_dir, relays, host, run.seed, disk)
                    key = config.parent / KEY_FILE if host is not None else None
                    try:
                        _play_on(run, cluster, hand, _clients(cluster, relays, host), key, for_ms)
                    finally:
                        said = (cluster.run_dir / "up.err").read_text(encoding="utf-8", errors="replace")
                        run.said = said.splitlines()[-SAID_LINES:]
            except FabricError as error:
                run.wrong.append(f"the cluster did not come up or did not last: {error}")
            finally:
                for relay in relays:
                    relay.close()
            if run_dir is not None:
                _look_for_leaks(run, run_dir)
    finally:
        tempfile.tempdir = before


def _written(directory: Path, client: str, *, has_keys: bool) -> Path:
    """The cluster's file, and the keys that it names."""
    config = directory / "cluster.json"
    keys = directory / "keys" if has_keys else None
    config.write_text(document(MODELS, client, keys), encoding="utf-8")
    if keys is not None:
        for command in (
            ["create", str(keys), "--config", str(config)],
            ["add", str(keys), "client/chaos", "--out", str(directory / KEY_FILE)],
        ):
            subprocess.run(
                [sys.executable, "-m", "roles.cli", "keys", *command],
                check=True,
                capture_output=True,
                timeout=60,
            )
    return config


def _clients(
    cluster: TemporaryCluster, relays: list[Relay], host: ClientHost | None
) -> dict[str, list[dict[str, Any]]]:
    """Who asks whom, and which way: on this host and, if there is one, on the other."""
    here, there = [], []
    for number, relay in enumerate(relays):
        name = f"frontend-{number}"
        direct = [one for one in cluster.endpoints["client"] if one.startswith("ipc") and name in one]
        here += [
            {"addresses": [f"tcp://127.0.0.1:{relay.port}"], "frontend": name, "via": "relay"},
            {"addresses": direct, "frontend": name, "via": ""},
        ]
        if host is not None:
            port = relay.target[1]
            there.append({"addresses": [f"tcp://{host.server}:{port}"], "frontend": name, "via": "host"})
    return {"here": here} if host is None else {"here": here, "there": there}


def _play_on(
    run: Run,
    cluster: TemporaryCluster,
    hand: Hand,
    clients: dict[str, list[dict[str, Any]]],
    key: Path | None,
    for_ms: float,
) -> None:
    prefixes = {"here": _in_another_time(run), "there": [] if hand.host is None else hand.host.prefix}
    with contextlib.ExitStack() as stack:
        loads = [
            (stack.enter_context(_load(run, prefixes[where], own, key)), skew_of(prefixes[where]))
            for where, own in clients.items()
        ]
        _wait(1_000.0)
        own = {f"load {number}": _last_child(load.pid) for number, (load, _) in enumerate(loads)}
        waits = stack.enter_context(Waits(lambda: _pids(cluster) | own))
        pids = _pids(cluster)
        had = {role: _descriptors(pid) for role, pid in pids.items()}
        began_ms = CLOCK.now_ms()
        for fault in draw(run.seed, for_ms - 6_000.0):
            _wait(fault.at_ms - (CLOCK.now_ms() - began_ms), hand)
            text = hand.strike(fault, CLOCK.now_ms())
            if text:
                run.done.append((CLOCK.now_ms(), fault, text))
        _wait(2_500.0, hand)
        hand.go_on(CLOCK.now_ms(), is_over=True)
        report = _recovered(run, cluster)
        _wait(for_ms - (CLOCK.now_ms() - began_ms), hand)
        fates = [(_end(load), skew_ms) for load, skew_ms in loads]
    if cluster_pid_is_gone(cluster):
        run.wrong.append("`tenuto up` has ended")
        return
    for number, (one, skew_ms) in enumerate(fates):
        _judge(run, one, skew_ms, waits, f"load {number}")
    # Once more: what a stranger says at the supervisor's socket may be a wish to restart everything.
    if report is not None and (report := _recovered(run, cluster)) is not None:
        _look_at_counters(run, report)
    for role, pid in _pids(cluster).items():
        if pids.get(role) == pid and _descriptors(pid) > had[role] + DESCRIPTORS_MORE:
            run.wrong.append(f"{role} has {_descriptors(pid)} descriptors, it had {had[role]}")
    zombies = zombies_of(cluster.pid)
    if zombies:
        run.wrong.append(f"zombies of `tenuto up`: {zombies}")


def _last_child(pid: int) -> int:
    """Of a process that runs another one, and so on, that which does the work."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
        pid = int(children[0])
    return pid


def cluster_pid_is_gone(cluster: TemporaryCluster) -> bool:
    """Whether its `tenuto up` has ended."""
    try:
        return (
            Path(f"/proc/{cluster.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
        )
    except OSError:
        return True


def _recovered(run: Run, cluster: TemporaryCluster) -> ClusterReport | None:
    """Wait until every slice is ready again and every role is there."""
    began_ms = CLOCK.now_ms()
    problem = ""
    while CLOCK.now_ms() - began_ms < RECOVERS_WITHIN_MS:
        try:
            report = look(cluster.run_dir)
        except FabricError as error:
            problem = str(error)
        else:
            unready = [
                f"{one.slice_id}: {one.state} {one.reason}"
                for one in report.scheduler.slices
                if one.state != "ready"
            ]
            dead = [one.role_id for one in report.processes if not one.alive]
            missing = {"scheduler-0", "frontend-0", "frontend-1", "node-local"} - {
                one.role_id for one in report.processes
            }
            problem = "; ".join([*unready, *dead, *missing])
            if not problem:
                return report
        _wait(100.0)
    run.wrong.append(f"not well again within {RECOVERS_WITHIN_MS / 1e3:g} s: {problem}")
    return None


# ---------------------------------------------------------------- load and its fates


@contextlib.contextmanager
def _load(
    run: Run, prefix: list[str], clients: list[dict[str, Any]], key: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    told = {
        "seed": run.seed,
        "rate_rps": RATE_RPS,
        "clients": clients,
        "models": {f"m{number}": BUDGET_MS for number in range(MODELS)},
        "key_file": None if key is None else str(key),
    }
    command = [*prefix, sys.executable, "-m", "tests.chaos.live.load", json.dumps(told)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _in_another_time(run: Run) -> list[str]:
    """A prefix for a process whose monotonic clock is a day ahead: no two hosts' clocks agree."""
    prefix = [
        "unshare",
        "--time",
        "--monotonic",
        f"{SKEW_S}",
        "--boottime",
        f"{SKEW_S}",
        "--fork",
        "--kill-child",
    ]
    if run.seed % 2:
        return []
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        run.left_out.append("clocks that do not agree (time namespaces are not permitted)")
        return []
    return prefix


def skew_of(prefix: list[str]) -> float:
    """What the clock of a process with that prefix is ahead."""
    return SKEW_S * 1e3 if "--monotonic" in prefix else 0.0


def _end(load: subprocess.Popen[bytes]) -> dict[str, Any]:
    try:
        said, _ = load.communicate(timeout=60.0)
    except subprocess.TimeoutExpired:
        return {"counts": {"the load did not end": 1}, "late": [], "lag_ms": 0.0}
    return (
        dict(json.loads(said))
        if said
        else {"counts": {"the load said nothing": 1}, "late": [], "lag_ms": 0.0}
    )


def _judge(run: Run, fates: dict[str, Any], skew_ms: float, waits: Waits, load: str) -> None:
    for name, count in fates["counts"].items():
        run.counts[name] = run.counts.get(name, 0) + count
    if not run.counts.get("answer"):
        run.wrong.append("no request was answered")
    for name in ("unanswered", "the load did not end", "the load said nothing"):
        if run.counts.get(name):
            run.wrong.append(f"{name}: {run.counts[name]}")
    internal = run.counts.get("Internal", 0)
    if internal:
        run.wrong.append(f"{internal} requests ended as Internal")
    for one in fates["late"]:
        asked_ms, ended_ms = one["asked_at_ms"] - skew_ms, one["ended_at_ms"] - skew_ms
        starved_ms = sum(waits.waited_ms(name, asked_ms, ended_ms) for name in (one["frontend"], load, HOST))
        if one["late_ms"] > GRACE_MS + starved_ms and not _is_excused(run, one, asked_ms, ended_ms):
            run.wrong.append(
                f"asked of {one['frontend']} via {one['via'] or 'ipc'} at {asked_ms / 1e3:.2f} s: {one['fate']} {one['late_ms']:.0f} ms too late"
            )


def _is_excused(run: Run, one: dict[str, Any], asked_ms: float, ended_ms: float) -> bool:
    """Its frontend did not run, or nobody could reach it: no clock of a process that stands still can answer."""
    for at_ms, fault, _ in run.done:
        concerns = fault.role == one["frontend"] or (fault.via and fault.via == one["via"])
        # A lost frontend is found out by silence, for up to 2 s; its connections are made anew in half a second.
        if concerns and asked_ms < at_ms + fault.for_ms + 2_500.0 and at_ms < ended_ms:
            return True
    return False


# ---------------------------------------------------------------- what is left


def _look_at_counters(run: Run, report: ClusterReport) -> None:
    """Each frontend: accepted = answers + refusals + abandoned + pending."""
    for role, counted in report.counters.items():
        if not role.startswith("frontend"):
            continue
        ended = sum(counted.get(name, 0.0) for name in ("answers", "refusals", "abandoned", "pending"))
        if counted.get("accepted", 0.0) != ended:
            run.wrong.append(f"{role} accepted {counted.get('accepted')}, of which {ended} have a fate")


def _pids(cluster: TemporaryCluster) -> dict[str, int]:
    return {one.role_id: one.pid for one in run_files(cluster.run_dir)} | {"up": cluster.pid}


def _descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def _look_for_leaks(run: Run, run_dir: Path) -> None:
    began_ms = CLOCK.now_ms()
    while (left := processes_naming(str(run_dir))) and CLOCK.now_ms() - began_ms < 5_000.0:
        _wait(50.0)
    if left:
        run.wrong.append(f"processes are left: {left}")
    if run_dir.exists():
        run.wrong.append(f"{run_dir} is left")
    shared = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("tenuto")]
    if shared:
        run.wrong.append(f"shared memory is left: {shared}")


@contextlib.contextmanager
def small_disk(run: Run) -> Iterator[Path | None]:
    """A disk of a few MB for the run directory, where mounting is permitted."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as directory:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", SMALL_DISK, "none", directory],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            run.left_out.append("a full disk (mounting is not permitted)")
            yield None
            return
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", directory], capture_output=True, check=False)


def _wait(for_ms: float, hand: Hand | None = None) -> None:
    until_ms = CLOCK.now_ms() + for_ms
    while (left_ms := until_ms - CLOCK.now_ms()) > 0:
        select.select([], [], [], min(left_ms, 20.0) / 1e3)
        if hand is not None:
            hand.go_on(CLOCK.now_ms())


if __name__ == "__main__":
    if os.name != "posix":
        sys.exit("Linux only")
    sys.exit(main())
