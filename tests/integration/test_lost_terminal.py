"""A terminal that closes, or an ssh session that is lost, under a cluster: it ends in order, as by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fabric.client import BlockingClient
from roles.runtime.run_directory import UpFile, read_up_file
from tests.integration.proc import until
from tests.integration.test_up import CLUSTER, ROOT, STOP_MS, Home, home

__all__ = ["home"]


def is_up(home: Home) -> bool:
    found = read_up_file(home.path)
    return found is not None and found.is_ready


def up_on_a_terminal(home: Home) -> tuple[subprocess.Popen[str], int, UpFile]:
    """`tenuto up` as the one process of a session, the terminal's other end, and what it says."""
    ours, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "roles.cli", "up", str(home.file), "--apart", "--run-dir", str(home.path)],
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: os.login_tty(its),  # noqa: PLW1509  this process has one thread
    )
    home.started.append(process)
    os.close(its)
    until(lambda: is_up(home), what="the start")
    found = read_up_file(home.path)
    assert found is not None
    return process, ours, found


@pytest.mark.parametrize("how", ["closed", "closed, and systemd ends the session"])
def test_what_was_accepted_is_answered_when_the_terminal_goes(home: Home, how: str) -> None:
    """The kernel signals its foreground, the shell its jobs, systemd all of a session and by SIGTERM too."""
    home.file.write_text(
        CLUSTER.replace("alpha_ms: 1.053", "alpha_ms: 5").replace("slo_ms: 200", "slo_ms: 2000")
    )
    process, terminal, found = up_on_a_terminal(home)
    with BlockingClient(found.endpoints["client"]) as client:
        inputs = {"input": np.zeros(4, np.float32)}
        futures = [client.submit("resnet50", inputs, budget_ms=60_000.0) for _ in range(40)]
        client.models()  # it is answered when all before it have come
        os.close(terminal)
        if how != "closed":
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
                process.send_signal(number)
        assert all(future.result(60.0).outputs for future in futures)
    # After its last line it goes as any process does.
    assert process.wait(STOP_MS / 1e3) in (0, -signal.SIGHUP)
    home.assert_nothing_left()


def test_who_is_to_live_on_without_the_terminal_does(home: Home, tmp_path: Path) -> None:
    output = tmp_path / "nohup.out"
    with output.open("w") as said:
        process = subprocess.Popen(
            ["nohup", sys.executable, "-m", "roles.cli", "up", str(home.file), "--run-dir", str(home.path)],
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    home.started.append(process)
    until(lambda: is_up(home), what="the start")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.terminate()
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()
