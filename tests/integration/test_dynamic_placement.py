"""Models come and go while a real cluster serves: real processes, real commands, emulated devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.client import BlockingClient, ask_status
from fabric.errors import ModelNotFound, RequestError
from fabric.ids import ModelId
from fabric.messages import StatusListed
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.process import read_run_file
from tests.integration.proc import processes_naming, until
from tests.integration.steady_load import steady_load

pytestmark = pytest.mark.timeout(240)

LINE = "profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}"
WAIT_MS = 60_000.0  # commands and plans are niced, and may share two cores with a whole test run
SHARED = f"""
models:
 - {{name: one, slo_ms: 8000, rate_rps: 100, {LINE}}}
 - {{name: two, slo_ms: 8000, rate_rps: 100, {LINE}}}
cluster: {{nodes: [{{host: here, gpus: 2}}]}}
batching: eager
placement: symphony
"""
"""Every GPU hosts every model: a model more or less changes all slices."""
EXCLUSIVE = SHARED.replace("gpus: 2", "gpus: 4").replace("symphony", "exclusive")
THREE = f"{{name: three, slo_ms: 8000, rate_rps: 10, {LINE}}}"
ECHO = """
models:
 - {name: echo, slo_ms: 8000, loader: {python: "tests.models.echo:Echo"}}
cluster: {nodes: [{host: here, gpus: 2, device: cpu}]}
batching: eager
placement: exclusive
"""


ECHO_SHARED = ECHO.replace("gpus: 2", "gpus: 1").replace("exclusive", "symphony")
SLOW = '{name: slow, slo_ms: 8000, loader: {python: "tests.models.echo:SlowToLoad"}}'


@dataclass
class Live:
    """A running cluster and what one asks of it."""

    cluster: TemporaryCluster

    def tenuto(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "roles.cli", *arguments, "--run-dir", str(self.cluster.run_dir)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.tenuto(*arguments)
        out, err = process.communicate(timeout=180)
        return process.returncode, out, err

    def changed(self, *arguments: str) -> dict[str, Any]:
        """The answer of a change that is made."""
        code, out, err = self.run(*arguments, "--json")
        assert code == 0, err + self.log
        answer: dict[str, Any] = json.loads(out)
        return answer

    @property
    def status(self) -> StatusListed:
        return ask_status(self.cluster.endpoints["control"], 10_000)

    @property
    def log(self) -> str:
        plan = self.status.plan
        return "" if plan is None else "\n".join(plan.lately)

    def hosted(self) -> dict[str, list[str]]:
        """Ready slices: the models of each."""
        return {one.slice_id: sorted(one.models) for one in self.status.slices if one.state == "ready"}

    def workers(self) -> set[int]:
        return {
            pid
            for pid, command in processes_naming(str(self.cluster.run_dir)).items()
            if "roles.gpu_worker" in command
        }

    def pid_of_scheduler(self) -> int | None:
        run_file = read_run_file(self.cluster.run_dir / "scheduler-0.json")
        return None if run_file is None or not run_file.is_alive else run_file.pid

    def is_answered(self, model: str) -> bool:
        try:
            self.asked(model)
        except RequestError:
            return False
        return True

    def asked(self, model: str) -> None:
        """One request, which must be answered."""
        with BlockingClient(self.cluster.endpoints["client"]) as client:
            assert client.infer(model, {"input": np.zeros(4, np.float32)}).outputs


@contextmanager
def live(tmp_path: Path, text: str) -> Iterator[Live]:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        yield Live(cluster)


def test_models_come_and_go_under_load_and_nobody_else_is_refused(tmp_path: Path) -> None:
    with live(tmp_path, SHARED) as here:
        before, workers = here.hosted(), here.workers()
        rates = {"one": 80.0, "two": 80.0}
        with steady_load(here.cluster.endpoints["client"], rates) as fates:
            until(lambda: len(fates.of["one"]) > 50, WAIT_MS, "load")
            answer = here.changed("models", "add", THREE)
            assert (answer["started"], answer["ended"], answer["changed"]) == (0, 0, 2)
            here.asked("three")
            assert here.hosted() == {key: ["one", "three", "two"] for key in before}
            here.changed("models", "remove", "two")
            with_two = len(fates.of["two"])
            until(lambda: len(fates.of["two"]) > with_two + 20, WAIT_MS, "load")
            with BlockingClient(here.cluster.endpoints["client"]) as client, pytest.raises(ModelNotFound):
                client.infer("two", {"input": np.zeros(4, np.float32)})
        assert fates.refused("one") == [], here.log
        refused = fates.refused("two")
        assert set(refused) == {"ModelNotFound"}, here.log
        assert fates.of["two"][-len(refused) :].count("ok") <= 32, "what ran was answered, the rest refused"
        assert here.hosted() == {key: ["one", "three"] for key in before}
        assert here.workers() == workers, "they serve on"


def test_a_slice_that_is_not_affected_keeps_its_worker(tmp_path: Path) -> None:
    with live(tmp_path, EXCLUSIVE) as here:
        before = here.hosted()
        with steady_load(here.cluster.endpoints["client"], {"one": 60.0, "two": 60.0}) as fates:
            assert here.changed("models", "add", THREE)["kept"] == 2
            assert before.items() <= here.hosted().items()
            answer = here.changed("drain", "here/gpu0")
            assert (answer["started"], answer["ended"], answer["kept"]) == (1, 1, 2)
            assert "here/gpu0/0" not in here.hosted()
            assert here.hosted()["here/gpu1/0"] == ["two"]
        assert fates.refused("one") == fates.refused("two") == []


def test_a_worker_killed_in_the_middle_of_a_move_costs_nobody_an_answer(tmp_path: Path) -> None:
    with live(tmp_path, EXCLUSIVE) as here:
        old = here.workers()
        with steady_load(here.cluster.endpoints["client"], {"one": 60.0, "two": 60.0}) as fates:
            until(lambda: len(fates.of["one"]) > 20, WAIT_MS, "load")
            draining = here.tenuto("drain", "here/gpu0", "--json")
            until(lambda: bool(here.workers() - old), WAIT_MS, "the new worker")
            os.kill((here.workers() - old).pop(), signal.SIGKILL)
            out, err = draining.communicate(timeout=120)
            assert draining.returncode == 0, err + here.log
            assert json.loads(out)["status"] == "ok"
        assert fates.refused("one") == fates.refused("two") == [], here.log


def test_an_old_worker_killed_in_the_middle_of_a_move_is_replaced_by_it(tmp_path: Path) -> None:
    with live(tmp_path, EXCLUSIVE) as here:
        (old,) = here.workers()
        draining = here.tenuto("drain", "here/gpu0", "--json")
        until(lambda: len(here.workers()) == 2, WAIT_MS, "the new worker")
        os.kill(old, signal.SIGKILL)
        _, err = draining.communicate(timeout=120)
        assert draining.returncode == 0, err + here.log
        for model in ("one", "two"):
            until(lambda model=model: here.is_answered(model), WAIT_MS, f"an answer of {model}")  # type: ignore[misc]  # a default binds the loop's variable
        assert old not in here.workers()


def test_a_model_that_loads_slowly_holds_up_none_of_its_neighbours(tmp_path: Path) -> None:
    ones = np.ones((3, 224, 224), np.float32)
    with live(tmp_path, ECHO_SHARED) as here, BlockingClient(here.cluster.endpoints["client"]) as client:
        before = here.workers()
        adding = here.tenuto("models", "add", SLOW, "--json")
        answered = 0
        while adding.poll() is None:
            assert client.infer("echo", {"image": ones}).outputs
            answered += 1
        out, err = adding.communicate(timeout=120)
        assert adding.returncode == 0, err + here.log
        assert json.loads(out)["changed"] == 1
        assert answered > 10, "while the model took 2 s to load"
        assert client.infer("slow", {"image": ones}).outputs
        here.changed("models", "remove", "slow")
        assert here.workers() == before
        with pytest.raises(ModelNotFound):
            client.infer("slow", {"image": ones})
        assert client.infer("echo", {"image": ones}).outputs


def test_a_worker_killed_while_it_loads_a_model_more_comes_back_with_it(tmp_path: Path) -> None:
    ones = np.ones((3, 224, 224), np.float32)
    with live(tmp_path, ECHO_SHARED) as here:
        (old,) = here.workers()
        adding = here.tenuto("models", "add", SLOW, "--json")
        until(lambda: "planning: models are added" in here.log, WAIT_MS, "the plan")
        until(lambda: here.hosted() == {"here/gpu0/0": ["echo", "slow"]}, WAIT_MS, "the change")
        os.kill(old, signal.SIGKILL)
        _, err = adding.communicate(timeout=120)
        assert adding.returncode == 0, err + here.log
        with BlockingClient(here.cluster.endpoints["client"]) as client:
            assert client.infer("echo", {"image": ones}).outputs
            assert client.infer("slow", {"image": ones}).outputs


def test_a_model_that_cannot_be_loaded_beside_others_leaves_only_itself_out(tmp_path: Path) -> None:
    ones = np.ones((3, 224, 224), np.float32)
    with live(tmp_path, ECHO_SHARED) as here, BlockingClient(here.cluster.endpoints["client"]) as client:
        workers, before = here.workers(), here.hosted()
        broken = '{name: broken, slo_ms: 8000, loader: {python: "tests.models.echo:CannotLoad"}}'
        code, _, err = here.run("models", "add", broken, "--json")
        assert (code, "no weights for cpu" in err) == (1, True), err
        until(lambda: here.hosted() == before, WAIT_MS, "the roll-back")
        assert here.workers() == workers
        with pytest.raises(ModelNotFound):
            client.infer("broken", {"image": ones})
        assert client.infer("echo", {"image": ones}).outputs


def test_a_move_whose_new_slice_cannot_load_is_rolled_back(tmp_path: Path) -> None:
    ones = np.ones((3, 224, 224), np.float32)
    with live(tmp_path, ECHO) as here, BlockingClient(here.cluster.endpoints["client"]) as client:
        before = here.hosted()
        assert client.infer("echo", {"image": ones}).outputs
        broken = '{name: broken, slo_ms: 8000, loader: {python: "tests.models.echo:CannotLoad"}}'
        code, out, err = here.run("models", "add", broken, "--json")
        assert code == 1, err
        assert json.loads(out)["status"] == "failed"
        assert "no weights for cpu" in err
        assert here.hosted() == before
        assert "rolled back" in here.log
        plan = here.status.plan
        assert plan is not None
        assert plan.moves_failed == 1
        with pytest.raises(ModelNotFound):
            client.infer("broken", {"image": ones})
        assert client.infer("echo", {"image": ones}).outputs


def test_what_cannot_be_is_said_with_its_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    names = ("three", "four", "five")
    sections = "".join(f" - {THREE.replace('three', name)}\n" for name in names)
    file.write_text(f"models:\n{sections}", encoding="utf-8")
    with live(tmp_path, EXCLUSIVE) as here:
        for arguments, words in (
            (("add", THREE.replace("three", "one")), "NameTaken"),
            (("add", "{name: x, slo_ms: 5}"), "has neither profile nor loader"),
            (("add", str(tmp_path / "none.yaml")), "cannot be read"),
            (("add", str(file), "six"), "no model 'six'"),
            (("remove", "nobody"), "UnknownModel"),
            (("set", "nobody", "--rate", "5"), "UnknownModel"),
        ):
            code, _, err = here.run("models", *arguments)
            assert (code, words in err) == (3, True), err
        code, _, err = here.run("drain", "here/gpu9")
        assert (code, "UnknownGpu" in err) == (3, True)
        code, _, err = here.run("drain", "nothing-like-it")
        assert code == 3
        assert all(name in err for name in ("here", "here/gpu0", "frontend-0", "scheduler-0", "node-here")), (
            err
        )
        code, out, err = here.run("models", "add", str(file), "--json")
        assert code == 6, err + here.log
        assert [one["model"] for one in json.loads(out)["unplaced"]] == ["five"]
        here.changed("models", "set", "one", "--slo-ms", "7000", "--rate", "90")
        assert {one.model_id: one.slo_ms for one in here.status.models}[ModelId("one")] == 7_000
    code, _, err = here.run("models", "remove", "one")
    assert (code, "no cluster runs" in err) == (5, True)


def test_what_was_added_outlives_the_scheduler(tmp_path: Path) -> None:
    with live(tmp_path, EXCLUSIVE) as here:
        here.changed("models", "add", THREE)
        workers, hosted = here.workers(), here.hosted()
        killed = here.status.pid
        os.kill(killed, signal.SIGKILL)
        until(lambda: here.pid_of_scheduler() not in (None, killed), WAIT_MS, "the next scheduler")
        until(lambda: here.hosted() == hosted, WAIT_MS, "all slices")
        assert here.workers() == workers, "slices outlive their scheduler"
        for model in ("one", "two", "three"):  # a request may be told to the old one
            until(lambda model=model: here.is_answered(model), WAIT_MS, f"an answer of {model}")  # type: ignore[misc]  # a default binds the loop's variable
        here.changed("models", "remove", "three")
        assert sorted(here.hosted().values()) == [["one"], ["two"]]
