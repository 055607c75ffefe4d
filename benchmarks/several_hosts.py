"""What a cluster on several hosts does: set up, killed while it is set up, changed under load, taken over. As root.

    python -m benchmarks.several_hosts up killed changed taken-over [--kills 20] [--takeovers 5] [--rate 300] [--json FILE]

The hosts are network namespaces of this machine with sshd, a home and processes of their own (`tests/integration/hosts_stage.py`), and
a laptop that reaches them by ssh alone. All of them share this machine's cores, so times are upper bounds. Wheels come from a folder that is
filled once; it needs a package index, and the system's own Python.

- `up`: from bare hosts to a cluster that serves; again, when nothing is to do; 10,000 requests of the SDK; `down`, and what is left.
- `killed`: `up` is killed (kill -9) at random moments; then a whole one, and how often each role runs.
- `changed`: while requests come at `--rate`: a rolling restart of everything, an upgrade, a host more, a host less, a rollback.
- `taken-over`: the active scheduler's process is killed, on one host and then on the other; from that to the first answer to a request asked after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from benchmarks.figures import Figures, Line, add_json_option, tell
from roles.cli.keys import keys
from roles.runtime.epochs import LEASE_MS
from tests.integration.operator_stage import Operator, fetch_wheels, operator_of

NAMES = ("a", "b", "c")
UP_S_MAX = 180.0
GAP_MS_MAX = LEASE_MS + 500.0
MOMENT_S_MAX = 20.0
BUDGET_MS = 4_000.0
FILE = """
models:
 - {name: fast, slo_ms: 4000, profile: {alpha_ms: 1, beta_ms: 4, max_batch: 16}}
cluster:
  nodes:
   - {host: a}
   - {host: b}
   - {host: c}
  schedulers: [{host: a}, {host: b, standby: true}]
  frontends: [{host: a}, {host: b}]
security: {keys: keys}
deploy: {wheelhouse: wheels, python: /usr/bin/python3}
"""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--takeovers", type=int, default=5)
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("three hosts, two schedulers, two frontends")
    with tempfile.TemporaryDirectory(prefix="h-") as directory:
        wheels = Path(directory, "wheels")
        problem = fetch_wheels(wheels)
        if problem:
            sys.exit(problem)
        for name in options.scenarios or SCENARIOS:
            folder = Path(directory, name)
            folder.mkdir()
            with operator_of(folder, FILE, wheels, [*NAMES, "d"]) as operator:
                SCENARIOS[name](operator, options, figures)
    tell(figures, options.json)


def set_up(operator: Operator, options: argparse.Namespace, figures: Figures) -> None:
    """See the module."""
    del options
    table = figures.table("set up, s", "what", "s", "steps")
    took_s, done = timed(operator.up)
    table.rows.append(("first up", took_s, len(done["done"])))
    again_s, again = timed(operator.up)
    table.rows.append(("second up", again_s, len(again["done"])))
    serve_s, _ = timed(lambda: [operator.serves(500) for _ in range(10)])
    table.rows.append(("10,000 requests, one by one, at both frontends", serve_s, None))
    down_s, (code, _, said) = timed(lambda: operator.tenuto("deploy", "down", str(operator.file)))
    table.rows.append(("down", down_s, None))
    left = sum(len(operator.processes(name)) for name in NAMES)
    left += sum(b".tenuto" in operator.hosts[name].run("ls -A /root").stdout.split() for name in NAMES)
    if code:
        figures.remarks.append(said)
    figures.lines += [
        Line("first up, s", took_s, at_most=UP_S_MAX),
        Line("steps of the second up", len(again["done"]), at_most=0),
        Line("processes and folders after down", left, at_most=0),
    ]


def killed(operator: Operator, options: argparse.Namespace, figures: Figures) -> None:
    """See the module."""
    draw = random.Random(options.seed)
    table = figures.table("up, killed after", "s", "steps left then")
    for _ in range(options.kills):
        process = subprocess.Popen(
            operator.command("deploy", "up", str(operator.file)),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        after_s = draw.uniform(0.1, MOMENT_S_MAX)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        table.rows.append((after_s, len(operator.plan()["steps"])))
    operator.up()
    operator.serves()
    wanted = {
        "a": ["node-agent", "scheduler", "frontend"],
        "b": ["node-agent", "scheduler", "frontend"],
        "c": ["node-agent"],
    }
    twice = missing = 0
    for name, roles in wanted.items():
        lines = list(operator.processes(name).values())
        for word in (*(f"/bin/tenuto {role} " for role in roles), "roles.gpu_worker", "supervisord.conf"):
            running = sum(word in line and "supervisorctl" not in line for line in lines)
            twice, missing = twice + max(0, running - 1), missing + (running == 0)
    figures.lines += [
        Line("processes that run twice after all that", twice, at_most=0),
        Line("processes that are missing", missing, at_most=0),
        Line("steps of one more plan", len(operator.plan()["steps"]), at_most=0),
    ]


def changed(operator: Operator, options: argparse.Namespace, figures: Figures) -> None:
    """See the module."""
    operator.up()
    file = str(operator.file)
    table = figures.table("changes while requests come", "what", "s", "asked", "not ok")
    failed = 0

    def under_load(what: str, do: Callable[[], Any]) -> float:
        nonlocal failed
        with operator.load(options.rate, BUDGET_MS) as found:
            took_s, result = timed(do)
            select.select([], [], [], 1.0)
        if isinstance(result, tuple) and result[0]:
            figures.remarks.append(f"{what}: exit {result[0]}: {result[2][-300:]}")
            failed += 1
        refused = {fate: count for fate, count in found["fates"].items() if fate != "ok"}
        failed += sum(refused.values())
        table.rows.append((what, took_s, found["asked"], str(refused) if refused else 0))
        return took_s

    def rewritten(*pairs: tuple[str, str]) -> None:
        text = operator.file.read_text()
        for old, new in pairs:
            assert old in text, old
            text = text.replace(old, new)
        operator.file.write_text(text)

    under_load(
        "agents, one by one",
        lambda: operator.tenuto(
            "deploy", "restart", file, "--rolling", "--role", "node-a", "--role", "node-b", "--role", "node-c"
        ),
    )
    under_load(
        "schedulers and frontends, one by one",
        lambda: operator.tenuto(
            "deploy",
            "restart",
            file,
            "--rolling",
            "--role",
            "scheduler-0",
            "--role",
            "scheduler-1",
            "--role",
            "frontend-0",
            "--role",
            "frontend-1",
        ),
    )
    rewritten(("deploy: {", "deploy: {env: {CHANGED: '1'}, "))
    under_load("upgrade of everything", lambda: operator.tenuto("deploy", "upgrade", file))
    assert CliRunner().invoke(keys, ["add", str(operator.folder / "keys"), "node/d"]).exit_code == 0
    rewritten(("   - {host: c}\n", "   - {host: c}\n   - {host: d}\n"))
    under_load("a host more", lambda: operator.tenuto("deploy", "up", file))
    rewritten(("   - {host: c}\n", ""))
    under_load("a host less", lambda: operator.tenuto("deploy", "up", file))
    rewritten(("slo_ms: 4000", "slo_ms: 3500"))
    under_load("another SLO", lambda: operator.tenuto("deploy", "up", file))
    back_s = under_load("rollback", lambda: operator.tenuto("deploy", "rollback", file))
    figures.lines += [
        Line("requests that failed", failed, at_most=0),
        Line("rollback, s", back_s, at_most=60.0),
    ]


def taken_over(operator: Operator, options: argparse.Namespace, figures: Figures) -> None:
    """See the module."""
    operator.up()
    table = figures.table(
        "the active scheduler is killed, each time on the other host", "host", "gap, ms", "asked", "not ok"
    )
    gaps_ms = []
    for turn in range(options.takeovers):
        at = turn % 2
        host = operator.hosts[NAMES[at]]
        with operator.load(options.rate, BUDGET_MS) as found:
            select.select([], [], [], 1.0)
            pid = json.loads(host.run(f"cat /root/.tenuto/{host.name}/run/scheduler-{at}.json").stdout)["pid"]
            lost_at_s = time.monotonic()
            host.run(f"kill -9 {pid}")
            select.select([], [], [], 3.0)
        answered = [end for asked, end, fate in found["moments"] if fate == "ok" and asked > lost_at_s]
        gaps_ms.append(1e3 * (min(answered) - lost_at_s))
        refused = {fate: count for fate, count in found["fates"].items() if fate != "ok"}
        table.rows.append((host.name, gaps_ms[-1], found["asked"], str(refused) if refused else 0))
        operator.up()  # waits until the killed one stands by
    figures.lines.append(Line("longest gap, ms", max(gaps_ms), at_most=GAP_MS_MAX))


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """How long it took, s, and what came of it."""
    began_s = time.monotonic()
    result = do()
    return time.monotonic() - began_s, result


SCENARIOS: dict[str, Callable[[Operator, argparse.Namespace, Figures], None]] = {
    "up": set_up,
    "killed": killed,
    "changed": changed,
    "taken-over": taken_over,
}


if __name__ == "__main__":
    main()
