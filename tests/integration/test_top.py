"""`tenuto top` in a real terminal (a pty), beside a real cluster: what it draws, and that the terminal is as it was, however it ends.

And what other commands tell of that cluster: live figures, a recording, changes that are only planned.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fabric.client import BlockingClient
from roles.benchmark.temporary_cluster import temporary_cluster
from roles.cli.group import tenuto
from roles.runtime.running_cluster import processes_in
from tests.integration.proc import CLOCK, WAIT_MS

CLUSTER = """
models:
 - {name: fast, slo_ms: 8000, rate_rps: 20, profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}}
cluster: {gpus: 1}
"""
ENTERED, LEFT, CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """`tenuto top` on a pty of 80 columns and 24 lines; `told` is all it wrote."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.descriptor, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(other)
        self.other = other
        self.told = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "roles.cli", "top", "--run-dir", str(run_dir), "--every", "0.5", *options],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )

    def until(self, words: bytes) -> None:
        """Read on until it has written that, since the last time."""
        began_ms, seen = CLOCK.now_ms(), b""
        while words not in seen:
            assert CLOCK.now_ms() - began_ms < WAIT_MS, (words, seen[-2_000:])
            assert self.process.poll() is None or select.select([self.descriptor], [], [], 0.1)[0], seen[
                -2_000:
            ]
            seen += self._more()
        self.told += seen

    def press(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def ended(self) -> int:
        """How it ended; by then it has given the terminal back."""
        while self.process.poll() is None:
            self.told += self._more()
        while more := self._more():
            self.told += more
        assert self.told.count(ENTERED) == self.told.count(LEFT)
        assert self.told.rindex(LEFT) > self.told.rindex(ENTERED)
        assert self.told.rindex(CURSOR) > self.told.rindex(ENTERED)
        assert self.attributes == self.before
        return self.process.returncode

    @property
    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self.other)

    def _more(self) -> bytes:
        return os.read(self.descriptor, 65_536) if select.select([self.descriptor], [], [], 0.1)[0] else b""

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.descriptor)
        os.close(self.other)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("top") / "cluster.yaml"
    path.write_text(CLUSTER, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        yield cluster.run_dir


@pytest.fixture
def terminal(run_dir: Path) -> Iterator[Terminal]:
    own = Terminal(run_dir)
    yield own
    own.close()


def test_it_draws_hears_keys_and_leaves(terminal: Terminal) -> None:
    terminal.until(b"q quit")
    assert ENTERED in terminal.told
    assert b"fast" in terminal.told
    assert terminal.attributes != terminal.before
    terminal.press(b"?")
    terminal.until(b"sort by the next column")
    terminal.press(b"\x1b")
    terminal.until(b"late or refused")
    terminal.press(b"e")
    terminal.until(b"came in the last")
    terminal.press(b"q")
    assert terminal.ended() == 0


def test_signals_end_it_and_the_terminal_is_as_before(run_dir: Path) -> None:
    ends = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
    terminals = [Terminal(run_dir) for _ in ends]
    try:
        for own, (signum, code) in zip(terminals, ends.items(), strict=True):
            own.until(b"q quit")
            own.process.send_signal(signum)
            assert own.ended() == code
    finally:
        for own in terminals:
            own.close()


def test_while_it_is_stopped_the_terminal_is_the_shells(terminal: Terminal) -> None:
    terminal.until(b"q quit")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.until(LEFT)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert terminal.attributes == terminal.before
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(ENTERED)
    terminal.press(b"q")
    assert terminal.ended() == 0


def test_where_there_is_no_terminal_it_prints_once(run_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roles.cli", "top", "--run-dir", str(run_dir)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert b"fast" in done.stdout
    assert b"\x1b" not in done.stdout


def printed(*arguments: str | Path) -> Any:
    done = CliRunner().invoke(tenuto, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_live_figures_workers_and_a_recording(run_dir: Path, tmp_path: Path) -> None:
    frontend = next(one for one in processes_in(run_dir) if one.role_id == "frontend-0")
    began_ms = CLOCK.now_ms()
    with BlockingClient(frontend.addresses["client"][0]) as client:
        for _ in range(20):
            client.infer("fast", {"input": np.zeros(4, np.float32)})
    at = ("--run-dir", run_dir)
    told = printed("status", *at)
    took_ms = CLOCK.now_ms() - began_ms
    live = told["live"]["fast"]
    if took_ms < 9_000:  # else some may be longer ago than is told
        assert live["rate_rps"] * live["window_s"] == pytest.approx(20)
        assert live["goodput_rps"] * live["window_s"] == pytest.approx(20)
    assert (live["late"], live["dropped"], live["slo_ms"]) == (0, {}, 8_000.0)
    for worker_id, pid in told["workers"].items():
        assert worker_id.startswith("worker-local-")
        os.kill(pid, 0)
    assert told["workers"]
    assert printed("models", "list", *at)["live"].keys() == printed("top", *at)["models"].keys() == {"fast"}
    trace = tmp_path / "trace.csv"
    recorded = printed("record", "--last", "50", "--output", trace, *at)
    assert recorded["models"] == {"fast": 20}
    file = tmp_path / "c.yaml"
    file.write_text(CLUSTER, encoding="utf-8")
    played = printed("simulate", file, "--arrivals", trace, "--duration", "50", "--warmup", "0")
    assert played["models"]["fast"]["offered"] >= 20


def test_a_change_that_is_only_planned_is_told_and_not_made(run_dir: Path) -> None:
    at = ("--dry-run", "--run-dir", run_dir)
    before = printed("models", "list", "--run-dir", run_dir)["models"]
    section = "{name: more, slo_ms: 100, profile: {alpha_ms: 1, beta_ms: 5}}"
    told = printed("models", "add", section, *at)
    assert (told["status"], told["dry_run"], told["changed"] + told["started"]) == ("ok", True, 1)
    assert printed("models", "set", "fast", "--slo-ms", "50", *at)["status"] == "ok"
    assert printed("models", "remove", "fast", *at)["dry_run"]
    refused = CliRunner().invoke(tenuto, ["models", "remove", "nobody", *map(str, at)])
    assert "nobody" in str(refused.exception)
    after = printed("models", "list", "--run-dir", run_dir)["models"]
    assert [(one["model_id"], one["slo_ms"]) for one in after] == [
        (one["model_id"], one["slo_ms"]) for one in before
    ]
