from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.client import BlockingClient
from fabric.errors import FabricError, NoReplica, RequestError
from roles.runtime.journal import replay
from roles.runtime.process import read_run_file
from roles.runtime.run_directory import LOCK_FILE, LOG_FILE, OLD_LOG_FILE, read_up_file
from roles.scheduler.replay_start import scheduler_from
from tests.integration.proc import CLOCK, processes_naming, until, zombies_of

ROOT = Path(__file__).parents[2]
STOP_MS = 60_000.0  # for hosts that are busy
CLUSTER = """
models:
 - {name: resnet50, slo_ms: 200, profile: {alpha_ms: 1.053, beta_ms: 5.072, max_batch: 64}}
cluster: {gpus: 1}
batching: eager
"""


@dataclass
class Home:
    """A run directory, and the commands run in it."""

    path: Path
    file: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "roles.cli", *arguments, "--run-dir", str(self.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, and the last line of stderr."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, (err.strip().splitlines() or [""])[-1]

    def infer(self, *arguments: str) -> tuple[int, str, str]:
        """`tenuto infer`, which takes its run directory from the environment."""
        ended = subprocess.run(
            [sys.executable, "-m", "roles.cli", "infer", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TENUTO_RUN_DIR": str(self.path)},
        )
        return ended.returncode, ended.stdout, (ended.stderr.strip().splitlines() or [""])[-1]

    def up(self, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start a cluster and wait until it says that it is ready."""
        process = self.start("up", str(self.file), *arguments, "--json")
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return process, json.loads(line)

    def processes(self) -> dict[int, str]:
        return processes_naming(str(self.path))

    def agents(self) -> set[int]:
        return {pid for pid, command in self.processes().items() if " node-agent " in command}

    def pid(self, role_id: str) -> int | None:
        run_file = read_run_file(self.path / f"{role_id}.json") if self.path.exists() else None
        return None if run_file is None else run_file.pid

    def assert_nothing_left(self) -> None:
        until(lambda: not self.processes(), what="the end of all processes")
        assert not self.path.exists(), sorted(map(str, self.path.rglob("*")))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path / "run", tmp_path / "eager.yaml")
    opened.file.write_text(CLUSTER)
    yield opened
    for pid in opened.processes():
        os.kill(pid, signal.SIGKILL)
    for process in opened.started:
        process.kill()
        process.communicate()
    until(lambda: not opened.processes())


def infer(endpoints: Sequence[str]) -> None:
    with BlockingClient(endpoints) as client:
        client.infer("resnet50", {"input": np.zeros(4, np.float32)}, budget_ms=2_000.0)


def answers(endpoints: Sequence[str]) -> bool:
    try:
        infer(endpoints)
    except FabricError:
        return False
    return True


def test_a_cluster_serves_and_ctrl_c_leaves_nothing(home: Home) -> None:
    process, started = home.up()
    assert [(item["state"], item["models"]) for item in started["slices"]] == [("ready", ["resnet50"])]
    infer(started["endpoints"]["client"])
    directory = os.open(home.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # as systemd-tmpfiles asks before it cleans one
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(directory)
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()


def test_a_stop_that_signals_every_process_once_is_an_orderly_one(home: Home) -> None:
    """As systemd's is, and pkill's: each role has had its signal when the supervisor sends the next one."""
    process, started = home.up("--apart")
    infer(started["endpoints"]["client"])
    roles = set(home.processes()) - {process.pid}
    assert len(roles) == 4
    for pid in (process.pid, *roles):
        os.kill(pid, signal.SIGTERM)
    _, said = process.communicate(timeout=STOP_MS / 1e3)
    assert process.returncode == 0
    ended = dict(re.findall(r"child_ended name=(\S+) pid=\d+ code=(\S+)", said))
    assert ended == dict.fromkeys(("frontend-0", "worker-local-1", "node-local", "scheduler-0"), "0")
    home.assert_nothing_left()


def test_who_ends_a_cluster_that_ends_already_waits_for_it(home: Home) -> None:
    assert home.run("up", str(home.file), "--detach", "--apart")[0] == 0
    frontend = home.pid("frontend-0")
    assert frontend is not None
    os.kill(frontend, signal.SIGSTOP)
    first = home.start("down")
    until(lambda: is_ending(home), what="the end, which has begun")
    second = home.start("down")
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(1.5)
    os.kill(frontend, signal.SIGCONT)
    assert first.wait(STOP_MS / 1e3) == 0
    assert second.wait(STOP_MS / 1e3) in (0, 5), "5: this host is so busy that all had ended when it began"
    home.assert_nothing_left()


def is_ending(home: Home) -> bool:
    up_file = read_up_file(home.path)
    return up_file is not None and up_file.is_ending


def test_a_cluster_in_a_terminal_does_not_say_what_a_killed_one_in_its_directory_did(home: Home) -> None:
    home.path.mkdir(mode=0o700)
    for name in (LOG_FILE, OLD_LOG_FILE):
        (home.path / name).write_text("2026-01-01 10:00:00,000 level=INFO role=frontend-0 of a killed one\n")
    home.up()
    code, out, line = home.run("logs")
    assert (code, out) == (1, "")
    assert line == "tenuto: this cluster was started without --detach: its roles speak in that terminal"


def test_a_cluster_whose_run_directory_is_gone_serves_on_and_ends_in_order(home: Home) -> None:
    """As after the last logout of who does not linger."""
    process, started = home.up("--apart")
    shutil.rmtree(home.path)
    infer(started["endpoints"]["client"])
    process.terminate()
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()


def test_up_without_a_file_has_one_emulated_model(home: Home) -> None:
    process = home.start("up", "--json")
    assert process.stdout is not None
    started = json.loads(process.stdout.readline())
    assert [(item["state"], item["models"]) for item in started["slices"]] == [("ready", ["resnet50"])]
    process.terminate()
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()


@pytest.mark.parametrize("after_ms", [30, 150, 300, 450, 600, 750, 900, 1_100, 1_400])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_at_any_moment_of_the_start_leaves_nothing(
    home: Home, after_ms: float, number: signal.Signals
) -> None:
    process = home.start("up")
    stop_at_ms = CLOCK.now_ms() + after_ms
    until(lambda: CLOCK.now_ms() >= stop_at_ms)
    process.send_signal(number)
    try:
        process.communicate(timeout=STOP_MS / 2e3)
    except subprocess.TimeoutExpired as error:
        # The interpreter starts itself, and prints and forgets a KeyboardInterrupt in a callback of its imports.
        if b"Exception ignored in" not in (error.stderr or b""):
            raise
        process.send_signal(number)
        process.communicate(timeout=STOP_MS / 2e3)
    home.assert_nothing_left()


def test_a_supervisor_killed_hard_takes_everything_with_it_and_the_next_one_clears_up(home: Home) -> None:
    process, _ = home.up("--apart")
    assert len(home.processes()) == 5  # itself, scheduler, agent, frontend, worker
    process.kill()
    process.wait(10)
    until(lambda: not home.processes(), what="the end of all processes")
    assert home.run("status")[0] == 5
    process, started = home.up()
    infer(started["endpoints"]["client"])
    process.terminate()
    assert process.wait(STOP_MS / 1e3) == 0


def test_a_stop_while_an_agent_starts_again_leaves_none_of_the_workers_that_outlived_the_last_one(
    home: Home,
) -> None:
    nodes = "nodes: [{host: local, gpus: 1, device: emulated, workers_outlive_agent: true}]"
    home.file.write_text(CLUSTER.replace("gpus: 1", nodes))
    process, _ = home.up("--apart")
    former = home.pid("node-local")
    assert former is not None
    os.kill(former, signal.SIGKILL)
    until(lambda: bool(home.agents() - {former}), what="the next one")
    (agent,) = home.agents() - {former}
    os.kill(agent, signal.SIGSTOP)  # while it imports: a signal ends it at once
    assert len(home.processes()) == 5
    process.terminate()
    until(lambda: home.pid("frontend-0") is None, what="the turn of the agent")
    os.kill(agent, signal.SIGCONT)
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()


@pytest.mark.parametrize(
    ("role_id", "flag"),
    [
        ("scheduler-0", "--apart"),
        ("frontend-0", "--apart"),
        ("node-local", "--apart"),
        ("frontend-0", "--together"),
    ],
)
def test_a_role_killed_hard_is_replaced_and_requests_are_answered_again(
    home: Home, role_id: str, flag: str
) -> None:
    process, started = home.up(flag)
    assert (home.pid("frontend-0") == home.pid("scheduler-0")) == (flag == "--together")
    address = started["endpoints"]["client"][0]  # the ipc one, which stays the same
    infer(address)
    former = home.pid(role_id)
    assert former is not None
    os.kill(former, signal.SIGKILL)
    until(lambda: home.pid(role_id) not in (None, former), what=f"another {role_id}")
    until(lambda: answers(address), what="an answer")
    assert zombies_of(process.pid) == []
    assert process.poll() is None


def test_a_role_that_dies_again_and_again_comes_back_and_the_others_serve_on(home: Home) -> None:
    process, started = home.up("--apart")
    others = {role_id: home.pid(role_id) for role_id in ("scheduler-0", "node-local")}
    killed: set[int | None] = {None}
    for _ in range(6):
        until(lambda: home.pid("frontend-0") not in killed, what="another frontend")
        pid = home.pid("frontend-0")
        assert pid is not None
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
    until(lambda: answers(started["endpoints"]["client"][0]), what="an answer")
    assert {role_id: home.pid(role_id) for role_id in others} == others
    process.terminate()
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()


@pytest.mark.parametrize("becomes", ["missing", "half written", "another one"])
def test_a_role_starts_again_with_the_file_of_the_start_whatever_becomes_of_that(
    home: Home, becomes: str
) -> None:
    process, started = home.up("--apart")
    if becomes == "missing":
        home.file.rename(home.file.with_name("moved.yaml"))
    else:
        home.file.write_text(CLUSTER[:60] if becomes == "half written" else CLUSTER.replace("200", "1"))
    killed = {role_id: home.pid(role_id) for role_id in ("frontend-0", "scheduler-0", "node-local")}
    for pid in killed.values():
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    for role_id, pid in killed.items():
        until(lambda: home.pid(role_id) not in (None, pid), what=f"another {role_id}")  # noqa: B023  it waits here
    until(lambda: answers(started["endpoints"]["client"][0]), what="an answer")
    process.terminate()
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()


def test_a_file_where_up_keeps_its_copy_is_refused_and_stays(home: Home) -> None:
    home.path.mkdir()
    file = home.path / "up.config.yaml"
    file.write_text(CLUSTER)
    code, out, line = home.run("up", str(file))
    assert (code, out) == (3, "")
    assert (
        line
        == f"tenuto: {file}: is where 'up' keeps a copy of its file, which goes with the cluster; give yours another name"
    )
    assert file.read_text() == CLUSTER


def test_a_second_up_in_the_same_directory_is_refused_and_the_first_unharmed(home: Home) -> None:
    process, started = home.up()
    code, out, line = home.run("up")
    assert (code, out) == (1, "")
    assert line.startswith(f"tenuto: a cluster runs in {home.path} already as process {process.pid}")
    infer(started["endpoints"]["client"])
    process.terminate()
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()


@pytest.mark.parametrize(
    ("flag", "who"),
    [
        ("--apart", "frontend-0 did not start:"),
        ("--together", "scheduler-0 did not start: frontend-0, in the same process,"),
    ],
)
def test_a_second_up_on_the_same_port_is_refused_and_leaves_nothing(
    home: Home, tmp_path: Path, flag: str, who: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = tmp_path / "cluster.yaml"
        file.write_text(CLUSTER + f'listen: {{client: "tcp://127.0.0.1:{port}"}}\n')
        code, out, line = home.run("up", str(file), flag)
    assert code in (1, 3)
    assert out == ""
    assert line == f"tenuto: {who} cannot bind tcp://127.0.0.1:{port}: it is in use"
    home.assert_nothing_left()


def test_a_wrong_configuration_is_refused_before_anything_starts(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER.replace("slo_ms", "slo"))
    code, _, line = home.run("up", str(file))
    assert code == 3
    assert "slo" in line
    assert not home.path.exists()


def test_a_cuda_node_on_a_host_without_a_gpu_is_a_configuration_error(home: Home, tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this host has a GPU")
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER.replace("{gpus: 1}", "{nodes: [{host: a, device: cuda}]}"))
    code, _, line = home.run("up", str(file))
    assert code == 3
    assert line.startswith("tenuto: node-a did not start: node a: no usable NVIDIA GPU or driver here")
    home.assert_nothing_left()


@pytest.mark.parametrize("flag", ["--apart", "--together"])
def test_detached_it_runs_on_until_down(home: Home, flag: str) -> None:
    code, out, _ = home.run("up", str(home.file), "--detach", "--json", flag)
    assert code == 0
    started = json.loads(out)
    infer(started["endpoints"]["client"])
    code, out, _ = home.run("status", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["endpoints"] == started["endpoints"]
    assert {process["role_id"] for process in report["processes"] if process["alive"]} >= {
        "scheduler-0",
        "frontend-0",
        "node-local",
    }
    assert [item["state"] for item in report["slices"]] == ["ready"]
    assert [item["model_id"] for item in report["models"]] == ["resnet50"]
    assert report["counters"]["batches_sent"] == 1
    kinds = sorted(role_id.partition("-")[0] for role_id in report["roles"])
    assert kinds == ["frontend", "node", "scheduler", "worker"]
    for counters in report["roles"].values():
        assert counters["timer_late_p99_ms"] <= 1.125 * counters["timer_late_ms_max"] + 0.001
        assert counters["turn_ms_max"] > 0
    assert home.run("up", "--detach")[0] == 1
    code, out, _ = home.run("logs", "--since", "10m", "--role", "worker-local-1")
    assert code == 0
    assert out
    assert all(" role=worker-local-1 " in line for line in out.splitlines())
    assert len(home.run("logs")[1].splitlines()) > len(out.splitlines())
    (home.path / OLD_LOG_FILE).touch()  # as when the log becomes too long
    following = home.start("logs", "--follow")
    assert home.run("down")[0] == 0
    assert "tenuto is up" in following.communicate(timeout=60)[0]
    assert following.returncode == 0
    assert home.run("logs")[0] == 5
    home.assert_nothing_left()


def test_a_start_in_the_background_that_has_only_begun_is_ended_by_down(home: Home) -> None:
    starting = home.start("up", str(home.file), "--detach")
    until((home.path / LOCK_FILE).exists, what="its lock")
    code, _, line = home.run("down")
    assert code == 0, line
    assert starting.wait(STOP_MS / 1e3) == 1
    home.assert_nothing_left()


def test_a_detached_start_that_fails_says_why(home: Home, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = tmp_path / "cluster.yaml"
        file.write_text(CLUSTER + f'listen: {{client: "tcp://127.0.0.1:{taken.getsockname()[1]}"}}\n')
        code, _, line = home.run("up", "--detach", str(file))
    assert code in (1, 3)
    assert line.endswith("it is in use")
    home.assert_nothing_left()


MODELS = "tests.unit.roles.gpu_worker.executors.models_for_tests"


def on_a_cpu(*loaders: str) -> str:
    models = "".join(
        f" - {{name: {loader.rpartition(':')[2]}, slo_ms: 2000, rate_rps: 1, loader: {{python: '{loader}'}}}}\n"
        for loader in loaders
    )
    return f"models:\n{models}cluster: {{nodes: [{{host: here, gpus: 1, device: cpu}}]}}\n"


def test_models_that_cannot_be_loaded_leave_the_others_served_and_up_names_them(home: Home) -> None:
    broken = [f"{MODELS}:{name}" for name in ("RaisesInLoad", "NoExample", "WrongBatch")]
    home.file.write_text(on_a_cpu(broken[0], f"{MODELS}:Doubler", *broken[1:], "no.such.module:Nowhere"))
    process = home.start("up", "--detach", "--json", str(home.file))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 6, err
    for name in ("RaisesInLoad", "NoExample", "WrongBatch", "Nowhere"):
        assert f"tenuto: model {name} is not served on slice here/gpu0/0: " in err
    assert "no weights today" in err
    with BlockingClient(json.loads(out)["endpoints"]["client"]) as client:
        answer = client.infer("Doubler", {"x": np.ones(3, np.float32)}, budget_ms=5_000.0)
        assert answer.outputs["total"] == 3.0
        with pytest.raises(NoReplica):
            client.infer("WrongBatch", {"x": np.ones(3, np.float32)}, budget_ms=5_000.0)
    _, out, _ = home.run("status", "--json")
    (report,) = json.loads(out)["slices"]
    assert report["state"] == "ready"
    assert "without NoExample: " in report["reason"]
    assert home.run("down")[0] == 0
    home.assert_nothing_left()


def test_up_and_status_warn_of_smaller_batches_and_of_an_slo_that_hardly_holds(home: Home) -> None:
    tight = " - {name: tight, slo_ms: 50, rate_rps: 1, profile: {alpha_ms: 1, beta_ms: 30, max_batch: 4}}\n"
    home.file.write_text(f"models:\n{tight}cluster: {{gpus: 1}}\n")
    process = home.start("up", "--detach", str(home.file))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    words = "takes 31 ms of its SLO of 50 ms: one that has to wait for another may be late"
    assert f"tenuto: tight: a request alone {words}" in err
    assert words in " ".join(home.run("status")[1].split())
    assert home.run("down")[0] == 0
    home.file.write_text(on_a_cpu(f"{MODELS}:ManyInputs"))
    process = home.start("up", "--detach", str(home.file))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    words = "batches of at most 31, because it has 130 inputs a request, and a message holds 4096 tensors"
    assert f"tenuto: ManyInputs: {words}" in err
    assert f"ManyInputs: {words}" in " ".join(home.run("status")[1].split())
    code, out, _ = home.run("models", "list")
    assert code == 0
    assert f"ManyInputs: {words}" in " ".join(out.split())
    code, out, _ = home.run("models", "list", "--json")
    assert code == 0
    assert [model["model_id"] for model in json.loads(out)["models"]] == ["ManyInputs"]
    _, out, _ = home.run("status", "--json")
    assert json.loads(out)["warnings"] == [{"model_id": "ManyInputs", "reason": words}]
    assert home.run("down")[0] == 0
    home.assert_nothing_left()


def test_what_finds_no_place_is_said_with_the_reason_by_up_status_and_why(home: Home) -> None:
    tight = " - {name: tight, slo_ms: 10, rate_rps: 1, profile: {alpha_ms: 1, beta_ms: 50}}\n"
    home.file.write_text(f"models:\n{tight}cluster: {{gpus: 1}}\n")
    process = home.start("up", "--detach", str(home.file))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    words = "its SLO of 10 ms is below the 51 ms of a single request"
    assert f"tenuto: unplaced: tight (1.00 r/s): {words}" in err
    assert "tenuto: no model is served: none found a place" in err
    for command in (("status",), ("models", "list")):
        assert f"unplaced: tight (1.00 r/s): {words}" in " ".join(home.run(*command)[1].split())
    code, out, err = home.run("why", "tight")
    assert code == 0, err
    assert out.startswith("tight is not served, and no request for it came in the last 59 s.\n")
    assert f"no ready slice hosts tight: {words}" in " ".join(out.split())
    assert home.run("down")[0] == 0
    home.assert_nothing_left()


@pytest.mark.parametrize("flags", [(), ("--detach",)])
def test_where_no_model_can_be_loaded_up_fails_with_the_reason(home: Home, flags: tuple[str, ...]) -> None:
    home.file.write_text(on_a_cpu(f"{MODELS}:RaisesInLoad"))
    code, _, line = home.run("up", str(home.file), *flags)
    assert code == 1
    assert line == (
        "tenuto: no model can be served: slice here/gpu0/0 failed: RuntimeError: no weights today"
    )
    home.assert_nothing_left()


def test_a_model_that_hangs_is_left_out_in_the_end_and_its_neighbour_is_served(home: Home) -> None:
    home.file.write_text(on_a_cpu(f"{MODELS}:Doubler", f"{MODELS}:HangsOnMinusThree"))
    process = home.start("up", "--detach", "--json", str(home.file))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    with BlockingClient(json.loads(out)["endpoints"]["client"]) as client:

        def serves(model: str, value: float) -> bool:
            try:
                client.infer(model, {"x": np.full(3, value, np.float32)}, budget_ms=8_000.0)
            except RequestError:
                return False
            return True

        for _ in range(3):
            until(lambda: serves("HangsOnMinusThree", 1.0), 60_000.0, "the slice to be ready again")
            assert not serves("HangsOnMinusThree", -3.0)
        until(lambda: serves("Doubler", 1.0), 60_000.0, "the neighbour to be served")
        assert not serves("HangsOnMinusThree", 1.0)
    _, out, _ = home.run("status", "--json")
    (report,) = json.loads(out)["slices"]
    assert report["state"] == "ready"
    assert "without HangsOnMinusThree: left out after it ended its worker 3 times" in report["reason"]
    assert "did not end within 2000 ms" in report["reason"]
    assert home.run("down")[0] == 0
    home.assert_nothing_left()


@pytest.mark.timeout(300)  # the agent is patient, and the host may be busy
def test_a_worker_whose_loop_is_stuck_is_killed_and_serves_again(home: Home) -> None:
    home.file.write_text(on_a_cpu(f"{MODELS}:KeepsTheLock"))
    process = home.start("up", "--detach", "--json", str(home.file))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    with BlockingClient(json.loads(out)["endpoints"]["client"]) as client:

        def serves(value: float) -> bool:
            try:
                client.infer("KeepsTheLock", {"x": np.full(3, value, np.float32)}, budget_ms=5_000.0)
            except RequestError:
                return False
            return True

        assert serves(1.0)
        assert not serves(-4.0)
        until(lambda: serves(1.0), 60_000.0, "the slice to be ready again")
    assert home.run("down")[0] == 0
    home.assert_nothing_left()


def test_of_two_detached_starts_at_once_one_is_refused_and_the_other_has_its_log(home: Home) -> None:
    both = [home.start("up", "--detach", str(home.file)) for _ in range(2)]
    said = {process.communicate(timeout=120)[1].splitlines()[-1]: process.returncode for process in both}
    assert sorted(said.values()) == [0, 1], said
    assert any(f"a cluster runs in {home.path} already" in line for line in said)
    code, out, _ = home.run("logs", "--role", "up")
    assert code == 0
    assert out
    roles = {one["role_id"] for one in json.loads(home.run("status", "--json")[1])["processes"]}
    assert json.loads(home.run("down", "--dry-run", "--json")[1]) == {"dry_run": True, "roles": sorted(roles)}
    code, out, _ = home.run("down", "--json")
    ended = json.loads(out)
    assert code == 0
    assert {one["role_id"] for one in ended["processes"]} == roles
    assert not any(one["alive"] for one in ended["processes"])
    assert ended["endpoints"]["client"]
    home.assert_nothing_left()


def test_ctrl_c_while_a_detached_cluster_starts_ends_it(home: Home) -> None:
    process = home.start("up", "--detach")
    until(lambda: home.pid("scheduler-0") is not None)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=STOP_MS / 1e3)
    assert process.returncode != 0
    home.assert_nothing_left()


@pytest.mark.parametrize("command", ["down", "status"])
def test_where_nothing_runs_a_command_says_so_with_exit_code_5(home: Home, command: str) -> None:
    code, out, line = home.run(command)
    assert (code, out, line) == (5, "", f"tenuto: no cluster runs in {home.path}")


def test_status_shows_tables_to_people(home: Home) -> None:
    home.up()
    code, out, _ = home.run("status")
    assert code == 0
    assert "scheduler-0" in out
    assert "local/gpu0/0" in out
    assert "Loops" not in out
    np.save(home.file.with_suffix(".npy"), np.zeros(3, np.float32))
    code, _, line = home.infer("resnet51", str(home.file.with_suffix(".npy")))
    assert code == 1
    assert line.startswith("tenuto: ModelNotFound: ")
    code, out, _ = home.run("status", "--loops")
    assert code == 0
    assert "Loops" in out


def test_a_cluster_serves_on_when_nobody_reads_what_it_says(home: Home) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "roles.cli", "up", str(home.file), "--json", "--run-dir", str(home.path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=write, stderr=write, env=environment)
    os.close(write)
    until(lambda: home.path.exists() and is_ready(home), what="the start")
    (home.path / "notes.json").write_text("[]")
    code, out, _ = home.run("status", "--json")
    assert (code, process.poll()) == (0, None)
    infer(json.loads(out)["endpoints"]["client"])
    (home.path / "notes.json").unlink()
    process.terminate()
    assert process.wait(STOP_MS / 1e3) == 0
    home.assert_nothing_left()


def is_ready(home: Home) -> bool:
    up_file = read_up_file(home.path)
    return up_file is not None and up_file.is_ready


def test_who_waits_for_a_cluster_hears_that_it_serves_also_where_the_disk_was_full_at_that_moment(
    home: Home,
) -> None:
    process = home.start("up", str(home.file), "--apart", "--json")
    until(lambda: home.pid("node-local") is not None, what="an agent, whose worker is not ready yet")
    _, hard = former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
    assert process.stdout is not None
    assert process.stdout.readline(), "it says so to who reads its output"
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, former)
    until(lambda: is_ready(home), what="the same in up.json")


def test_a_second_scheduler_is_refused_and_leaves_the_journal_of_the_first_alone(home: Home) -> None:
    journal = home.path.parent / "journal"
    arguments = ("scheduler", str(home.file), "--journal", str(journal))
    home.path.mkdir(mode=0o700)
    first = home.start(*arguments)
    until(lambda: home.pid("scheduler-0") == first.pid, what="the start")
    until(lambda: journal.stat().st_size > 0)
    begun = journal.read_bytes()
    code, _, line = home.run(*arguments)
    assert code != 0
    assert line.startswith("tenuto: ")
    assert journal.read_bytes().startswith(begun)
    first.terminate()
    assert first.wait(STOP_MS / 1e3) == 0
    assert replay(journal, scheduler_from).difference is None
