"""A defect in the loop of a real role: what is left of it, and that the cluster serves on as it was planned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roles.runtime.process import read_run_file
from tests.integration.proc import processes_naming, until

ROOT = Path(__file__).parents[2]
CLUSTER = """
models:
 - {name: a, slo_ms: 200, rate_rps: 10, profile: {alpha_ms: 1, beta_ms: 5, max_batch: 8}}
cluster: {gpus: 2}
placement: exclusive
batching: eager
"""
# Python runs this at the start of every process: the scheduler raises at the next event when the file is there.
PLANTED = """
import os, sys
PLANT = {plant!r}
if "scheduler" in sys.orig_argv:
    from roles.scheduler.core import SchedulerCore
    handle = SchedulerCore.handle
    def fragile(self, event, now_ms):
        if os.path.exists(PLANT):
            os.unlink(PLANT)
            raise KeyError("planted")
        return handle(self, event, now_ms)
    SchedulerCore.handle = fragile
"""


class Cluster:
    """`tenuto up` with a scheduler that can be made to raise."""

    def __init__(self, path: Path) -> None:
        self.run_dir = path / "run"
        self.plant = path / "plant"
        (path / "cluster.yaml").write_text(CLUSTER)
        (path / "site").mkdir()
        (path / "site" / "sitecustomize.py").write_text(PLANTED.format(plant=str(self.plant)))
        self.environment = os.environ | {"PYTHONPATH": f"{path / 'site'}{os.pathsep}{ROOT}"}
        self.err = (path / "err").open("w+")
        self.process = subprocess.Popen(
            self.command("up", str(path / "cluster.yaml"), "--json"),
            stdout=subprocess.PIPE,
            stderr=self.err,
            env=self.environment,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), self.said()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "roles.cli", *arguments, "--run-dir", str(self.run_dir)]

    def run(self, *arguments: str) -> str:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    def said(self) -> str:
        self.err.seek(0)
        return self.err.read()

    def scheduler_pid(self) -> int | None:
        found = read_run_file(self.run_dir / "scheduler-0.json")
        return None if found is None else found.pid

    def placed(self) -> dict[str, str]:
        try:
            listed = json.loads(self.run("status", "--json"))
        except subprocess.CalledProcessError:
            return {}
        return {",".join(item["models"]): item["state"] for item in listed["slices"] if item["models"]}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    yield running
    running.process.terminate()
    running.process.communicate(timeout=60)
    for pid in processes_naming(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    running.err.close()


def test_a_defect_of_the_scheduler_is_a_file_and_a_line_and_its_successor_keeps_the_plan(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = tmp_path / "b.yaml"
    model.write_text(
        "{name: b, slo_ms: 200, rate_rps: 10, profile: {alpha_ms: 1, beta_ms: 5, max_batch: 8}}\n"
    )
    cluster.run("models", "add", str(model))
    until(lambda: cluster.placed() == {"a": "ready", "b": "ready"}, what="the second model's place")
    former = cluster.scheduler_pid()
    cluster.plant.touch()
    until(lambda: cluster.scheduler_pid() not in (None, former), what="another scheduler")
    until(lambda: cluster.placed() == {"a": "ready", "b": "ready"}, what="the plan as it was changed")

    report = cluster.run_dir / f"scheduler-0-{former}.defect"
    text = report.read_text()
    assert "KeyError: 'planted'" in text
    assert "events of SchedulerReplica, newest first" in text
    said = cluster.said()
    assert (
        f"tenuto: a defect of Tenuto ended scheduler-0 (KeyError); what is known of it is in {report}\n"
        in said
    )
    assert "Traceback" not in said
    assert "scheduler-0 ended with code 70" in said
    cluster.process.terminate()
    assert cluster.process.wait(60) == 0
    assert [path.name for path in cluster.run_dir.iterdir()] == [report.name], "only the report stays"
